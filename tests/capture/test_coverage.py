"""The ledger of what a capture shows: each row by hand, against plain loops over real traces, and on damaged ones."""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import real_traces
from builders import (
    ACCUMULATE,
    ENGINE,
    Event,
    annotation,
    call,
    capture,
    kernel,
    launched,
    node,
    payload_of,
    span,
    steps,
    write_capture,
    write_trace,
)
from golden import Golden
from real_traces import load

from capture.plain_loops import ns, raw
from capture.test_device_views import TRAINING
from instrument.cli import show
from instrument.export.sinks.memory import Memory
from instrument.export.sinks.parquet import Parquet
from instrument.export.sinks.table import TableSink
from instrument.export.sinks.window_scalars import scalars
from instrument.read.capture import Capture
from instrument.read.show import notebook
from instrument.read.show.terminal import draw
from instrument.read.show.text import as_json, capture_parts, render
from instrument.read.views import coverage_rows as rows
from instrument.read.views.coverage import incomplete, is_launch, line, part
from instrument.read.views.layout import plain
from instrument.read.views.views import VIEWS, rows_of

Share = float | tuple[int, int] | None


def shares(found: Capture) -> dict[str, Share]:
    """Each row: its time in µs and the whole of which this is a part, or else the share."""
    return {
        row.name: row.share
        if row.total_ns is None
        else (row.covered_ns / 1000, row.total_ns / 1000)
        for row in found.coverage
    }


CAPTURED = [
    call("cudaStreamBeginCapture", 300, 5),
    call("cudaLaunchKernel", 310, 5, 70),
    call("cudaMemcpyAsync", 320, 5, 71),
    call("cudaStreamEndCapture", 330, 5),
]
GRAPH = [call("cudaGraphLaunch", 290, 5, 9), kernel("gemm", 296, 20, correlation=9)]
BY_ID = kernel("gemm", 296, 20, correlation=99, External_id=4, graph_id=5)
# What is added to the training.
ADDED: dict[str, list[Event]] = {
    "work from before": [kernel("old", 2, 20, correlation=99)],
    "a lost call": [kernel("odd", 250, 20, correlation=99)],
    "a lost call of a known operator": [kernel("gemm", 250, 20, correlation=99, External_id=4)],
    "a thread without operators": [
        call("cudaLaunchKernel", 240, 5, 9, tid=3),
        kernel("own", 250, 20, correlation=9),
    ],
    "a lost kernel": [call("cudaLaunchKernel", 280, 5, 9)],
    "a call of the driver in one of the runtime": [
        span("cuLaunchKernel", 156, 2, "cuda_driver", correlation=4)
    ],
    "an empty memset": [call("cudaMemsetAsync", 280, 5, 9)],
    "launches during a capture": CAPTURED,
    "a capture that began before": [
        call("cudaLaunchKernel", 1, 2, 70),
        call("cudaStreamEndCapture", 4, 1),
    ],
    "a lost kernel after a capture": [*CAPTURED, call("hipExtModuleLaunchKernel", 340, 5, 72)],
    "a node of a graph": [call("cudaGraphAddMemcpyNode", 280, 5, 9)],
    "work that overtakes": launched("later", 250, 222, 5, 9) + launched("sooner", 230, 260, 20, 10),
    "another stream": [
        call("cudaLaunchKernel", 230, 5, 9),
        kernel("own", 236, 20, correlation=9, tid=11),
    ],
    "a graph": GRAPH,
    "a graph without its launch": [BY_ID],
    "work after the steps": launched("late", 310, 320, 20, 9),
    "work of a step after its end": launched("late", 285, 320, 20, 9),
    "another forward": [node("MulBackward0", 140, 5, 77)],
    "gradients": [span(ENGINE + ACCUMULATE, 116, 4, tid=2), span(ACCUMULATE, 117, 2, tid=2)],
    "a clock set back": [span("aten::odd", 260, -5)],
}


ALONE = kernel("side", 2, 20, correlation=99, tid=11)
# Traces whose missing parts have other causes than those above.
CAUSES: dict[str, list[Event]] = {
    "two lost calls, one of a known operator": [
        *TRAINING,
        *ADDED["a lost call of a known operator"],
        kernel("odd", 280, 2, correlation=98),
    ],
    "a stream without any call": [*TRAINING, ALONE],
    "a stream without any call, and a longer lost call": [
        *TRAINING,
        ALONE,
        kernel("odd", 250, 21, correlation=98),
    ],
    "no calls at all": [ALONE],
    "a lost kernel before others": [e for e in TRAINING if e["name"] != "gemm_backward"],
    "no device work": [e for e in TRAINING if e["cat"] not in ("kernel", "gpu_memcpy")],
}


def test_rows_and_likely_causes_by_hand(tmp_path, golden: Golden) -> None:
    """The rows of a training, and those that differ from them where something is added to it or missing.

    Of 350 µs on the CPU, the device is waited for during 10.
    """
    traces = {"the training": TRAINING}
    traces |= {name: [*TRAINING, *added] for name, added in ADDED.items()} | CAUSES
    known: set[str] = set()
    told = []
    for name, events in traces.items():
        lines = [
            f"  {row}" for row in map(said, capture(tmp_path, events).coverage) if row not in known
        ]
        known = known or {line.strip() for line in lines}
        told.append("\n".join([f"{name}:", *lines]))
    golden("coverage.txt", "\n".join(told))


def said(row: Any) -> str:
    """The share and its whole, in µs or as a number, and the reason if it is not 1."""
    assert (row.why is None) == (row.share == 1), row
    share = (
        row.share
        if row.total_ns is None
        else f"{row.covered_ns / 1000} of {row.total_ns / 1000} µs"
    )
    return f"{row.name}: {share}" + (f"; {row.why}" if row.why else "")


WINDOW = {"first_step": 3, "last_step": 4, "steps": 2, "truncated": False, "reason": None}
COST = {"recorded_step_ns": 1_250_000, "unrecorded_step_ns": 1_000_000}


@pytest.mark.parametrize(
    ("changed", "row", "share"),
    [
        ({"window": {**WINDOW, "planned_steps": 2}}, rows.PLANNED, 1),
        ({"window": {**WINDOW, "planned_steps": 8, "truncated": True}}, rows.PLANNED, 0.25),
        ({"window": {**WINDOW, "planned_steps": None, "truncated": True}}, rows.PLANNED, None),
        ({"cost": {**COST, "unrecorded_steps": 10}}, rows.UNDISTURBED, 0.8),
        ({"cost": {**COST, "unrecorded_steps": 9}}, rows.UNDISTURBED, None),
        (
            {"cost": {**COST, "unrecorded_step_ns": 2**40, "unrecorded_steps": 10}},
            rows.UNDISTURBED,
            1,
        ),
    ],
)
def test_what_the_metadata_says(tmp_path, changed, row, share) -> None:
    events = [*steps(), annotation("Torch-Compiled Region: 0/0", 2000, 5)]
    found = write_capture(tmp_path, events, **changed)
    (part,) = found.coverage.where(name=row)
    assert part.share == (share if share is None else pytest.approx(share))
    assert (part.why is None) == (share == 1)
    assert (row in line(found)) == (share != 1 and row != rows.UNDISTURBED)


def test_types_of_device_work_that_were_not_chosen_are_not_missed(tmp_path) -> None:
    events = [event for event in TRAINING if event["cat"] != "gpu_memcpy"]
    assert shares(capture(tmp_path / "all", events))[rows.LAUNCHES] == pytest.approx(5 / 6)
    config = {"activities": ["cpu", {"cuda": ["CONCURRENT_KERNEL"]}]}
    assert shares(write_capture(tmp_path, events, config=config))[rows.LAUNCHES] == 1


@pytest.mark.filterwarnings("ignore::instrument.base.errors.TraceWarning")
def test_a_truncated_file_says_so(tmp_path) -> None:
    path = write_trace(tmp_path, steps())
    path.write_text(path.read_text()[:-200])
    found = Capture.load(path)
    assert shares(found)[rows.READ] is None
    assert (
        line(found)
        == f"Coverage below 95 %: {rows.READ} unknown. `instrument show --coverage` says why."
    )


def test_counter_events_are_counted(tmp_path) -> None:
    counter = {"ph": "C", "name": "Queue Length", "pid": 0, "tid": 0, "ts": 1, "args": {"7": 3}}
    found = capture(tmp_path, [*steps(), counter, {**counter, "args": {"7": float("nan")}}])
    assert shares(found)[rows.READ] == 1
    (row,) = found.coverage.where(name=rows.READ)
    assert row.why.startswith("The values of 2 counter events in the trace, such as the length")
    assert line(found) == ""


def test_rows_that_do_not_apply_are_left_out(tmp_path) -> None:
    got = list(shares(capture(tmp_path, [span("aten::mm", 0, 1)])))
    assert got == [rows.VALID, rows.READ]
    assert shares(capture(tmp_path / "none", [])) == {}


def test_steps_of_which_none_finished_cover_nothing(tmp_path) -> None:
    events = [
        {**e, "args": {**e.get("args", {}), "finished": False}} if "Step#" in e["name"] else e
        for e in TRAINING
    ]
    found = shares(capture(tmp_path, events))
    assert found[rows.CPU_IN_STEPS] == (0, 340)


def test_a_share_just_below_the_limit_is_not_rounded_up_to_it(tmp_path) -> None:
    events = [*launched("gemm", 0, 10, 9499, 1), kernel("old", 20_000, 501, correlation=9)]
    found = capture(tmp_path, events)
    assert f"{rows.LAUNCHED} 94.9 %" in line(found)
    assert part(found, rows.LAUNCHED) is part(found, rows.LAUNCHED), "it is computed once"


def test_every_view_names_the_rows_it_depends_on() -> None:
    for name, view in VIEWS.items():
        assert set(view.coverage) <= set(rows.ROWS), name
        assert bool(view.coverage) == (name != "coverage"), name
    named = {row for view in VIEWS.values() for row in view.coverage}
    assert named == set(rows.ROWS)
    assert rows.OUTSIDE_GRAPHS in VIEWS["operators"].coverage
    assert rows.JOINED in VIEWS["ranges"].coverage
    assert rows.LAUNCHED not in VIEWS["breakdown"].coverage


def test_a_view_has_its_own_losses_and_computes_nothing_for_others(tmp_path) -> None:
    found = capture(tmp_path, [*TRAINING, kernel("old", 2, 20, correlation=99)])
    assert [row.name for row in incomplete(found, VIEWS["kernels"].coverage)] == [rows.LAUNCHED]
    assert line(found, rows_of(["breakdown", "streams"])) == ""
    assert not {"ranges", "operators", "coverage"} & vars(found).keys()
    assert "call_tree" not in vars(found.links)
    assert [row.name for row in incomplete(found)] == [rows.LAUNCHED]


OUTPUTS: dict[str, Callable[[Capture, Path], str]] = {
    "text": lambda found, _: render(found),
    "terminal": lambda found, _: draw(
        [*capture_parts(found), notebook.incomplete(found, ["ranges", "operators"])]
    ),
    "notebook": lambda found, _: found._repr_html_(),
    "json": lambda found, _: as_json(found, ["kernels"]),
    "command": lambda found, _: plain(shown(found, "--kernels")),
    "command for all": lambda found, _: plain(shown(found)),
    "log": lambda found, folder: written(TableSink(), found, folder / "table.txt"),
    "memory page": lambda found, folder: memory_page(found, folder / "memory.html"),
    "memory data": lambda found, folder: written(Memory(), found, folder / "memory.json"),
    "parquet": lambda found, folder: parquet_metadata(found, folder),
    "scalars": lambda found, _: str(dict(scalars(found))),
}


def shown(found: Capture, *options: str) -> Any:
    parser = ArgumentParser()
    show.add_arguments(parser)
    return show.run(parser.parse_args([str(found.folder), *options]))


def written(sink: Any, found: Capture, file: Path) -> str:
    sink.write(found, file.parent)
    return file.read_text()


def memory_page(found: Capture, file: Path) -> str:
    written(Memory(), found, file)
    return str(payload_of(file))


def parquet_metadata(found: Capture, folder: Path) -> str:
    Parquet(dir=str(folder / "lake")).write(found, folder)
    files = sorted(folder.rglob("*.parquet"))
    assert [file.name for file in files] == ["events.parquet", "segments.parquet"]
    events, segments = map(pl.read_parquet_metadata, files)
    assert events.pop("ARROW:schema") != segments.pop("ARROW:schema")
    assert events == segments
    return str(events)


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_output_says_what_is_missing_and_nothing_otherwise(tmp_path, output) -> None:
    # The memory page does not depend on launches.
    is_memory = output.startswith("memory")
    old, odd = kernel("old", 2, 20, correlation=9), span("aten::odd", 260, -5)
    lost, row = ([odd, odd], rows.VALID) if is_memory else ([old], rows.LAUNCHED)
    texts = []
    for name, events in (("whole", TRAINING), ("cut", [*TRAINING, *lost])):
        found = write_capture(tmp_path, events, name)
        texts.append(OUTPUTS[output](found, tmp_path / name).replace("_", " "))
    marks = ("Coverage below", "incomplete", "coverage/")
    assert not any(mark in texts[0] for mark in marks), texts[0]
    assert any(mark in texts[1] for mark in marks)
    assert row in " ".join(texts[1].split())
    if output == "command":
        others = write_capture(tmp_path, [*TRAINING, node("MulBackward0", 140, 5, 77)], "other")
        assert "Coverage" not in OUTPUTS[output](others, tmp_path / "other")
        assert "Coverage" in render(others)


def test_the_command_prints_the_whole_table_with_its_reasons(tmp_path) -> None:
    found = write_capture(tmp_path, [*TRAINING, kernel("old", 2, 20, correlation=99)])
    text = plain(shown(found, "--coverage"))
    assert all(name in text for name in found.coverage.column("name"))
    (why,) = found.coverage.where(name=rows.LAUNCHED).column("why")
    assert why in " ".join(text.split())
    assert "1 column left out: why; .select" in repr(found.coverage)
    assert why in found.coverage._repr_html_()
    (row,) = [
        each
        for each in json.loads(shown(found, "--coverage", "--json"))["coverage"]
        if each["name"] == rows.LAUNCHED
    ]
    assert (row["covered_ns"], row["total_ns"], row["why"]) == (126_000, 146_000, why)


# ---- Real traces ----


@cache
def file_of(name: str) -> list[Event]:
    return [
        event for event in raw(real_traces.path(name)) if event.get("ph") in ("X", "i", "s", "f")
    ]


@cache
def exact(name: str) -> list[Event]:
    """The events with a duration; their times are decimals."""
    events = raw(real_traces.path(name), parse_float=Decimal)
    return [event for event in events if event.get("ph") == "X"]


ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
ON_CPU = {"cpu_op", "user_annotation", "Operator"}


def is_call(event: Event) -> bool:
    return event["cat"].endswith(("_runtime", "_driver")) or event["cat"] == "Runtime"


def by_loops(events: list[Event]) -> dict[str, tuple[int, int]]:
    """Rows of a trace in plain loops over its JSON: what is covered, and the whole."""
    spans = [event for event in events if event["ph"] == "X"]
    calls = {e["args"].get("correlation"): e for e in reversed(spans) if is_call(e)}
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    work = [e for e in spans if e["cat"] in ON_DEVICE]
    last_called: dict[Any, int] = {}
    for event in sorted(work, key=ns):
        start, end = ns(event)
        launch = calls.get(event["args"].get("correlation"))
        count(found[rows.LAUNCHED], end - start, launch is not None)
        in_graph = launch is not None and "GraphLaunch" in launch["name"]
        count(found[rows.OUTSIDE_GRAPHS], end - start, not in_graph)
        if launch is not None:
            lane, (called, returned) = (event["pid"], event["tid"]), ns(launch)
            is_late = start < called or last_called.get(lane, 0) > returned
            count(found[rows.IN_ORDER], end - start, not is_late)
            last_called[lane] = max(last_called.get(lane, 0), called)
    has_work = {event["args"].get("correlation") for event in work}
    for event in spans:
        if is_call(event) and is_launch(event["name"]):
            count(found[rows.LAUNCHES], 1, event["args"]["correlation"] in has_work)
    if not any("GraphLaunch" in event["name"] for event in spans):
        del found[rows.OUTSIDE_GRAPHS]
    return {name: (covered, whole) for name, (covered, whole) in found.items()}


def count(sums: list[int], amount: int, is_covered: bool) -> None:
    sums[0] += amount * is_covered
    sums[1] += amount


# What is missing from each real trace that is not whole: launches from before the recording, a backward whose forward ran
# before it (a pipeline), graphs; on MTIA, device work without a launch in between.
LOSSES = {
    "h100_qwen_0.5b_inference": {rows.LAUNCHED: 0.699},
    "mi300x_resnet_checkpoint_train": {rows.LAUNCHED: 0.682},
    "mi300x_vllm_graph": {rows.OUTSIDE_GRAPHS: 0.040},
    "h800_deepseek_train": {rows.JOINED: 0.0},
    "mtia_rank0": {rows.LAUNCHED: 0.945},
}


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each())
def test_real_traces_are_silent_unless_something_is_missing(name) -> None:
    found = load(name)
    expected = LOSSES.get(name, {})
    lost = {row.name: row.share for row in incomplete(found)}
    assert lost == {row: pytest.approx(share, abs=0.001) for row, share in expected.items()}
    text = ", ".join(f"{row} {100 * share:.1f} %" for row, share in lost.items())
    said = f"Coverage below 95 %: {text}. `instrument show --coverage` says why."
    assert line(found) == (said if expected else "")
    assert all((row.why is None) == (row.share == 1) for row in found.coverage)


LOOPED = (
    "a100_nccl_2ranks_rank0", "h100_qwen_0.5b_inference", "mi300x_vllm_graph", "v100_ns_resolution",
    "mi300x_resnet_checkpoint_train", "hta_simple_add", "v100_resnet50_workers4", "a100_megatron_tp8_rank3",
)  # fmt: skip


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(LOOPED))
def test_rows_of_real_traces_are_those_of_plain_loops(name) -> None:
    table = {row.name: row for row in load(name).coverage}
    for row, (covered, whole) in by_loops(exact(name)).items():
        if table[row].total_ns is None:
            assert table[row].share == covered / whole, row
        else:
            assert (table[row].covered_ns, table[row].total_ns) == (covered, whole), row
    assert table[rows.LAUNCHES].share == 1


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(["hta_simple_add", "h100_qwen_0.5b_inference"]))
def test_owners_in_real_traces_are_those_of_plain_loops(name) -> None:
    spans = exact(name)
    lanes = defaultdict(list)
    for event in spans:
        if event["cat"] in ON_CPU and not event["name"].startswith("ProfilerStep#"):
            lanes[event["tid"]].append(ns(event))
    in_operator = [0, 0]
    calls = {e["args"]["correlation"]: e for e in spans if is_call(e)}
    for event in spans:
        if event["cat"] in ON_DEVICE and (launch := calls.get(event["args"]["correlation"])):
            start, end = ns(event)
            at = ns(launch)[0]
            count(in_operator, end - start, any(a <= at <= b for a, b in lanes[launch["tid"]]))
    (found,) = load(name).coverage.where(name=rows.IN_OPERATOR)
    assert [found.covered_ns, found.total_ns] == in_operator


def without_first_step(events: list[Event]) -> list[Event]:
    marks = [e for e in events if e["name"].startswith("ProfilerStep#")]
    first = min(marks, key=lambda e: e["ts"])["name"]
    return [e for e in events if e["name"] != first]


@real_traces.needs_traces
@pytest.mark.parametrize(
    "name",
    real_traces.each(
        [
            "a100_nccl_2ranks_rank0",
            "h100_timesformer_inference",
            "v100_ns_resolution",
            "mi300x_resnet_checkpoint_train",
        ]
    ),
)
def test_work_whose_launch_was_taken_has_none(tmp_path: Path, name: str) -> None:
    """The External id of the work still names its operator, but that is no launch."""
    before = file_of(name)
    calls = [e for e in before if e["ph"] == "X" and is_call(e) and is_launch(e["name"])]
    taken = {e["args"]["correlation"] for e in calls[::5]}
    after = [
        e
        for e in before
        if not (e["ph"] == "X" and is_call(e)) or e["args"].get("correlation") not in taken
    ]
    lost_ns = sum(
        round(e["dur"] * 1000)
        for e in before
        if e.get("cat") in ON_DEVICE and e["args"]["correlation"] in taken
    )
    was, now = (
        {row.name: row for row in found.coverage}
        for found in (load(name), capture(tmp_path, after))
    )
    assert lost_ns > 0
    assert now[rows.LAUNCHED].total_ns == was[rows.LAUNCHED].total_ns
    assert was[rows.LAUNCHED].covered_ns - now[rows.LAUNCHED].covered_ns == pytest.approx(
        lost_ns, abs=len(taken)
    )
    assert now[rows.IN_OPERATOR].share == pytest.approx(was[rows.IN_OPERATOR].share, abs=0.001)


@real_traces.needs_traces
def test_the_share_of_lost_kernels_is_that_of_the_file_before(tmp_path: Path) -> None:
    """The truth from outside: how many events with a launch were taken, of all launches."""
    before = file_of("a100_nccl_2ranks_rank0")
    chance = random.Random(30)
    after = [e for e in before if e.get("cat") != "kernel" or chance.random() < 0.7]
    kernels = [sum(e.get("cat") == "kernel" for e in events) for events in (before, after)]
    launches = sum(is_call(e) and is_launch(e["name"]) for e in before if e["ph"] == "X")
    (row,) = capture(tmp_path, after).coverage.where(name=rows.LAUNCHES)
    assert row.share == pytest.approx(1 - (kernels[0] - kernels[1]) / launches, abs=0.01)


@real_traces.needs_traces
def test_cpu_time_and_backward_of_a_step_without_its_mark(tmp_path: Path) -> None:
    """The lost step lasts from its mark to the next: its CPU time is a third of that of three equal steps."""
    before = file_of("a100_nccl_2ranks_rank0")
    found = capture(tmp_path, without_first_step(before))
    parts = {row.name: row for row in found.coverage}
    assert parts[rows.CPU_IN_STEPS].share == pytest.approx(2 / 3, abs=0.02)
    assert parts[rows.JOINED].share == 1
    cut = min(e["ts"] for e in before if e["name"].startswith(ENGINE))
    late = [e for e in before if e["ts"] >= cut or e["name"].startswith("ProfilerStep#")]
    nodes = [ns(e) for e in late if e["name"].startswith(ENGINE) and e["ph"] == "X"]
    first_forward = min(e["ts"] for e in late if e["name"] == "aten::conv2d") * 1000
    of_lost = sum(end - start for start, end in nodes if start < first_forward)
    # A range inside of a node, such as that of an all-reduce, has its own time.
    ranges = [ns(e) for e in late if e.get("cat") == "user_annotation" and "nccl" in e["name"]]
    inside = sum(end - start for start, end in ranges if any(a <= start < b for a, b in nodes))
    whole = sum(end - start for start, end in nodes) - inside
    (row,) = capture(tmp_path / "cut", late).coverage.where(name=rows.JOINED)
    assert row.share == pytest.approx(1 - of_lost / whole, abs=0.01)
    assert row.total_ns == whole
