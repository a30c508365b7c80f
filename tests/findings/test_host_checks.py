"""Waiting for data, synchronizing calls, loops over tiny operators and unmarked time, on built and real traces."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import real_traces
from builders import (
    PAGEABLE,
    SINGLE_PROCESS,
    WORKERS,
    annotation,
    call,
    capture,
    frame,
    kernel,
    launched,
    made,
    node,
    span,
    step,
    write_capture,
)

from findings.twins import assert_command_runs
from instrument import Capture
from instrument.cli.command import main
from instrument.findings import (
    float64,
    loader_wait,
    operator_storm,
    synchronizing_calls,
    unmarked_time,
)
from instrument.findings.check import Check, NotRecorded, run_check
from instrument.findings.finding import Finding

CHECKS = (loader_wait.CHECK, synchronizing_calls.CHECK, operator_storm.CHECK, unmarked_time.CHECK)


def findings(check: Check, found: Capture) -> list[Finding]:
    return list(run_check(check, found, found.whatif))


def loading(
    name: str = SINGLE_PROCESS, waits_us: float = 400, *, cat: str = "user_annotation", **more: Any
) -> list[dict[str, Any]]:
    """Four steps of 1000 µs, each with a wait for its batch, then an operator."""
    events = []
    for number in range(4):
        start = 1000 * number
        events += [
            step(number, start, 1000),
            span(name, start, waits_us, cat, **more),
            span("aten::mm", start + waits_us, 1000 - waits_us),
        ]
    return events


def settings(**loader: Any) -> dict[str, Any]:
    threads = {"intra_op": 8, "inter_op": 8, "cpus": 12, "local_ranks": 4}
    return {"threads": threads, "loaders": [{"phase": "train", "workers": 0, **loader}]}


# Waiting for data


def test_a_wait_for_data_is_told_with_its_share_and_saving(tmp_path: Path) -> None:
    frames = [frame("train.py(7): main", 0, 4000)]
    (found,) = findings(loader_wait.CHECK, capture(tmp_path, [*loading(), *frames]))
    assert found.title == (
        "40 % of the step waits for data: 400.000 µs in each step; the training process loads it"
    )
    assert found.change == "DataLoader(..., num_workers=4, persistent_workers=True)"
    assert (found.source, found.range) == ("train.py:7 in main", SINGLE_PROCESS)
    assert found.evidence[0][:3] == (SINGLE_PROCESS, 3, 1_200_000)
    assert found.saving is not None
    assert found.saving.saving_ns == 400_000


def test_the_recorded_settings_choose_the_number_of_workers(tmp_path: Path) -> None:
    (found,) = findings(
        loader_wait.CHECK,
        write_capture(tmp_path, loading(), environment=settings(pin_memory=False)),
    )
    assert found.change == (
        "DataLoader(..., num_workers=3, persistent_workers=True), and torch.set_num_threads(1), "
        "because workers and operators share the CPUs"
    )
    assert found.evidence[-1].detail == "workers=0, pin_memory=False"


def test_without_steps_the_title_names_no_step(tmp_path: Path) -> None:
    events = [annotation(SINGLE_PROCESS, 0, 400), span("aten::mm", 400, 600)]
    (found,) = findings(loader_wait.CHECK, capture(tmp_path, events))
    assert found.title == (
        "40 % of the recording waits for data: 400.000 µs; the training process loads it"
    )


def test_with_workers_the_saving_is_not_known(tmp_path: Path) -> None:
    own = settings(workers=2, persistent_workers=True)
    (found,) = findings(
        loader_wait.CHECK, write_capture(tmp_path, loading(WORKERS), environment=own)
    )
    assert "; worker processes load it" in found.title
    assert found.saving is None
    assert "num_workers=3" in found.change


def test_as_many_workers_as_cpus_cannot_be_more(tmp_path: Path) -> None:
    own = settings(workers=3, persistent_workers=True)
    (found,) = findings(
        loader_wait.CHECK, write_capture(tmp_path, loading(WORKERS), environment=own)
    )
    assert found.change.startswith("Make a batch cheaper")


def test_one_long_wait_is_the_start_of_the_workers(tmp_path: Path) -> None:
    events = loading(WORKERS, 10)
    long = [step(4, 4000, 2000), annotation(WORKERS, 4000, 1500)]
    own = settings(workers=2, persistent_workers=False)
    (found,) = findings(
        loader_wait.CHECK, write_capture(tmp_path, [*events, *long], environment=own)
    )
    assert "persistent_workers=True): one wait" in found.change


def test_the_range_of_session_steps_counts_in_captures_alone(tmp_path: Path) -> None:
    (found,) = findings(loader_wait.CHECK, write_capture(tmp_path, loading("data")))
    assert found.title == "40 % of the step waits for data: 400.000 µs in each step"
    assert "torch.utils.data.DataLoader(dataset, num_workers=4" in found.change
    assert found.saving is not None
    assert found.saving.saving_ns == 400_000
    assert not findings(loader_wait.CHECK, capture(tmp_path, loading("data")))


def test_a_batch_that_loads_longer_than_the_step_works_is_still_waited_for(tmp_path: Path) -> None:
    """With 4 workers, 900 µs of loading give a batch each 225 µs; the step works for 100."""
    (found,) = findings(loader_wait.CHECK, write_capture(tmp_path, loading("data", 900)))
    assert found.saving is not None
    assert found.saving.saving_ns == pytest.approx(900_000 - 125_000, abs=10)


@pytest.mark.parametrize("waits_us", [0, 40])
def test_a_short_wait_is_no_finding(tmp_path: Path, waits_us: float) -> None:
    assert not findings(loader_wait.CHECK, capture(tmp_path, loading(waits_us=waits_us)))


def test_a_wait_on_another_thread_is_no_finding(tmp_path: Path) -> None:
    assert not findings(loader_wait.CHECK, capture(tmp_path, loading(tid=5)))


def test_a_wait_while_the_device_works_is_no_finding(tmp_path: Path) -> None:
    work = [each for k in range(4) for each in launched("gemm", 1000 * k + 1, 1000 * k, 995, k + 1)]
    assert not findings(loader_wait.CHECK, capture(tmp_path, [*loading(), *work]))


# Synchronizing calls


def synchronizing(works_us: float = 300, *, to_device: bool = False) -> list[dict[str, Any]]:
    """Four steps; in each, a kernel that `.item()` waits for, then 500 µs of work on the CPU."""
    events = []
    for number in range(4):
        start, first = 1000.0 * number, 10 * number + 1
        until = start + 20 + works_us
        copied = {"tid": 7, "correlation": first + 1}
        copy = PAGEABLE if to_device else "Memcpy DtoH (Device -> Pageable)"
        events += [
            step(number, start, 1000),
            annotation("train", start, 900),
            *launched("gemm", start, start + 10, works_us, first),
            span("aten::item", start + 10, works_us + 20),
            span("aten::_local_scalar_dense", start + 11, works_us + 18),
            call("cudaMemcpyAsync", start + 12, 3, first + 1),
            span(copy, start + 11 + works_us, 2, "gpu_memcpy", **copied),
            call("cudaStreamSynchronize", start + 16, until + 2 - start - 16),
            frame("train.py(9): log", start + 10, works_us + 20),
            *launched("gemm", until + 500, until + 505, 990 - 505 - works_us - 20, first + 2),
        ]
    return events


def test_synchronizing_calls_are_told_with_their_number_and_place(tmp_path: Path) -> None:
    (found,) = findings(synchronizing_calls.CHECK, capture(tmp_path, synchronizing()))
    assert found.title == (
        "Synchronizing calls leave the device idle for 51 % of the step: 1 call a step"
    )
    assert (found.range, found.source) == ("train", "train.py:9 in log")
    assert ".item(), float(), int()" in found.change
    (row,) = found.evidence
    assert (row.name, row.calls) == ("aten::item", 3)
    assert row.detail == ("in train, at train.py:9 in log, leaves the device idle for 1.536 ms")
    assert found.saving is not None
    assert found.saving.saving_ns > 200_000


def test_a_copy_to_the_device_is_another_finding(tmp_path: Path) -> None:
    assert not findings(synchronizing_calls.CHECK, capture(tmp_path, synchronizing(to_device=True)))


def test_waiting_for_a_busy_device_is_no_finding(tmp_path: Path) -> None:
    """The device has work of its own beside the wait, on another stream."""
    other = [
        each
        for k in range(4)
        for each in launched("long", 1000 * k, 1000 * k + 5, 990, 1000 + k, tid=8)
    ]
    assert not findings(synchronizing_calls.CHECK, capture(tmp_path, [*synchronizing(), *other]))


def test_idle_time_in_the_loader_is_the_loaders(tmp_path: Path) -> None:
    loads = [annotation(SINGLE_PROCESS, 1000 * k + 325, 490) for k in range(4)]
    assert not findings(synchronizing_calls.CHECK, capture(tmp_path, [*synchronizing(), *loads]))


def test_synchronizing_calls_need_device_work(tmp_path: Path) -> None:
    calls = [step(0, 0, 1000), call("cudaStreamSynchronize", 10, 500)]
    with pytest.raises(NotRecorded, match=r"profiler\.activities"):
        findings(synchronizing_calls.CHECK, capture(tmp_path, calls))
    on_cpu = write_capture(tmp_path, [step(0, 0, 1000), span("aten::mm", 0, 900)])
    assert not findings(synchronizing_calls.CHECK, on_cpu)
    unseen = write_capture(tmp_path, [step(0, 0, 1000)], "other", devices=["NVIDIA H100"])
    with pytest.raises(NotRecorded):
        findings(synchronizing_calls.CHECK, unseen)


# Loops over tiny operators


def looping(
    rounds: int, names: tuple[str, ...] = ("aten::select", "aten::add"), every_us: float = 5
) -> list[dict[str, Any]]:
    """Three steps of 2000 µs, each with a loop in the range `rows` that calls an operator every 5 µs."""
    events = []
    for number in range(3):
        start = 2000.0 * number
        count = rounds * len(names)
        events += [step(number, start, 2000), annotation("rows", start, every_us * count)]
        events += [
            span(names[k % len(names)], start + every_us * k, every_us - 1) for k in range(count)
        ]
        events.append(span("aten::mm", start + 1500, 400))
    return events


def test_a_loop_over_rows_is_told_with_its_calls(tmp_path: Path) -> None:
    (found,) = findings(operator_storm.CHECK, capture(tmp_path, looping(100)))
    assert found.title == (
        "50 % of the step goes to a loop over tiny operators: 200 calls of 4.000 µs (median), and the gaps between them"
    )
    assert found.range == "rows"
    assert found.evidence[0].detail == "100 in a row, 2 calls each"
    assert {row.name for row in found.evidence[1:]} == {"aten::select", "aten::add"}
    assert found.saving is not None
    assert found.saving.saving_ns == pytest.approx(990_000, rel=0.02)


def test_a_loop_in_no_range_saves_the_time_of_its_calls(tmp_path: Path) -> None:
    events = [event for event in looping(100) if event["name"] != "rows"]
    (found,) = findings(operator_storm.CHECK, capture(tmp_path, events))
    assert found.saving is not None
    assert found.saving.saving_ns == pytest.approx(0.99 * 800_000, rel=0.02)


def test_the_work_of_large_calls_in_a_loop_is_not_saved(tmp_path: Path) -> None:
    """A loop over parameters: 90 small ones, and 10 large ones that take nearly all its time."""
    lasts_us = [1000 if k % 10 == 0 else 4 for k in range(100)]
    events = []
    for number in range(3):
        at = 20_000.0 * number
        events += [step(number, at, 20_000), annotation("update", at, sum(lasts_us) + 100)]
        for each_us in lasts_us:
            events.append(span("aten::mul_", at, each_us))
            at += each_us + 1
    (found,) = findings(operator_storm.CHECK, capture(tmp_path, events))
    assert found.saving is not None
    called_us = 90 * 4 + 10 * 20 + 100
    assert found.saving.saving_ns == pytest.approx(called_us * 1000, rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        ("Adam", "torch.optim.Adam(params, ..., fused=True)"),
        ("RMSprop", "torch.optim.RMSprop(params, ..., foreach=True)"),
    ],
)
def test_an_optimizer_can_update_all_parameters_at_once(
    tmp_path: Path, optimizer: str, change: str
) -> None:
    events = looping(100, ("aten::mul_", "aten::add_"))
    for event in events:
        if event["name"] == "rows":
            event["name"] = f"Optimizer.step#{optimizer}.step"
    (found,) = findings(operator_storm.CHECK, capture(tmp_path, events))
    assert found.change.startswith(change)
    assert_command_runs(found)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(looping(31), id="few rounds"),
        pytest.param(looping(32, ("aten::add",), 2), id="little time"),
        pytest.param(
            looping(10, tuple(f"layer{k}" for k in range(20))), id="a long pattern, as of layers"
        ),
    ],
)
def test_what_is_no_storm(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    assert not findings(operator_storm.CHECK, capture(tmp_path, events))


def test_large_operators_are_no_storm(tmp_path: Path) -> None:
    events = []
    for number in range(3):
        start = 10_000.0 * number
        events.append(step(number, start, 10_000))
        events += [span("aten::mm", start + 100 * k, 90) for k in range(90)]
    assert not findings(operator_storm.CHECK, capture(tmp_path, events))


def test_small_launches_for_a_busy_device_are_no_storm(tmp_path: Path) -> None:
    """The kernels keep the device busy for the whole step, so that calling less wins nothing."""
    events = looping(100)
    for k in range(3):  # launched in the step before, and waited for at the end of the step
        events += [call("cudaLaunchKernel", 2000 * k - 400, 2, k + 1)]
        events += [kernel("gemm", 2000 * k + 5, 1990, correlation=k + 1)]
        events += [call("cudaStreamSynchronize", 2000 * k + 1905, 92)]
    found = findings(operator_storm.CHECK, capture(tmp_path, events))
    assert not found


def test_operators_inside_operators_and_backward_nodes_do_not_count(tmp_path: Path) -> None:
    events = [
        {**event, "name": "aten::lstm", "cat": "cpu_op"} if event["name"] == "rows" else event
        for event in looping(100)
    ]
    assert not findings(operator_storm.CHECK, capture(tmp_path, events))


# Float64


def typed(name: str, start_us: float, duration_us: float, *types: Any) -> dict[str, Any]:
    return span(name, start_us, duration_us, Input_type=list(types))


def test_float64_is_found_by_the_first_input_and_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = []
    for number in range(3):
        start = 1000 * number
        events += [
            step(number, start, 1000),
            typed("aten::linear", start, 300, "double", "double"),
            typed("aten::addmm", start + 10, 200, "double", "double", "double"),
            typed("aten::mul", start + 400, 500, "float", "double"),
            typed("aten::_foreach_add_", start + 900, 100, ["double", "double"], "Scalar"),
        ]
    (found,) = findings(float64.CHECK, capture(tmp_path, events))
    assert found.title == "40 % of the step computes in float64"
    assert [(row.name, row.calls, row.total_ns) for row in found.evidence] == [
        ("aten::linear", 2, 600_000),
        ("aten::_foreach_add_", 2, 200_000),
    ]
    assert found.saving is not None
    assert found.saving.saving_ns == 200_000
    assert main([*shlex.split(found.verify, comments=True)[1:]]) == 0
    shown = capsys.readouterr().out
    assert "[double, double, double]" in shown
    assert "[[double, double], Scalar]" in shown


def test_float32_beside_numbers_is_no_float64(tmp_path: Path) -> None:
    events = []
    for number in range(3):
        events += [
            step(number, 1000 * number, 1000),
            typed("aten::mul", 1000 * number, 900, "float", "double"),
        ]
    assert not findings(float64.CHECK, capture(tmp_path, events))


def test_float64_needs_input_types(tmp_path: Path) -> None:
    events = [step(0, 0, 1000), span("aten::mm", 0, 900), step(1, 1000, 1000)]
    with pytest.raises(NotRecorded, match="record_shapes"):
        findings(float64.CHECK, capture(tmp_path, events))


# Unmarked time


def test_unmarked_time_is_told_with_what_runs_in_it(tmp_path: Path) -> None:
    events = []
    for number in range(3):
        start = 1000 * number
        events += [
            step(number, start, 1000),
            annotation("forward", start, 400),
            span("aten::mm", start + 400, 300),
            span("aten::inner", start + 410, 100),
        ]
    (found,) = findings(unmarked_time.CHECK, capture(tmp_path, events))
    assert found.title == "60 % of the step is in no range; 30 % is in no range and no operator"
    assert found.saving is None
    assert [(row.name, row.calls, row.total_ns) for row in found.evidence] == [
        ("(no range, no operator)", 2, 600_000),
        ("aten::mm", 2, 600_000),
    ]
    assert "Session(model=model)" not in found.change
    assert "with_stack" in found.change


def test_python_stacks_show_the_functions_outside_of_operators(tmp_path: Path) -> None:
    events = [frame("train.py(1): main", 0, 2000)]
    for number in range(2):
        start = 1000 * number
        events += [
            step(number, start, 1000),
            frame("train.py(9): tokenize", start + 100, 700),
            frame("json/decoder.py(3): decode", start + 200, 100),
            span("aten::mm", start + 500, 200),
            frame("other.py(2): sleep", start + 100, 900, tid=3),
        ]
    (found,) = findings(unmarked_time.CHECK, capture(tmp_path, events))
    tokenize = "train.py:9 in tokenize"
    assert found.title == f"100 % of the step is in no range; 50 % is spent in {tokenize}"
    assert found.source == tokenize
    assert "with_stack" not in found.change
    assert [(row.name, row.calls, row.total_ns) for row in found.evidence] == [
        ("(no range, no operator)", 1, 800_000),
        ("train.py:9 in tokenize", 1, 500_000),
        ("train.py:1 in main", 1, 300_000),
        ("aten::mm", 1, 200_000),
    ]


def test_without_any_range_the_model_should_be_given(tmp_path: Path) -> None:
    events = [step(0, 0, 1000), span("aten::mm", 0, 990)]
    (found,) = findings(unmarked_time.CHECK, capture(tmp_path, events))
    assert found.title == "100 % of the step is in no range"
    assert "Session(model=model)" in found.change


def test_loader_and_backward_of_ranges_are_marked(tmp_path: Path) -> None:
    events = [
        step(0, 0, 1000),
        annotation(SINGLE_PROCESS, 0, 200),
        annotation("forward", 200, 300),
        made("aten::mul", 210, 280, sequence=1),
        node("MulBackward0", 510, 480, sequence=1),
    ]
    assert not findings(unmarked_time.CHECK, capture(tmp_path, events))


def test_unmarked_time_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=r"session\.step\(\)"):
        findings(unmarked_time.CHECK, capture(tmp_path, [span("aten::mm", 0, 1000)]))
    disabled = write_capture(tmp_path, [step(0, 0, 10)], annotations_disabled=True)
    with pytest.raises(NotRecorded, match="INSTRUMENT_DISABLE"):
        findings(unmarked_time.CHECK, disabled)


def test_a_loop_that_something_else_fills_is_no_storm(tmp_path: Path) -> None:
    """Between its tiny operators, the loop sleeps: no batched operator would save that."""
    events = [step(k, 100_000 * k, 100_000) for k in range(3)]
    events += [
        span("aten::randn", 100_000 * k + 1000 + 700 * n, 14) for k in range(3) for n in range(64)
    ]
    assert not findings(operator_storm.CHECK, capture(tmp_path, events))


@real_traces.needs_traces
@pytest.mark.nightly  # reads 75,000 events
def test_the_loader_is_the_bottleneck_of_a_real_trace() -> None:
    """Its twin with four workers took 126.5 ms a step, and subtraction says 105.5."""
    (found,) = findings(loader_wait.CHECK, real_traces.load("v100_resnet50_workers0"))
    assert found.source == "resnet50_profiler_api.py:42 in <module>"
    assert found.saving is not None
    assert found.saving.share == pytest.approx(0.33, abs=0.05)
    assert found.saving.step_ns == pytest.approx(126.5e6, rel=0.1)
