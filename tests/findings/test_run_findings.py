"""The findings about a run on traces and captures written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import builders
import pytest
from builders import annotation, call, frame, made, node, span, step

from findings.twins import check_of
from instrument import Capture, diff
from instrument.findings.check import NotRecorded, run_check
from instrument.findings.finding import Finding


def check(capture: Capture, code: str) -> list[Finding]:
    """The findings of a check, which may raise `NotRecorded`."""
    return list(run_check(check_of(code), capture, capture.whatif))


def steps(count: int, duration_us: float = 1000, first_us: float | None = None) -> list[Any]:
    """Steps after each other, each with an operator that fills the last 10 µs; the first may be longer."""
    events, start = [], 0.0
    for number in range(count):
        length = first_us if number == 0 and first_us is not None else duration_us
        events += [step(number, start, length), span("aten::mm", start + length - 10, 9)]
        start += length
    return events


def described(folder: Path, events: list[Any], **environment: Any) -> Capture:
    """A capture of a session that recorded facts of its environment."""
    return builders.write_capture(folder, events, environment=environment)


# The collector


def test_collections_without_events_are_those_of_the_whole_window(tmp_path: Path) -> None:
    counted = {"collections": 7, "total_ns": 400_000, "longest_ns": 100_000}
    capture = described(tmp_path, steps(4), garbage_collection=counted)
    (finding,) = check(capture, "garbage-collection")
    assert finding.title == (
        "Python's garbage collector takes 10 % of the window: 7 collections, the longest 100.000 µs"
    )
    assert (finding.saving, finding.share) == (None, 0.1)
    assert finding.evidence[0][:3] == ("Python GC", 7, 400_000)


ONE = (
    " One collection makes most of the time in this window: a longer window shows how often such a "
    "collection occurs, and so what a step saves on average."
)


@pytest.mark.parametrize(
    ("durations_us", "title"),
    [
        ((300, 20, 20), "3 collections, but one of 300.000 µs makes 88 % of this time"),
        ((300,), "one collection of 300.000 µs"),
        ((110, 110, 110), "3 collections, the longest 110.000 µs"),
    ],
)
def test_one_long_collection_is_not_a_cost_of_each_step(
    tmp_path: Path, durations_us: tuple[int, ...], title: str
) -> None:
    events = steps(4)
    collections = [
        frame("Python GC", 1000 * k + 100, each) for k, each in enumerate(durations_us, 1)
    ]
    counted = {
        "collections": len(durations_us),
        "total_ns": sum(durations_us) * 1000,
        "longest_ns": max(durations_us) * 1000,
    }
    of_events = builders.capture(tmp_path, [*events, *collections])
    of_window = described(tmp_path, events, garbage_collection=counted)
    for capture, what in ((of_events, "step"), (of_window, "window")):
        (finding,) = check(capture, "garbage-collection")
        assert f" % of the {what}: {title}" in finding.title
        assert finding.change.endswith(ONE) == (max(durations_us) == 300)


def test_a_collector_that_takes_little_is_no_problem(tmp_path: Path) -> None:
    counted = {"collections": 7, "total_ns": 40_000, "longest_ns": 10_000}
    assert not check(
        described(tmp_path, steps(4), garbage_collection=counted), "garbage-collection"
    )


def test_a_trace_alone_does_not_tell_of_collections(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="record_python_gc_info"):
        check(builders.capture(tmp_path, steps(4)), "garbage-collection")


def test_collections_that_the_program_calls_for(tmp_path: Path) -> None:
    events = steps(4)
    for start in (0, 1000, 2000, 3000):
        events += [
            frame("train.py(9): main", start + 1, 500),
            frame("<built-in function collect>", start + 99, 102),
            frame("Python GC", start + 100, 100),
        ]
    (finding,) = check(builders.capture(tmp_path, events), "garbage-collection")
    assert finding.title.startswith("Python's garbage collector takes 10 % of the step: 3 coll")
    assert finding.change == "Do not call gc.collect() in the steps."
    assert finding.source == "train.py:9 in main"
    assert finding.saving is not None
    assert finding.saving.saving_ns == 100_000


# torch.compile


def compilation(start_us: float, again: int = 1) -> list[Any]:
    """A compilation of 400 µs, as torch records it."""
    note = f"entire_frame_compile_data: fn_name=f, compile_id=0/{again}"
    return [
        span("dynamo", start_us, 400),
        span("entire_frame_compile", start_us + 1, 398),
        annotation(note, start_us + 2, 1),
        span("_compile.compile_inner (dynamo_timed)", start_us + 4, 390),
        span("build_guards (dynamo_timed)", start_us + 100, 100),
    ]


def test_a_compilation_in_a_later_step(tmp_path: Path) -> None:
    events = [
        *steps(4),
        *compilation(0, 0),
        *compilation(1100),
        *compilation(2100),
        *compilation(3100),
    ]
    (finding,) = check(builders.capture(tmp_path, events), "recompilation")
    assert finding.title == (
        "torch.compile compiles in the window: 40 % of the step, 3 compilations, 3 of them again "
        "after a failed guard"
    )
    assert finding.saving is not None
    assert finding.saving.saving_ns == 400_000


def test_the_first_step_may_compile(tmp_path: Path) -> None:
    assert not check(builders.capture(tmp_path, [*steps(4), *compilation(0)]), "recompilation")


def test_one_step_does_not_tell_whether_it_is_compiled_again(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="fewer than two finished steps"):
        check(builders.capture(tmp_path, [*steps(1), *compilation(0)]), "recompilation")


def test_recompilations_that_only_the_session_counted(tmp_path: Path) -> None:
    capture = described(tmp_path, steps(4), dynamo={"recompilations": 2, "graphs": 2})
    (finding,) = check(capture, "recompilation")
    assert finding.title == "torch.compile compiled functions again 2 times in the window"
    assert finding.saving is None
    assert "TORCH_LOGS" in finding.change


def test_the_guards_that_failed_are_evidence(tmp_path: Path) -> None:
    guards = {"train.py:3 in f: k == 2": 1, "train.py:3 in f: tensor 'x' size mismatch": 5}
    capture = described(tmp_path, steps(4), dynamo={"recompilations": 2, "failed_guards": guards})
    (finding,) = check(capture, "recompilation")
    assert [(row.name, row.calls, row.detail) for row in finding.evidence] == [
        ("recompilation", 2, ""),
        ("failed guard", 5, "train.py:3 in f: tensor 'x' size mismatch"),
        ("failed guard", 1, "train.py:3 in f: k == 2"),
    ]
    assert "TORCH_LOGS" not in finding.change


def test_graph_breaks_with_their_reasons(tmp_path: Path) -> None:
    breaks = {"call to print": 1, "Tensor.item()\n  at train.py:3": 2}
    capture = described(tmp_path, steps(4), dynamo={"graphs": 4, "graph_breaks": breaks})
    (finding,) = check(capture, "graph-breaks")
    assert (
        finding.title == "torch.compile breaks the graph: 3 graph breaks and 4 graphs in the window"
    )
    assert [row.detail for row in finding.evidence] == [
        "Tensor.item() at train.py:3",
        "call to print",
    ]


def test_graph_breaks_of_compiled_code_that_nobody_counted(tmp_path: Path) -> None:
    events = [*steps(4), span("Torch-Compiled Region: 0/0", 10, 20)]
    with pytest.raises(NotRecorded, match="does not count graph breaks"):
        check(builders.capture(tmp_path, events), "graph-breaks")


def test_no_graph_breaks_where_nothing_is_compiled(tmp_path: Path) -> None:
    assert not check(described(tmp_path, steps(4), dynamo=None), "graph-breaks")
    assert not check(builders.capture(tmp_path, steps(4)), "graph-breaks")


# The first step


def test_a_slow_first_step_and_its_cause(tmp_path: Path) -> None:
    events = [*steps(5, first_us=20_000), call("cudaModuleLoadData", 100, 15_000)]
    (finding,) = check(builders.capture(tmp_path, events), "first-step")
    assert finding.title == (
        "The first step takes 20.000 ms, 20.0 times as long as the others; 79 % of the difference is loading "
        "kernel code onto the device"
    )


def test_the_operator_that_makes_the_first_step_slow(tmp_path: Path) -> None:
    events = [*steps(5, first_us=20_000), span("aten::cudnn_convolution", 100, 15_000)]
    (finding,) = check(described(tmp_path, events, cudnn_benchmark=True), "first-step")
    assert finding.title.endswith(
        "aten::cudnn_convolution, for which cuDNN searches its fastest algorithm"
    )
    (finding,) = check(builders.capture(tmp_path, events), "first-step")
    assert finding.title.endswith("79 % of the difference is aten::cudnn_convolution")


@pytest.mark.parametrize("first_us", [1000, 9000, 19_000])
def test_a_first_step_like_the_others(tmp_path: Path, first_us: float) -> None:
    length = 10_000 if first_us > 9000 else 1000
    assert not check(builders.capture(tmp_path, steps(5, length, first_us)), "first-step")


def test_few_steps_show_no_slow_first_one(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="fewer than 4 finished steps: record"):
        check(builders.capture(tmp_path, steps(3, first_us=50_000)), "first-step")


# Threads


def threads(**changed: Any) -> dict[str, Any]:
    return {"intra_op": 8, "inter_op": 8, "cpus": 8, "local_ranks": 1, **changed}


LONG = [span("aten::mm", start + 100, 400) for start in (0, 1000, 2000, 3000)]


def test_ranks_with_as_many_threads_as_cpus_each(tmp_path: Path) -> None:
    capture = described(tmp_path, [*steps(4), *LONG], threads=threads(local_ranks=4))
    (finding,) = check(capture, "thread-oversubscription")
    assert finding.title == "32 threads work on 8 CPUs: 4 processes with 8 threads for operators"
    assert "torch.set_num_threads(2)" in finding.change
    assert finding.evidence[0].name == "aten::mm"


def test_threads_without_work_compete_for_nothing(tmp_path: Path) -> None:
    capture = described(tmp_path, steps(4), threads=threads(local_ranks=4))
    assert not check(capture, "thread-oversubscription")


def test_workers_of_loaders_work_too(tmp_path: Path) -> None:
    loaders = [{"phase": "train", "workers": 6}, {"phase": "validation", "workers": 2}]
    capture = described(tmp_path, [*steps(4), *LONG], threads=threads(), loaders=loaders)
    (finding,) = check(capture, "thread-oversubscription")
    assert (
        finding.title == "14 threads work on 8 CPUs: 8 threads for operators and 6 loader workers"
    )
    assert "torch.set_num_threads(2)" in finding.change


def test_more_processes_than_cpus_are_a_problem_by_themselves(tmp_path: Path) -> None:
    many = threads(intra_op=1, local_ranks=16)
    (finding,) = check(described(tmp_path, steps(4), threads=many), "thread-oversubscription")
    assert finding.change.endswith("and fewer processes on this machine")


def test_workers_that_fit_beside_one_thread_are_no_problem(tmp_path: Path) -> None:
    loaders = [{"phase": "train", "workers": 8}]
    capture = described(tmp_path, [*steps(4), *LONG], threads=threads(intra_op=1), loaders=loaders)
    assert not check(capture, "thread-oversubscription")


def test_the_defaults_are_no_problem(tmp_path: Path) -> None:
    capture = described(tmp_path, [*steps(4), *LONG], threads=threads())
    assert not check(capture, "thread-oversubscription")


def test_unknown_threads(tmp_path: Path) -> None:
    for capture in (
        builders.capture(tmp_path, steps(4)),
        described(tmp_path, steps(4), threads=threads(cpus=None)),
    ):
        with pytest.raises(NotRecorded, match="how many threads and CPUs"):
            check(capture, "thread-oversubscription")


def test_other_work_on_the_cpus(tmp_path: Path) -> None:
    def waiting(waited_ns: int) -> Capture:
        wait = {"waited_ns": waited_ns, "window_ns": 1_000_000}
        return described(tmp_path / str(waited_ns), steps(4), cpu_wait=wait)

    (finding,) = check(waiting(350_000), "busy-cpus")
    assert finding.title.startswith("For 35 % of the window, the thread of the steps was ready")
    assert (finding.saving, finding.share) == (None, 0.35)
    assert not check(waiting(99_000), "busy-cpus")
    busy = "35 % of a window of {}, the thread of the steps was ready to run, but got no CPU"
    for sides, at in (((350_000, 99_000), "BEFORE"), ((99_000, 350_000), "AFTER")):
        captures = [Capture.load(tmp_path / str(ns) / "steps_3-4") for ns in sides]
        (sentence,) = [each.sentence for each in diff(*captures).unlike]
        assert busy.format(at) in sentence
    for unknown in (None, {}, {"waited_ns": 5, "window_ns": 0}):
        capture = described(tmp_path / f"unknown {unknown}", steps(4), cpu_wait=unknown)
        with pytest.raises(NotRecorded, match="waited for a CPU"):
            check(capture, "busy-cpus")


# Memory


def growth(count: int, kept: int, *, name: str = "forward") -> list[Any]:
    """Steps in which a range keeps memory; each also allocates and frees a megabyte."""
    events, total = steps(count), 10**9
    for number in range(count):
        start, address = number * 1000, 10**6 + number * 10**6
        events.append(annotation(name, start + 100, 200))
        events.append(span("aten::exp", start + 150, 50))
        total += kept
        events.append(builders.allocation(start + 160, kept, address, total, device=0))
        events.append(builders.allocation(start + 500, 2**20, 77, total + 2**20, device=0))
        events.append(builders.allocation(start + 600, -(2**20), 77, total, device=0))
    return events


def test_memory_that_a_range_keeps_in_each_step(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, growth(5, 2**20)), "memory-growth")
    assert finding.title == (
        "Memory in use on cuda:0 grows by 1.00 MiB in each step, allocated in range 'forward'"
    )
    assert finding.range == "forward"
    assert finding.evidence[0][:2] == ("aten::exp", 4)
    assert finding.saving is None


def test_memory_that_grows_little_or_not_always(tmp_path: Path) -> None:
    assert not check(builders.capture(tmp_path, growth(5, 1000)), "memory-growth")
    events = growth(5, 2**20)
    events.append(builders.allocation(3700, -(2**21), 3 * 10**6, device=0))
    assert not check(builders.capture(tmp_path, events), "memory-growth")


def test_memory_that_was_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="profile_memory=true"):
        check(builders.capture(tmp_path, steps(5)), "memory-growth")
    with pytest.raises(NotRecorded, match="fewer than 4 finished steps: record with"):
        check(builders.capture(tmp_path, growth(3, 2**20)), "memory-growth")


# Autograd


def training(count: int, *, validates: bool = True, validation_us: float = 300) -> list[Any]:
    """Steps with a forward and its backward, and a validation that records gradients."""
    events, number = steps(count), 10
    for start in range(0, 1000 * count, 1000):
        events += [annotation("forward", start + 10, 60), made("aten::mm", start + 20, 20, number)]
        events.append(made("aten::relu", start + 45, 20, number + 1))
        events += [
            node("ReluBackward0", start + 100, 30, number + 1),
            node("MmBackward0", start + 140, 30, number),
        ]
        number += 2
        if validates:
            events.append(annotation("validation", start + 300, validation_us))
            events += [made("aten::mm", start + 310 + 20 * k, 15, number + k) for k in range(10)]
            number += 10
    return events


def test_a_range_whose_graph_no_backward_uses(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, training(4)), "unused-autograd")
    assert finding.title == (
        "Range 'validation', 30 % of the step, builds a graph that no backward uses: 10 graph "
        "nodes a step"
    )
    assert finding.range == "validation"
    assert finding.saving is not None
    assert finding.saving.saving_ns == pytest.approx(25_000, rel=0.1)


def test_ranges_with_a_backward_need_their_graph(tmp_path: Path) -> None:
    assert not check(builders.capture(tmp_path, training(4, validates=False)), "unused-autograd")


def test_operators_that_make_no_node(tmp_path: Path) -> None:
    events = training(4, validates=False)
    for start in range(0, 4000, 1000):  # gradients are enabled, and the number stays
        number = 12 + start // 500
        events.append(annotation("validation", start + 300, 300))
        events += [made("aten::mm", start + 310 + 20 * k, 15, number) for k in range(10)]
    assert not check(builders.capture(tmp_path, events), "unused-autograd")


def test_a_program_without_any_backward(tmp_path: Path) -> None:
    events = steps(4)
    events += [made("aten::mm", 10 + 50 * k, 30, k) for k in range(78)]
    (finding,) = check(builders.capture(tmp_path, events), "unused-autograd")
    assert (
        finding.title
        == "The program builds a graph for gradients, but runs no backward: 19 graph nodes a step"
    )


def test_the_backward_of_an_earlier_forward(tmp_path: Path) -> None:
    events = [made("aten::mm", 10 + 50 * k, 30, 100 + k) for k in range(20)]
    events += [node("MmBackward0", 1200 + 40 * k, 30, 90 - k) for k in range(10)]
    with pytest.raises(NotRecorded, match="the backward of an earlier forward"):
        check(builders.capture(tmp_path, [*steps(4), *events]), "unused-autograd")


def test_anomaly_mode_of_which_the_trace_shows_nothing(tmp_path: Path) -> None:
    (finding,) = check(described(tmp_path, steps(4), anomaly_mode=True), "debug-modes")
    assert finding.title == "Anomaly detection is on"
    assert finding.saving is None


def test_whether_anomaly_mode_was_off(tmp_path: Path) -> None:
    assert not check(described(tmp_path, steps(4), anomaly_mode=False), "debug-modes")
    with pytest.raises(NotRecorded, match="whether anomaly detection was on"):
        check(builders.capture(tmp_path, steps(4)), "debug-modes")


def test_the_search_of_anomaly_mode_in_the_backward(tmp_path: Path) -> None:
    events = training(4, validates=False)
    for start in range(0, 4000, 1000):
        for at in (start + 110, start + 150):
            events += [
                span("aten::isnan", at, 5, tid=2),
                span("aten::_is_any_true", at + 6, 5, tid=2),
                span("aten::item", at + 12, 5, tid=2),
            ]
    (finding,) = check(builders.capture(tmp_path, events), "debug-modes")
    assert finding.title == (
        "Anomaly detection is on; the search for NaN in the gradients takes 3.0 % of the step"
    )


def test_a_hook_that_searches_one_gradient(tmp_path: Path) -> None:
    events = [*training(4, validates=False), span("aten::isnan", 1110, 5, tid=2)]
    assert not check(builders.capture(tmp_path, events), "debug-modes")
