"""The cost of the report page compared with reading its trace, and its size; run by `make bench`.

The costs are measured on real traces from the folder INSTRUMENT_TRACES, and on a trace of a million events, which
repeats one of them. Reading and the page together are compared with `orjson.loads`, which only decodes the trace.
"""

from __future__ import annotations

import gzip
import os
import statistics
import sys
import tempfile
from pathlib import Path

import orjson
from loguru import logger
from rounds import Row, report
from simulation import EVENTS, REPEATED, TRACES, repeated, timed

from instrument.read.capture import Capture
from instrument.read.show.page import causal
from instrument.read.show.page.page import page, payload
from instrument.read.trace import reader

ROUNDS = 3
MOST_BYTES = 2_000_000


def opened(path: Path) -> Capture:
    """A capture whose events are read, and nothing else."""
    capture = Capture.load(path)
    _ = capture.events
    return capture


def decoded(path: Path) -> object:
    """The trace as Python objects."""
    data = path.read_bytes()
    return orjson.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def costs(name: str, path: Path) -> tuple[list[Row], int]:
    """Return the costs of the diagnosis, the causal profile and the whole page, and the size of the page in bytes.

    The rounds measure the parts in turns. The causal profile is measured after the diagnosis of the same capture.
    """
    parts = ("read", "diagnose", "profile", "page", "decode")
    times: dict[str, list[float]] = {part: [] for part in parts}
    pages: list[str] = []
    for _ in range(ROUNDS):
        times["read"].append(timed(lambda: reader.read(path)))
        capture = opened(path)
        times["diagnose"].append(timed(capture.diagnose))
        times["profile"].append(timed(lambda capture=capture: causal.what_if(capture.whatif)))
        capture = opened(path)
        times["page"].append(
            timed(lambda capture=capture: pages.append(page(payload([capture])).html))
        )
        times["decode"].append(timed(lambda: decoded(path)))
    ns = {what: statistics.median(values) for what, values in times.items()}
    limits = {
        "diagnose": ("its diagnosis", 3.0),
        "profile": ("its causal profile", 1.0),
    }
    rows = [
        Row(f"{name}: {what}", ns[part], "reading the trace", ns["read"], limit)
        for part, (what, limit) in limits.items()
    ]
    whole_ns = ns["read"] + ns["page"]
    rows.append(Row(f"{name}: reading and the page", whole_ns, "orjson.loads", ns["decode"], 1.0))
    return rows, len(pages[-1].encode())


def main() -> int:
    logger.remove()
    folder = os.environ.get("INSTRUMENT_TRACES")
    if folder is None:
        print("No costs were measured: set INSTRUMENT_TRACES to a folder with real traces.")
        return 0
    rows, sizes = [], {}
    with tempfile.TemporaryDirectory() as made:
        paths = {name: Path(folder, f"{name}.json.gz") for name in TRACES}
        large = f"{EVENTS:,} events"
        paths[large] = repeated(Path(folder, f"{REPEATED}.json.gz"), Path(made, "million.json"))
        for name, path in paths.items():
            found, sizes[name] = costs(name, path)
            rows += found
    reached = report("The report page, compared with reading its trace", rows)
    for name, size in sizes.items():
        print(f"{name}: the page has {size:,} bytes; at most {MOST_BYTES:,} are allowed")
    return 0 if reached and max(sizes.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
