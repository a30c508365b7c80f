"""The package's log messages: loguru writes them, and none can forge a line or end training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from textwrap import indent
from traceback import format_exception
from typing import TYPE_CHECKING

import loguru

from instrument.base.errors import reason_of
from instrument.base.printable import printable, printable_lines

if TYPE_CHECKING:
    from loguru import Record


#: The levels whose messages are not written: those of details, on all ranks but one.
silenced: set[str] = set()


class Logger:
    """Writes messages to loguru's sinks; values replace the braces of a message, as in `format`.

    A sink that the program has added with `catch=False` may raise. Its error is not raised here:
    the message goes to stderr, and training goes on.
    """

    def __init__(self, patch: Callable[[Record], None]) -> None:
        self._logger = loguru.logger.patch(patch)
        self.prints: Callable[[str], None] | None = None  # messages of level INFO, if given

    def debug(self, message: str, *values: object) -> None:
        """Log a detail."""
        self._write("DEBUG", message, values)

    def info(self, message: str, *values: object) -> None:
        """Log what happens as it should."""
        self._write("INFO", message, values)

    def warning(self, message: str, *values: object) -> None:
        """Log what a user may want to change."""
        self._write("WARNING", message, values)

    def error(self, message: str, *values: object, exception: BaseException | None = None) -> None:
        """Log a failure, with the traceback of `exception` if there is one."""
        if exception is None:
            self._write("ERROR", message, values)
            return
        # as text, because loguru's own traceback would show the values of variables
        sentence = printable(message.format(*values) if values else message)
        lines_logger._write("ERROR", "{}", (f"{sentence}\n{_traceback_of(exception)}",))

    def block(self, text: str) -> None:
        """Log a text of several lines as it is, without the time and the place of a message."""
        try:
            self._logger.bind(is_block=True).opt(depth=1, raw=True).info("{}", f"\n{text}\n\n")
        except Exception as error:
            self._fallback("INFO", text, error)

    def log(self, level: str, message: str, *values: object) -> None:
        """Log a message of a level that is known only at run time."""
        self._write(level, message, values)

    def _write(
        self,
        level: str,
        message: str,
        values: tuple[object, ...],
    ) -> None:
        if level in silenced:
            return
        try:
            if level == "INFO" and self.prints is not None:
                self.prints(message.format(*values) if values else message)
                return
            # the record names the function that calls a method of this class
            self._logger.opt(depth=2).log(level, message, *values)
        except Exception as error:
            self._fallback(level, message.format(*values) if values else message, error)

    def _fallback(self, level: str, text: str, error: Exception) -> None:
        with suppress(AttributeError, OSError, ValueError):  # stderr is closed
            print(
                printable_lines(f"{level}: {text} (a log sink failed: {reason_of(error)})"),
                file=sys.stderr,
            )


def _traceback_of(error: BaseException) -> str:
    """The traceback of an exception, indented, so that its message cannot forge a log line."""
    return indent("".join(format_exception(error)).rstrip(), "  ")


def _one_line(record: Record) -> None:
    record["message"] = printable_lines(record["message"])


def _lines(record: Record) -> None:
    record["message"] = printable_lines(*record["message"].split("\n"))


#: Writes a message as one line.
logger = Logger(_one_line)
#: Writes messages of several lines: tables and tracebacks.
lines_logger = Logger(_lines)
