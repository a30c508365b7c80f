"""The commands. `instrument show PATH` prints the tables of a capture or of any Chrome/Kineto trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.errors import CaptureError, InstrumentError

if TYPE_CHECKING:
    from instrument.capture import Capture

# How far below a given folder captures are looked for: Hydra's outputs/<day>/<time>/profile/<capture> is four.
_DEPTH = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 with one line on stderr for what the user can mend.

    `argv` is without the program's name; None takes the process's own. Nothing here loads torch.
    """
    arguments = _parser().parse_args(argv)
    with suppress(AttributeError, ValueError):  # a stdout that is no text file of Python's keeps its ways
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        print(arguments.run(arguments), flush=True)
    except InstrumentError as error:
        print(f"instrument: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; the flush leaves Python nothing to complain of at its exit
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="instrument", description="Read what torch-instrument or torch.profiler has recorded."
    )
    parser.add_argument("--version", dest="run", action="store_const", const=_version, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_show(commands.add_parser("show", help="print the range tree and the costliest operators"))
    parser.set_defaults(run=lambda _: parser.format_help().rstrip())
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the range tree and the costliest operators of a capture."
    parser.set_defaults(run=_show)
    add = parser.add_argument
    add("path", metavar="PATH", type=Path, help="a capture, a Chrome trace, or a folder that holds captures")
    add("--sort", metavar="KEY", default="self_host_ns", help="operator column, torch's names too (%(default)s)")
    add("--rows", metavar="N", type=_positive, default=15, help="operators and ranges shown at most (%(default)s)")
    add("--by", choices=("name", "input_shapes", "stack"), default="name", help="group operators by (%(default)s)")
    add("--stack-depth", metavar="N", type=_positive, default=5, help="frames that make a stack (%(default)s)")
    add("--columns", metavar="A,B", type=_names, help="columns to show (those in which something is known)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--ranges", action="store_true", help="the range tree alone")
    either.add_argument("--ops", action="store_true", help="the operators alone")


def _show(arguments: argparse.Namespace) -> str:
    from instrument.sinks.table import render

    return render(
        _capture(arguments.path),
        rows=arguments.rows,
        sort=arguments.sort,
        columns=arguments.columns,
        by=arguments.by,
        stack_depth=arguments.stack_depth,
        ranges=not arguments.ops,
        operators=not arguments.ranges,
    )


def _capture(path: Path) -> Capture:
    """The capture at a path; in a folder that holds several the newest, which is told on stderr."""
    from instrument.capture import Capture

    is_folder = path.is_dir()
    if not is_folder or any((path / name).exists() for name in ("capture.json", "trace.json.gz", "trace.json")):
        return Capture.load(path)
    found = sorted(_captures_below(path), key=lambda folder: (folder / "capture.json").stat().st_mtime_ns)
    if not found:
        raise CaptureError(f"{path} holds no capture: give a capture's folder, a folder above it, or a trace file.")
    *others, newest = found
    if others:
        listed = "".join(f"\n  {folder}" for folder in reversed(others))
        print(f"Showing the newest of {len(found)} captures, {newest}; the others are:{listed}", file=sys.stderr)
    return Capture.load(newest)


def _captures_below(folder: Path) -> Iterator[Path]:
    for depth in range(1, _DEPTH + 1):
        for found in folder.glob("*/" * depth + "capture.json"):
            inner = found.parent.relative_to(folder)
            if not any(part.startswith(".") for part in inner.parts):  # hidden: still being written
                yield found.parent


def _version(_: argparse.Namespace) -> str:
    from importlib.metadata import version

    return f"instrument {version('torch-instrument')}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
