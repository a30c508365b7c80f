"""Builds and calls sinks: what a sink raises is logged, and ends nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

from instrument.base.errors import InstrumentError, reason_of
from instrument.base.instantiate import sink_of_class
from instrument.base.log import logger
from instrument.base.options import Options
from instrument.base.queue import name_of
from instrument.base.signals import raised_by_handler

if TYPE_CHECKING:
    from instrument.read.capture import Capture


def run_sink(name: str, sink: Any, capture: Capture, folder: Path, failed: set[str]) -> None:
    """Run a sink on a capture. If the sink raises, log the exception and add the sink to `failed`.

    The exception of a sink that is already in `failed` is not logged. Only what a signal handler of
    the program raises goes through, if this is called by `interruptibly`.
    """
    try:
        with ending_children():
            sink.write(capture, folder)
    except BaseException as error:  # training and the other sinks go on
        # after Ctrl-C, `interruptibly` raises when the capture is complete
        if raised_by_handler(error) and not isinstance(error, KeyboardInterrupt):
            raise
        if name in failed:
            return
        failed.add(name)
        logger.error(
            "The {} sink failed on {}: {}. The trace is kept in {}, and further failures of this "
            "sink are not logged.",
            name,
            name_of(folder),
            reason_of(error),
            folder.with_name(name_of(folder)),
            exception=_to_trace(error),
        )


def is_last(sink: Any) -> bool:
    """Whether a sink runs after all others."""
    return bool(getattr(sink, "last", False))


def close_sinks(sinks: Mapping[str, Any], failed: set[str], timeout_s: float | None = None) -> None:
    """Call `close` of all sinks; log what they raise. `timeout_s` is as for `Sink.close`."""
    for name, sink in sinks.items():
        try:
            if not isinstance(sink, Options):  # `close` of a user's own class may mean anything
                continue
            with ending_children():
                sink.close(timeout_s)  # type: ignore[attr-defined]
        except BaseException as error:
            if raised_by_handler(error) and not isinstance(error, KeyboardInterrupt):
                raise
            if f"{name}.close" not in failed:
                failed.add(f"{name}.close")
                logger.error(
                    "The {} sink failed in close(): {}",
                    name,
                    reason_of(error),
                    exception=_to_trace(error),
                )


def _to_trace(error: BaseException) -> BaseException | None:
    """The error, unless it is one of this package, whose message says it all."""
    return None if isinstance(error, InstrumentError) else error


@contextmanager
def ending_children() -> Iterator[None]:
    """End a process that the block forks, once the block ends in it; use this around a sink's code.

    Otherwise the child would continue the work of its parent.
    """
    process, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            status = error.code or 0
        raise
    except BaseException as error:
        if os.getpid() != process:
            print_exception(error)
        raise
    finally:
        if os.getpid() != process:
            os._exit(status)


def build_sinks(mappings: Mapping[str, Mapping[str, Any]], failed: set[str]) -> dict[str, Any]:
    """Build the sinks of a job; log the errors of the others, and add them to `failed`."""
    sinks = {}
    for name, mapping in mappings.items():
        try:
            options = {option: value for option, value in mapping.items() if option != "_target_"}
            with ending_children():
                sinks[name] = sink_of_class(str(mapping.get("_target_")), options)
        except Exception as error:
            if name not in failed:
                failed.add(name)
                logger.error(
                    "The {} sink cannot be built in the process that finishes captures: {}",
                    name,
                    reason_of(error),
                )
    return sinks
