"""`Options`: a pydantic model of options that reports a mistake in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from instrument.base.errors import ConfigError, did_you_mean, suggestion
from instrument.base.redact import redact


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

    # Where the options stand in every config, such as "profiler". Sinks and triggers have no fixed
    # place, so an error sentence names their class.
    _place: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**{name: _unwrapped(value) for name, value in options.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(type(self), error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:  # a class of options that is frozen
            raise ConfigError(_sentence(type(self), error)) from None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact(value, name or "")

    @classmethod
    def display_name(cls) -> str:
        """The name of the class in an error sentence, such as "The table sink"."""
        return f"The {cls.__name__}"


def _unwrapped(value: Any) -> Any:
    """Replace OmegaConf's containers by lists and dicts, because pydantic refuses them."""
    if isinstance(value, Mapping):
        return {key: _unwrapped(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_unwrapped(item) for item in value]
    return value


def _sentence(model: type[Options], error: ValidationError) -> str:
    """A sentence about an unknown option if there is one, else about pydantic's first error."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    option, given, kind = ".".join(map(str, first["loc"])), first["input"], first["type"]
    if kind == "value_error":
        return str(first["ctx"]["error"])
    known = model.model_fields
    path = f"{model._place}.{option}" if model._place else ""
    if kind == "extra_forbidden":
        if not path:
            hint = did_you_mean(option, known)
            return f"{model.display_name()} has no option {option!r}{hint}"
        hint = suggestion(option, known, f"{model._place}.") or f": choose from {', '.join(known)}."
        return f"{path} is not an option{hint}"
    if kind == "missing":
        return f"{model.display_name()} needs a value for its option {option!r}."
    name = path or f"{model.display_name()}'s option {option!r}"
    if kind == "literal_error" and not path:
        choices = re.findall("'(.*?)'", first["ctx"]["expected"])
        return f"{name} cannot be {given!r}{did_you_mean(given, choices)}"
    return f"{name} is {given!r}, but it {_must(first, known[str(first['loc'][0])].annotation)}."


def _must(error: ErrorDetails, annotation: Any) -> str:
    """The end of an error sentence: what a value must be whose option has this annotation."""
    kind, context = error["type"].split("_")[0], error.get("ctx", {})
    if error["type"] == "greater_than_equal":
        return f"must be {context['ge']} or more"
    if error["type"] == "greater_than":
        return f"must be more than {context['gt']:g}"
    if kind == "model":
        kinds = (annotation, *get_args(annotation))  # a model, or one or None
        keys = [name for each in kinds for name in getattr(each, "model_fields", ())]
        return f"must be a mapping with keys such as {' and '.join(keys[:2])}"
    expected = {
        "bool": "must be true or false",
        "int": "must be a whole number",
        "float": "must be a number",
        "byte": "must be a number of bytes, such as 4GB",
        "string": "must be text",
        "dict": "must be a mapping with names as keys",
        "list": "must be a list",
        "frozen": "cannot be set on a config: make another one, with config.replace",
        "literal": f"must be {context.get('expected')}",
        "too": "needs at least one item",
    }
    return expected.get(kind, "cannot be used: " + error["msg"])
