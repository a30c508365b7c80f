"""The findings about devices: on pairs of hand-built traces, and on traces of real hardware."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import (
    capture,
    span,
    step,
    synchronous_steps,
    write_capture,
    write_rank,
)

from findings.device_traces import (
    PAIRS,
    V100,
    Pair,
    all_reduce,
    allocations,
    attention,
    cpu_between_kernels,
    many_kernels,
    products,
)
from findings.twins import found
from instrument import Capture
from instrument.findings import (
    allocator_churn,
    attention_not_fused,
    blocking_copies,
    device_idle,
    exposed_communication,
    launch_bound,
    layout_and_casts,
    recording_overhead,
    slow_links,
    stragglers,
    tensor_cores,
)
from instrument.findings.finding import Check, Finding, NotRecorded
from instrument.runs.run import Run

CHECKS = (
    allocator_churn.CHECK,
    attention_not_fused.CHECK,
    blocking_copies.CHECK,
    device_idle.CHECK,
    exposed_communication.CHECK,
    launch_bound.CHECK,
    layout_and_casts.CHECK,
    recording_overhead.CHECK,
    slow_links.CHECK,
    tensor_cores.CHECK,
)
FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
needs_traces = pytest.mark.skipif(
    not FOLDER.joinpath("expected.json").is_file(),
    reason="INSTRUMENT_TRACES names no folder of real traces with an expected.json",
)


def all_found(capture: Capture) -> list[Finding]:
    """What all checks find, the largest saving first; unknown savings come last."""
    every = [finding for check in CHECKS for finding in found(capture, check.code)]
    return sorted(every, key=lambda each: -each.saving.saving_ns if each.saving else 1)


def shares(capture: Capture) -> dict[str, float | None]:
    """For each kind that is found, the saving as a share of the step; None if it is not known."""
    return {
        each.code: round(each.saving.saving_ns / each.saving.baseline_ns, 2)
        if each.saving
        else None
        for each in reversed(all_found(capture))
    }


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.code}: {pair.says[-1]}")
def test_fires_on_the_problem_alone(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "fixed").mkdir()
    (finding,) = found(capture(tmp_path / "slow", pair.slow, **pair.document), pair.code)
    assert not found(capture(tmp_path / "fixed", pair.fixed, **pair.document), pair.code)
    assert finding.code == pair.code
    assert all(part in finding.title for part in pair.says), finding.title
    assert finding.evidence
    assert finding.change
    assert finding.verify.startswith("instrument ")
    if pair.saves is not None:
        assert finding.saving is not None
        least, most = pair.saves
        assert least * 1000 <= finding.saving.saving_ns <= most * 1000


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_passed_checks_are_sentences(check: Check) -> None:
    assert check.passed[0].isupper()
    assert check.passed.endswith(".")


def test_the_range_of_launches_is_named(tmp_path: Path) -> None:
    (finding,) = found(capture(tmp_path, many_kernels(2)), "launch-bound")
    assert finding.range == "model"
    # Of the first gap in each step, 9 µs lie in the step before.
    assert finding.evidence[0][:3] == ("aten::add", 150, 150 * 37_000 - 3 * 9_000)


def test_a_gap_that_the_loader_explains_is_not_told_twice(tmp_path: Path) -> None:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = [
        {**event, "name": name} if event["name"] == "tokenize" else event
        for event in cpu_between_kernels(1000)
    ]
    assert not found(capture(tmp_path, events), "device-idle")


def test_idle_time_in_no_event_is_said(tmp_path: Path) -> None:
    bare = [e for e in cpu_between_kernels(1000) if e["name"] not in ("tokenize", "text::encode")]
    (finding,) = found(capture(tmp_path, bare), "device-idle")
    assert "in no range and no operator" in finding.title
    assert finding.saving is None
    assert finding.range is None


def test_a_device_without_work_was_not_recorded(tmp_path: Path) -> None:
    bare = capture(tmp_path, [step(3, 0, 10), span("aten::mm", 0, 5)], deviceProperties=[V100])
    with pytest.raises(NotRecorded, match="no device work"):
        list(launch_bound.CHECK.find(bare, bare.whatif))


def test_a_run_without_a_device_has_no_finding(tmp_path: Path) -> None:
    bare = capture(tmp_path, [step(3, 0, 10), span("aten::mm", 0, 5)])
    assert not all_found(bare)


def test_collectives_of_gloo_are_exposed_too(tmp_path: Path) -> None:
    (finding,) = found(capture(tmp_path, synchronous_steps(300)), "exposed-communication")
    assert "60 % of the step" in finding.title


def test_messages_without_a_size_have_no_rate(tmp_path: Path) -> None:
    events = [
        {**event, "args": {"correlation": event["args"]["correlation"]}}
        if "Collective name" in event.get("args", {})
        else event
        for event in all_reduce(hidden=False)
    ]
    bare = capture(tmp_path, events)
    with pytest.raises(NotRecorded, match="no sizes of messages"):
        list(slow_links.CHECK.find(bare, bare.whatif))


def test_tensor_cores_of_an_unknown_device_are_not_judged(tmp_path: Path) -> None:
    unknown = capture(tmp_path, products("volta_sgemm_128x64_nn"))
    with pytest.raises(NotRecorded, match="device unknown"):
        list(tensor_cores.CHECK.find(unknown, unknown.whatif))


def test_softmax_of_other_shapes_is_no_attention(tmp_path: Path) -> None:
    events = attention(fused=False)
    for event in events:
        if event["name"] == "aten::softmax" and event["cat"] == "cpu_op":
            event["args"]["Input Dims"] = [[2, 64, 32], [], []]
    assert not found(capture(tmp_path, events), "attention-not-fused")


def test_attention_is_found_without_shapes(tmp_path: Path) -> None:
    events = attention(fused=False)
    for event in events:
        event["args"].pop("Input Dims", None)
    assert found(capture(tmp_path, events), "attention-not-fused")


def test_allocations_of_few_steps_are_not_judged(tmp_path: Path) -> None:
    one = [event for event in allocations(steps=4) if event["ts"] < 2000]
    bare = capture(tmp_path, one)
    with pytest.raises(NotRecorded, match="at least 3 steps"):
        list(allocator_churn.CHECK.find(bare, bare.whatif))


@pytest.mark.parametrize(("recorded_ns", "fires"), [(1_400_000, True), (1_200_000, False)])
def test_overhead_of_recording(tmp_path: Path, recorded_ns: int, fires: bool) -> None:
    cost = {
        "recorded_step_ns": recorded_ns,
        "unrecorded_step_ns": 1_000_000,
        "unrecorded_steps": 20,
    }
    findings = found(write_capture(tmp_path, [step(3, 0, 1000)], cost=cost), "recording-overhead")
    assert bool(findings) == fires
    if fires:
        assert "40 % longer" in findings[0].title
        assert findings[0].saving is None


def test_overhead_is_unknown_after_few_steps(tmp_path: Path) -> None:
    cost = {"recorded_step_ns": 2_000_000, "unrecorded_step_ns": 1_000_000, "unrecorded_steps": 9}
    few = write_capture(tmp_path, [step(3, 0, 1000)], cost=cost)
    with pytest.raises(NotRecorded, match="fewer than 10 steps"):
        list(recording_overhead.CHECK.find(few, few.whatif))


def test_a_rank_that_others_wait_for(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 800, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    (finding,) = stragglers.CHECK.find(window)
    assert finding.title.startswith("Rank 2 is late: the own work of rank 2 takes 122 %")
    assert "495.000 µs of each step (50 %)" in finding.title
    assert finding.range == "forward"


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 302, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    assert not list(stragglers.CHECK.find(window))


# What each trace is known to be held back by, from careful reading. Shares of the step are not asserted to the
# last percent, as the simulation may change; what leads, and what must be silent, is.
LED_BY = {
    "mi300x_resnet_checkpoint_train": ("exposed-communication", "slow-links"),
    "a100_nccl_2ranks_rank0": ("launch-bound", "device-idle"),
    "b200_eager": ("launch-bound", "device-idle"),
    "v100_ns_resolution": ("tensor-cores",),
    "h100_timesformer_inference": ("attention-not-fused", "tensor-cores", "device-idle"),
    "a100_megatron_tp8_rank1": ("exposed-communication",),
}
# Nothing of what these checks know holds these back: they are bound by the device's own work.
SILENT = ("h800_deepseek_train", "mi300x_vllm_graph", "h100_qwen_0.5b_inference", "cupti_counters")


@needs_traces
@pytest.mark.parametrize("name", LED_BY)
def test_a_real_trace_is_led_by_what_holds_it_back(name: str) -> None:
    real = Capture.load(FOLDER / f"{name}.json.gz")
    codes = tuple(dict.fromkeys(each.code for each in all_found(real)))
    assert codes == LED_BY[name], [each.title for each in all_found(real)]


@needs_traces
@pytest.mark.parametrize("name", SILENT)
def test_harmless_waiting_is_not_reported(name: str) -> None:
    assert not all_found(Capture.load(FOLDER / f"{name}.json.gz"))


@needs_traces
def test_stragglers_of_a_real_job() -> None:
    ranks = [FOLDER / f"a100_megatron_tp8_rank{rank}.json.gz" for rank in range(8)]
    (window,) = Run.load(*ranks).windows
    (finding,) = stragglers.CHECK.find(window)
    assert finding.title.startswith("Ranks 6, 0, 2 are late")
    assert "its CPU is late" in finding.change
    # The CPU of each rank is busy all the time, so that balance wins much less than the devices wait.
    assert finding.saving is not None
    assert 0 < finding.saving.saving_ns < 0.1 * finding.saving.baseline_ns
