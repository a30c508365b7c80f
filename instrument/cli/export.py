"""`instrument export`: finish what a run has left, or run a sink on captures that were recorded before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.cli.arguments import path_or_url
from instrument.cli.paths import captures_at, captures_in
from instrument.errors import CaptureError, ConfigError, InstrumentError

if TYPE_CHECKING:
    from instrument.capture import Capture

HELP = "run a sink on captures or traces recorded before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.usage = "instrument export PATH [--sink NAME [--to FOLDER] [KEY=VALUE ...]]"
    parser.description = (
        "Without --sink, finish what a run has recorded but not exported, and send what has not arrived: as the run "
        "was configured, if you ran it here, else with the sinks table, chrome_trace, stacks and memory. What a "
        "capture itself asks for is never done. With --sink, run a sink on a capture, on all captures below a folder, "
        "or on a Chrome trace. KEY=VALUE are its options, in YAML, with dots for what is nested: rows=30 "
        "'columns=[calls, cpu_ns]' metadata.model=vit."
    )
    parser.set_defaults(options=[])
    add = parser.add_argument
    of = "a capture, a folder that holds captures, a Chrome trace, or a URL"
    add("path", metavar="PATH", type=path_or_url, help=of)
    add(
        "--sink",
        metavar="NAME",
        help="one that ships, such as parquet, or a class: package.module.Class",
    )
    add(
        "--upload-to",
        metavar="URL",
        help="without --sink: where captures are sent, in place of profiler.upload_to",
    )
    where = "where each capture gets its folder (the capture's own; a trace or one at a URL gets one of its name here)"
    add("--to", metavar="FOLDER", type=Path, help=where)


def run(arguments: argparse.Namespace) -> str:
    """Return which captures were finished, or on which ones the sink ran.

    Raises:
        CaptureError: a capture could not be exported; the others were.
        ConfigError: there is no such sink or option.
    """
    if arguments.sink is None:
        if arguments.options:
            raise ConfigError(
                f"{arguments.options[0]} is an option of a sink, but there is no --sink NAME."
            )
        from instrument.worker.leftovers import finish_all

        return finish_all(arguments.path, arguments.upload_to)
    from instrument.capture import Capture
    from instrument.config.instantiate import parse_options, sink_of_class
    from instrument.files import importable_here
    from instrument.sinks import Sink
    from instrument.worker.leftovers import finish_queued, queued_at

    with (
        importable_here() if "." in arguments.sink else nullcontext()
    ):  # a class in a file that lies here
        sink = sink_of_class(arguments.sink, parse_options(arguments.options))
    path, to = arguments.path, arguments.to
    failures: list[str] = []
    chosen: Sequence[Path | str]
    if not isinstance(path, str) and to is None and (queued := queued_at(path)):
        finished, _, failures = finish_queued(queued, {arguments.sink: sink})
        chosen = sorted(
            {*finished, *([] if path in queued else captures_in(path))} - {*finished}, key=str
        )
    else:
        finished, chosen = [], sorted(captures_at(path), key=str)
    for each in chosen:
        try:
            capture = Capture.load(each)
            inner = (
                Path(capture.name).name
                if each == path
                else str(each).removeprefix(str(path)).strip("/")
            )
            own = Path(inner) if isinstance(path, str) else capture.folder
            _write(sink, capture, to / inner if to else own or Path(capture.name))
        except (InstrumentError, OSError) as error:
            says_it_all = len(chosen) == 1 and isinstance(error, InstrumentError)
            failures.append(
                str(error)
                if says_it_all
                else f"The {arguments.sink} sink failed on {each}: {error}"
            )
    try:
        if isinstance(sink, Sink):
            sink.close()
    except (InstrumentError, OSError) as error:
        failures.append(str(error))
    if failures:
        count = len(chosen) + len(finished)
        others = (
            f" ({len(failures)} of {count} captures failed; this was the first.)"
            if count > 1
            else ""
        )
        raise CaptureError(f"{failures[0]}{others}")
    return f"The {arguments.sink} sink ran on {', '.join(map(str, [*finished, *chosen]))}."


def _write(sink: Any, capture: Capture, folder: Path) -> None:
    """Run a sink with a folder that is there, and gone if the sink wrote elsewhere or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sink.write(capture, folder)
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()
