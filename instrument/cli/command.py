"""The commands.

`instrument show PATH` prints the tables of a capture or of any Chrome/Kineto trace, and `instrument export PATH --sink
NAME` runs a sink on captures that were recorded before. `instrument ranks RUN_FOLDER` puts the ranks of a run together.
`instrument trigger FOLDER` has a run record its next window. `instrument graph MODULE:NAME` times a model node by node.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.files import exists, regular_files
from instrument.printable import printable_lines

if TYPE_CHECKING:
    from instrument.capture import Capture

# How many captures and the like are named beside the one that is shown.
_OTHERS = 10
# How many rows of each table are shown unasked.
_ROWS = 15

# What `show` prints when asked for: its option, the capture's view, which must be a table, and what that tells. The
# first two have a layout of their own; the names stand here and not in Capture, so that --help needs no numpy.
_VIEWS = {
    "ranges": ("ranges", "the range tree: time on CPU and device, forward and backward"),
    "ops": ("operators", "the operators, by name or --by"),
    "kernels": ("kernels", "the device's kernels by name, with what launching them cost"),
    "steps": ("steps", "each step, what the device did for it, and what its idle time waited for"),
    "moments": ("moments", "the moments that were marked with instrument.mark"),
    "memory": ("memory.devices", "what was allocated and freed on each device, and the peak"),
    "memory-categories": ("memory_categories", "what memory was for, where profiler.memory_categories was on"),
    "breakdown": ("breakdown", "the device's time: compute, communication, copies, idle"),
    "copies": ("copies", "copies and memsets, with their bandwidth"),
    "launches": ("launches", "the CPU calls that launch device work, and how long it took to start"),
    "streams": ("streams", "what ran on each stream of each device"),
    "overview": ("overview", "each step by kernels, copies, communication, loader and CPU"),
    "devices": ("devices", "how well each device was used"),
    "swallowed": ("swallowed", "the ranges inside compiled regions, which cannot be timed"),
}

# What `--by` groups operators by, as the table sink's option of that name.
_GROUPINGS = ("name", "input_shapes", "stack", "overload", "thread", "step", "device", "range")

# What `graph --by` groups nodes by, as `NodeTable.by`, whose module loads torch; a test holds both equal.
_NODE_GROUPINGS = ("module_path", "module_type", "target", "op", "source")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 with one line on stderr for what the user can mend.

    `argv` is without the program's name; None takes the process's own. Nothing here loads torch.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    options = [word for word in rest if "options" in arguments and "=" in word and not word.startswith("-")]
    if len(options) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word not in options)}")
    arguments.options = options
    with suppress(AttributeError, ValueError):  # a stdout that is no text file of Python's keeps its ways
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        print(printable_lines(arguments.run(arguments)), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is left goes nowhere when Python flushes at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InstrumentError, OSError) as error:
        _say(f"instrument: {error}")
        return 2
    return 0


def _say(text: str) -> None:
    """Print beside what a command gives, with nothing in it that a terminal would obey."""
    print(printable_lines(text), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="instrument", description="Read what torch-instrument or torch.profiler has recorded."
    )
    parser.add_argument("--version", dest="run", action="store_const", const=_version, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_show(commands.add_parser("show", help="print the range tree and the costliest operators, or another view"))
    _add_export(commands.add_parser("export", help="run a sink on captures or traces recorded before"))
    _add_ranks(commands.add_parser("ranks", help="compare the ranks of a run, and merge their traces"))
    _add_trigger(commands.add_parser("trigger", help="have a run that goes on record its next steps"))
    _add_graph(commands.add_parser("graph", help="time a model node by node of its torch.fx graph"))
    parser.set_defaults(run=lambda _: parser.format_help().rstrip())
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the range tree and the costliest operators of a capture, or those views that are named."
    parser.set_defaults(run=_show)
    add = parser.add_argument
    add("path", metavar="PATH", type=_place, help="a capture, a Chrome trace, a folder that holds captures, or a URL")
    add("--sort", metavar="KEY", help="column to sort by, torch's names too (operators: self time; others as they are)")
    add("--rows", metavar="N", type=_rows, help=f"rows shown of each table at most; -1: all ({_ROWS}, with --json all)")
    add("--by", choices=_GROUPINGS, default="name", help="group operators by it besides their name")
    add("--stack-depth", metavar="N", type=_positive, default=5, help="frames that make a stack (%(default)s)")
    add("--columns", metavar="A,B", type=_names, help="columns to show (those in which something is known)")
    for option, (view, tells) in _VIEWS.items():
        add(f"--{option}", dest="views", action="append_const", const=view, help=tells)
    told = "what profiler.timings has written of the whole run, alone; also by its file as PATH"
    add("--timings", action="store_true", help=told)
    add("--json", action="store_true", help="the views as JSON, all columns of each, times in nanoseconds")


def _show(arguments: argparse.Namespace) -> str:
    from instrument.report.text import as_json, render, render_view, sort_keys

    timings = arguments.timings or str(arguments.path).endswith(".jsonl")
    chosen = arguments.views or ["ranges", "operators"]
    if arguments.by != "name" and (timings or "operators" not in chosen):
        raise ConfigError(f"--by {arguments.by} groups operators, which are not asked for: add --ops, or leave it out.")
    if timings:
        return _show_timings(arguments)
    capture = _capture(arguments.path)
    if arguments.json:
        grouping = {"by": arguments.by, "stack_depth": arguments.stack_depth}
        return as_json(capture, chosen, rows=arguments.rows or sys.maxsize, sort=arguments.sort, **grouping)
    rows = arguments.rows or _ROWS
    own = {name: name in chosen for name in ("ranges", "operators")}
    sort, sort_ranges = sort_keys(arguments.sort, **own) if any(own.values()) else (None, None)
    text = render(
        capture,
        rows=rows,
        sort=sort,
        sort_ranges=sort_ranges,
        columns=arguments.columns if any(own.values()) else None,
        by=arguments.by,
        stack_depth=arguments.stack_depth,
        **own,
    )
    others = [view for view in dict.fromkeys(chosen) if view not in ("ranges", "operators")]
    options = {"rows": rows, "sort": arguments.sort, "columns": arguments.columns}
    return "\n\n".join([text, *(render_view(capture, view, **options) for view in others)])


def _show_timings(arguments: argparse.Namespace) -> str:
    from instrument.report.text import view_text
    from instrument.runs.timings_file import read_timings

    table, heading = read_timings(_timings_file(arguments.path))
    shown = view_text("timings", table, rows=arguments.rows or _ROWS, sort=arguments.sort, columns=arguments.columns)
    return f"{heading}\n\n{shown}"


def _timings_file(path: Path | str) -> Path:
    """The file of timings at a path; in a folder that holds several the newest, which is told on stderr."""
    if isinstance(path, str):
        from instrument.storage import fetch

        path = fetch(path)
    if not path.is_dir():
        return path
    files = (file for file in regular_files(path) if fnmatch(file.name, "timings_rank*.jsonl"))
    found = sorted(files, key=lambda file: (file.stat().st_mtime_ns, file))
    if not found:
        raise CaptureError(f"{path} holds no timings: record some with profiler=timings.")
    *others, newest = found
    _tell_others(newest, others, "files of timings")
    return newest


def _tell_others(newest: Path | str, others: Sequence[Path | str], kind: str) -> None:
    if others:
        listed = "".join(f"\n  {path}" for path in others[: -_OTHERS - 1 : -1])
        listed += f"\n  and {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
        _say(f"Showing the newest of {len(others) + 1} {kind}, {newest}; the others are:{listed}")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.usage = "instrument export PATH [--sink NAME [--to FOLDER] [KEY=VALUE ...]]"
    parser.description = (
        "Without --sink, finish what a run has recorded but not exported, and send what has not arrived: as the run "
        "was configured, if you ran it here, else with the sinks table, chrome_trace, stacks and memory. What a "
        "capture itself asks for is never done. With --sink, run a sink on a capture, on all captures below a folder, "
        "or on a Chrome trace. KEY=VALUE are its options, in YAML, with dots for what is nested: rows=30 "
        "'columns=[calls, cpu_ns]' metadata.model=vit."
    )
    parser.set_defaults(run=_export, options=[])
    add = parser.add_argument
    add("path", metavar="PATH", type=_place, help="a capture, a folder that holds captures, a Chrome trace, or a URL")
    add("--sink", metavar="NAME", help="one that ships, such as parquet, or a class: package.module.Class")
    add("--upload-to", metavar="URL", help="without --sink: where captures are sent, in place of profiler.upload_to")
    where = "where each capture gets its folder (the capture's own; a trace or one at a URL gets one of its name here)"
    add("--to", metavar="FOLDER", type=Path, help=where)


def _export(arguments: argparse.Namespace) -> str:
    if arguments.sink is None:
        if arguments.options:
            raise ConfigError(f"{arguments.options[0]} is an option of a sink, but there is no --sink NAME.")
        from instrument.worker.leftovers import finish_all

        return finish_all(arguments.path, arguments.upload_to)
    from instrument.capture import Capture
    from instrument.config.instantiate import build_sink, parse_options
    from instrument.files import importable_here
    from instrument.sinks import Sink
    from instrument.worker.leftovers import finish_queued, queued_at

    with importable_here() if "." in arguments.sink else nullcontext():  # a class in a file that lies here
        sink = build_sink(arguments.sink, parse_options(arguments.options))
    path, to = arguments.path, arguments.to
    failures: list[str] = []
    chosen: Sequence[Path | str]
    if not isinstance(path, str) and to is None and (queued := queued_at(path)):
        finished, _, failures = finish_queued(queued, {arguments.sink: sink})
        chosen = sorted({*finished, *([] if path in queued else _captures_below(path))} - {*finished}, key=str)
    else:
        finished, chosen = [], sorted(_captures(path), key=str)
    for each in chosen:
        try:
            capture = Capture.load(each)
            inner = Path(capture.name).name if each == path else str(each).removeprefix(str(path)).strip("/")
            own = Path(inner) if isinstance(path, str) else capture.folder
            _write(sink, capture, to / inner if to else own or Path(capture.name))
        except (InstrumentError, OSError) as error:
            says_it_all = len(chosen) == 1 and isinstance(error, InstrumentError)
            failures.append(str(error) if says_it_all else f"The {arguments.sink} sink failed on {each}: {error}")
    try:
        if isinstance(sink, Sink):
            sink.close()
    except (InstrumentError, OSError) as error:
        failures.append(str(error))
    if failures:
        count = len(chosen) + len(finished)
        others = f" ({len(failures)} of {count} captures failed; this was the first.)" if count > 1 else ""
        raise CaptureError(f"{failures[0]}{others}")
    return f"The {arguments.sink} sink ran on {', '.join(map(str, [*finished, *chosen]))}."


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the ranks of a run's newest window: each one's step, who holds the others up, the ranges over all "
        "ranks. RUN_FOLDER may also be captures, or the traces of several ranks, whoever recorded them."
    )
    parser.set_defaults(run=_ranks)
    add = parser.add_argument
    add("paths", metavar="RUN_FOLDER", type=_place, nargs="+", help="a folder of captures, traces by rank, or a URL")
    add("--window", metavar="NAME", help="another window than the newest, such as steps_000010-000012")
    add("--rows", metavar="N", type=_rows, default=_ROWS, help="rows of each table at most; -1: all (%(default)s)")
    add("--sort", metavar="KEY", help="column to sort the ranges by")
    add("--columns", metavar="A,B", type=_names, help="columns of the ranges to show")
    add("--json", action="store_true", help="everything as JSON, times in nanoseconds")
    add("--trace", metavar="FILE", type=Path, help="also write the ranks' traces as one, for Perfetto; .gz packs it")


def _ranks(arguments: argparse.Namespace) -> str:
    from instrument.runs import merge_traces, ranks_report
    from instrument.runs.run import Run

    run = Run.load(*arguments.paths)
    for sentence in run.unread:
        _say(f"instrument: left out: {sentence}")
    ranks = run.window(arguments.window) if arguments.window else run.windows[-1]
    if not arguments.window:
        _tell_others(ranks.where, [window.where for window in run.windows[:-1]], "windows")
    if arguments.trace:
        merge_traces.merge(ranks, arguments.trace)
        _say(f"The traces of {len(ranks.paths)} ranks are in {arguments.trace}")
    if arguments.json:
        return ranks_report.as_json(ranks)
    return ranks_report.as_text(ranks, rows=arguments.rows, sort=arguments.sort, columns=arguments.columns)


def _add_trigger(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Have the runs in or below a folder record their next steps, from another shell or node. They must have been "
        "started with the file trigger: 'profiler/triggers=[file]'. Every rank that listens there records."
    )
    parser.set_defaults(run=_trigger)
    add = parser.add_argument
    add("folder", metavar="RUN_FOLDER", type=Path, help="a folder for captures, or one above it, such as Hydra's")
    add("--steps", metavar="N", type=_positive, help="steps to record (as many as profiler.active says)")


def _trigger(arguments: argparse.Namespace) -> str:
    from instrument.triggers.file import ask

    folders = ask(arguments.folder, arguments.steps)
    how_many = f"the next {arguments.steps} steps" if arguments.steps else "the next window"
    return f"Asked for {how_many} in {', '.join(map(str, folders))}; the run looks there every half second."


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a model node by node of its graph, on made-up inputs; print what each took and computed."
    parser.set_defaults(run=_graph)
    add, alone = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("model", metavar="MODULE:NAME", help="a module, its class, or what makes it, such as my_package.models:build")
    shape = "an input's shape, as in 1,3,224,224, with its type, 8,128:int64, and its parameter, input_ids=8,128:int64"
    add("--input", metavar="SHAPE", dest="inputs", action="append", default=[], help=f"{shape}; once for each")
    add("--runs", metavar="N", type=_positive, default=10, help="runs that are counted (%(default)s)")
    add("--train", action="store_true", help="as in training: in its mode and with gradients (for inference)")
    add("--device", metavar="NAME", default="cpu", help="where it runs (%(default)s)")
    add("--sort", metavar="KEY", help="column to sort by, such as mean_ns (the order of the graph)")
    add("--rows", metavar="N", type=_rows, help="rows shown at most (all)")
    alone("--by", choices=_NODE_GROUPINGS, help="group nodes by it")
    alone("--roofline", action="store_true", help="what limits each node on this machine, and its time at that limit")
    add("--depth", metavar="N", type=_positive, help="with --by module_path: modules down to this depth")
    add("--columns", metavar="A,B", type=_names, help="columns to show (the most telling)")
    add("--html", metavar="FILE", type=Path, help="write the picture of the graph too, with a row for each node")
    add("--refresh", action="store_true", help="measure anew what the machine can do (measured once, then remembered)")


def _graph(arguments: argparse.Namespace) -> str:
    from instrument.cli.fx import report

    sys.path.insert(0, str(Path.cwd()))  # a model in a file that lies here, as for python -m
    return report(arguments)


def _write(sink: Any, capture: Capture, folder: Path) -> None:
    """Run a sink with a folder that is there, and gone if the sink wrote elsewhere or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sink.write(capture, folder)
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _capture(path: Path | str) -> Capture:
    """The capture at a path or URL; where there are several the newest, which is told on stderr."""
    from instrument.capture import Capture

    *others, newest = _captures(path)
    _tell_others(newest, others, "captures")
    return Capture.load(newest)


def _captures(path: Path | str) -> Sequence[Path | str]:
    """The captures at or below a path or URL, the newest last.

    Raises:
        CaptureError: there are none.
    """
    if isinstance(path, str):
        from instrument.storage import captures

        return captures(path)
    if _is_one(path):
        return [path]
    return sorted(_captures_below(path), key=lambda folder: (folder / "capture.json").stat().st_mtime_ns)


def _is_one(path: Path) -> bool:
    """Whether a path is one capture or trace, and no folder of captures."""
    return not path.is_dir() or any(exists(path / name) for name in ("capture.json", "trace.json.gz", "trace.json"))


def _captures_below(folder: Path) -> list[Path]:
    """The folders of the captures below one.

    Raises:
        CaptureError: there are none.
    """
    from instrument.runs.run import captures_below

    found = list(captures_below(folder))
    if not found:
        raise CaptureError(f"{folder} holds no capture: give a capture's folder, a folder above it, or a trace file.")
    return found


def _version(_: argparse.Namespace) -> str:
    from importlib.metadata import version

    return f"instrument {version('torch-instrument')}"


def _place(text: str) -> Path | str:
    """A path, or a URL as it is."""
    return text if "://" in text else Path(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def _rows(text: str) -> int:
    """How many rows; all for -1, as in torch's `row_limit`."""
    return sys.maxsize if text == "-1" else _positive(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
