"""Builds and calls sinks: what a sink raises is logged, and ends nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
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
    place = folder.with_name(name_of(folder))
    kept = f". The trace is kept in {place}, and further failures of this sink are not logged."
    what = f"The {name} sink failed on {place.name}"
    _call(name, lambda: sink.write(capture, folder), failed, what, kept)


def is_last(sink: Any) -> bool:
    """Whether a sink runs after all others."""
    return bool(getattr(sink, "last", False))


def close_sinks(sinks: Mapping[str, Any], failed: set[str], timeout_s: float | None = None) -> None:
    """Call `close` of all sinks; log what they raise. `timeout_s` is as for `Sink.close`."""
    for name, sink in sinks.items():
        # `close` of a user's own class may mean anything
        if isinstance(sink, Options) and hasattr(sink, "close"):
            act = partial(sink.close, timeout_s)
            _call(f"{name}.close", act, failed, f"The {name} sink failed in close()")


def _call(key: str, act: Callable[[], object], failed: set[str], what: str, then: str = "") -> None:
    """Call `act`; if it raises, log `what`, the reason and `then`, once for each `key`."""
    try:
        act()
    except BaseException as error:  # training and the other sinks go on
        # after Ctrl-C, `interruptibly` raises when the capture is complete
        if raised_by_handler(error) and not isinstance(error, KeyboardInterrupt):
            raise
        if key not in failed:
            failed.add(key)
            # the message of an error of this package says it all
            trace = None if isinstance(error, InstrumentError) else error
            logger.error("{}: {}{}", what, reason_of(error), then, exception=trace)


def build_sinks(mappings: Mapping[str, Mapping[str, Any]], failed: set[str]) -> dict[str, Any]:
    """Build the sinks of a job; log the errors of the others, and add them to `failed`."""
    sinks = {}
    for name, mapping in mappings.items():
        try:
            options = {option: value for option, value in mapping.items() if option != "_target_"}
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
