"""The findings about devices: on traces written by hand, and on traces of real hardware."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import real_traces
from builders import (
    ENGINE,
    SINGLE_PROCESS,
    Event,
    annotation,
    call,
    capture,
    copy,
    frame,
    in_steps,
    kernel,
    launched,
    span,
    step,
    synchronous_steps,
    write_rank,
)

from findings.by_hand import Case, check
from findings.device_traces import (
    A100,
    V100,
    all_reduce,
    allocations,
    attention,
    attention_on_cpu,
    casts,
    copies,
    cpu_between_kernels,
    layouts,
    many_kernels,
    products,
)
from findings.twins import assert_command_runs
from instrument import Capture
from instrument.read.advise.communication import STRAGGLERS
from instrument.read.advise.diagnose import CHECKS, diagnose
from instrument.read.advise.evidence import cost_share, share_of, share_with_device
from instrument.read.advise.verdict import verdict
from instrument.read.ranks.run import Run

tensor_cores = partial(Case, "tensor-cores")
not_fused = partial(Case, "attention-not-fused")
layout_and_casts = partial(Case, "layout-and-casts")
device_idle = partial(Case, "device-idle")
recording_overhead = partial(Case, "recording-overhead")
launch_bound = partial(Case, "launch-bound")

ON_V100, ON_A100 = {"deviceProperties": [V100]}, {"deviceProperties": [A100]}
ON_L40 = {"deviceProperties": [{**V100, "name": "NVIDIA L40", "numSms": 142}]}
CUTLASS = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align"


def with_cause(cause: Event, *, launches: bool) -> list[Event]:
    """Steps of 10 ms: a kernel of 1 ms, and one that waits for 6 ms of CPU work, which may launch it."""
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
    return events


def without_shapes(events: list[Event], changed: object = None) -> list[Event]:
    """The same trace, in which softmax has other shapes, or no operator has any."""
    for event in events:
        if changed is None:
            event["args"].pop("Input Dims", None)
        elif event["name"] == "aten::softmax" and event["cat"] == "cpu_op":
            event["args"]["Input Dims"] = changed
    return events


def beside_a_loader(name: str) -> list[Event]:
    """Steps of 10 ms: the loader takes 5 ms; then 10 kernels of 10 µs are launched, one each 500 µs.

    The range `train_step` holds the loader, and `model` does not.
    """
    events, count = [], iter(range(1, 1000))
    for number in range(4):
        at = number * 10_000.0
        begin = at if name == "train_step" else at + 5000
        events += [step(number, at, 10_000), annotation(name, begin, at + 10_000 - begin)]
        events.append(span(SINGLE_PROCESS, at, 5000))
        for k in range(10):
            launch = at + 5000 + 500 * k
            events += launched("add", launch, launch + 6, 10, next(count))
    return events


def on_mtia(events: list[Event]) -> list[Event]:
    categories = {"kernel": "mtia_ccp_events", "cuda_runtime": "mtia_runtime"}
    return [{**event, "cat": categories.get(event["cat"], event["cat"])} for event in events]


def costs(recorded_ns: int, steps: int = 20) -> dict[str, object]:
    unrecorded = {"unrecorded_step_ns": 1_000_000, "unrecorded_steps": steps}
    return {"cost": {"recorded_step_ns": recorded_ns, **unrecorded}}


ATTENTION_WITH_DROPOUT = [
    {**event, "name": event["name"].replace("aten::mul", "aten::native_dropout")}
    for event in attention(fused=False)
]
COMPILED = [
    {**event, "name": "CompiledFunction"} if event["name"] == "aten::add" else event
    for event in many_kernels(2)
]
IN_DOUBLE = [
    {**event, "args": {**event["args"], "Input type": ["double", "double"]}}
    for event in attention(fused=False)
]
BARE_IDLE = [e for e in cpu_between_kernels(1000) if e["name"] not in ("tokenize", "text::encode")]
LOADER_EXPLAINS = [
    {**event, "name": SINGLE_PROCESS} if event["name"] == "tokenize" else event
    for event in cpu_between_kernels(1000)
]
SIZES_UNKNOWN = [
    {**event, "args": {"correlation": event["args"]["correlation"]}}
    if "Collective name" in event.get("args", {})
    else event
    for event in all_reduce(hidden=False)
]
COPIES_INSIDE = in_steps(
    4, 1000, span("aten::addmm", 0, 900), span("aten::clone", 10, 500), span("aten::copy_", 20, 450)
)


def inside(around: str, *names: str) -> list[Event]:
    """Steps of 1000 µs, of which calls inside each other copy for 800."""
    calls = [span(name, 10 * k, 900 - 20 * k) for k, name in enumerate((around, *names))]
    return in_steps(4, 1000, *calls, span("aten::copy_", 50, 800))


def warming_up(*long_launches: int, created_us: float = 5) -> list[Event]:
    """A recording of 40 calls of an operator, of which some launch for 50 ms, and the first may create a stream."""
    events, at = [], 0.0
    for number in range(40):
        launches_us = 50_000 if number in long_launches else 5
        creates_us = created_us if number == 0 else 5
        events += [
            span("aten::conv2d", at, creates_us + launches_us + 20),
            call("cudaStreamCreate", at + 5, creates_us),
            call("cudaLaunchKernel", at + creates_us + 10, launches_us, number + 1),
            kernel("conv", at + creates_us + launches_us + 10, 1000, correlation=number + 1),
        ]
        at += creates_us + launches_us + 1000
    return events


ON_ROCM = [
    {**event, "name": event["name"].replace("cuda", "hip")}
    for event in layouts("batched_transpose_32x32_half")
]
MASKED = [*inside("aten::masked_fill", "aten::clone"), span("aten::masked_fill_", 3900, 10)]
TYPED = span("aten::mm", 10, 5, Input_type=["float"])

FOUND = {
    "gaps between kernels": launch_bound(many_kernels(2)),
    "gaps between kernels of MTIA": launch_bound(on_mtia(many_kernels(2))),
    "gaps between kernels of a compiled model": launch_bound(COMPILED),
    "the first launch of a kernel": Case("one-time-costs", warming_up(0)),
    "the first call of a library": Case("one-time-costs", warming_up(created_us=30_000)),
    "idle while the CPU prepares": device_idle(cpu_between_kernels(1000)),
    "idle in no event": device_idle(BARE_IDLE),
    # Code that launches cannot move to the workers of the loader.
    "idle in no event, with Python stacks": device_idle(
        [*BARE_IDLE, frame("train.py(1): main", 0, 40_000)]
    ),
    "idle in an operator": device_idle(with_cause(span("text::encode", 0, 6000), launches=False)),
    "idle in an operator that launches": device_idle(
        with_cause(span("aten::linear", 0, 6000), launches=True)
    ),
    "idle in a range": device_idle(with_cause(annotation("tokenize", 0, 6000), launches=False)),
    "idle in a range that launches": device_idle(
        with_cause(annotation("forward", 0, 6000), launches=True)
    ),
    "a blocking copy": Case("blocking-copies", copies(blocking=True)),
    "an all-reduce alone": Case("exposed-communication", all_reduce(hidden=False)),
    "an all-reduce of gloo": Case("exposed-communication", synchronous_steps(300)),
    "a slow link": Case("slow-links", all_reduce(hidden=False, reduce_us=4000)),
    "float32 on tensor cores": tensor_cores(products("volta_sgemm_128x64_nn"), document=ON_V100),
    "float32 on a device with fast TF32": tensor_cores(
        products("volta_sgemm_128x64_nn"), document=ON_A100
    ),
    "float32 where TF32 is as slow": tensor_cores(
        products("volta_sgemm_128x64_nn"), document=ON_L40
    ),
    "float64 on tensor cores": tensor_cores(
        products("void cutlass_80_tensorop_d884gemm_64x64_nn"), document=ON_V100
    ),
    "not aligned": tensor_cores(products(f"{CUTLASS}1"), document=ON_A100),
    # Four steps, of which three are measured.
    "attention": not_fused(attention(fused=False)),
    "attention of one measured step": not_fused(
        [each for each in attention(fused=False) if each["ts"] < 2000]
    ),
    "attention without shapes": not_fused(without_shapes(attention(fused=False))),
    "attention on a CPU": not_fused(attention_on_cpu()),
    "attention with dropout on a device": not_fused(ATTENTION_WITH_DROPOUT),
    "another layout": layout_and_casts(layouts("void cudnn::ops::nchwToNhwcKernel<float>")),
    "another layout on ROCm": layout_and_casts(ON_ROCM),
    "a cast in each step": layout_and_casts(casts(each_step=True)),
    "a cast in the closure of an optimizer": layout_and_casts(
        casts(each_step=True, optimizer=True, grad=True)
    ),
    "a cast in an autograd function of the program": layout_and_casts(
        inside("MyFunctionBackward", "aten::to")
    ),
    "copies inside an operator": layout_and_casts(COPIES_INSIDE),
    "allocations in each step": Case("allocator-churn", allocations(steps=4)),
    "recording makes steps longer": recording_overhead([step(3, 0, 1000)], costs(1_400_000)),
    "so do options": recording_overhead([step(3, 0, 1000), TYPED], costs(2_000_000)),
}
NOT_FOUND = {
    "long kernels": launch_bound(many_kernels(39)),
    "launches that are long again": Case("one-time-costs", warming_up(0, 20)),
    "a launch that is long later": Case("one-time-costs", warming_up(20)),
    "one-time costs": device_idle(warming_up(0, created_us=30_000)),
    "a busy device": device_idle(cpu_between_kernels(7000)),
    "the loader explains the gap": device_idle(LOADER_EXPLAINS),
    "a copy beside the CPU": Case("blocking-copies", copies(blocking=False)),
    "a hidden all-reduce": Case("exposed-communication", all_reduce(hidden=True)),
    "a fast link": Case("slow-links", all_reduce(hidden=False)),
    "float16": tensor_cores(products("volta_h884gemm_128x64_nn"), document=ON_V100),
    "float16 on A100": tensor_cores(
        products("ampere_s16816gemm_fp16_128x128_nn"), document=ON_V100
    ),
    "aligned": tensor_cores(products(f"{CUTLASS}8"), document=ON_A100),
    "fused attention": not_fused(attention(fused=True)),
    "softmax of other shapes": not_fused(
        without_shapes(attention(fused=False), [[2, 64, 32], [], []])
    ),
    # Where torch has no faster kernel.
    "attention with dropout on a CPU": not_fused(attention_on_cpu(drops="aten::bernoulli_")),
    "attention with dropout by hand on a CPU": not_fused(attention_on_cpu(drops="aten::rand_like")),
    "attention in bfloat16 on a CPU": not_fused(attention_on_cpu(dtype="c10::BFloat16")),
    "attention with few keys on a CPU": not_fused(attention_on_cpu(keys=32)),
    "attention in float64 on a device": not_fused(IN_DOUBLE),
    "attention on MTIA": not_fused(on_mtia(attention(fused=False))),
    "one layout": layout_and_casts(layouts("bn_fw_tr")),
    "a cast that is kept": layout_and_casts(casts(each_step=False)),
    "casts of an optimizer": layout_and_casts(casts(each_step=True, optimizer=True)),
    "a cast that torch's operator makes": layout_and_casts(inside("aten::sum", "aten::to")),
    "a cast that torch's backward makes": layout_and_casts(
        inside(f"{ENGINE}AmaxBackward0", "AmaxBackward0", "aten::to")
    ),
    "a copy that torch's backward makes": layout_and_casts(
        inside(f"{ENGINE}MulBackward0", "MulBackward0", "aten::clone")
    ),
    "a copy that is the result": layout_and_casts(MASKED),
    "allocations of the first step": Case("allocator-churn", allocations(steps=1)),
    "recording is cheap": recording_overhead([step(3, 0, 1000)], costs(1_200_000)),
}
ON_CPU = [step(3, 0, 10), span("aten::mm", 0, 5)]
UNKNOWN = {
    "the types of attention on a CPU": (
        not_fused(attention_on_cpu(recorded=False)),
        "no input types",
    ),
    "no device work": (launch_bound(ON_CPU, document=ON_V100), "no device work"),
    "sizes of messages": (Case("slow-links", SIZES_UNKNOWN), "no sizes of messages"),
    "the device": (tensor_cores(products("volta_sgemm_128x64_nn")), "device unknown"),
    "few steps": (
        Case("allocator-churn", [each for each in allocations(steps=4) if each["ts"] < 2000]),
        "too few finished steps",
    ),
    "few unrecorded steps": (
        recording_overhead([step(3, 0, 1000)], costs(2_000_000, steps=9)),
        "Fewer than 10 steps",
    ),
    "other kinds of steps": (
        recording_overhead(
            [step(3, 0, 1000)], {"cost": {"recorded_step_ns": 9_000_000, "unrecorded_steps": 20}}
        ),
        "not known to be of the recorded kinds",
    ),
    "threads without a CPU": (
        recording_overhead(
            [step(3, 0, 1000)],
            costs(2_000_000) | {"environment": {"cpu_wait": {"waited_ns": 40, "window_ns": 100}}},
        ),
        "without a CPU may explain",
    ),
    "one step": (
        recording_overhead([step(3, 0, 1000)], costs(20_000_000) | {"window": {"steps": 1}}),
        "only one step",
    ),
}


@pytest.mark.parametrize("name", ["model", "train_step", None])
def test_launches_promise_no_time_of_the_loader(tmp_path: Path, name: str | None) -> None:
    """Half of the step loads data, whatever range holds most of the gaps, and if none does."""
    events = beside_a_loader(name or "model")
    if name is None:  # two ranges, each with half of the gaps
        half = [annotation("head", each["ts"], 2500) for each in events if each["name"] == "model"]
        events = [each for each in events if each["name"] != "model"]
        events += [*half, *({**each, "name": "tail", "ts": each["ts"] + 2500} for each in half)]
    (finding,) = check(capture(tmp_path, events), "launch-bound")
    assert finding.saving is not None
    assert finding.share is not None
    assert 0.4 < finding.saving.share <= finding.share + 1e-6 < 0.5


def test_only_copies_that_block_overlap(tmp_path: Path) -> None:
    """A copy from pinned memory behind the kernel takes as long as before."""
    events, pinned = copies(blocking=True), []
    for k, at in enumerate(range(0, 4000, 1000)):
        moved = copy(at + 950, 40, correlation=1000 + k, tid=7)
        pinned += [call("cudaMemcpyAsync", at + 345, 5, 1000 + k), moved]
    (alone,) = Case("blocking-copies", events).findings(tmp_path / "alone")
    (both,) = Case("blocking-copies", [*events, *pinned]).findings(tmp_path / "both")
    assert alone.saving is not None
    assert both.saving is not None
    assert abs(both.saving.high_ns - alone.saving.high_ns) < 10_000


def test_a_run_without_a_device_has_no_finding(tmp_path: Path) -> None:
    assert not diagnose([capture(tmp_path, ON_CPU)]).findings


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


def test_one_peak_rate_for_all_precisions_does_not_hide_faster_units(tmp_path: Path) -> None:
    folder = capture(tmp_path, products("volta_sgemm_128x64_nn"), **ON_V100)
    assert folder.trace_path is not None
    (finding,) = check(Capture.load(folder.trace_path, peak_flops=1e13), "tensor-cores")
    assert "float32 without tensor cores" in finding.title


def test_the_rates_of_types_that_are_not_advised_promise_nothing(tmp_path: Path) -> None:
    trace_path = capture(tmp_path, products("volta_sgemm_128x64_nn")).trace_path
    assert trace_path is not None
    rates = {"float32": 1e13, "tf32": 1e13, "float16": 1.5e13, "int8": 4e13, "float8": 4e13}
    assert not check(Capture.load(trace_path, peak_flops=rates), "tensor-cores")
    (finding,) = check(
        Capture.load(trace_path, peak_flops={**rates, "float16": 2e13}), "tensor-cores"
    )
    assert "torch.float16" in finding.change


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
    on_cpu = capture(tmp_path / "cpu", [each for each in events if each["cat"] != "kernel"])
    for made in (on_device, on_cpu):
        products = np.flatnonzero(made.events.named("aten::mm".__eq__))
        assert cost_share(made, products) == 1.0
        assert share_with_device(made, products) == 1.0
    assert share_of(on_device, on_device.work.event) == 1.0


def test_a_rank_that_others_wait_for(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 800, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    (finding,) = STRAGGLERS.find(window)
    assert finding.title.startswith("Rank 2 is late: the own work of rank 2 takes 122 %")
    assert "495.0 µs of each step (50 %)" in finding.title
    assert finding.range == "forward"
    # With equal work, each rank has the mean of 300, 310, 800 and 305 µs.
    assert finding.saving == (1_000_000, 371_250, 0, 495_000)
    assert_command_runs(finding)


@pytest.mark.parametrize("slow_us", [800, 302])
def test_communication_that_waits_for_a_straggler_promises_nothing(tmp_path, slow_us) -> None:
    captures = [
        write_rank(tmp_path, rank, synchronous_steps(own_us))
        for rank, own_us in enumerate((300, 310, slow_us, 305))
    ]
    found = {each.code: each for each in diagnose(captures).findings}
    waits = found["exposed-communication"]
    says = waits.title.startswith(
        "59 % of the step is exposed communication (with waits for late ranks), mostly all_reduce"
    )
    assert says == (waits.saving is None) == ("stragglers" in found) == (slow_us == 800)
    assert [*found][:2] == ["stragglers", "exposed-communication"] or slow_us != 800


def test_one_rank_alone_does_not_show_for_whom_it_waits(tmp_path: Path) -> None:
    found = diagnose([write_rank(tmp_path, 0, synchronous_steps(300))]).findings
    titles = {each.code: each.title for each in found}
    assert titles["exposed-communication"].startswith(
        "60 % of the step is exposed communication (perhaps with waits for late ranks), mostly"
    )
    assert all(each.saving is None for each in found if "communication" in each.title)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_saving_of_communication_needs_all_ranks(tmp_path: Path, world_size: int) -> None:
    found = diagnose([write_rank(tmp_path, k, synchronous_steps(300), world_size) for k in (0, 1)])
    (waits,) = (each for each in found.findings if each.code == "exposed-communication")
    assert (waits.saving is None) == ("perhaps" in waits.title) == (world_size == 4)
    assert waits.change.startswith("First give the captures of all ranks") == (world_size == 4)


def test_ranks_that_are_slow_in_turn_wait_for_each_other(tmp_path: Path) -> None:
    """Their means are equal, so none is a straggler, but less communication would save nothing."""
    captures = []
    for rank in (0, 1):
        events = []
        for number in range(3, 8):  # the first does not count
            start, own_us = 1000 * number, 800 if number % 2 == rank else 100
            reduces = annotation("gloo:all_reduce", start + own_us, 900 - own_us, tid=2)
            events += [step(number, start, 1000), span("aten::mm", start, own_us), reduces]
        captures.append(write_rank(tmp_path, rank, events, 2))
    first, second, *_ = diagnose(captures).findings
    assert first.title.startswith("The ranks wait for each other for ")
    assert "78 % of the time in collectives is waiting" in first.title
    assert "(with waits for late ranks)" in second.title
    assert (first.saving, second.saving) == (None, None)
    assert_command_runs(first)


@pytest.mark.parametrize(("device", "hook"), [(True, "bf16"), (False, "fp16")])
def test_the_hook_is_one_that_the_backend_has(tmp_path: Path, device: bool, hook: str) -> None:
    """DistributedDataParallel refuses bf16_compress_hook (TypeError) with gloo on a CPU."""
    events = all_reduce(hidden=False) if device else synchronous_steps(300)
    events.append(annotation("DistributedDataParallel.forward", 1, 2))
    found = diagnose([write_rank(tmp_path, 0, events)]).findings
    (change,) = (each.change for each in found if each.code == "exposed-communication")
    assert f"default_hooks.{hook}_compress_hook" in change
    assert change.count("_hook)") == 1


@real_traces.needs_traces
def test_late_ranks_come_before_what_only_they_have() -> None:
    every = diagnose([real_traces.load(f"a100_megatron_tp8_rank{rank}") for rank in range(8)])
    got = [each.code for each in every.findings][:3]
    assert got == ["stragglers", "exposed-communication", "device-idle"]
    assert ". Ranks 6, 0, 2 are late" in verdict(every)
    assert " On rank 7: The device computes for 21 % of it" in verdict(every)  # not of the job


def test_a_rank_that_others_without_own_work_wait_for(tmp_path: Path) -> None:
    """The others are in a collective for the whole step, so that no excess is known."""
    for rank, own_us in enumerate((0, 0, 800, 0)):
        work = [span("aten::mm", at, own_us) for at in (0, 1000)] if own_us else []
        waits = [
            annotation("gloo:all_reduce", at + own_us, 1000 - own_us, tid=2) for at in (0, 1000)
        ]
        write_rank(tmp_path, rank, [step(3, 0, 1000), step(4, 1000, 1000), *work, *waits])
    (window,) = Run.load(tmp_path).windows
    (finding,) = STRAGGLERS.find(window)
    assert finding.title == (
        "Rank 2 is late: the other ranks wait up to 800.0 µs of each step (80 %)"
    )


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    for rank, own_us in enumerate((300, 310, 302, 305)):
        write_rank(tmp_path, rank, synchronous_steps(own_us))
    (window,) = Run.load(tmp_path).windows
    assert not list(STRAGGLERS.find(window))


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
        "device-idle": "this rank's CPU launches late: 160 of 223 ms idle lie in gaps of over 2 ms"
    },
    "a100_megatron_tp8_rank1": {
        "exposed-communication": "481 of 621 ms are all-reduce alone, much of it waiting for ranks 0 and 6"
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
        "one-time-costs": "25 s start CUDA, 8 s free memory for the first time, 4 s load the first kernel",
        "device-idle": "aten::conv2d loads images and searches algorithms between launches",
    },
    "v100_resnet50_autograd_api": {
        "one-time-costs": "one cudaLaunchKernel of 1.565 s loads code; streams, events and cuDNN start"
    },
    # An optimizer that loops over its parameters takes 7 % of the step, but launching early saves less than 1 %.
    "mtia_rank0": {},
    # Bound by the device, or with the waits hidden: nothing to tell of what these checks know.
    "h800_deepseek_train": {},
    "mi300x_vllm_graph": {},
    "h100_qwen_0.5b_inference": {},
    "cupti_counters": {},
}


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(JUSTIFIED))
def test_a_real_trace_gives_what_is_justified(name: str) -> None:
    findings = diagnose([real_traces.load(name)]).findings
    codes = [*dict.fromkeys(each.code for each in findings)]
    assert codes == [*JUSTIFIED[name]], [each.title for each in findings]
    for idle in (each for each in findings if each.code == "device-idle"):
        assert idle.saving is not None
        assert idle.share is not None
        assert 0 < idle.saving.share <= 1.01 * idle.share, "the device works as long as before"


@real_traces.needs_traces
@pytest.mark.nightly  # reads eight traces
def test_stragglers_of_a_real_job() -> None:
    (window,) = Run.load(
        *(real_traces.path(f"a100_megatron_tp8_rank{rank}") for rank in range(8))
    ).windows
    (finding,) = STRAGGLERS.find(window)
    assert finding.title.startswith("Ranks 6, 0, 2 are late")
    assert "its CPU is late" in finding.change
    # The CPU of each rank is busy all the time, so that balance wins much less than the devices wait.
    assert finding.saving is not None
    assert finding.saving.low_ns == 0 < finding.saving.saving_ns < finding.saving.high_ns
    assert finding.saving.high_ns < 0.1 * finding.saving.baseline_ns
