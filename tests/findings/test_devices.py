"""The findings about devices: on pairs of hand-built traces, and on traces of real hardware."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import real_traces
from builders import (
    SINGLE_PROCESS,
    Event,
    annotation,
    call,
    capture,
    kernel,
    launched,
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
from findings.twins import assert_command_runs, found
from instrument import Capture
from instrument.findings import (
    allocator_churn,
    launch_bound,
    recording_overhead,
    slow_links,
    stragglers,
    tensor_cores,
)
from instrument.findings.check import NotRecorded, run_check
from instrument.findings.diagnose import CHECKS, diagnose
from instrument.findings.evidence import cost_share, share_of, share_with_device
from instrument.runs.run import Run

MARKED = [check for check in CHECKS if check.code != "unmarked-time"]


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
    assert_command_runs(finding)
    if pair.saves is not None:
        assert finding.saving is not None
        least, most = pair.saves
        assert least * 1000 <= finding.saving.saving_ns <= most * 1000


def test_the_range_of_launches_is_named(tmp_path: Path) -> None:
    (finding,) = found(capture(tmp_path, many_kernels(2)), "launch-bound")
    assert finding.range == "model"
    # Of the first gap in each step, 9 µs lie in the step before.
    assert finding.evidence[0][:3] == ("aten::add", 150, 150 * 37_000 - 3 * 9_000)


def test_a_gap_that_the_loader_explains_is_not_told_twice(tmp_path: Path) -> None:
    events = [
        {**event, "name": SINGLE_PROCESS} if event["name"] == "tokenize" else event
        for event in cpu_between_kernels(1000)
    ]
    assert not found(capture(tmp_path, events), "device-idle")


@pytest.mark.parametrize(
    ("cause", "launches", "advice"),
    [
        (span("text::encode", 1000, 6000), False, "in the workers of the DataLoader"),
        (span("aten::linear", 1000, 6000), True, "Spend less CPU time in aten::linear, which"),
        (annotation("tokenize", 1000, 6000), False, "in the workers of the DataLoader"),
        (annotation("forward", 1000, 6000), True, "Find the code of forward that launches nothing"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_code_that_launches_is_not_sent_to_the_workers_of_the_loader(
    cause: Event, launches: bool, advice: str, tmp_path: Path
) -> None:
    """Steps of 10 ms: a kernel of 1 ms, and one that waits for 6 ms of CPU work."""
    events = []
    for start in (0, 10_000, 20_000, 30_000):
        first = start // 100 + 1
        call_us = start + (6980 if launches else 7000)
        events += [
            step(start // 10_000, start, 10_000),
            *launched("gemm", start, start + 10, 1000, first),
            {**cause, "ts": start + 1000},
            *launched("gemm", call_us, call_us + 10, 2500, first + 1),
        ]
    (finding,) = found(capture(tmp_path, events), "device-idle")
    assert f"the CPU is in {cause['name']}" in finding.title
    assert advice in finding.change
    assert ("DataLoader" in finding.change) != launches


def test_idle_time_in_no_event_is_said(tmp_path: Path) -> None:
    bare = [e for e in cpu_between_kernels(1000) if e["name"] not in ("tokenize", "text::encode")]
    (finding,) = found(capture(tmp_path, bare), "device-idle")
    assert "in no range and no operator" in finding.title
    assert finding.saving is None
    assert finding.range is None


def test_a_device_without_work_was_not_recorded(tmp_path: Path) -> None:
    bare = capture(tmp_path, [step(3, 0, 10), span("aten::mm", 0, 5)], deviceProperties=[V100])
    with pytest.raises(NotRecorded, match="no device work"):
        list(run_check(launch_bound.CHECK, bare, bare.whatif))


def test_a_run_without_a_device_has_no_finding(tmp_path: Path) -> None:
    bare = capture(tmp_path, [step(3, 0, 10), span("aten::mm", 0, 5)])
    assert not diagnose([bare], MARKED).findings


@pytest.mark.parametrize(
    "events",
    [
        [],
        [kernel("sgemm", 0, 10)],
        [step(3, 0, 0), kernel("sgemm", 0, 0)],
        [step(3, 5, 10), *launched("sgemm", 40, 60, 5, 1)],
        [span("aten::softmax", 0, 10), kernel("ncclDevKernel_AllReduce", 3, 10)],
    ],
    ids=["nothing", "kernel", "no time", "outside of the step", "no launch"],
)
def test_odd_traces_break_no_check(tmp_path: Path, events: list[Event]) -> None:
    found = diagnose([capture(tmp_path, events)], CHECKS)
    assert not [each for each in found.not_checked if "please report it" in each]


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
        list(run_check(slow_links.CHECK, bare, bare.whatif))


def test_tensor_cores_of_an_unknown_device_are_not_judged(tmp_path: Path) -> None:
    unknown = capture(tmp_path, products("volta_sgemm_128x64_nn"))
    with pytest.raises(NotRecorded, match="device unknown"):
        list(run_check(tensor_cores.CHECK, unknown, unknown.whatif))


def test_one_peak_rate_for_all_precisions_does_not_hide_faster_units(tmp_path: Path) -> None:
    folder = capture(tmp_path, products("volta_sgemm_128x64_nn"), deviceProperties=[V100])
    assert folder.trace_path is not None
    given = Capture.load(folder.trace_path, peak_flops=1e13)
    (finding,) = run_check(tensor_cores.CHECK, given, given.whatif)
    assert "float32 without tensor cores" in finding.title


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


def test_attention_of_the_first_step_is_not_counted(tmp_path: Path) -> None:
    (finding,) = found(capture(tmp_path, attention(fused=False)), "attention-not-fused")
    assert finding.title.endswith(
        ": 1 softmax call a step"
    )  # four steps, of which three are measured
    (tmp_path / "two").mkdir()
    two = [event for event in attention(fused=False) if event["ts"] < 2000]
    (finding,) = found(capture(tmp_path / "two", two), "attention-not-fused")
    assert finding.title.endswith(": 1 softmax call a step")


def test_work_of_several_streams_and_threads_counts_once(tmp_path: Path) -> None:
    """In the measured step of 1000 µs, events of 600 µs on two lanes overlap by 200 µs."""
    events = [step(3, 0, 1000), step(4, 1000, 1000)]
    for at, tid in ((1000, 1), (1400, 2)):
        events += [
            span("aten::mm", at, 600, tid=tid),
            call("cudaLaunchKernel", at + 1, 5, tid, tid=tid),
            kernel("gemm", at, 600, tid=6 + tid, correlation=tid),
        ]
    on_device = capture(tmp_path, events)
    (tmp_path / "cpu").mkdir()
    on_cpu = capture(tmp_path / "cpu", [each for each in events if each["cat"] != "kernel"])
    for made in (on_device, on_cpu):
        products = np.flatnonzero(made.events.named("aten::mm".__eq__))
        nodes = made.links.call_tree.nodes_of(products)
        assert cost_share(made, nodes) == 1.0
        assert share_with_device(made, products) == 1.0
    assert share_of(on_device, on_device.work.event) == 1.0


def test_allocations_of_few_steps_are_not_judged(tmp_path: Path) -> None:
    one = [event for event in allocations(steps=4) if event["ts"] < 2000]
    bare = capture(tmp_path, one)
    with pytest.raises(NotRecorded, match="too few finished steps"):
        list(run_check(allocator_churn.CHECK, bare, bare.whatif))


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
        assert "Record less" not in findings[0].change, "only the events were recorded"


def test_overhead_of_recording_names_the_options_that_were_on(tmp_path: Path) -> None:
    cost = {"recorded_step_ns": 2_000_000, "unrecorded_step_ns": 1_000_000, "unrecorded_steps": 20}
    typed = span("aten::mm", 10, 5, Input_type=["float"])
    capture = write_capture(tmp_path, [step(3, 0, 1000), typed], cost=cost)
    (finding,) = found(capture, "recording-overhead")
    assert finding.change.startswith("Record less: profiler.record_shapes=false. Mark fewer")


def test_overhead_is_unknown_after_few_steps(tmp_path: Path) -> None:
    cost = {"recorded_step_ns": 2_000_000, "unrecorded_step_ns": 1_000_000, "unrecorded_steps": 9}
    few = write_capture(tmp_path, [step(3, 0, 1000)], cost=cost)
    with pytest.raises(NotRecorded, match="Fewer than 10 steps"):
        list(run_check(recording_overhead.CHECK, few, few.whatif))


def test_a_rank_that_others_wait_for(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 800, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    (finding,) = stragglers.CHECK.find(window)
    assert finding.title.startswith("Rank 2 is late: the own work of rank 2 takes 122 %")
    assert "495.000 µs of each step (50 %)" in finding.title
    assert finding.range == "forward"
    assert_command_runs(finding)


def test_a_rank_that_others_without_own_work_wait_for(tmp_path: Path) -> None:
    """The others are in a collective for the whole step, so that no excess is known."""
    for rank, own_us in enumerate((0, 0, 800, 0)):
        work = [span("aten::mm", at, own_us) for at in (0, 1000)] if own_us else []
        waits = [
            annotation("gloo:all_reduce", at + own_us, 1000 - own_us, tid=2) for at in (0, 1000)
        ]
        write_rank(tmp_path, rank, [step(3, 0, 1000), step(4, 1000, 1000), *work, *waits])
    (window,) = Run.load(tmp_path).windows
    (finding,) = stragglers.CHECK.find(window)
    assert finding.title == (
        "Rank 2 is late: the other ranks wait up to 800.000 µs of each step (80 %)"
    )


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 302, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    assert not list(stragglers.CHECK.find(window))


# What the checks find in each trace beside unmarked time, in this order, and why each finding is justified. The readings
# of the traces that the reasons repeat were made by hand.
JUSTIFIED = {
    "mi300x_resnet_checkpoint_train": {
        "exposed-communication": "NCCL without compute takes 64 % of the device's time",
        "slow-links": "17.6 MB need 9.2 ms on eight ranks: 3.4 GB/s, where xGMI gives 50 and more",
    },
    "a100_nccl_2ranks_rank0": {
        "launch-bound": "the device waits 171 of 222 ms a step for launches, most of them in gaps of under 1 ms",
        "device-idle": "flattening and unflattening of gradients on the CPU takes gaps of 2 to 20 ms",
    },
    "b200_eager": {
        "launch-bound": "the kernels of an eager mixture of experts take 6 µs, and each launch 80",
        "device-idle": "eight gaps of over 1 ms, of which aten::linear takes 7 ms on the CPU",
    },
    "v100_ns_resolution": {"tensor-cores": "sgemm and cuDNN's float32 kernels fill a busy V100"},
    "h100_timesformer_inference": {
        "device-idle": "the video is prepared on the CPU for 216 of 382 ms, outside of all operators",
        "attention-not-fused": "aten::softmax of 3137 x 3137 scores takes 69 of 160 ms of the device's time",
        "tensor-cores": "the same products have 3137 columns, so that cutlass takes its align1 kernels",
    },
    "a100_megatron_tp8_rank0": {
        "device-idle": "this rank's CPU launches late: 160 of 223 ms idle lie in gaps of over 2 ms",
    },
    "a100_megatron_tp8_rank1": {
        "exposed-communication": "481 of 621 ms are all-reduce alone, much of it waiting for ranks 0 and 6",
    },
    "v100_216k_events": {"launch-bound": "median kernel 6 µs; 2,300 gaps of 54 µs a step"},
    "v100_resnet50_workers0": {
        "loader-wait": "the training process loads: num_workers=0, as the plugin of TensorBoard says too",
        "launch-bound": "zero_grad and small kernels, after what the loader takes",
    },
    "v100_resnet50_workers4": {
        "launch-bound": "the same with a faster loader: 18 % of the step",
        "tensor-cores": "47 % of the step is float32 convolutions; the CPU and the loader leave 1 % of it to win",
    },
    "hta_simple_add": {
        "device-idle": "the first calls of the process take seconds; no step is marked"
    },
    "mtia_rank0": {
        "launch-bound": "an optimizer that loops over its parameters: mul_, add_, addcmul_ and addcdiv_ of 10 µs each"
    },
    # Bound by the device, or with the waits hidden: nothing to tell of what these checks know.
    "h800_deepseek_train": {},
    "mi300x_vllm_graph": {},
    "h100_qwen_0.5b_inference": {},
    "cupti_counters": {},
}


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(JUSTIFIED))
def test_a_real_trace_gives_what_is_justified(name: str) -> None:
    findings = diagnose([real_traces.load(name)], MARKED).findings
    codes = [*dict.fromkeys(each.code for each in findings)]
    assert codes == [*JUSTIFIED[name]], [each.title for each in findings]


@real_traces.needs_traces
@pytest.mark.nightly  # reads eight traces
def test_stragglers_of_a_real_job() -> None:
    (window,) = Run.load(
        *(real_traces.path(f"a100_megatron_tp8_rank{rank}") for rank in range(8))
    ).windows
    (finding,) = stragglers.CHECK.find(window)
    assert finding.title.startswith("Ranks 6, 0, 2 are late")
    assert "its CPU is late" in finding.change
    # The CPU of each rank is busy all the time, so that balance wins much less than the devices wait.
    assert finding.saving is not None
    assert 0 < finding.saving.saving_ns < 0.1 * finding.saving.baseline_ns
