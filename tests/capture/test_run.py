"""A run's ranks put together, from captures made by hand, generated figures, and traces of real jobs."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    Event,
    annotation,
    kernels,
    launched,
    span,
    steps,
    synchronous_steps,
    write_capture,
    write_rank,
    write_trace,
)
from golden import Golden, rows_as_lines
from real_traces import FOLDER, KNOWN, load, needs_traces

from instrument.base import storage
from instrument.base.errors import CaptureError, TraceWarning
from instrument.base.range_names import to_trace
from instrument.read.capture import Capture
from instrument.read.ranks import rank_summary, shards
from instrument.read.ranks.merge_traces import merge
from instrument.read.ranks.rank_summary import (
    CollectiveGroups,
    Collectives,
    Ranges,
    RankSummary,
    Steps,
    encoded,
    summarize,
    written,
)
from instrument.read.ranks.run import Run
from instrument.read.show.ranks import as_json, as_text


def test_a_summary_holds_the_figures_of_its_capture(tmp_path: Path) -> None:
    capture = write_rank(tmp_path, 2, steps() + kernels(), host="node-7", base_ns=5_000)
    found = written([capture.folder])[capture.folder]
    assert found == summarize(capture)
    assert (found.version, found.rank, found.world_size) == (5, 2, 4)
    assert (found.host, found.base_ns) == ("node-7", 5_000)
    assert (found.first_step, found.last_step, found.truncated) == (3, 4, False)
    said = json.loads((capture.folder / "summary.json").read_text())
    assert said["ranges"] == {
        "path": ["forward", "forward/attention"],
        "calls": capture.ranges.column("calls"),
        "cpu_ns": capture.ranges.column("cpu_ns_per_step"),
        "device_ns": capture.ranges.column("device_ns_per_step"),
        "self_cpu_ns": [200_000, 400_000],
        "self_device_ns": [0, 30_000],
    }
    assert said["steps"]["duration_ns"] == [1_000_000, 1_000_000]
    assert said["steps"]["compute_ns"] == [70_000, 30_000]
    assert said["steps"]["idle_ns"] == [930_000, 970_000]
    assert said["collectives"]["end_ns"] == said["collective_groups"]["kind"] == []


def test_a_summary_stays_small(tmp_path: Path) -> None:
    ranges = [{**steps()[1], "name": f"block{k}", "ts": k, "dur": 1} for k in range(900)]
    outer = {**steps()[1], "ts": 0, "dur": 2000}
    reduces = [
        {**steps()[1], "name": "gloo:barrier", "tid": 2, "ts": 3 * k, "dur": 2} for k in range(600)
    ]
    capture = write_rank(tmp_path, 0, [outer, *ranges, *reduces])
    found = written([capture.folder])[capture.folder]
    assert len(found.ranges) == 500
    assert {"forward", "gloo:barrier"} <= {*found.ranges.path}, "those with the most CPU time"
    assert found.ranges_left_out == 902 - 500
    assert list(found.collectives.ordinal) == list(range(88, 600)), "the last, numbered among all"
    assert (capture.folder / "summary.json").stat().st_size < 80_000
    got = Run.load(tmp_path).windows[0].notes[-1]
    assert got == "Only the ranges with the most CPU time are known for rank 0."


def test_a_name_that_no_text_file_can_hold_is_escaped(tmp_path: Path) -> None:
    capture = write_rank(
        tmp_path, 0, [*synchronous_steps(100), {**steps()[1], "name": to_trace("caf\udce9")}]
    )
    assert r"caf\udce9" in summarize(capture).ranges.path


def own_work(*own_us: int, devices: Sequence[int] = ()) -> list[list[Event]]:
    """Ranks whose own work in a step takes so long, on these devices, and on the CPU of the other ranks."""
    return [synchronous_steps(us, device=rank in devices) for rank, us in enumerate(own_us)]


def lasting(events: list[Event], more_us: int) -> list[Event]:
    """The all-reduces of gloo last longer."""
    return [{**e, "dur": e["dur"] + more_us * (e["name"] == "gloo:all_reduce")} for e in events]


def of_stage(rank: int) -> list[Event]:
    """Both stages of a pipeline have a slow rank; the stages' own ranges are on half of the ranks each."""
    slow = rank in (2, 3)
    work = [annotation(f"stage{rank % 2}", 0, 200), span("aten::mm", 0, 200)]
    if slow:
        work += [annotation("checkpoint", 200, 100 + rank), span("aten::copy_", 200, 90)]
    begins = 310 if slow else 210
    waits = annotation("gloo:all_reduce", begins, 1000 - begins, tid=2)
    return [annotation("ProfilerStep#3", 0, 1000), *work, waits]


def with_setup(rank: int, own_us: int) -> list[Event]:
    setup = [annotation("setup", 0, 20_000)] if rank == 2 else []
    return [*setup, *({**each, "ts": each["ts"] + 50_000} for each in synchronous_steps(own_us))]


SHORTER = [{**each, "dur": 200} if each["name"] == "forward" else each for each in steps()]
OTHER = [{**each, "name": "head"} if each["name"] == "attention" else each for each in SHORTER]
# Of 800 µs of all-reduce in each step an operator covers 300, and one inside the collective is its own.
MEANWHILE = [
    *synchronous_steps(100),
    *(
        each
        for start in (0, 1000)
        for each in (
            span("aten::addmm", start + 200, 300),
            span("aten::copy_", start + 600, 200, tid=2),
            span("c10d::barrier", start + 850, 100),
        )
    ),
]
CASES: dict[str, list[list[Event]]] = {
    # All steps last equally long; the usual own work is 105 µs of 900, and 100 outside.
    "the rank that waits least is the straggler": own_work(100, 110, 400, 105),
    "the rank that waits least, on devices": own_work(100, 110, 400, 105, devices=range(4)),
    "of what is unknown nothing is said": [lasting(each, 100) for each in own_work(0, 0, 400)],
    "of ranks on the CPU nothing is known of devices": [
        lasting(each, 100) for each in own_work(100, 100, 400, devices=[2])
    ],
    "a host that computes meanwhile does not wait": [MEANWHILE],
    "without communication nothing is known of waiting": [steps(), steps()],
    "the slowest range of the first rank": own_work(400, 100, 105),
    "the range that slows a rank may be on this rank only": [of_stage(rank) for rank in range(8)],
    # The first rank has 600 µs of forward a step, the second 200 and a range that the first has not.
    "ranks of a pipeline have ranges of their own": [steps() + kernels(), OTHER + kernels()],
    "ranks without steps are compared by the whole recording": [
        [annotation("forward", 0, lasts), *launched("gemm", 10, 20, 50 + rank, 1)]
        for rank, lasts in enumerate((300, 500))
    ],
    "what a rank does once is no time of each step": [
        with_setup(*each) for each in enumerate([100, 110, 400, 105])
    ],
}


def test_ranks_by_hand(tmp_path: Path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for number, (name, ranks) in enumerate(CASES.items()):
        for rank, events in enumerate(ranks):
            write_rank(tmp_path / str(number), rank, events, len(ranks), host=f"node{rank}")
        (window,) = Run.load(tmp_path / str(number)).windows
        tables = {"rank": window.ranks, "straggler": window.stragglers, "range": window.ranges}
        told += [
            f"---- {name}",
            rows_as_lines(tables),
            f"clocks: {window.clocks.column('offset_ns')}",
        ]
        told += [line for line in as_text(window).split("\n") if "a straggler" in line]
    golden("ranks.txt", "\n".join(told))


@pytest.mark.parametrize(
    ("own_us", "slow"),
    [
        ([100, 100, 100, 100], []),
        ([100, 104, 96, 108], []),  # a tenth at least: 108 + 100 outside is 4 % above 200
        ([100, 140, 180, 220, 260, 320], []),  # they differ as much among themselves
        ([100, 100, 100, 100, 110], []),  # as above, where the others do not differ at all
        ([100, 180], [1]),
        ([100, 180, 100, 180], [1, 3]),
        ([300, 100, 110, 120, 90, 800], [5, 0]),
    ],
)
def test_who_is_a_straggler(tmp_path: Path, own_us: list[int], slow: list[int]) -> None:
    for rank, each in enumerate(own_us):
        write_rank(tmp_path, rank, synchronous_steps(each), world_size=len(own_us))
    assert Run.load(tmp_path).windows[0].stragglers.column("rank") == slow


def test_windows_missing_ranks_and_what_differs(tmp_path: Path) -> None:
    window = {"first_step": 3, "last_step": 4, "steps": 2, "planned_steps": 2, "phase": "train"}
    for rank in (0, 1, 3):
        versions = {"torch": "2.13.0" if rank else "2.12.1"}
        last = {"last_step": 3, "truncated": True} if rank == 3 else {}
        write_rank(
            tmp_path, rank, synchronous_steps(100), 5, window=window | last, versions=versions
        )
    validation = window | {"phase": "validation"}
    write_capture(
        tmp_path, steps(), "validation_steps_000003-000004_rank0", window=validation, world_size=5
    )
    write_capture(tmp_path, steps(), ".steps_000003-000004_rank2.partial", rank=2)
    run = Run.load(tmp_path)
    got = [each.name for each in run.windows]
    assert got == ["steps_000003-000004", "validation_steps_000003-000004"]
    train = run.window("steps_000003-000004")
    assert train.missing == [2, 4], "one that is still being written is not there"
    assert train.notes == [
        "Of 5 ranks, captures are missing for rank 2, 4.",
        "The window was cut short on rank 3.",
        "The ranks differ in steps: 3–4 on rank 0, 1; 3–3 on rank 3.",
        "The ranks differ in torch: 2.13.0 on rank 1, 3; 2.12.1 on rank 0.",
    ]
    with pytest.raises(
        CaptureError,
        match=r"no window 'x'; the windows are .*/steps_000003-000004, .*/validation_steps",
    ):
        run.window("x")


@pytest.mark.parametrize("read", ["summaries", "traces"])
def test_a_rank_whose_trace_is_cut_short_is_marked(tmp_path: Path, read: str) -> None:
    for rank in range(3):
        folder = write_rank(tmp_path, rank, synchronous_steps(100), 3).folder
        trace = folder / "trace.json.gz"
        if rank == 1:
            trace.write_bytes(trace.read_bytes()[:-40])
            if read == "summaries":
                with pytest.warns(TraceWarning):
                    rank_summary.write(Capture.load(folder), folder)
        if read != "summaries":
            (folder / "summary.json").unlink()
    (window,) = Run.load(tmp_path).windows
    assert window.ranks.column("trace") == [None, "cut short", None]
    (note,) = (note for note in window.notes if "cut short" in note)
    assert re.fullmatch(
        r"The trace file of rank 1 (\(\d of 2 steps\) )?is cut short, and its figures are left out of "
        "medians: copy or record it again.",
        note,
    )
    text = as_text(window)
    assert note in text
    assert len(re.findall(r"^ *1 .* cut short ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("place", ["captures", "traces", "URL", "shards"])
def test_a_trace_that_is_cut_short_counts_in_no_median(tmp_path: Path, place: str) -> None:
    """Of five steps, rank 0 kept two without their end; with it, the median would be 150 µs."""
    bare, found = tmp_path / "bare", tmp_path
    bare.mkdir()
    for rank, own_us in enumerate((150, 100, 160, 600)):
        events = [
            each | {"ts": each["ts"] + later_us, "name": each["name"].replace("#3", f"#{3 + k}")}
            for k, later_us in enumerate(range(0, 5000, 1000))
            for each in synchronous_steps(own_us)[:3]
        ]
        if rank:
            events += [
                annotation("gloo:all_reduce", 1000 * k + own_us, 900 - own_us, tid=2)
                for k in range(5)
            ]
        folder = write_rank(tmp_path, rank, events, 4).folder
        text = gzip.decompress((folder / "trace.json.gz").read_bytes())
        if rank == 0:
            text = text[: text.index(b"ProfilerStep#5")]
        (folder / "trace.json.gz").write_bytes(gzip.compress(text))
        (folder / "summary.json").unlink()
        shutil.copy(folder / "trace.json.gz", bare / f"rank{rank}.json.gz")
    if place == "traces":
        found = bare
    elif place == "shards":
        shards.make([bare], shards.Shard(0, 1), tmp_path / "shards")
        found = tmp_path / "shards"
    (window,) = Run.load(f"file://{bare}" if place == "URL" else found).windows
    assert window.ranks.column("trace") == ["cut short", None, None, None]
    note = (
        "The trace file of rank 0 (2 of 5 steps) is cut short, and its figures are left out of "
        "medians: copy or record it again."
    )
    assert note in window.notes
    assert note in json.loads(as_json(window))["notes"]
    if place != "captures":
        assert window.name == "steps_000003-000007"
    (slow,) = window.stragglers
    assert (slow.rank, slow.median_own_ns) == (3, 260_000)
    (forward,) = window.ranges.where(path="forward")
    assert (forward.ranks, forward.calls, forward.cpu_median_ns) == (3, 15, 160_000)


def test_if_all_traces_are_cut_short_they_are_compared(tmp_path: Path) -> None:
    for rank in range(2):
        folder = write_rank(tmp_path, rank, synchronous_steps(100), 2).folder
        text = gzip.decompress((folder / "trace.json.gz").read_bytes())
        (folder / "trace.json.gz").write_bytes(gzip.compress(text[:-4]))
        (folder / "summary.json").unlink()
    (window,) = Run.load(tmp_path).windows
    assert "The trace file of rank 0, 1 is cut short: copy or record it again." in window.notes
    assert window.ranges.where(path="forward")[0].ranks == 2


@pytest.mark.parametrize(
    ("chosen", "missing"),
    [("all", [2]), ("one_per_role", [2]), ([0, 1], []), ([0, 7], [7]), ("first_per_node", [])],
)
def test_only_ranks_that_were_to_record_are_missing(tmp_path, chosen, missing) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, rank, synchronous_steps(100), 3, config={"ranks": chosen})
    assert Run.load(tmp_path).windows[0].missing == missing


def test_without_a_number_of_ranks_none_is_missing(tmp_path: Path) -> None:
    write_rank(tmp_path, 3, synchronous_steps(100), world_size=None, config={"ranks": "all"})
    assert Run.load(tmp_path).windows[0].missing == []


def test_of_equally_slow_ranks_the_lowest_is_named_and_equal_texts_are_one_list(tmp_path) -> None:
    for rank in (2, 0, 1):
        write_rank(tmp_path, rank, synchronous_steps(100), world_size=3)
    (window,) = Run.load(tmp_path).windows
    assert {*window.ranges.column("slowest")} == {0}
    assert len({id(summary.ranges.path) for summary in window.summaries}) == 1


def test_other_runs_over_the_same_steps_are_other_windows(tmp_path: Path) -> None:
    def at(folder: str, rank: int, hour: int) -> None:
        started = f"2026-01-02T{hour:02d}:04:0{rank}+00:00"
        write_rank(tmp_path / folder, rank, synchronous_steps(100), 2, started_at=started)

    at("crashed", 0, 3)
    at("again", 0, 4)
    at("again", 1, 4)
    at("own/rank0", 0, 5)
    at("own/rank1", 1, 5)
    windows = Run.load(tmp_path).windows
    assert [[path.parent.relative_to(tmp_path) for path in window.paths] for window in windows] == [
        [Path("crashed")], [Path("again")] * 2, [Path("own/rank0"), Path("own/rank1")]
    ]  # fmt: skip


def generated(folder: Path, ranks: int, ranges: int) -> dict[str, np.ndarray]:
    """Summaries of so many ranks; gives the figures of each rank and range, -1 where the rank has no such range."""
    random = np.random.default_rng(7)
    paths = np.array([f"layer{k % 10}/block{k}" for k in range(ranges)])
    there = random.random((ranks, ranges)) < 0.97
    there[0] = True
    names = ("cpu_ns", "device_ns", "calls", "self_cpu_ns")
    figures = {name: np.where(there, random.integers(1, 10**9, there.shape), -1) for name in names}
    for rank in range(ranks):
        columns = {name: values[rank][there[rank]].tolist() for name, values in figures.items()}
        columns["path"] = paths[there[rank]].tolist()
        summary = RankSummary(
            name=f"r{rank}",
            rank=rank,
            world_size=ranks,
            first_step=1,
            ranges=Ranges(**columns),
            steps=Steps(number=[1, 2], duration_ns=[10, 10]),
        )
        home = folder / f"steps_000001-000002_rank{rank}"
        home.mkdir(parents=True)
        (home / "capture.json").write_text("{}")
        (home / "summary.json").write_bytes(encoded(summary))
    return figures | {"path": paths}


def test_many_summaries_are_one_table(tmp_path: Path) -> None:
    made = generated(tmp_path, 200, 100)
    (window,) = Run.load(tmp_path).windows
    assert window.missing == []
    assert len(window.ranks) == 200
    table = window.ranges
    assert table.column("path") == made["path"].tolist()
    there = made["calls"] >= 0
    assert table.column("ranks") == there.sum(axis=0).tolist()
    assert table.column("calls") == np.where(there, made["calls"], 0).sum(axis=0).tolist()
    for what in ("cpu", "device"):
        values = made[f"{what}_ns"].astype(np.float64)
        values[~there] = np.nan
        assert table.column(f"{what}_min_ns") == np.nanmin(values, axis=0).tolist()
        assert table.column(f"{what}_max_ns") == np.nanmax(values, axis=0).tolist()
        middle = np.nanpercentile(values, 50, axis=0, method="inverted_cdf")
        assert table.column(f"{what}_median_ns") == middle.tolist()
    assert table.column("slowest") == made["cpu_ns"].argmax(axis=0).tolist()


@pytest.mark.parametrize(
    ("groups", "slow_ns", "named"),
    [(4, 2_100, [3]), (4, 1_900, []), (3, 2_100, []), (20, 2_100, [3, 10, 17])],
)
def test_the_group_with_slow_links_is_named(groups: int, slow_ns: int, named: list[int]) -> None:
    """Every seventh group of two ranks transfers slowly; one group has larger messages, and is not compared."""
    found = []
    for rank in range(2 * groups + 2):
        group = rank // 2
        transfer_ns = slow_ns if group % 7 == 3 or group == groups else 1_000
        times = {"start_ns": [5_000 - transfer_ns] * 3, "end_ns": [5_000] * 3}
        sizes = {"bytes": [1_000 if group < groups else 3_000] * 3, "number": [0, 1, 2]}
        about = {"kind": "all_reduce", "process_group": f"g{group}", "ranks": str(group)}
        about |= {"group_size": 2, "runs_on": "device", "description": "tp"}
        summary = RankSummary(
            name=f"r{rank}",
            rank=rank,
            world_size=None,
            collectives=Collectives(group=[0] * 3, **times, **sizes),
            collective_groups=CollectiveGroups(**{k: [value] for k, value in about.items()}),
        )
        found.append((Path(summary.name), summary))
    (window,) = Run(found).windows
    said = re.findall(
        r"links of ranks (\d+) are slow: all_reduce in process group g(\d+)", as_text(window)
    )
    assert said == [(str(k), str(k)) for k in named]


def test_captures_without_a_summary_are_read(tmp_path: Path) -> None:
    for rank in range(5):
        write_rank(tmp_path, rank, synchronous_steps(100 + rank), 5)
    before = Run.load(tmp_path).windows[0]
    summaries = sorted(tmp_path.rglob("summary.json"))
    summaries[0].write_text('{"version": 2}')
    summaries[1].write_text("{")
    for path in summaries[2:]:
        path.unlink()
    (tmp_path / "steps_000003-000004_rank4" / "trace.json.gz").write_text("{")
    run = Run.load(tmp_path)
    assert run.windows[0].summaries == before.summaries[:4]
    assert run.windows[0].missing == [4]
    assert len(run.unread) == 1
    assert "rank4/trace.json.gz is cut short" in run.unread[0]


@pytest.mark.parametrize(
    ("where", "damage"),
    [
        ("", {"started_at": "2026-01-01T00:00:00Zx"}),
        ("", {"world_size": 10**9}),
        ("", {"version": 2}),
        ("steps", {"duration_ns": ["x", "y"]}),
        ("steps", {"duration_ns": [None, 5]}),
        ("ranges", {"calls": [1.5]}),
        ("collective_groups", {"name": [3]}),
        ("collectives", {"group": [0, 1]}),
        ("collectives", {"group": None}),
        ("collectives", {"end_ns": [None, 5]}),
        ("ranges", {"calls": [2**70]}),
        ("ranges", {"calls": [1, 2, 3]}),
        ("ranges", {"path": None}),
        ("", {"rank": 2**70}),
        ("", {"first_step": 2**70}),
        ("", {"base_ns": 2**70}),
        ("", {"base_ns": 2**62}),
        ("collectives", {"end_ns": [5, 2**63 - 1]}),
        ("collectives", {"start_ns": [-(2**63), 5]}),
        ("collectives", {"start_ns": ["x", "y"]}),
        ("", {"started_at": "0001-01-01"}),
    ],
)
def test_a_damaged_summary_is_made_anew(tmp_path: Path, where: str, damage: dict[str, Any]) -> None:
    capture = write_rank(tmp_path, 0, synchronous_steps(100), 2)
    path = (capture.folder or tmp_path) / "summary.json"
    content = json.loads(path.read_text())
    (content[where] if where else content).update(damage)
    path.write_text(json.dumps(content))
    assert written([path.parent]) == {path.parent: None}
    assert Run.load(tmp_path).windows[0].summaries == [summarize(capture)]


def test_a_run_at_a_url_is_read_from_its_summaries(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "_downloaded", {})
    folder = tmp_path / "ranks=[0,1,2]"  # as Hydra's sweeps name them, and no pattern
    for rank in range(3):
        write_rank(folder, rank, synchronous_steps(100), 3)
    here = Run.load(folder).windows[0]
    url = f"file://{folder}"
    (window,) = Run.load(url).windows
    assert window.summaries == here.summaries
    assert window.paths == [f"{url}/{path.name}" for path in here.paths]
    assert not storage._downloaded, "nothing else is fetched"
    merge(window, tmp_path / "there.json")
    merge(here, tmp_path / "here.json")
    there, here_too = (Capture.load(tmp_path / name).events for name in ("there.json", "here.json"))
    assert list(there.start_ns) == list(here_too.start_ns)
    large = folder / here.paths[2].name / "summary.json"
    with large.open("ab") as file:
        file.truncate(rank_summary.MOST_BYTES + 1)
    (folder / here.paths[1].name / "summary.json").unlink()
    assert Run.load(url).windows[0].summaries == here.summaries


def trace_of(path: Path, own_us: int, first_step: int = 3, **document: Any) -> Path:
    """A bare trace, of which only `document` or the name of its file may tell the rank."""
    path.parent.mkdir(exist_ok=True)
    (made := write_trace(path.parent, synchronous_steps(own_us), **document)).rename(path)
    text = path.read_text()
    for step in (4, 3):
        text = text.replace(f"ProfilerStep#{step}", f"ProfilerStep#{first_step + step - 3}")
    path.write_text(text)
    assert not made.exists()
    return path


@pytest.mark.parametrize(
    ("names", "first_steps", "ranks"),
    [
        pytest.param(["a", "b"], [3, 3], [0, 1], id="no rank"),
        pytest.param(["b", "c", "a"], [3, 3, 3], [0, 1, 2], id="in the given order"),
        pytest.param(["a", "b"], [3, 8], [0, 1], id="other steps"),
        pytest.param(["a", "rank0"], [3, 3], [1, 0], id="one names its rank"),
        pytest.param(["node0/rank0", "node1/rank0"], [3, 3], [0, 1], id="a rank twice"),
        pytest.param(["rank0", "rank1"], [3, 8], [0, 1], id="two ranks, other steps"),
    ],
)
def test_no_trace_that_is_named_is_left_out(tmp_path, names, first_steps, ranks, command) -> None:
    own_us = [100] * (len(names) - 1) + [800]
    paths = [
        trace_of(tmp_path / f"{name}.json", *each)
        for name, *each in zip(names, own_us, first_steps)
    ]
    (window,) = Run.load(*paths).windows
    of_path = dict(zip(window.paths, window.ranks.column("rank")))
    assert [of_path[path] for path in paths] == ranks
    printed = command("ranks", *paths)
    assert printed.err == ""
    numbered = ", ".join(f"{rank} is {path}" for rank, path in zip(ranks, paths))
    said = f"Some files name no rank, or that of another file: rank {numbered}."
    assert (said in " ".join(printed.out.split())) == (names[:2] != ["rank0", "rank1"])
    if len({*first_steps}) == 1:
        late, *_ = json.loads(command("diagnose", *paths, "--json").out)["findings"]
        assert late["title"].startswith(f"Rank {ranks[-1]} is late")


def test_named_traces_of_two_windows_or_jobs_stay_apart(tmp_path: Path) -> None:
    windows = [
        trace_of(tmp_path / f"{k}.json", 100 + k, first) for k, first in enumerate([3, 3, 8, 8])
    ]
    assert [len(each.ranks) for each in Run.load(*windows).windows] == [2, 2]
    jobs = [
        trace_of(
            tmp_path / f"{job}{rank}.json", 100, distributedInfo={"rank": rank, "world_size": 2}
        )
        for job in ("a", "b")
        for rank in range(2)
    ]
    assert [len(each.ranks) for each in Run.load(*jobs).windows] == [2, 2]


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="There is no capture at"):
        Run.load(tmp_path / "none")
    with pytest.raises(CaptureError, match="holds no capture"):
        Run.load(tmp_path)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(CaptureError, match="JSON, but not a trace"):
        Run.load(tmp_path)


@needs_traces
@pytest.mark.nightly
def test_each_rank_of_a_real_job_is_as_others_measured_it(tmp_path: Path) -> None:
    """Eight ranks of one tensor-parallel step; that 0 and 6 hold it up is what HTA's idle shares say too."""
    for path in FOLDER.glob("a100_megatron_tp8_rank*.json.gz"):
        shutil.copy(path, tmp_path)
    (window,) = Run.load(tmp_path).windows
    assert (len(window.ranks), window.missing, window.notes) == (8, [], [])
    ours = {
        "compute_ns": "computation_time", "exposed_communication_ns": "exposed_comm_time",
        "exposed_copy_ns": "exposed_memcpy_time", "idle_ns": "idle_time", "total_ns": "total_time",
        "communication_ns": "total_comm_time", "overlap_ns": "overlap",
    }  # fmt: skip
    for rank, path in enumerate(window.paths):
        (row,) = Capture.load(path).breakdown
        exact = KNOWN[f"a100_megatron_tp8_rank{rank}"]["exact"]
        assert {name: getattr(row, name) / 1e6 for name in ours} == pytest.approx(
            {name: exact[theirs] for name, theirs in ours.items()}
        )
    idle = {
        rank: KNOWN[f"a100_megatron_tp8_rank{rank}"]["hta_temporal_us"]["idle_time_pctg"]
        for rank in range(8)
    }
    assert set(window.stragglers.column("rank")) == {
        rank for rank, share in idle.items() if share > 5
    }
    assert set(window.clocks.column("matched")) == {84}
    assert all(abs(ns) <= 11_000 for ns in window.clocks.column("offset_ns")), (
        "one machine, one clock"
    )


@needs_traces
def test_a_trace_tells_its_rank_and_the_groups_of_its_collectives() -> None:
    found = load("a100_nccl_2ranks_rank0")
    assert (found.events.rank, found.events.world_size) == (0, 2)
    summary = summarize(found)
    assert summary.collective_groups.ranks == ["[0, 1]"]
    assert set(summary.collectives.group) == {0}
    assert list(summary.collectives.step) == [4] * 5 + [5] * 5 + [6] * 5, (
        "15 all-reduces; broadcasts are left out"
    )
