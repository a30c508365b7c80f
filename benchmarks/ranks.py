"""What it costs to compare many ranks by their summaries; run by `make bench`.

- With the plain way: of a thousand ranks, the standard library's json reads the same files, and one pandas frame of
  them is grouped by range; only figures that ours hold as well are asked for. Both are interleaved in one process.
- From 100 to 10,000 ranks, each number in a process of its own: the CPU time and the peak memory of `instrument ranks`
  as text. One rank is slower than all others, and the links of one group of eight ranks: the text must name both.
- The largest of these jobs also as 64 shards: the same text must come from them, at the cost of the JSON files.
  DuckDB answers the three questions of `docs/how-to/shards.md` from these shards, in a process of its own too.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pandas
from rounds import Row, medians, report

from instrument.read.ranks.rank_summary import (
    CollectiveGroups,
    Collectives,
    Ranges,
    RankSummary,
    Steps,
    encoded,
)
from instrument.read.ranks.run import Run
from instrument.read.ranks.shards import Shard, make
from instrument.read.show.ranks import as_text

RANKS, RANGES, COLLECTIVES, ROUNDS = 1000, 200, 512, 5
CURVE = (100, 1_000, 10_000)
MOST_SECONDS, MOST_GB, SHARDS = 15.0, 1.5, 64
QUESTIONS = Path(__file__).parents[1] / "docs" / "how-to" / "shards.md"
GROUP, MS = 8, 1_000_000
COLUMNS = ("calls", "cpu_ns", "device_ns", "self_cpu_ns", "self_device_ns")
OVER_RANKS = ("cpu_ns", "device_ns")


def straggler(ranks: int) -> int:
    return ranks * 3 // 7


def slow_group(ranks: int) -> int:
    return ranks // GROUP * 2 // 3


def write(folder: Path, ranks: int) -> None:
    """Write so many summaries: half of the collectives are of all ranks, half of groups of eight."""
    random = np.random.default_rng(1)
    paths = [f"layer{k // 8}/block{k}" for k in range(RANGES)]
    usual = {name: random.integers(MS, 1000 * MS, RANGES) for name in COLUMNS}
    whole = np.arange(COLLECTIVES) % 2
    ends = np.cumsum(random.integers(MS, 2 * MS, COLLECTIVES))
    for rank in range(ranks):
        group, late = rank // GROUP, rank == straggler(ranks)
        ranges = {
            name: values + random.integers(0, MS // 10, RANGES) for name, values in usual.items()
        }
        ranges["self_cpu_ns"][17] += 400 * MS * late
        transfer = np.where(whole, 300_000, 2_000_000 if group == slow_group(ranks) else 200_000)
        waits = random.integers(50_000, 100_000, COLLECTIVES) * (not late)
        clock, exposed = int(random.integers(-MS, MS)), 100 * MS + int(random.integers(0, MS))
        exposed = exposed // 10 if late else exposed
        one = {"number": [3, 4], "duration_ns": [1000 * MS] * 2}
        kinds = {"compute_ns": 850 * MS, "exposed_communication_ns": exposed, "exposed_copy_ns": 0}
        kinds |= {"idle_ns": 150 * MS - exposed, "communication_ns": 2 * exposed}
        summary = RankSummary(
            name=f"steps_000003-000004_rank{rank}",
            rank=rank,
            world_size=ranks,
            host=f"node-{group:04d}",
            started_at="2026-01-01T00:00:00Z",
            first_step=3,
            last_step=4,
            versions={"torch": "2.13.0"},
            devices=["NVIDIA H100 80GB HBM3"],
            base_ns=10**18 + clock,
            ranges=Ranges(path=paths, **{name: each.tolist() for name, each in ranges.items()}),
            steps=Steps(**one, **{name: [value] * 2 for name, value in kinds.items()}),
            collectives=Collectives(
                group=whole.tolist(),
                number=(np.arange(COLLECTIVES) // 2).tolist(),
                start_ns=(ends - transfer - waits).tolist(),
                end_ns=(ends + random.integers(0, 5_000, COLLECTIVES)).tolist(),
                bytes=[10**7] * COLLECTIVES,
            ),
            collective_groups=CollectiveGroups(
                name=["all_reduce", "all_reduce"],
                kind=["all_reduce", "all_reduce"],
                process_group=[str(1 + group), "0"],
                description=["mesh_tp", "default_pg"],
                ranks=[str([*range(group * GROUP, (group + 1) * GROUP)]), None],
                group_size=[GROUP, ranks],
                runs_on=["device", "device"],
            ),
        )
        home = folder / summary.name
        home.mkdir()
        (home / "capture.json").write_text("{}")
        (home / "summary.json").write_bytes(encoded(summary))


def _ours(folder: Path) -> object:
    (window,) = Run.load(folder).windows
    return window.ranges, window.ranks, window.missing


def _everything(folder: Path) -> object:
    (window,) = Run.load(folder).windows
    return (
        window.ranges,
        window.ranks,
        window.stragglers,
        window.clocks,
        window.collectives,
        window.notes,
    )


def _pandas(folder: Path) -> object:
    frames = []
    for path in folder.glob("*/summary.json"):
        summary = json.loads(path.read_bytes())
        frames.append(pandas.DataFrame(summary["ranges"]).assign(rank=summary["rank"]))
    table = pandas.concat(frames).reset_index(drop=True)
    grouped = table.groupby("path", sort=False)
    figures = grouped[list(OVER_RANKS)].agg(["min", "median", "max"])
    slowest = table.loc[grouped["cpu_ns"].idxmax(), "rank"]
    return figures, slowest, grouped["calls"].sum(), grouped.size()


def compare(folder: Path, *, by_sql: bool = False) -> None:
    """Print the text of a run, or DuckDB's answers, then the CPU seconds and the peak gigabytes of this process."""
    if by_sql:
        for query in re.findall(r'duckdb\.sql\("""(.*?)"""\)', QUESTIONS.read_text(), re.DOTALL):
            print(duckdb.sql(query.replace("shards/*.jsonl", f"{folder}/*.jsonl")))
    else:
        (window,) = Run.load(folder).windows
        print(as_text(window))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6)


def _ran(*arguments: str) -> tuple[str, float, float]:
    """The output of `compare` in a process of its own, its CPU seconds and peak gigabytes."""
    ran = [sys.executable, __file__, *arguments]
    said = subprocess.run(ran, check=True, capture_output=True, text=True).stdout.splitlines()
    return "\n".join(said[:-1]), *map(float, said[-1].split())


def _measured(ranks: int, folder: Path) -> tuple[float, float, int]:
    """CPU seconds and peak gigabytes for so many ranks, and how many of the two planted problems are not named."""
    write(folder, ranks)
    said, seconds, gigabytes = _ran(str(folder))
    first = slow_group(ranks) * GROUP
    named = {
        "straggler": f"Rank {straggler(ranks)} on node-{straggler(ranks) // GROUP:04d} is a straggler",
        "slow link": f"The links of ranks [{first}, {first + 1}, ",
    }
    missing = [what for what, text in named.items() if text not in said]
    print(
        f"{ranks:>6} ranks: {seconds:6.2f} s CPU, {gigabytes:5.2f} GB; not named: {missing or 'none'}"
    )
    return seconds, gigabytes, len(missing)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, RANKS)
        acts = {act.__name__: act for act in (_ours, _everything, _pandas)}
        found = medians(
            {name: lambda act=act: act(folder) for name, act in acts.items()},
            calls=1,
            rounds=ROUNDS,
        )
    with tempfile.TemporaryDirectory() as name:
        jobs = [Path(name) / str(ranks) for ranks in CURVE]
        shards = Path(name) / "shards"
        for job in jobs:
            job.mkdir()
        *_, (fewer_s, _, _), (most_s, most_gb, not_named) = map(_measured, CURVE, jobs)
        for number in range(SHARDS):
            make([jobs[-1]], Shard(number, SHARDS), shards)
        from_json, sharded = _ran(str(jobs[-1])), _ran(str(shards))
        sql = _ran(str(shards), "sql")
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
        Row(f"{CURVE[-1]} ranks as text, CPU time", most_s, "at most", MOST_SECONDS, 1.0, "s"),
        Row("the same, peak memory", most_gb, "at most", MOST_GB, 1.0, "GB"),
        Row(
            "the same, CPU time",
            most_s,
            "ten times that of a tenth of the ranks",
            10 * fewer_s,
            1.2,
            "s",
        ),
        Row("the same, planted problems not named", not_named, "of", 2, 0.0, "problems"),
        Row(
            f"{CURVE[-1]} ranks from {SHARDS} shards, CPU time",
            sharded[1],
            "JSON summaries",
            from_json[1],
            1.0,
            "s",
        ),
        Row("the same, peak memory", sharded[2], "at most", MOST_GB, 1.0, "GB"),
        Row("the same, other text", sharded[0] != from_json[0], "of", 1, 0.0, "texts"),
        Row("the same, CPU time", sharded[1], "three SQL queries, DuckDB", sql[1], 3.0, "s"),
        Row("the same, peak memory", sharded[2], "three SQL queries, DuckDB", sql[2], 2.0, "GB"),
    ]
    return (
        0 if report(f"{RANKS} ranks of {RANGES} ranges, pandas {pandas.__version__}", rows) else 1
    )


if __name__ == "__main__":
    sys.exit(compare(Path(sys.argv[1]), by_sql=len(sys.argv) > 2) if sys.argv[1:] else main())
