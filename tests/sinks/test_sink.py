"""What every sink shares: options, their checks, and the built-in config files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import Field, field_validator

from instrument.base.errors import ConfigError
from instrument.export.sinks import Sink
from instrument.export.sinks.table import TableSink
from instrument.read.capture import Capture


class Letter(Sink):
    """A user's sink."""

    to: str
    copies: int = Field(1, ge=1)
    paper: Literal["plain", "lined"] = "plain"
    colours: list[str] = Field(default_factory=list)

    @field_validator("to")
    @classmethod
    def _someone(cls, to: str) -> str:
        if to == "nobody":
            raise ValueError("A letter to nobody is never read.")
        return to

    def write(self, capture: Capture, folder: Path) -> None:
        (folder / "letter.txt").write_text(f"{self.to}: {capture.name}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to": "ann", "copes": 2}, " has no option 'copes'; did you mean 'copies'?"),
        (
            {"to": "ann", "zzz": 2},
            " has no option 'zzz'; choose from 'to', 'copies', 'paper', 'colours'.",
        ),
        ({}, " needs a value for its option 'to'."),
        ({"tto": "ann"}, " has no option 'tto'; did you mean 'to'?"),
        ({"to": "ann", "copies": 0}, "'s option 'copies' is 0, but it must be 1 or more."),
        ({"to": "ann", "copies": "x"}, "'s option 'copies' is 'x', but it must be a whole number."),
        (
            {"to": "ann", "paper": "lines"},
            "'s option 'paper' cannot be 'lines'; did you mean 'lined'?",
        ),
        ({"to": "ann", "paper": 7}, "'s option 'paper' cannot be 7; choose from 'plain', 'lined'."),
        ({"to": "ann", "colours": ["red", 3]}, "'s option 'colours.1' is 3, but it must be text."),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Letter(**options)
    assert str(error.value) == f"The Letter sink{sentence}"
    assert isinstance(error.value, ValueError)


def test_a_sink_of_ones_own(capture: Capture) -> None:
    sink = Letter(to="ann")
    sink.write(capture, capture.folder)
    assert (capture.folder / "letter.txt").read_text() == "ann: steps_3-4"
    assert (sink.needs, sink.last, sink.sink_name) == ((), False, "Letter")
    assert pickle.loads(pickle.dumps(sink)) == sink
    with pytest.raises(ConfigError, match=r"^A letter to nobody is never read\.$"):
        Letter(to="nobody")


def test_names_go_into_sentences() -> None:
    class PostSink(Sink):
        def write(self, capture: Any, folder: Path) -> None: ...

    class Parcel(PostSink):
        sink_name: ClassVar[str] = "parcel post"

    assert (PostSink.sink_name, Parcel.sink_name) == ("Post", "parcel post")
    with pytest.raises(ConfigError, match=r"^The parcel post sink has no option 'x'\.$"):
        Parcel(x=1)


def test_a_sink_that_writes_nothing_is_refused_when_it_is_built() -> None:
    class Silent(Sink):
        pass

    with pytest.raises(
        ConfigError, match=r"^The sink Silent must define write\(self, capture, folder\)\.$"
    ):
        Silent()


def test_lists_and_mappings_of_omegaconf_are_taken() -> None:
    table = {"_target_": "instrument.export.sinks.table.TableSink", "columns": ["calls", "cpu_ns"]}
    assert instantiate(OmegaConf.create(table)) == TableSink(columns=["calls", "cpu_ns"])
    chrome, given = (
        "instrument.export.sinks.chrome_trace.ChromeTrace",
        {"run": {"tags": ["a", "b"]}},
    )
    metadata = instantiate(OmegaConf.create({"_target_": chrome, "metadata": given})).metadata
    assert metadata == given
    assert type(metadata["run"]) is dict
    assert type(metadata["run"]["tags"]) is list
