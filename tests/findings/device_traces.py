"""Pairs of hand-built traces: one with a problem of a device, and one without it. Times are in µs.

Each trace has the steps 3 to 6, which are equal; the first of them does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from builders import PAGEABLE, REDUCES, Event, annotation, call, copy, kernel, launched, span, step

STEPS = (3, 4, 5, 6)
V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 2**35, "numSms": 80}
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 2**36, "numSms": 108}
_Numbers = Callable[[], int]


class Pair(NamedTuple):
    """Two traces and what the finding on the slow one must say.

    Attributes:
        code: the kind of the finding.
        slow, fixed: the events of both traces.
        says: parts of the title, with its number.
        document: keys of the trace's document.
        saves: the least and the largest saving of a step, in µs; None if none is simulated.
    """

    code: str
    slow: list[Event]
    fixed: list[Event]
    says: tuple[str, ...]
    document: Mapping[str, Any] = MappingProxyType({})
    saves: tuple[float, float] | None = None


def every_step(length: float, make: Callable[[float, _Numbers], list[Event]]) -> list[Event]:
    """The steps of a length, with the events that `make` gives for a start and fresh correlations."""
    count = iter(range(1, 100_000))
    events = []
    for at, number in enumerate(STEPS):
        start = at * length
        events += [step(number, start, length), *make(start, lambda: next(count))]
    return events


def many_kernels(length: float) -> list[Event]:
    """Steps of 2000 µs: a range with 50 kernels of a length, of which one is launched each 40 µs."""

    def make(start: float, number: _Numbers) -> list[Event]:
        events = [annotation("model", start, 2000)]
        for k in range(50):
            at = start + 40 * k
            events += [
                span("aten::add", at, 30),
                *launched("add", at + 5, at + 11, length, number()),
            ]
        return events

    return every_step(2000, make)


def cpu_between_kernels(kernel_us: float) -> list[Event]:
    """Steps of 10 ms: a kernel launched at once, 6 ms of CPU work, and a kernel launched after it."""

    def make(start: float, number: _Numbers) -> list[Event]:
        return [
            *launched("gemm", start, start + 10, kernel_us, number()),
            annotation("tokenize", start + 1000, 6000),
            span("text::encode", start + 1000, 6000),
            *launched(
                "gemm", start + 7000, max(start + 10 + kernel_us, start + 7010), 2500, number()
            ),
        ]

    return every_step(10_000, make)


def copies(*, blocking: bool) -> list[Event]:
    """Steps of 1000 µs: a batch of 300 µs is copied to the device, then a kernel of 600 µs runs."""

    def make(start: float, number: _Numbers) -> list[Event]:
        first, second = number(), number()
        if blocking:
            moved = [
                span("aten::to", start, 330),
                call("cudaMemcpyAsync", start + 5, 305, first),
                {
                    **copy(start + 8, 300, correlation=first, bytes=2**20, tid=7),
                    "name": PAGEABLE,
                },
                call("cudaStreamSynchronize", start + 312, 10),
            ]
        else:
            moved = [
                span("aten::to", start, 30),
                call("cudaMemcpyAsync", start + 5, 5, first),
                copy(start + 20, 300, correlation=first, bytes=2**20),
            ]
        after = start + (340 if blocking else 40)
        waiting = call("cudaDeviceSynchronize", after + 10, 605)
        return [*moved, *launched("gemm", after, after + 10, 600, second), waiting]

    return every_step(1000, make)


def waits(start: float, until: float) -> Event:
    """The call from 150 µs after the start of a step that waits for the device."""
    return call("cudaDeviceSynchronize", start + 150, until + 5 - 150)


def all_reduce(*, hidden: bool, reduce_us: float = 400) -> list[Event]:
    """Steps of 1000 µs: a kernel of 500 µs, and an all-reduce of 8 MiB beside or after it."""
    record = {
        "Collective name": "allreduce",
        "In msg nelems": 2**21,
        "Out msg nelems": 2**21,
        "dtype": "Float",
        "Group size": 8,
        "Process Group Name": "0",
    }

    def make(start: float, number: _Numbers) -> list[Event]:
        begins = start + (30 if hidden else 520)
        reduce = number()
        return [
            *launched("gemm", start, start + 10, 500, number()),
            call("cudaLaunchKernel", start + 10, 5, reduce),
            kernel(REDUCES, begins, reduce_us, correlation=reduce, tid=8)
            | {"args": {"correlation": reduce, **record}},
            waits(start, max(510, begins - start + reduce_us)),
        ]

    return every_step(600 + reduce_us, make)


def products(name: str) -> list[Event]:
    """Steps of 1000 µs with a matrix product of 900 µs."""

    def make(start: float, number: _Numbers) -> list[Event]:
        return [
            span("aten::mm", start, 30, Input_Dims=[[512, 512], [512, 512]]),
            *launched(name, start + 5, start + 15, 900, number()),
            waits(start, 915),
        ]

    return every_step(1000, make)


def attention(*, fused: bool) -> list[Event]:
    """Steps of 1000 µs with attention of two heads over 64 tokens, most of it softmax."""

    def make(start: float, number: _Numbers) -> list[Event]:
        def on_device(
            name: str, at: float, begins: float, lasts: float, shapes: Any
        ) -> list[Event]:
            return [
                span(name, start + at, 30, Input_Dims=shapes),
                *launched(name, start + at + 5, start + begins, lasts, number()),
            ]

        query, scores = [2, 64, 16], [2, 64, 64]
        if fused:
            parts = on_device("aten::scaled_dot_product_attention", 0, 10, 800, [query] * 3)
        else:
            parts = [
                *on_device("aten::bmm", 0, 10, 100, [query, [2, 16, 64]]),
                *on_device("aten::mul", 40, 110, 100, [scores, []]),
                *on_device("aten::softmax", 80, 210, 500, [scores, [], []]),
                *on_device("aten::bmm", 120, 710, 100, [scores, query]),
            ]
        return [*parts, waits(start, 810)]

    return every_step(1000, make)


def layouts(name: str) -> list[Event]:
    """Steps of 1000 µs: a convolution of 600 µs after a kernel of 200 µs."""

    def make(start: float, number: _Numbers) -> list[Event]:
        return [
            span("aten::cudnn_convolution", start, 30),
            *launched(name, start + 2, start + 10, 200, number()),
            *launched("sm80_xmma_fprop", start + 10, start + 210, 600, number()),
            waits(start, 810),
        ]

    return every_step(1000, make)


def casts(*, each_step: bool) -> list[Event]:
    """Steps of 1000 µs: the weight is cast for 300 µs or not, then a product of 600 µs follows."""

    def make(start: float, number: _Numbers) -> list[Event]:
        cast = [
            span("aten::to", start, 40),
            span("aten::_to_copy", start + 1, 38),
            span("aten::copy_", start + 2, 30),
            *launched("unrolled_elementwise_kernel", start + 5, start + 12, 300, number()),
        ]
        return [
            *(cast if each_step else []),
            span("aten::mm", start + 50, 30),
            *launched("gemm", start + 55, start + 312, 600, number()),
            waits(start, 912),
        ]

    return every_step(1000, make)


def allocations(*, steps: int) -> list[Event]:
    """Steps of 1000 µs with a kernel of 500 µs; cudaMalloc and cudaFree take 200 µs in the first ones."""

    def make(start: float, number: _Numbers) -> list[Event]:
        churn = [call("cudaFree", start + 10, 100), call("cudaMalloc", start + 120, 100)]
        return [
            *(churn if start < 1000 * steps else []),
            *launched("gemm", start + 230, start + 240, 500, number()),
            call("cudaDeviceSynchronize", start + 240, 505),
        ]

    return every_step(1000, make)


PAIRS = (
    Pair(
        "launch-bound",
        many_kernels(2),
        many_kernels(39),
        ("waits 92 % of the step", "50 gaps of 36.820 µs"),
        saves=(1000, 2000),
    ),
    Pair(
        "device-idle",
        cpu_between_kernels(1000),
        cpu_between_kernels(7000),
        ("idle for 60 % of the step", "in text::encode"),
        saves=(5900, 6100),
    ),
    Pair(
        "blocking-copies",
        copies(blocking=True),
        copies(blocking=False),
        ("pageable memory", "32 % of the step"),
        saves=(250, 350),
    ),
    Pair(
        "exposed-communication",
        all_reduce(hidden=False),
        all_reduce(hidden=True),
        ("40 % of the step is exposed communication", "all_reduce"),
        saves=(300, 500),
    ),
    Pair(
        "slow-links",
        all_reduce(hidden=False, reduce_us=4000),
        all_reduce(hidden=False),
        ("3.67 GB/s", "8 ranks"),
    ),
    Pair(
        "tensor-cores",
        products("volta_sgemm_128x64_nn"),
        products("volta_h884gemm_128x64_nn"),
        ("90 % of the step", "float32"),
        {"deviceProperties": [V100]},
        saves=(440, 460),
    ),
    Pair(
        "tensor-cores",
        products("void cutlass_80_tensorop_d884gemm_64x64_nn"),
        products("ampere_s16816gemm_fp16_128x128_nn"),
        ("90 % of the step", "float64"),
        {"deviceProperties": [V100]},
        saves=(440, 460),
    ),
    Pair(
        "tensor-cores",
        products("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"),
        products("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align8"),
        ("90 % of the step", "not aligned"),
        {"deviceProperties": [A100]},
        saves=(440, 460),
    ),
    Pair(
        "attention-not-fused",
        attention(fused=False),
        attention(fused=True),
        ("60 % of the step", ": 1 softmax call a step"),
        saves=(590, 610),
    ),
    Pair(
        "layout-and-casts",
        layouts("void cudnn::ops::nchwToNhwcKernel<float>"),
        layouts("bn_fw_tr"),
        ("20 % of the step", "NCHW", ": 1 kernel a step"),
        saves=(190, 210),
    ),
    Pair(
        "layout-and-casts",
        casts(each_step=True),
        casts(each_step=False),
        ("30 % of the step", "casts"),
        saves=(290, 350),
    ),
    Pair(
        "allocator-churn",
        allocations(steps=4),
        allocations(steps=1),
        ("20 % of the step", "2 calls a step"),
        saves=(190, 210),
    ),
)
