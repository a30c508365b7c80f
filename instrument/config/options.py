"""`Options`: a pydantic model of options that reports a mistake in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from instrument.errors import ConfigError, did_you_mean
from instrument.redact import redact


def _no_bool(kind: str) -> BeforeValidator:
    """Refuse true and false, which Python treats as 1 and 0."""

    def refuse(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError(f"{kind}_type", "a bool is no number")
        return value

    return BeforeValidator(refuse)


#: Types of options that are numbers.
Count = Annotated[int, _no_bool("int")]
Amount = Annotated[float, _no_bool("float")]
Bytes = Annotated[ByteSize, _no_bool("int")]


class Options(BaseModel):
    """A pydantic class of options; its constructor checks the options.

    Raises:
        ConfigError: an option does not exist, or has a value that cannot work.
    """

    model_config = ConfigDict(extra="forbid")

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**{name: unwrapped(value) for name, value in options.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(type(self), error)) from None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact(value, name or "")

    @classmethod
    def display_name(cls) -> str:
        """The name of the class in an error sentence, such as "The table sink"."""
        return f"The {cls.__name__}"


def unwrapped(value: Any) -> Any:
    """Replace OmegaConf's containers by lists and dicts, because pydantic refuses them."""
    if isinstance(value, Mapping):
        return {key: unwrapped(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [unwrapped(item) for item in value]
    return value


def must(error: ErrorDetails, options: Iterable[str] = ()) -> str:
    """The end of an error sentence: what the value must be.

    `options` are the names of the options inside the value, if the value is a pydantic model.
    """
    if error["type"] == "greater_than_equal":
        return f"must be {error['ctx']['ge']} or more"
    if error["type"] == "greater_than":
        return f"must be more than {error['ctx']['gt']:g}"
    expected = {
        "bool": "must be true or false",
        "int": "must be a whole number",
        "float": "must be a number",
        "byte": "must be a number of bytes, such as 4GB",
        "string": "must be text",
        "dict": "must be a mapping with names as keys",
        "list": "must be a list",
        "model": f"must be a mapping with keys such as {' and '.join([*options][:2])}",
        "literal": "must be " + str(error.get("ctx", {}).get("expected")),
        "too": "needs at least one item",
    }
    kind = error["type"].split("_")[0]
    return expected.get(kind, "cannot be used: " + error["msg"])


def _sentence(model: type[Options], error: ValidationError) -> str:
    """A sentence about an unknown option if there is one, else about pydantic's first error."""
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    first = errors[0]
    where = [str(part) for part in first["loc"]]
    option, given, kind = ".".join(where), first["input"], first["type"]
    if kind == "extra_forbidden":
        hint = did_you_mean(option, model.model_fields)
        return f"{model.display_name()} has no option {option!r}{hint}"
    if kind == "missing":
        return f"{model.display_name()} needs a value for its option {option!r}."
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if kind == "literal_error":
        choices = map(str, get_args(model.model_fields[where[0]].annotation))
        hint = did_you_mean(given, choices)
        return f"{model.display_name()}'s option {option!r} cannot be {given!r}{hint}"
    return f"{model.display_name()}'s option {option!r} is {given!r}, but it {must(first)}."
