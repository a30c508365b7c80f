"""The package's loggers: nothing in a message can forge a line of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loguru import logger as _logger

from instrument.printable import printable_lines

if TYPE_CHECKING:
    from loguru import Record


def _one_line(record: Record) -> None:
    record["message"] = printable_lines(record["message"])


def _lines(record: Record) -> None:
    record["message"] = printable_lines(*record["message"].split("\n"))


#: Writes a message as one line.
logger = _logger.patch(_one_line)
#: Writes messages of several lines: tables and tracebacks.
lines_logger = _logger.patch(_lines)
