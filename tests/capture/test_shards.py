"""Shards: parts of a run's summaries in Parquet files, which give the tables of the local run."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest
from builders import annotation, kernels, steps, synchronous_steps, write_rank, write_trace

from instrument.base import storage
from instrument.base.errors import CaptureError, ConfigError
from instrument.read.ranks import rank_summary, shards
from instrument.read.ranks.rank_summary import Ranges, RankSummary
from instrument.read.ranks.run import SCHEMAS, Run
from instrument.read.ranks.shards import Shard, make
from instrument.read.show.ranks import as_json, as_text


@pytest.fixture(scope="module")
def job_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine of ten ranks, of which rank 2 is a straggler, and a capture that cannot be read; two windows."""
    run = tmp_path_factory.mktemp("job") / "run"
    for rank in range(9):
        events = synchronous_steps(400 if rank == 2 else 100 + rank, later_us=rank)
        write_rank(run, rank, events, 10, host=f"node{rank % 2}")
    earlier = "2020-01-01T00:00:00Z"
    write_rank(run / "earlier", 0, steps() + kernels(), 10, started_at=earlier)
    (run / "steps_000003-000004_rank8" / "trace.json.gz").write_text("{")
    (run / "steps_000003-000004_rank8" / "summary.json").unlink()
    return run


@pytest.fixture
def job(job_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(job_once, tmp_path / "run")


def written_shards(job: Path, parts: int = 3) -> Path:
    folder = job.parent / "shards"
    for number in range(parts):
        make([job], Shard(number, parts), folder)
    return folder


def test_shards_give_the_tables_of_the_local_run(job: Path) -> None:
    folder = written_shards(job)
    names = sorted(file.name for file in folder.iterdir())
    assert names == [f"ranks-0000{k}-of-00003.jsonl" for k in range(3)]
    local, reduced = Run.load(job), Run.load(folder)
    shutil.rmtree(job)  # only the shards are read
    assert len(local.windows) == 2
    for one, other in zip(local.windows, reduced.windows, strict=True):
        assert as_json(other) == as_json(one)
        assert as_text(other, columns=["all"]) == as_text(one, columns=["all"])
        assert (other.paths, other.where) == (one.paths, one.where)
    assert reduced.unread == local.unread
    assert "rank8/trace.json.gz is cut short" in reduced.unread[0]
    assert local.windows[-1].missing == [8, 9]
    assert local.windows[-1].stragglers.column("rank") == [2]


def test_a_summary_of_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    """Unknown cells among known ones, unknown columns, no rank, lists of ranks."""
    every = {}
    for rank in range(7):
        ranges = Ranges(path=["a", "a/b"], calls=[1, None], cpu_ns=[5, rank])
        every[tmp_path / f"r{rank}"] = RankSummary(
            name=f"r{rank}",
            rank=rank or None,
            world_size=None,
            ranks=[1, 5],
            truncated=None if rank else True,
            versions={"torch": "2"},
            ranges=ranges if rank % 2 else Ranges(),
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "captures_at", lambda path, or_traces: [*every, "unread"])
        patch.setattr(shards, "read_all", lambda paths, keep_copies: every | {"unread": "one"})
        file, _ = make([tmp_path], Shard(0, 1), tmp_path)
    assert shards.read(file) == (every, ["one"])


@pytest.mark.parametrize(("parts", "everywhere"), [(3, True), (16, True), (3, False)])
def test_documented_queries_find_the_slow_rank(parts, everywhere, tmp_path, monkeypatch) -> None:
    """Of 16 parts, some hold no capture."""
    job = tmp_path / "run"
    for rank in range(9):  # the range "load" takes longer on rank 2, or is on this rank only
        own_us, load_us = (400, 700) if rank == 2 else (100 + rank, 10 + rank)
        loads = [annotation("load", 1001, load_us, tid=3)] if everywhere or rank == 2 else []
        write_rank(job, rank, [*synchronous_steps(own_us), *loads], 9)
    written_shards(job, parts)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "shards.md").read_text(encoding="utf-8")
    queries = re.findall(r'duckdb\.sql\("""(.*?)"""\)', page, re.DOTALL)
    with duckdb.connect() as database:
        database.execute(queries.pop(0))
        slow, waits, differing = [database.sql(query).fetchall() for query in queries]
    window = Run.load(job).windows[-1]
    (straggler,) = window.stragglers
    rank, own_ms, path, above_ms = slow[0]
    assert (rank, path) == (2, "load") == (straggler.rank, straggler.range)
    assert own_ms * 1e6 == straggler.own_ns
    assert above_ms * 1e6 == straggler.range_excess_ns
    row = max(window.collectives, key=lambda row: row.waiting_ns or 0)
    kind, _, waits_for, calls, waiting_ms = waits[0]
    assert (kind, waits_for, calls) == (row.kind, 2, row.calls)
    assert waiting_ms * 1e6 == pytest.approx(row.waiting_ns, rel=1e-4)
    spread = max(window.ranges, key=lambda row: row.cpu_max_ns - row.cpu_min_ns)
    (first,) = window.ranges.where(path=differing[0][0])
    assert first.cpu_max_ns - first.cpu_min_ns == spread.cpu_max_ns - spread.cpu_min_ns
    (found,) = (row for row in differing[:2] if row[0] == spread.path)  # two may differ as much
    _, ranks, median_ms, most_ms, slowest = found
    assert (ranks, slowest) == (spread.ranks, 2)
    assert (median_ms * 1e6, most_ms * 1e6) == (spread.cpu_median_ns, spread.cpu_max_ns)


def test_a_missing_shard_is_named_and_captures_beside_shards_count_too(job, command) -> None:
    folder = written_shards(job)
    whole = as_json(Run.load(folder).windows[-1])
    lost, _ = shards.read(folder / "ranks-00001-of-00003.jsonl")
    (folder / "ranks-00001-of-00003.jsonl").unlink()
    said = command("ranks", folder).err
    assert "Left out: shards 1 of 3, which are missing: make them with --shard K/3." in said
    (window,) = (each for each in Run.load(folder).windows if len(each.summaries) > 1)
    gone = [summary.rank for path, summary in lost.items() if path.parent == job]
    assert gone
    assert window.missing == sorted([8, 9, *gone])
    assert as_json(Run.load(folder, *lost).windows[-1]) == whole, (
        "the lost ones as captures with JSON"
    )
    assert as_json(Run.load(*folder.iterdir(), *lost).windows[-1]) == whole


def test_a_job_with_one_cpu_reads_one_trace_at_a_time(job, monkeypatch) -> None:
    """Slurm gives a task some CPUs of a large machine; its memory is as limited."""
    sizes: list[int] = []

    def pool(size: int) -> ThreadPoolExecutor:
        sizes.append(size)
        return ThreadPoolExecutor(size)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    monkeypatch.setattr(rank_summary, "ThreadPoolExecutor", pool)
    rank_summary.read_all([job])
    assert sizes == [1]


def test_shards_of_two_divisions_are_refused(job: Path) -> None:
    folder = written_shards(job)
    make([job], Shard(0, 2), folder)
    with pytest.raises(
        CaptureError, match=r"The shards are of 2, 3 parts: remove those of an earlier run\."
    ):
        Run.load(folder)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_names_that_differ_in_one_digit_fill_all_parts(parts: int) -> None:
    run = Path("/data/run")
    places = [
        run / f"steps_{first:06}-{first + 1:06}_rank{k}" for first in (3, 9) for k in range(64)
    ]
    sizes = [len(Shard(k, parts).part_of(places, run)) for k in range(parts)]
    assert min(sizes) > 128 / parts / 2


def test_the_part_of_a_capture_does_not_depend_on_what_else_is_there() -> None:
    places = [Path(f"/data/run/steps_rank{k}") for k in range(100)]
    parts = [Shard(k, 7).part_of(places, Path("/data/run")) for k in range(7)]
    assert sorted(each for part in parts for each in part) == sorted(places)
    assert all(parts), "100 captures, 7 parts"
    assert Shard(3, 7).part_of(places[::-2], Path("/data/run")) == [
        k for k in places[::-2] if k in parts[3]
    ]
    elsewhere = [Path("/mnt") / place.relative_to("/data") for place in places]
    assert Shard(3, 7).part_of(elsewhere, Path("/mnt/run")) == [
        Path("/mnt") / place.relative_to("/data") for place in parts[3]
    ]


SLURM = {
    f"SLURM_ARRAY_TASK_{k}": v
    for k, v in {"ID": "14", "MIN": "10", "STEP": "2", "COUNT": "4"}.items()
}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("3/64", {}, (3, 64)),
        ("3/64", SLURM, (3, 64)),
        ("auto", SLURM, (2, 4)),
        ("/16", SLURM, (14, 16)),
        ("/8", {"JOB_COMPLETION_INDEX": "7"}, (7, 8)),
        ("/8", {"SLURM_ARRAY_TASK_ID": "5"}, (5, 8)),
    ],
)
def test_a_job_array_says_which_part_it_is(text, environment, expected) -> None:
    assert Shard.parse(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("64/64", {}), ("-1/4", {}), ("3", {}), ("a/b", {}), ("", {}), ("0/0", {}), ("1/100000", {}),
        ("auto", {}), ("auto", {"JOB_COMPLETION_INDEX": "7"}), ("/8", {}), ("/8", {"JOB_COMPLETION_INDEX": "8"}),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_ID": "x"}), ("auto", {**SLURM, "SLURM_ARRAY_TASK_STEP": "0"}),
        ("/8", SLURM),
    ],
)  # fmt: skip
def test_what_names_no_part_is_refused(text: str, environment: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match="must be K/N with K from 0 to N - 1, auto in an array of Slurm"
    ):
        Shard.parse(text, environment)


def test_a_shard_is_written_whole_or_not_at_all(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written_shards(job, 1)
    (file,) = folder.iterdir()
    before = file.read_bytes()
    encode = shards.encoded

    def full(line: Any) -> bytes:
        if "rank5" in (line.capture or ""):
            raise OSError(28, "No space left on device")
        return encode(line)

    monkeypatch.setattr(shards, "encoded", full)
    with pytest.raises(OSError, match="No space left"):
        make([job], Shard(0, 1), folder)
    assert [*folder.iterdir()] == [file]
    assert file.read_bytes() == before


def test_the_command_writes_a_part_and_names_what_it_cannot_read(job, command, monkeypatch) -> None:
    monkeypatch.chdir(job.parent)
    for number in range(2):
        printed = command("ranks", "run", "--shard", f"{number}/2")
        assert printed.out == f"Part {number} of 2 is in shards/ranks-0000{number}-of-00002.jsonl\n"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")
    printed = command("ranks", "run", "--shard", "auto", "--to", "one")
    assert "Left out: " in printed.err
    assert "rank8/trace.json.gz is cut short" in printed.err
    assert (
        command("ranks", "one").out == command("ranks", "shards").out == command("ranks", "run").out
    )
    assert "--shard is '2/2'" in command("ranks", "run", "--shard", "2/2", status=2).err


STRANGE = [
    "PAR1",
    "{}",
    "[" * 200_000,
    '{"capture": "a"}',
    '{"capture": "a", "summary": {"version": 4, "name": "a", "rank": 0, "world_size": 1}}',
    '{"capture": 1, "summary": {"name": "a", "rank": 0, "world_size": 1}}',
    '{"capture": "a", "summary": {"name": "a", "rank": 0, "world_size": 1, "started_at": "1"}}',
    '{"capture": "a", "summary": {"name": "a", "rank": 0, "world_size": 1, "steps": '
    '{"duration_ns": ["5"]}}}',
    '{"capture": "a", "summary": {"name": "a", "rank": 0, "world_size": 1, "collectives": '
    '{"group": [0], "start_ns": [0], "end_ns": [9223372036854775807]}, '
    '"collective_groups": {"kind": ["barrier"]}}}',
]


def test_a_file_of_a_stranger_is_refused_in_one_sentence(job: Path) -> None:
    (file,) = written_shards(job, 1).iterdir()
    whole = file.read_text()
    for line in STRANGE:
        file.write_text(f"{whole}{line}\n")
        with pytest.raises(CaptureError, match=r"jsonl is no shard of this version") as raised:
            Run.load(file)
        assert "\n" not in str(raised.value)


def test_a_line_of_a_shard_is_no_longer_than_a_summary(job, monkeypatch) -> None:
    (file,) = written_shards(job, 1).iterdir()
    monkeypatch.setattr(shards, "MOST_BYTES", 1000)
    with pytest.raises(CaptureError, match="is no shard"):
        Run.load(file)


def test_a_part_without_captures_is_a_shard_too(job: Path) -> None:
    folder = job.parent / "shards"
    for number in range(64):
        make([job], Shard(number, 64), folder)
    assert as_json(Run.load(folder).windows[-1]) == as_json(Run.load(job).windows[-1])
    empty = [file for file in folder.iterdir() if not shards.read(file)[0]]
    assert empty
    with pytest.raises(CaptureError, match="shards"):
        Run.load(empty[0])


def test_bare_traces_at_a_url_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_downloaded", {})
    for rank in range(3):
        made = write_trace(
            tmp_path, synchronous_steps(100), distributedInfo={"rank": rank, "world_size": 3}
        )
        made.rename(tmp_path / f"rank{rank}.json")
    (tmp_path / ".hidden.json").write_text("{}")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other.json").write_text("{}")
    here = Run.load(tmp_path).windows[0]
    (window,) = Run.load(f"file://{tmp_path}").windows
    assert window.paths == [f"file://{tmp_path}/rank{rank}.json" for rank in range(3)]
    assert {n: getattr(window, n).to_dicts() for n in SCHEMAS} == {
        n: getattr(here, n).to_dicts() for n in SCHEMAS
    }
    storage._downloaded.clear()
    make([f"file://{tmp_path}"], Shard(0, 1), tmp_path / "shards")
    assert not storage._downloaded, "the copies are removed"
    assert as_json(Run.load(tmp_path / "shards").windows[0]) == as_json(window)
    with pytest.raises(CaptureError, match="There is no capture at or below"):
        storage.captures(f"file://{tmp_path}")
    assert json.loads(as_json(window))["world_size"] == 3
