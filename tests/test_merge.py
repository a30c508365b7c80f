"""One trace of all ranks: strict JSON, every event once, each rank's own figures, times on one clock."""

from __future__ import annotations

import gzip
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_traces
from builders import annotation, kernels, span, steps, synchronous_steps, write_rank

from instrument.base.errors import CaptureError
from instrument.read.capture import Capture
from instrument.read.ranks.merge_traces import merge
from instrument.read.ranks.run import Run


def strict(path: Path) -> dict[str, Any]:
    """The document, read as a parser does that forgives nothing."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def ranks_of(document: dict[str, Any]) -> dict[int, set[int]]:
    """The processes of each rank, by their names."""
    found: dict[int, set[int]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            found.setdefault(int(re.match(r"rank (\d+)", event["args"]["name"])[1]), set()).add(
                event["pid"]
            )
    return found


def alone(document: dict[str, Any], processes: set[int], path: Path) -> Capture:
    """A rank's part of a merged trace, as a trace of its own."""
    events = [event for event in document["traceEvents"] if event["pid"] in processes]
    path.write_text(json.dumps(document | {"traceEvents": events}))
    return Capture.load(path)


def metadata(name: str, value: Any, pid: int) -> dict[str, Any]:
    key = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index"}[
        name
    ]
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 0, "args": {key: value}}


def test_every_rank_keeps_its_own(tmp_path: Path) -> None:
    """The ranks have the same processes, correlations, flows and names of operators."""
    flow = {"cat": "ac2g", "name": "ac2g", "id": 3, "pid": 1, "tid": 1, "ts": 5}
    flows = [{"ph": ph, **flow} for ph in "sf"]
    text = {"ph": "b", "cat": "x", "name": "y", "id": "0x1f", "pid": 1, "tid": 1, "ts": 5}
    named = [metadata("process_name", "python", 1), metadata("process_labels", "CPU", 1)]
    sorted_ = [metadata("process_sort_index", 1, 1), metadata("process_sort_index", 2**24 + 3, 0)]
    odd = span("aten::µ", 900, 1.5, External_id=0, Sequence_number=0, Input_Dims=[[1, [2]], "\\"])
    for rank in (0, 1):
        write_rank(tmp_path, rank, [*named, *sorted_, *steps(), *kernels(), *flows, text, odd], 2)
    (window,) = Run.load(tmp_path).windows
    merge(window, tmp_path / "all.json.gz")
    document = strict(tmp_path / "all.json.gz")
    events, processes = document["traceEvents"], ranks_of(document)
    assert {rank: len(pids) for rank, pids in processes.items()} == {0: 2, 1: 2}
    assert processes[0].isdisjoint(processes[1])
    own = strict(window.paths[0] / "trace.json.gz")["traceEvents"]
    assert len(events) == 2 * (len(own) + 1), "process 0 got a name"
    sorted_by = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert sorted_by == [0, 4, 1000, 1004]
    assert [e["args"]["labels"] for e in events if e["name"] == "process_labels"] == ["CPU", "CPU"]
    assert len({e["id"] for e in events if e["name"] == "ac2g"}) == 2
    assert [e["id"] for e in events if e["ph"] == "b"] == ["0x1f", "1.0x1f"]
    for rank, pids in processes.items():
        part = alone(document, pids, tmp_path / f"part{rank}.json")
        whole = Capture.load(window.paths[rank])
        for view in ("operators", "ranges", "steps", "kernels", "breakdown"):
            assert list(getattr(part, view)) == list(getattr(whole, view)), view
    both = Capture.load(tmp_path / "all.json.gz")
    # each kernel counts where it was launched
    assert both.operators.where(name="aten::mm")[0].device_ns == 200_000
    assert [e["args"] for e in events if e["name"] == "aten::µ"] == [
        {"External id": 0, "Sequence number": number, "Input Dims": [[1, [2]], "\\"]}
        for number in (0, 2**40)
    ]


def test_the_clocks_are_one(tmp_path: Path) -> None:
    """Rank 1 is 250.125 µs ahead and counts from another base; the all-reduces end together in the merged trace."""
    for rank, later in ((0, 4_000_000.5), (1, 2_000_250.625)):
        base_ns = 10**18 + 2 * rank * 10**9
        write_rank(tmp_path, rank, synchronous_steps(100, later_us=later), 2, base_ns=base_ns)
    (window,) = Run.load(tmp_path).windows
    merge(window, tmp_path / "all.json")
    document = strict(tmp_path / "all.json")
    assert document["baseTimeNanoseconds"] == 10**18
    assert document["ranks"][1] == {
        "rank": 1, "offset_ns": 250_125, "drift_ppm": None, "at_ns": None, "uncertainty_ns": 0,
        "matched": 2,
    }  # fmt: skip
    reduces = [e for e in document["traceEvents"] if e["name"] == "gloo:all_reduce"]
    ends = [round((e["ts"] + e["dur"]) * 1000) for e in reduces]
    assert ends == [4_000_900_500, 4_001_900_500] * 2


def test_a_drift_is_corrected_and_keeps_the_order_and_the_nesting_of_events(tmp_path: Path) -> None:
    """Rank 1's clock gains 50 ppm over a minute; its ranges follow each other without a gap."""
    random = np.random.default_rng(2)
    begins = np.cumsum(random.integers(900_000_000, 1_100_000_000, 60))
    for rank in (0, 1):
        clock = np.rint(begins * (1 + 50e-6 * rank)).astype(int) / 1000
        events = [annotation("ProfilerStep#3", 0, float(clock[-1]) + 2000)]
        for at_us, next_us in pairwise(clock.tolist()):
            half_us, reduces_us = round((next_us - at_us) / 2, 3), at_us - 500
            reduces_us += random.uniform(0, 2)
            second = (round(at_us + half_us, 3), round(next_us - at_us - half_us, 3))
            events += [
                annotation("whole", at_us, round(next_us - at_us, 3)),
                annotation("first", at_us, half_us),
                annotation("second", *second),
                annotation("gloo:all_reduce", round(reduces_us, 3), 500, tid=2),
            ]
        write_rank(tmp_path, rank, events, 2)
    (window,) = Run.load(tmp_path).windows
    assert window.clocks[1].drift_ppm == pytest.approx(50, abs=0.1)
    merge(window, tmp_path / "all.json")
    document = strict(tmp_path / "all.json")
    mine, theirs = (
        [e for e in document["traceEvents"] if e.get("pid") in pids and e["ph"] == "X"]
        for _, pids in sorted(ranks_of(document).items())
    )
    for one, other in zip(mine, theirs):
        assert one["ts"] == pytest.approx(other["ts"], abs=5)
        assert one["dur"] == pytest.approx(other["dur"], abs=5)
    ranges = {
        name: [e for e in theirs if e["name"] == name] for name in ("whole", "first", "second")
    }
    for whole, first, second in zip(*ranges.values()):
        ends = [round((e["ts"] + e["dur"]) * 1000) for e in (whole, first, second)]
        assert whole["ts"] == first["ts"]
        assert ends[1] == round(second["ts"] * 1000)
        assert ends[0] == ends[2]
    for before, after in pairwise(ranges["whole"]):
        assert round((before["ts"] + before["dur"]) * 1000) == round(after["ts"] * 1000)


def test_what_kineto_writes_wrongly_is_mended(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = write_rank(tmp_path, rank, steps(), 2).folder
        text = gzip.decompress((folder / "trace.json.gz").read_bytes())
        wrong = b'"bad": NaN, "x": "\\q \xff \\ud800", "y": 1e400, '
        text = text.replace(b'"External id": 3', wrong + b'"External id": 3')
        (folder / "trace.json.gz").write_bytes(gzip.compress(text))
    (window,) = Run.load(tmp_path).windows
    merge(window, tmp_path / "all.json.gz")
    document = strict(tmp_path / "all.json.gz")
    mended = [e["args"] for e in document["traceEvents"] if "bad" in e.get("args", {})]
    assert [args["bad"] for args in mended] == [None, None]
    assert [args["x"] for args in mended] == ["\\q � �"] * 2
    assert [args["y"] for args in mended] == [sys.float_info.max] * 2
    assert [args["External id"] for args in mended] == [3, 3 + 2**40]


def test_numbers_that_nobody_can_hold_stay_as_they_are(tmp_path: Path) -> None:
    odd = [
        '"ph": "X", "ts": 1e999999999, "dur": 1',
        '"ph": "X", "ts": 1e-999999999, "dur": 1',
        '"ph": "X", "ts": 5.000, "dur": -1918637.-566',
        f'"ph": "s", "ts": "soon", "id": {"9" * 5000}',
        '"ph": "M", "name": "process_name", "args": {"name": "x", "y": 1e400}',
        '"ph": "M", "name": "process_sort_index", "args": {"sort_index": 1e400}',
    ]
    for rank in (0, 1):
        folder = write_rank(tmp_path, rank, synchronous_steps(500, later_us=5.0 * rank), 2).folder
        text = gzip.decompress((folder / "trace.json.gz").read_bytes()).decode()
        events = ", ".join(f'{{"name": "odd", "pid": 1, "tid": 1, {each}}}' for each in odd)
        text = text.replace('"traceEvents": [', f'"traceEvents": [{events}, ')
        (folder / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    merge(Run.load(tmp_path).windows[0], tmp_path / "all.json")
    text = (tmp_path / "all.json").read_text()
    assert len(text) < 100_000
    assert text.count("1e999999999") == 2
    assert text.count('"dur":-1918637.566') == 2


def test_a_trace_that_was_dropped_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    for rank in (0, 1):
        (write_rank(tmp_path, rank, steps(), 2).folder / "trace.json.gz").unlink()
    (window,) = Run.load(tmp_path).windows
    with pytest.raises(CaptureError, match="rank0 holds no trace"):
        merge(window, tmp_path / "all.json.gz")
    assert not list(tmp_path.glob("*all*"))


JOBS = [
    (real_traces.SAMPLES, "two-ranks/*/trace.json.gz"),
    pytest.param(real_traces.FOLDER, "a100_megatron_tp8_rank[01].json.gz", marks=real_traces.needs_traces),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "ranks"), JOBS)
def test_a_real_job_merges_whole(folder: Path, ranks: str, tmp_path: Path) -> None:
    (window,) = Run.load(*folder.glob(ranks)).windows
    merge(window, tmp_path / "all.json.gz")
    document = strict(tmp_path / "all.json.gz")
    merged, parts = Capture.load(tmp_path / "all.json.gz"), [*map(Capture.load, window.paths)]
    named = sum(
        e["name"] == "process_name" and ":" in e["args"]["name"] and "ts" not in e
        for e in document["traceEvents"]
    )
    assert merged.events.recorded == sum(part.events.recorded for part in parts) + named
    assert len(merged.events) == sum(len(part.events) for part in parts)
    assert sum(merged.kernels.column("launch_ns")) == sum(
        sum(part.kernels.column("launch_ns")) for part in parts
    )
    for rank, pids in ranks_of(document).items():
        part = alone(document, pids, tmp_path / f"part{rank}.json")
        assert list(part.operators) == list(parts[rank].operators)
        assert list(part.breakdown) == list(parts[rank].breakdown)
