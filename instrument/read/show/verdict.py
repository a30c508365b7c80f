"""The verdict on one capture, for texts that go on if it cannot be diagnosed."""

from __future__ import annotations

from dataclasses import replace

from instrument.base.errors import ConfigError, reason_of
from instrument.base.prose import code, wrapped
from instrument.read.advise.diagnose import diagnose
from instrument.read.advise.diagnosis import Diagnosis, as_markdown, below
from instrument.read.advise.settings import DEFAULT, Settings
from instrument.read.advise.verdict import first_lines
from instrument.read.views.views import Views


def first_parts(capture: Views, settings: Settings = DEFAULT) -> list[list[str]]:
    """Return the paragraphs before the tables: the verdict with its notes, what to change first."""
    try:
        diagnosis = replace(_diagnosis(capture, settings), lost_events="")  # the heading has these
        rest = [line for each in below(diagnosis) for line in wrapped(each)]
        return [*first_lines(diagnosis), *([rest] if rest else [])]
    except ConfigError:
        raise
    except Exception as error:  # the tables are shown anyway
        return [wrapped(f"The capture could not be diagnosed: {reason_of(error)}.")]


def markdown_of(capture: Views) -> str:
    """Return the diagnosis of one capture as Markdown; see `diagnosis.as_markdown`."""
    try:
        return as_markdown(_diagnosis(capture))
    except Exception as error:
        return f"The capture could not be diagnosed: {code(reason_of(error))}"


def _diagnosis(capture: Views, settings: Settings = DEFAULT) -> Diagnosis:
    def found() -> Diagnosis:
        return diagnose(capture, ranks_checks=(), **settings._asdict())

    return capture.once("diagnosis", found) if settings == DEFAULT else found()
