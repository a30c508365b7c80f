"""What it costs to get from a trace file to the operator table, beside its peers; run by `make bench`.

Each measurement is a process of its own, so that its peak is its own; the contestants take turns. torch can only be
asked about a recording that it has just made: each turn of torch records 200,000 events, which we then read.
"""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rounds import Row, report

EVENTS, EVENTS_OF_TORCH = 1_000_000, 200_000
SIZES = (50_000, 200_000, 1_000_000, 5_000_000)
ROUNDS = 3
IMPORTED_S = (
    0.3  # after the import of NumPy, a thread of OpenBLAS keeps a core busy for about 0.05 s
)
Measured = dict[str, float]


def _recorded(plain: Path, events: int, *, shapes: bool = False) -> Any:
    """Record a training loop, export it, and return torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    warnings.simplefilter("ignore")
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
    )
    optimizer, x = torch.optim.Adam(model.parameters(), foreach=False), torch.randn(2, 5, 16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        for _ in range(events // 2100):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(plain))
    return profiler


def _torch(plain: Path) -> None:
    """Only after the export is torch asked for its table."""
    profiler = _recorded(plain, EVENTS_OF_TORCH)
    _timed(lambda: (profiler.events(), profiler.key_averages()))


def _record(plain: Path) -> None:
    _timed(lambda: _recorded(plain, EVENTS))


def _ours(path: Path) -> object:
    from instrument.read.facts.links import Links
    from instrument.read.trace import reader
    from instrument.read.views.operators import operators

    return operators(Links(reader.read(path)))


def _events(path: Path) -> object:
    from instrument.read.trace import reader

    return reader.read(path)


def _decoded(path: Path) -> object:
    """As `_events`, on a machine without a C compiler."""
    from instrument.read.trace import scanner

    scanner.compiled = None
    return _events(path)


def _four(path: Path) -> object:
    """The same trace four times at once."""
    with ThreadPoolExecutor(4) as threads:
        return [*threads.map(_events, [path] * 4)]


def _every_table(path: Path) -> object:
    """Every view of a capture and every table that a view gives, also those of what the recording does not hold."""
    from instrument import Capture
    from instrument.base.errors import CaptureError
    from instrument.read.trace import reader
    from instrument.read.views.operators import GROUPINGS
    from instrument.read.views.views import VIEWS

    capture = Capture(path, None, {})
    capture.__dict__["events"] = reader.read(path)
    tables = [getattr(capture, name) for name in VIEWS if not name.endswith("()")]
    tables += [capture.operators_by(what) for what in GROUPINGS]
    with suppress(CaptureError):  # no memory events
        tables += [capture.memory_live(by) for by in capture.memory.kinds]
    with suppress(CaptureError):  # no Python frames
        tables.append(capture.stacks())
    return tables


def _orjson(path: Path) -> object:
    import orjson

    return orjson.loads(path.read_bytes())


def _msgspec(path: Path) -> object:
    from instrument.read.trace import schema

    document = msgspec.defstruct("Document", [("traceEvents", schema.EVENT_LIST)], gc=False)
    gc.disable()
    return msgspec.json.decode(path.read_bytes(), type=document)


def _hta(path: Path) -> object:
    from hta.trace_analysis import TraceAnalysis

    warnings.simplefilter("ignore")
    return TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))


CONTESTANTS: dict[str, Callable[[Path], object]] = {
    f.__name__[1:]: f
    for f in (_ours, _events, _decoded, _four, _every_table, _orjson, _msgspec, _hta)
}
IMPORTS = {"hta": "hta.trace_analysis", "orjson": "orjson"}


def _timed(act: Callable[[], object]) -> None:
    start = time.perf_counter_ns()
    kept = act()
    took = time.perf_counter_ns() - start
    status = Path(
        "/proc/self/status"
    ).read_text()  # getrusage would give the parent's peak where that is higher
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"ns": took, "peak": peak}), flush=True)
    del kept


def _child(name: str, path: Path) -> Measured:
    command = [sys.executable, __file__, name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    found: Measured = json.loads(
        next(line for line in done.stdout.splitlines()[::-1] if line.startswith('{"ns"'))
    )
    print(
        f"  {name:<12}{path.name:<20}{found['ns'] / 1e9:8.2f} s{found['peak'] / 1e6:10.0f} MB",
        file=sys.stderr,
    )
    return found


def _median(runs: list[Measured]) -> Measured:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _take_turns(
    contestants: dict[str, tuple[str, Path]], rounds: int = ROUNDS
) -> dict[str, Measured]:
    names, runs = list(contestants), {name: list[Measured]() for name in contestants}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name].append(_child(*contestants[name]))
    return {name: _median(found) for name, found in runs.items()}


def pack(plain: Path) -> Path:
    """The same trace compressed as the recorder does."""
    packed = plain.with_name(f"{plain.name}.gz")
    with plain.open("rb") as source, gzip.open(packed, "wb", 4) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return packed


def repeated(source: Path, target: Path, events: int) -> None:
    """A longer trace: the first 50,000 events of a recording again and again, each time later."""
    text = source.read_bytes()
    begin = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    times = list(itertools.islice(re.finditer(rb'"ts": (\d+)\.(\d+)', text), SIZES[0] + 1))
    starts = [int(match[1]) * 1000 + int(match[2]) for match in times]
    ends = [text.rindex(b"{", 0, match.start()) for match in times]
    bodies = [text[match.end() : end].rstrip() for match, end in zip(times, ends[1:])]
    heads = [text[end : match.start()] for match, end in zip(times, ends)]
    length = max(starts) - min(starts)
    with target.open("wb") as file:
        file.write(text[:begin])
        for turn in range(events // SIZES[0]):
            for head, ns, body in zip(heads, starts[: len(bodies)], bodies):
                file.write(head + b'"ts": %d.%03d' % divmod(ns + turn * length, 1000) + body)
        file.seek(-1, 1)  # the comma behind the last
        file.write(b"]}")


def against_torch(folder: Path) -> list[Row]:
    """Reading the recording that torch has just made, beside torch."""
    plain = folder / "torch.json"
    theirs, ours = [], []
    for _ in range(ROUNDS):
        theirs.append(_child("torch", plain))
        ours.append(_child("ours", pack(plain)))
    took, torchs = _median(ours), _median(theirs)
    name, peer = (
        f"{EVENTS_OF_TORCH:,} events from .json.gz to the operator table",
        "torch events() + key_averages()",
    )
    return [
        Row(name, took["ns"], peer, torchs["ns"], 1 / 80),
        Row(f"{name}, peak", took["peak"] / 1e6, peer, torchs["peak"] / 1e6, 1 / 4, "MB"),
    ]


def against_others(plain: Path) -> list[Row]:
    """Reading a million events, beside other readers."""
    took = _take_turns(
        {
            "plain": ("ours", plain),
            "events": ("events", plain),
            "decoded": ("decoded", plain),
            "tables": ("every_table", plain),
            "orjson": ("orjson", plain),
            "msgspec": ("msgspec", plain),
            "hta": ("hta", plain),
        }
    )
    table = took["plain"]["ns"]
    return [
        Row(
            "from .json to the operator table",
            table,
            f"HTA {version('HolisticTraceAnalysis')}",
            took["hta"]["ns"],
            1 / 30,
        ),
        Row("from .json to the operator table", table, "orjson.loads", took["orjson"]["ns"], 1 / 4),
        Row(
            "from .json to the operator table",
            table,
            "msgspec, typed, bare",
            took["msgspec"]["ns"],
            0.6,
        ),
        Row(
            "reading it into columns",
            took["events"]["ns"],
            "msgspec, typed, bare",
            took["msgspec"]["ns"],
            0.7,
        ),
        Row(
            "reading it into columns",
            took["events"]["ns"],
            "without the compiled reader",
            took["decoded"]["ns"],
            1 / 3,
        ),
        Row(
            "from .json to every table",
            took["tables"]["ns"],
            "msgspec, typed, bare",
            took["msgspec"]["ns"],
            1.2,
        ),
    ]


def with_shapes(plain: Path) -> list[Row]:
    """Reading a million events with the shapes of their inputs."""
    took = _take_turns({name: (name, plain) for name in ("events", "msgspec")})
    peer = "msgspec, typed, bare"
    return [
        Row("with shapes, into columns", took["events"]["ns"], peer, took["msgspec"]["ns"], 0.45)
    ]


def columns_bytes(path: Path) -> int:
    """The memory that the columns of a trace take."""
    from instrument.read.trace import reader
    from instrument.read.trace.columns import is_repeated

    events = reader.read(path)
    columns = [
        getattr(owner, field.name) for owner in (events, events.memory) for field in fields(owner)
    ]
    return sum(
        column.itemsize if is_repeated(column) else column.nbytes
        for column in columns
        if hasattr(column, "nbytes")
    )


def at_once(files: dict[int, Path]) -> list[Row]:
    """Four traces at once, in threads; 4 on two cores, both of which one trace uses too."""
    path = files[SIZES[2]]
    took = _take_turns({"one": ("events", path), "four": ("four", path)}, 3 * ROUNDS)
    return [Row("four traces at once", took["four"]["ns"], "one", took["one"]["ns"], 4.2)]


def growth(files: dict[int, Path], plain: Path) -> list[Row]:
    """Time and memory for each event, by the number of events."""
    took = _take_turns({str(size): ("events", path) for size, path in files.items()})
    idle = _child("imports", plain)["peak"]
    each = {s: (took[str(s)]["ns"] / s, (took[str(s)]["peak"] - idle) / s) for s in SIZES}
    rows = []
    for size in SIZES[1:]:
        (ns, held), (base_ns, base_held) = each[size], each[SIZES[0]]
        rows.append(Row(f"{size:,} events, each", ns, f"of {SIZES[0]:,}", base_ns, 1.2))
        rows.append(
            Row(f"{size:,} events, memory of each", held, f"of {SIZES[0]:,}", base_held, 1.3, "B")
        )
    size = SIZES[2]
    held = columns_bytes(files[size]) / size
    rows.append(Row(f"{size:,} events, peak of each", each[size][1], "the columns", held, 2.5, "B"))
    return rows


def main() -> int:
    if len(sys.argv) == 3:
        name, path = sys.argv[1], Path(sys.argv[2])
        if name == "torch":
            _torch(path)
            return 0
        if name == "record":
            _record(path)
            return 0
        if name == "record_shapes":
            _timed(lambda: _recorded(path, EVENTS, shapes=True))
            return 0
        # what is imported is not measured
        from instrument import capture  # noqa: F401
        from instrument.read.trace import reader  # noqa: F401
        from instrument.read.views import views  # noqa: F401

        if name in IMPORTS:
            __import__(IMPORTS[name])
        time.sleep(IMPORTED_S)
        _timed(lambda: None if name == "imports" else CONTESTANTS[name](path))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        plain = folder / "trace.json"
        _child("record", plain)
        shapes = folder / "shapes.json"
        _child("record_shapes", shapes)
        rows = against_torch(folder) + against_others(plain) + with_shapes(shapes)
        files = {size: folder / f"{size}.json" for size in SIZES}
        for size, path in files.items():
            repeated(plain, path, size)
        rows += growth(files, plain) + at_once(files)
    title = f"Reading {EVENTS:,} events: Python {sys.version.split()[0]}, medians of {ROUNDS} turns"
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
