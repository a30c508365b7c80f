"""What a refresh of `instrument watch` costs with many ranks, in CPU time; run by `make bench`.

Each of 10,000 ranks has a timings file with 20 lines of 20 ranges. Compared are the first refresh, one after which every
rank has written a line, and one without new lines, with reading every file whole, as its readers in other tools do.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rounds import Row, report

from instrument.cli.watch import state
from instrument.read.show.live import LiveRun

RANKS, RANGES, LINES, EVERY = 10_000, 20, 20, 100
MS, SLOW = 1_000_000, 4_321
MOST_SECONDS = 2.0


def line(rank: int, number: int) -> bytes:
    found = {}
    for name, ms in {
        "ProfilerStep*": 100,
        **{f"model.layers.{k}": 4 + k % 3 for k in range(RANGES)},
    }.items():
        late = 10 * (rank == SLOW and name == "model.layers.7")
        ns = int((ms + late + (rank * 7919 + number * 104_729) % 100 / 1e3) * MS)
        since = {"calls": EVERY, "mean_ns": ns, "p50_ns": ns, "p95_ns": ns, "max_ns": 2 * ns}
        found[name] = {"since": since, "run": since | {"calls": EVERY * (number + 1)}}
    last, written = EVERY * (number + 1) - 1, f"2026-01-01T00:{number // 6:02}:{number % 6}0+00:00"
    return (
        json.dumps({"format": 1, "step": last, "time": written, "ranges": found}).encode() + b"\n"
    )


def cpu_s(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


def read_whole(folder: Path) -> None:
    for file in folder.iterdir():
        for text in file.read_bytes().splitlines():
            json.loads(text)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(RANKS):
            lines = [line(rank, number) for number in range(LINES)]
            (folder / f"timings_rank{rank}.jsonl").write_bytes(b"".join(lines))
        run, shown = LiveRun(folder), []

        def refresh() -> None:
            shown[:] = state(run, 1_767_225_600.0 + 10 * LINES)

        first, same = cpu_s(refresh), cpu_s(refresh)
        for rank in range(RANKS):
            with (folder / f"timings_rank{rank}.jsonl").open("ab") as file:
                file.write(line(rank, LINES))
        new = cpu_s(refresh)
        whole = cpu_s(lambda: read_whole(folder))
    peer = "every file read whole, with json"
    rows = [
        Row("the first refresh", first, peer, whole, 0.5, "s"),
        Row("every rank has written a line", new, peer, whole, 0.5, "s"),
        Row("no rank has written", same, peer, whole, 0.1, "s"),
        Row("every rank has written a line", new, "at most", MOST_SECONDS, 1.0, "s"),
        Row("the slow rank is not named", shown[1].table[0].rank != SLOW, "of", 1, 0.0, "ranks"),
    ]
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    return 0 if report(f"{RANKS} ranks of {RANGES} ranges, CPU time of a refresh", rows) else 1


if __name__ == "__main__":
    sys.exit(main())
