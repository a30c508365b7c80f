"""Traces written by hand, each with a problem of a device, and without it. Times are in µs.

Each trace has the steps 3 to 6, which are equal; the first of them does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from builders import (
    PAGEABLE,
    REDUCES,
    Event,
    annotation,
    call,
    copy,
    in_steps,
    kernel,
    launched,
    span,
    step,
)

STEPS = (3, 4, 5, 6)
V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 2**35, "numSms": 80}
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 2**36, "numSms": 108}
_Numbers = Callable[[], int]


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


def python_between_kernels(python_us: float) -> list[Event]:
    """Steps that launch 12 kernels of 500 µs, with some time in no event before each third launch.

    A kernel starts 10 µs after its launch, or when the one before ends. A step waits for its last kernel.
    """
    kernels, count = list[tuple[float, float]](), range(12)
    at, end = 0.0, 0.0
    for k in count:
        at += 40 + (python_us if k % 3 == 2 else 0)
        kernels.append((at, max(at + 10, end)))
        end = kernels[-1][1] + 500

    def make(start: float, number: _Numbers) -> list[Event]:
        events = [annotation("model", start, kernels[-1][0] + 10)]
        for at, begins in kernels:
            events += [
                span("aten::addmm", start + at - 20, 30),
                *launched("gemm", start + at, start + begins, 500, number()),
            ]
        last = start + kernels[-1][0] + 20
        return [*events, call("cudaDeviceSynchronize", last, start + end + 5 - last)]

    return every_step(end + 20, make)


def copies(*, blocking: bool) -> list[Event]:
    """Steps of 1000 µs: a batch of 300 µs is copied to the device, then a kernel of 600 µs runs."""

    def make(start: float, number: _Numbers) -> list[Event]:
        first, second = number(), number()
        if blocking:
            moved = [
                span("aten::to", start, 330),
                call("cudaMemcpyAsync", start + 5, 305, first),
                {**copy(start + 8, 300, correlation=first, bytes=2**20, tid=7), "name": PAGEABLE},
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


def attention_on_cpu(
    keys: int = 256, dtype: str = "float", *, drops: str = "", recorded: bool = True
) -> list[Event]:
    """Steps of 1000 µs with attention of two heads, half of it softmax; `drops` draws random numbers after it."""

    def typed(name: str, at: float, lasts: float, *shapes: list[int]) -> Event:
        types = {"Input_Dims": [*shapes], "Input_type": [dtype] * len(shapes)}
        return span(name, at, lasts, **(types if recorded else {}))

    query, scores = [2, keys, 32], [2, keys, keys]
    inside = [
        typed("aten::bmm", 0, 200, query, [2, 32, keys]),
        typed("aten::softmax", 200, 500, scores),
        typed("aten::dropout", 700, 100, scores),
        *([typed(drops, 710, 80, scores)] if drops else []),
        typed("aten::bmm", 800, 200, scores, query),
    ]
    return in_steps(4, 1000, *inside)


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


def casts(*, each_step: bool, optimizer: bool = False, grad: bool = False) -> list[Event]:
    """Steps of 1000 µs: the weight is cast for 300 µs or not, then a product of 600 µs follows.

    The cast is in the step of an optimizer or not, and in grad mode, as in its closure, or not.
    """

    def make(start: float, number: _Numbers) -> list[Event]:
        sequence = {"Sequence_number": 7} if grad else {}
        cast = [
            *([annotation("Optimizer.step#Adam.step", start, 45)] if optimizer else []),
            span("aten::to", start, 40, **sequence),
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
