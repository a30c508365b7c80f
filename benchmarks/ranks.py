"""What it costs to put the summaries of a thousand ranks together, beside the plain way; run by `make bench`.

The peer reads the same files with the standard library's json, makes one pandas frame of them and groups it by range;
of its figures only those are asked for that ours hold as well. Both are interleaved in one process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pandas
from rounds import Row, medians, report

from instrument.runs.rank_summary import RankSummary
from instrument.runs.run import Run

RANKS, RANGES, COLLECTIVES, ROUNDS = 1000, 200, 512, 5
COLUMNS = (
    "calls", "cpu_ns", "self_cpu_ns", "forward_ns", "backward_ns", "optimizer_ns", "device_ns", "self_device_ns",
    "device_busy_ns", "cpu_ns_per_step", "min_ns", "median_ns", "p95_ns", "max_ns",
)  # fmt: skip
OVER_RANKS = ("cpu_ns_per_step", "device_ns", "forward_ns", "backward_ns")


def _write(folder: Path) -> None:
    random = np.random.default_rng(1)
    paths = [f"layer{k // 8}/block{k}" for k in range(RANGES)]
    for rank in range(RANKS):
        ranges = {name: random.integers(1, 10**9, RANGES).tolist() for name in COLUMNS}
        ends = np.cumsum(random.integers(1, 10**6, COLLECTIVES)).tolist()
        summary = RankSummary(
            name=f"steps_000003-000004_rank{rank}",
            rank=rank,
            world_size=RANKS,
            first_step=3,
            last_step=4,
            ranges={"path": paths, **ranges},
            steps={"number": [3, 4], "start_ns": [0, 10**9], "duration_ns": [10**9, 10**9]},
            collectives={
                "group": [0] * COLLECTIVES,
                "number": list(range(COLLECTIVES)),
                "start_ns": [end - 1000 for end in ends],
                "end_ns": ends,
                "bytes": [10**7] * COLLECTIVES,
            },
            collective_groups={
                "name": ["all_reduce"],
                "kind": ["all_reduce"],
                "process_group": ["0"],
            },
        )
        home = folder / summary.name
        home.mkdir()
        (home / "capture.json").write_text("{}")
        (home / "summary.json").write_bytes(msgspec.json.encode(summary))


def _ours(folder: Path) -> object:
    (window,) = Run.load(folder).windows
    return window.ranges, window.ranks, window.missing


def _everything(folder: Path) -> object:
    (window,) = Run.load(folder).windows
    return (
        window.ranges,
        window.ranks,
        window.breakdown,
        window.stragglers,
        window.clocks,
        window.collectives,
        window.notes,
    )


def _pandas(folder: Path) -> object:
    frames = []
    for path in folder.glob("*/summary.json"):
        with path.open() as file:
            summary = json.load(file)
        frames.append(pandas.DataFrame(summary["ranges"]).assign(rank=summary["rank"]))
    table = pandas.concat(frames).reset_index(drop=True)
    grouped = table.groupby("path", sort=False)
    figures = grouped[list(OVER_RANKS)].agg(["min", "median", "max"])
    slowest = table.loc[grouped["cpu_ns_per_step"].idxmax(), "rank"]
    return figures, slowest, grouped["calls"].sum(), grouped.size()


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder)
        acts = {act.__name__: act for act in (_ours, _everything, _pandas)}
        found = medians(
            {name: lambda act=act: act(folder) for name, act in acts.items()},
            calls=1,
            rounds=ROUNDS,
        )
    peer = "json.load, pandas.concat, groupby"
    rows = [
        Row("one table of ranges from the summaries", found["_ours"], peer, found["_pandas"], 0.5),
        Row(
            "every table: stragglers, clocks and collectives too",
            found["_everything"],
            peer,
            found["_pandas"],
            1.0,
        ),
    ]
    return (
        0 if report(f"{RANKS} ranks of {RANGES} ranges, pandas {pandas.__version__}", rows) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
