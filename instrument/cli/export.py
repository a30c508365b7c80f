"""`instrument export`: export captures that a run did not export, or run a sink on captures."""

from __future__ import annotations

import argparse
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from instrument.base.errors import CaptureError, ConfigError, InstrumentError, need_package
from instrument.cli.arguments import path_or_url
from instrument.cli.output import Parts

HELP = "export captures that a run did not export, or run a sink on captures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.usage = "instrument export PATH [--sink NAME [--to FOLDER] [KEY=VALUE ...]]"
    parser.description = (
        "Without --sink, export the captures that a run recorded but did not export, with the "
        "sinks table, chrome_trace, stacks and memory. With --upload-to, also upload the captures "
        "that have not arrived at this URL. The sinks and the URL in the files of a capture are "
        "never used, so that a capture from another person cannot run code on this machine. With "
        "--sink, run one sink on a capture, on all captures below a folder, or on a Chrome trace. "
        "KEY=VALUE are options of the sink, in YAML, with dots for nested options: rows=30 "
        "'columns=[calls, cpu_ns]' metadata.model=vit."
    )
    parser.set_defaults(options=[])
    add = parser.add_argument
    of = "a capture, a folder that holds captures, a Chrome trace, or a URL"
    add("path", metavar="PATH", type=path_or_url, help=of)
    add(
        "--sink",
        metavar="NAME",
        help="the name of a sink, such as parquet, or a class: package.module.Class",
    )
    add("--upload-to", metavar="URL", help="without --sink: the URL to upload captures to")
    where = (
        "write into this folder, in a subfolder for each capture (default: the capture's own "
        "folder; for a trace or a URL, a folder of the same name in the current folder)"
    )
    add("--to", metavar="FOLDER", type=Path, help=where)


def run(arguments: argparse.Namespace) -> str | Parts:
    """Export captures, or run a sink on captures; return a sentence that names the captures."""
    if arguments.sink is None:
        if arguments.options:
            raise ConfigError(
                f"{arguments.options[0]} is an option of a sink: add --sink NAME, or remove the "
                "option."
            )
        from instrument.export.leftovers import finish_all

        return [finish_all(arguments.path, arguments.upload_to)]
    from instrument.base.files import importable_here
    from instrument.base.instantiate import parse_options, sink_of_class
    from instrument.export.leftovers import finish_queued, queued_at
    from instrument.read.views.find_captures import captures_at, captures_below

    if arguments.options:
        need_package("An option of a sink", "omegaconf", None)
    # A class may be in a file of the current folder.
    with importable_here() if "." in arguments.sink else nullcontext():
        sink = sink_of_class(arguments.sink, parse_options(arguments.options))
    path, to = arguments.path, arguments.to
    queued = [] if isinstance(path, str) or to is not None else queued_at(path)
    finished, _, failures = finish_queued(queued, {arguments.sink: sink})
    chosen: list[Path | str]
    if queued:
        chosen = [] if path in queued else sorted({*captures_below(path)} - {*finished})
    else:
        chosen = sorted(captures_at(path), key=str)
    for each in chosen:
        try:
            _run_sink(sink, each, path, to)
        except (InstrumentError, OSError) as error:
            is_alone = len(chosen) == 1 and isinstance(error, InstrumentError)
            prefix = "" if is_alone else f"The {arguments.sink} sink failed on {each}: "
            failures.append(f"{prefix}{error}")
    try:
        _close(sink)
    except (InstrumentError, OSError) as error:
        failures.append(str(error))
    count = len(chosen) + len(finished)
    if failures:
        others = f" ({len(failures)} of {count} captures failed; this is the first error.)"
        raise CaptureError(f"{failures[0]}{others if count > 1 else ''}")
    return f"The {arguments.sink} sink ran on {', '.join(map(str, [*finished, *chosen]))}."


def _run_sink(sink: Any, each: Path | str, path: Path | str, to: Path | None) -> None:
    """Run the sink on a capture at or below `path`, and remove its folder if it is empty.

    Raises:
        ConfigError: the folder cannot be created.
    """
    from instrument.read.capture import Capture

    capture = Capture.load(each)
    name = Path(capture.name)
    inner = name.name if each == path else str(each).removeprefix(str(path)).strip("/")
    own = Path(inner) if isinstance(path, str) else capture.folder
    folder = to / inner if to else own or name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} cannot be created ({error.strerror}): name another one with --to."
        ) from None
    try:
        sink.write(capture, folder)
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _close(sink: Any) -> None:
    from instrument.base.options import Options

    if isinstance(sink, Options):  # `close` of a user's own class may mean anything
        sink.close()  # type: ignore[attr-defined]
