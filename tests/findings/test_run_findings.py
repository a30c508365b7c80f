"""The findings about a run on traces and captures written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import builders
import pytest
from builders import accumulation, annotation, call, frame, kernel, made, node, span, step

from findings.twins import check_of
from instrument import Capture, diff
from instrument.findings.finding import Finding, NotRecorded


def check(capture: Capture, code: str) -> list[Finding]:
    """The findings of a check, which may raise `NotRecorded`."""
    return list(check_of(code).find(capture, capture.whatif))


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
    assert finding.saving is None
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
    with pytest.raises(NotRecorded, match="but the trace has 3: record"):
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
    assert finding.saving is None
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
    with pytest.raises(NotRecorded, match="has 3: record with"):
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


# Hooks

MODULES = "torch/nn/modules/module.py"
ENGINE_RUN = "<built-in method run_backward of torch._C._EngineBase object at 0x7f1>"
COUNTED = {"every_module": 0, "modules": 0, "parameters": 3}


def hooked(forward: str = "torch/nn/modules/linear.py(130): forward") -> list[Any]:
    """Steps of 1000 µs with hooks of 30 µs (a module), 20 (its backward) and 10 µs (a tensor)."""
    events = steps(4)
    for start in range(0, 4000, 1000):
        events += [
            frame(f"{MODULES}(1782): _call_impl", start + 10, 100),
            frame(f"{MODULES}(1794): inner", start + 11, 98),
            frame("<built-in method items of dict object at 0x7f1>", start + 12, 2),
            frame(forward, start + 20, 30),
            frame("watch.py(7): keeps_output", start + 60, 30),
            frame("watch.py(2): summary", start + 62, 20),
            span("aten::histc", start + 65, 15),
            frame(ENGINE_RUN, start + 200, 300),
            frame("/venv/torch/utils/hooks.py(208): hook", start + 210, 40),
            frame("/venv/site-packages/wandb/watch.py(9): <lambda>", start + 220, 20),
            frame("train.py(3): clips", start + 300, 10),
            frame("torch/autograd/function.py(313): apply", start + 320, 100),
            frame("model.py(8): backward", start + 330, 80),
        ]
    return events


@pytest.mark.parametrize("hooks", [None, COUNTED], ids=["not counted", "counted"])
def test_hooks_of_modules_and_tensors(tmp_path: Path, hooks: dict[str, int] | None) -> None:
    (finding,) = check(described(tmp_path, hooked(), hooks=hooks), "hooks")
    assert finding.title == "Hooks of modules and tensors take 6.0 % of the step: 3 calls a step"
    assert finding.saving is not None
    assert finding.saving.saving_ns == 60_000
    assert [(row.name, row.calls, row.total_ns) for row in finding.evidence] == [
        ("watch.py(7): keeps_output", 3, 90_000),
        ("/venv/site-packages/wandb/watch.py(9): <lambda>", 3, 60_000),
        ("train.py(3): clips", 3, 30_000),
    ]


def test_a_function_in_place_of_a_forward_is_no_hook(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, hooked("peft.py(1): new_forward")), "hooks")
    assert "take 3.0 % of the step: 2 calls a step" in finding.title


def test_hooks_that_take_little(tmp_path: Path) -> None:
    own = ("watch.py", "/venv")
    assert not check(
        builders.capture(tmp_path, [e for e in hooked() if not e["name"].startswith(own)]), "hooks"
    )


def test_without_hooks_nothing_has_to_be_recorded(tmp_path: Path) -> None:
    none = dict.fromkeys(COUNTED, 0)
    assert not check(described(tmp_path / "none", steps(4), hooks=none), "hooks")
    unknown = {"every_module": 0, "modules": None, "parameters": None}
    for name, hooks, said in (("some", COUNTED, "the 3 hooks"), ("unknown", unknown, "long hooks")):
        with pytest.raises(NotRecorded, match=f"{said} of .*: record with .*with_stack=true"):
            check(described(tmp_path / name, steps(4), hooks=hooks), "hooks")


# Gradients


def zeroing(count: int, *, backwards: int = 1, fill: str = "aten::zero_") -> list[Any]:
    """Steps that fill three gradients with zeros, and add to them in each backward."""
    events = steps(count)
    for start in range(0, 1000 * count, 1000):
        events.append(annotation("Optimizer.zero_grad#SGD.zero_grad", start + 10, 90))
        events += [span(fill, start + 20 + 25 * k, 20) for k in range(3)]
        for backward in range(backwards):
            for k in range(3):
                at = start + 200 + 200 * backward + 50 * k
                events += [*accumulation(at, 40), span("aten::add_", at + 5, 30, tid=2)]
    return events


def test_fills_and_the_additions_that_follow(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, zeroing(4)), "zero-grad")
    assert finding.title == (
        "15 % of the step fills gradients with zeros: 3 fills a step, and 3 additions to these "
        "gradients"
    )
    assert finding.range == "Optimizer.zero_grad#SGD.zero_grad"
    assert finding.saving is not None
    assert finding.saving.saving_ns >= 60_000


def test_later_backwards_must_add(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, zeroing(4, backwards=2)), "zero-grad")
    assert "3 fills a step, and 3 additions" in finding.title
    assert [(row.name, row.calls) for row in finding.evidence] == [
        ("aten::add_", 12),
        ("aten::zero_", 12),
    ]


def test_a_fill_of_all_gradients_tells_not_how_many(tmp_path: Path) -> None:
    events = zeroing(4, fill="aten::_foreach_zero_")
    (finding,) = check(builders.capture(tmp_path, events), "zero-grad")
    assert finding.title == "6.0 % of the step fills gradients with zeros: 3 fills a step"


def test_other_fills_are_no_gradients(tmp_path: Path) -> None:
    events = [*steps(4), *(span("aten::zero_", start + 100, 100) for start in range(0, 4000, 1000))]
    assert not check(builders.capture(tmp_path, events), "zero-grad")


# Biases


def convolutions(count: int, *, bias: bool = True, norm: list[int] | None = None) -> list[Any]:
    """Steps with a convolution as cuDNN runs it, the count of batches, and a batch norm."""
    events = []
    for start in range(0, 1000 * count, 1000):
        shapes = [[2, 3, 8, 8], [4, 3, 3, 3], [4] if bias else [], [], [], [], []]
        values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]
        arguments = {"Input_Dims": shapes, "Concrete_Inputs": values}
        events.append(made("aten::conv2d", start + 10, 200, start, **arguments))
        events.append(span("aten::_convolution", start + 15, 190))
        events.append(span("aten::cudnn_convolution", start + 20, 100, Input_Dims=shapes[:2]))
        if bias:
            events.append(
                span("aten::add_", start + 130, 50, Input_Dims=[[2, 4, 4, 4], [1, 4, 1, 1]])
            )
            events += [
                call("cudaLaunchKernel", start + 135, 10, start + 1),
                kernel("add", start + 300, 80, correlation=start + 1),
            ]
        events.append(span("aten::add_", start + 220, 10, Input_Dims=[[], []]))
        events.append(
            span("aten::batch_norm", start + 240, 40, Input_Dims=[norm or [2, 4, 4, 4], [4]])
        )
        events.append(node("ConvolutionBackward0", start + 500, 200, start))
        events.append(span("aten::convolution_backward", start + 510, 180, tid=2))
        events += [span("aten::sum", start + 600, 50, tid=2)] if bias else []
        for at, shape in ((720, [4, 3, 3, 3]), (750, [4])):
            outer, inner = accumulation(start + at, 20)
            events += [outer, {**inner, "args": {"Input Dims": [shape]}}]
    return [*steps(count), *events]


def test_a_bias_that_a_batch_norm_takes_away(tmp_path: Path) -> None:
    (finding,) = check(builders.capture(tmp_path, convolutions(4)), "conv-bias-before-norm")
    assert finding.title == (
        "12 % of the step is spent on biases without effect: 1 convolutions a step add a bias "
        "before a batch norm"
    )
    assert finding.evidence[0][:2] == ("aten::conv2d", 4)
    assert {row.name: row.calls for row in finding.evidence[1:]} == {
        "aten::add_": 4,
        "aten::sum": 4,
        f"{builders.ENGINE}{builders.ACCUMULATE}": 4,
    }


@pytest.mark.parametrize(
    "changed",
    [{"bias": False}, {"norm": [2, 8, 4, 4]}, {"norm": [2, 4, 8, 8]}],
    ids=["no bias", "other channels", "another size"],
)
def test_a_bias_that_has_an_effect(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert not check(
        builders.capture(tmp_path, convolutions(4, **changed)), "conv-bias-before-norm"
    )


def test_an_operator_between_convolution_and_norm(tmp_path: Path) -> None:
    events = convolutions(4)
    for start in range(0, 4000, 1000):
        events.append(span("aten::relu_", start + 212, 5, Input_Dims=[[2, 4, 4, 4]]))
    assert not check(builders.capture(tmp_path, events), "conv-bias-before-norm")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("aten::conv2d", "Concrete Inputs", ["", "", "", "[0, 0]", "[1, 1]", "[1, 1]", "1"]),
        ("aten::conv2d", "Concrete Inputs", ["", "", "", [], "[1, 1]", "[1, 1]", "1"]),
        ("aten::conv2d", "Concrete Inputs", ["", "", "", 2, ["x"], {}, "1"]),
        ("aten::conv2d", "Concrete Inputs", {"stride": 2}),
        ("aten::conv2d", "Concrete Inputs", 7),
        ("aten::conv2d", "Input Dims", [[2, 3, "8", 8], [4, 3, 3, 3], [4], [], [], [], []]),
        ("aten::conv2d", "Input Dims", [[2, 3, 8, 8], 7, [4], [], [], [], []]),
        ("aten::conv2d", "Input Dims", {}),
        ("aten::conv2d", "Input Dims", [[2, 3], [4, 3], [4], [], [], [], []]),
        ("aten::batch_norm", "Input Dims", 7),
        ("aten::batch_norm", "Input Dims", {}),
        ("aten::batch_norm", "Input Dims", {"a": 1}),
        ("aten::batch_norm", "Input Dims", ["x"]),
    ],
    ids=str,
)
def test_odd_shapes_are_no_convolution_before_a_norm(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    events = convolutions(4)
    for event in events:
        if event["name"] == name:
            event["args"][key] = value
    assert not check(builders.capture(tmp_path, events), "conv-bias-before-norm")


@pytest.mark.parametrize("value", [7, {}, [7], ["x"], [None], [["4"]]], ids=str)
def test_accumulations_of_odd_shapes_do_not_count(tmp_path: Path, value: Any) -> None:
    events = convolutions(4)
    for event in events:
        if event["name"] == builders.ACCUMULATE:
            event["args"]["Input Dims"] = value
    (finding,) = check(builders.capture(tmp_path, events), "conv-bias-before-norm")
    assert [row.name for row in finding.evidence] == ["aten::conv2d", "aten::add_", "aten::sum"]


def test_a_list_of_tensors_between_convolution_and_norm(tmp_path: Path) -> None:
    events = convolutions(4)
    for start in range(0, 4000, 1000):
        shapes = [[[2, 4, 4, 4], [2, 4, 4, 4]], []]
        events.append(span("aten::_foreach_add_", start + 212, 5, Input_Dims=shapes))
    assert not check(builders.capture(tmp_path, events), "conv-bias-before-norm")


def test_biases_without_shapes(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="record_shapes=true"):
        check(builders.capture(tmp_path, steps(4)), "conv-bias-before-norm")
