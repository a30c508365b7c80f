"""What the report page costs, beside reading its trace, and how large it is; run by `make bench`.

The costs are measured on the real traces of INSTRUMENT_TRACES and on a million events made of one of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from loguru import logger
from rounds import Row, report
from simulation import EVENTS, REPEATED, TRACES, repeated, timed

from instrument.capture import Capture
from instrument.report.page import causal
from instrument.report.page.page import page, payload
from instrument.trace import reader

ROUNDS = 3
MOST_BYTES = 2_000_000


def opened(path: Path) -> Capture:
    """A capture of which nothing but the events is known."""
    capture = Capture.load(path)
    _ = capture.events
    return capture


def costs(name: str, path: Path) -> tuple[list[Row], int]:
    """Reading, diagnosing, the causal profile after that, and the whole page, in turns; and the page's bytes."""
    times: dict[str, list[float]] = {"read": [], "diagnose": [], "profile": [], "page": []}
    pages: list[str] = []
    for _ in range(ROUNDS):
        times["read"].append(timed(lambda: reader.read(path)))
        capture = opened(path)
        times["diagnose"].append(timed(capture.diagnose))
        times["profile"].append(timed(lambda capture=capture: causal.section(capture.whatif)))
        capture = opened(path)
        times["page"].append(
            timed(lambda capture=capture: pages.append(page(payload([capture])).html))
        )
    ns = {what: statistics.median(values) for what, values in times.items()}
    limits = {
        "page": ("the whole page", 1.0),
        "diagnose": ("its diagnosis", 3.0),
        "profile": ("its causal profile", 1.0),
    }
    rows = [
        Row(f"{name}: {what}", ns[part], "reading the trace", ns["read"], limit)
        for part, (what, limit) in limits.items()
    ]
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
    reached = report("The report page, beside reading its trace", rows)
    for name, size in sizes.items():
        print(f"{name}: the page has {size:,} bytes, of at most {MOST_BYTES:,}")
    return 0 if reached and max(sizes.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
