"""Rates of operators and steps: worked out by hand, and compared with torch's own tensors and counter."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from builders import (
    call,
    capture,
    kernel,
    launched,
    made,
    node,
    span,
    step,
    write_capture,
    write_trace,
)
from golden import Golden, rows_as_lines
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from capture.conftest import record
from instrument.base import peak_flops
from instrument.base.errors import CaptureError, ConfigError
from instrument.read.capture import Capture
from instrument.read.facts.flops import _LENGTHS, _MASK_TYPES, FUSED_ATTENTION
from instrument.read.facts.traffic import _SIZES, ELEMENT_TYPES, operand_types
from instrument.read.trace.events import Device
from instrument.read.views.peak_rates import _TABLE, peak_rates, roof
from instrument.record.config.schema import ProfilerConfig

HALF, FLOAT, BFLOAT = "c10::Half", "float", "c10::BFloat16"
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}


def product(name: str, at: float, shapes, kind: str, correlation: int, took: float, **more):
    """An operator with one kernel."""
    kernel_name = more.pop("kernel_name", "some_gemm")
    on = more.pop("on", {})
    given = {
        "Input_Dims": shapes,
        "Input_type": [kind if dims else "Scalar" for dims in shapes],
        **more,
    }
    return [
        span(name, at, 8, **given),
        *launched(kernel_name, at + 1, at + 20, took, correlation, **on),
    ]


SQUARE = [[4096, 4096], [4096, 4096]]
SCORES = [[32, 2048, 2048], [32, 2048, 64], [32, 64, 2048], [], []]
BY_HAND = [
    # 2 · 4096³ = 137,438,953,472 FLOPs; 3 · 4096² · 2 = 100,663,296 bytes; twice
    *product("aten::mm", 0, SQUARE, HALF, 1, 500),
    *product("aten::mm", 1000, SQUARE, HALF, 2, 600),
    # a linear layer calls addmm: one row, for addmm
    span("aten::linear", 2000, 50, Input_Dims=[[8, 3], [4, 3], [4]], Input_type=[FLOAT] * 3),
    *product(
        "aten::addmm", 2010, [[4], [8, 3], [3, 4], [], []], FLOAT, 3, 10,
        kernel_name="ampere_sgemm_32x32_sliced1x4_tn", Concrete_Inputs=["", "", "", "1", "1"],
    ),
    # beta=0: what is added is not read
    *product("aten::baddbmm", 3000, SCORES, HALF, 4, 300, Concrete_Inputs=["", "", "", "0.", "0.125"]),
    # launched nothing: on the CPU
    span("aten::mm", 4000, 8, Input_Dims=SQUARE, Input_type=[HALF, HALF]),
]  # fmt: skip


def test_the_roof_is_the_longer_of_two_times() -> None:
    assert roof(100, 10, 50, 1) == ("bandwidth", 10e9)
    assert roof(100, 2, 50, 1) == ("compute", 2e9), "equal times"
    assert roof(100, 1, None, 1) == roof(100, 1, 0, 1) == (None, 1e9)
    assert roof(100, 1, 50, None) == (None, 2e9)
    assert roof(0, 1, None, 1) == ("bandwidth", 1e9)
    assert roof(0, 0, 50, 1) == (None, 0)


# What torch itself computes with: the bytes of the tensors that go into an operator and come out of it.


class Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name
        outputs = result if isinstance(result, tuple) else (result,)
        moved = [each for each in (*args, *outputs) if isinstance(each, torch.Tensor)]
        if "attention" in name:  # without the sums that the forward keeps
            moved = [each for each in moved if each.dim() == 4]
        self.bytes[name] += sum(each.numel() * each.element_size() for each in moved)
        return result


def convolutions() -> Callable[[], None]:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 3, dilation=2, bias=False),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=2, output_padding=1, dilation=2, groups=2),
    )  # fmt: skip
    x = torch.randn(2, 4, 33, 31, requires_grad=True)
    return lambda: model(x).sum().backward()


def line() -> Callable[[], None]:
    model = nn.Conv1d(3, 4, 3, padding=2).double()
    x = torch.randn(2, 3, 40, dtype=torch.float64, requires_grad=True)
    return lambda: model(x).sum().backward()


def products() -> Callable[[], None]:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    ints = torch.ones(17, 8, dtype=torch.int8)

    def body() -> None:
        torch.baddbmm(torch.randn(3, 4, 6), a, b).sum().backward()
        torch.bmm(a, b).sum().backward()
        torch.addmm(torch.randn(6), a[0], b[0], beta=0.5).sum().backward()
        with torch.no_grad():
            torch.addbmm(torch.randn(4, 6), a, b)
            torch._int_mm(ints, ints[:8])

    return body


def vectors() -> Callable[[], None]:
    a, x = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    return lambda: (a @ x, x @ x, torch.addmv(torch.ones(4, dtype=torch.float64), a, x))


def attention(**options) -> Callable[[], None]:
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (7, 9, 9))

    def body() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            nn.functional.scaled_dot_product_attention(q, k, v, **options).sum().backward()

    return body


@pytest.mark.parametrize("make", [convolutions, line, products, vectors, attention])
def test_traffic_and_flops_are_those_of_torchs_own_tensors(tmp_path, make) -> None:
    body = make()
    with Traffic() as traffic:
        body()
    with FlopCounterMode(display=False) as counter:
        body()
    rows = record(tmp_path / "trace.json", body).capture.efficiency
    moved, flops = Counter(), Counter()
    for row in rows:
        moved[row.name] += row.moved_bytes
        flops[row.name] += row.flops
        assert row.intensity == row.flops / row.moved_bytes
        assert (row.device_number, row.device_ns, row.bound_by) == (None, None, None)
    assert moved == {name: traffic.bytes[name] for name in moved}
    by_torch = counter.get_flop_counts().get("Global", {})
    expected = {str(op).replace("aten.", "aten::"): n for op, n in by_torch.items()}
    if make is convolutions:  # torch counts the gradient of a grouped weight too often
        del expected["aten::convolution_backward"]
    assert expected.items() <= flops.items()
    assert set(flops) >= {
        convolutions: {"aten::convolution", "aten::convolution_backward"},
        line: {"aten::convolution", "aten::convolution_backward"},
        products: {"aten::baddbmm", "aten::bmm", "aten::addmm", "aten::mm", "aten::addbmm", "aten::_int_mm"},
        vectors: {"aten::mv", "aten::dot", "aten::addmv"},
        attention: {f"aten::_scaled_dot_product_flash_attention_for_cpu{s}" for s in ("", "_backward")},
    }[make]  # fmt: skip


def test_the_sizes_of_element_types_are_those_of_torch() -> None:
    for name, size in ELEMENT_TYPES.values():
        assert getattr(torch, name).itemsize == size, name


def test_only_the_gradients_that_are_needed_move(tmp_path) -> None:
    """The gradient of the image reads the weight, that of the weight reads the image, that of the bias neither."""
    gradient, image, weight = [2, 6, 5, 5], [2, 4, 7, 7], [6, 4, 3, 3]
    sizes = {"gradient": 2 * 300, "image": 2 * 392, "weight": 2 * 216, "bias": 2 * 6}
    parts = {
        "[True, False, False]": ["gradient", "weight", "image"],
        "[False, True, False]": ["gradient", "image", "weight"],
        "[False, False, True]": ["gradient", "bias"],
        "[True, True, True]": ["gradient", "weight", "image", "image", "weight", "bias"],
        "[False, False, False]": [],
    }
    for number, (mask, moved) in enumerate(parts.items()):
        given = ["", "", "", "[6]", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1", mask]
        events = [
            span(
                "aten::convolution_backward", 0, 5, Input_Dims=[gradient, image, weight, *([[]] * 8)],
                Input_type=[HALF] * 3 + ["ScalarList"] * 8, Concrete_Inputs=given,
            )
        ]  # fmt: skip
        folder = tmp_path / str(number)
        (row,) = capture(folder, events).efficiency
        assert row.moved_bytes == sum(sizes[part] for part in moved), mask


RESULT_TYPES = [
    ("mm", [[8, 16], [16, 4]], [HALF, HALF, "Scalar"], ["", "", "6"], 2 * (128 + 64) + 4 * 32),
    ("mm.out", [[8, 16], [16, 4], [8, 4]], [HALF] * 3, ["", "", ""], 2 * (128 + 64 + 32)),
    ("addmm", [[4], [8, 16], [16, 4]], [HALF] * 3 + ["Scalar"] * 3, ["", "", "", "6", "1", "1"],
     2 * (4 + 128 + 64) + 4 * 32),
    ("addmm.out", [[4], [8, 16], [16, 4], [], [], [8, 4]], [HALF] * 3 + ["Scalar"] * 2 + [HALF],
     ["", "", "", "1", "1", ""], 2 * (4 + 128 + 64 + 32)),
    ("_addmm_activation", [[4], [8, 16], [16, 4]], [HALF] * 3 + ["Scalar"] * 3, ["", "", "", "1", "1", "True"],
     2 * (4 + 128 + 64 + 32)),
    ("_scaled_mm", [[8, 16], [16, 4], [8, 1], [1, 4], [4], [], [], []],
     ["c10::Float8_e4m3fn"] * 2 + [FLOAT] * 2 + [HALF, "", "Scalar", "Scalar"], ["", "", "", "", "", "", "15", "False"],
     128 + 64 + 4 * (8 + 4) + 2 * 4 + 2 * 32),
    ("addmm", [[4], [8, 16], [16, 4]], [FLOAT] * 3, None, 4 * (128 + 64 + 32)),  # whether beta is 0 is not known
    ("mm", [[8, 16], [16, 4]], ["Odd", "Odd"], None, None),
    ("mm", [[8, 16], [16, 4]], None, None, None),
    ("mkldnn_rnn_layer", [[3, 2, 5], [24, 5], [24, 6]], [FLOAT] * 3, None, None),  # no rule
]  # fmt: skip


@pytest.mark.parametrize(("name", "dims", "types", "concrete", "moved"), RESULT_TYPES)
def test_traffic_depends_on_the_arguments(tmp_path, name, dims, types, concrete, moved) -> None:
    if types is not None:
        dims = dims + [[]] * (len(types) - len(dims))
    given = {"Input_type": types, "Concrete_Inputs": concrete}
    known = {key: value for key, value in given.items() if value is not None}
    (row,) = capture(tmp_path, [span(f"aten::{name}", 0, 5, Input_Dims=dims, **known)]).efficiency
    assert (row.moved_bytes, row.flops > 0) == (moved, True)
    if name == "_scaled_mm":
        assert (row.dtype, row.precision) == ("float8_e4m3fn", "float8")


# Attention with a causal mask.


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 7), (5, 9), (9, 5)])
def test_a_causal_mask_leaves_the_products_that_torchs_mask_leaves(tmp_path, rows, columns) -> None:
    q, k = [2, 8, rows, 4], [2, 2, columns, 4]
    pairs = int(torch.ones(rows, columns).tril().sum())
    for number, name in enumerate(FUSED_ATTENTION):
        flags = ["False", "True", *["False"] * (-1 - FUSED_ATTENTION[name])]
        backward = name.endswith("_backward")
        dims = [q, q, k, k] if backward else [q, k, k]
        given = {"Input_Dims": [*dims, [rows, columns]], "Input_type": [HALF] * len(dims) + [FLOAT]}
        events = [span(name, 0, 5, **given, Concrete_Inputs=flags)]
        folder = tmp_path / str(number)
        found = capture(folder, events)
        (row,), (operator,) = found.efficiency, found.operators
        assert row.flops == 2 * 2 * 8 * pairs * 4 * (5 if backward else 2)
        assert row.dtype == "float16", "a bias is not multiplied"
        assert operator.flops == row.flops // pairs * rows * columns, "as torch's counter"


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("name", _LENGTHS)
def test_a_causal_mask_of_flash_attn_ends_at_the_last_row(tmp_path, name, rows, columns) -> None:
    pairs = int(torch.ones(rows, columns).tril(columns - rows).sum()) if columns >= rows else None
    q, k = [2, rows, 8, 4], [2, columns, 2, 4]
    backward = name.endswith(("backward", "bwd"))
    dims = [q, q, k, k] if backward else [q, k, k]
    concrete = [""] * 30
    concrete[5] = "True"
    if name in _MASK_TYPES:
        concrete[5], concrete[_MASK_TYPES[name]] = "False", "2"
    given = {"Input_Dims": dims + [[]] * 13, "Input_type": [HALF] * len(dims) + [""] * 13}
    (row,) = capture(tmp_path, [span(name, 0, 5, **given, Concrete_Inputs=concrete)]).efficiency
    if pairs is None:  # at most the lower triangle that is as wide as the keys
        pairs = columns * (columns + 1) // 2
    assert row.flops == 2 * 2 * 8 * pairs * 4 * (5 if backward else 2)


def test_the_position_of_is_causal_is_that_of_torchs_schema() -> None:
    for name, position in FUSED_ATTENTION.items():
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if operator is None:  # not in every version of torch
            continue
        arguments = operator.default._schema.arguments
        flags = [each.name for each in arguments if str(each.type) == "bool"]
        assert flags[position] == "is_causal", name


def test_attention_is_left_out_if_it_is_not_known_whether_it_is_causal(tmp_path) -> None:
    name, q = "aten::_scaled_dot_product_flash_attention", [2, 8, 7, 4]
    found = capture(tmp_path, [span(name, 0, 5, Input_Dims=[q, q, q], Input_type=[HALF] * 3)])
    assert len(found.efficiency) == 0
    assert found.operators[0].flops == 2 * 2 * 2 * 8 * 7 * 7 * 4


def test_a_causal_attention_of_torch_itself(tmp_path) -> None:
    found = record(tmp_path / "trace.json", attention(is_causal=True)).capture.efficiency
    pairs = sum(min(row, 9) for row in range(1, 8))
    assert {row.name.rpartition("_")[2]: row.flops for row in found} == {
        "cpu": 2 * 2 * 2 * 3 * pairs * 8, "backward": 5 * 2 * 2 * 3 * pairs * 8,
    }  # fmt: skip


# Types and precisions.


def test_autocast_counts_the_call_with_the_types_that_are_multiplied(tmp_path) -> None:
    """Under autocast an operator casts its inputs, and calls itself again."""
    a, b, model = torch.randn(8, 16), torch.randn(16, 4), nn.Linear(16, 4)

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(a, b)
            torch.baddbmm(torch.randn(2, 3, 3), torch.randn(2, 3, 5), torch.randn(2, 5, 3))
            model(a).float().sum().backward()

    with FlopCounterMode(display=False) as counter:
        body()
    found = record(tmp_path / "trace.json", body).capture
    expected = {
        str(op).replace("aten.", "aten::"): n
        for op, n in counter.get_flop_counts()["Global"].items()
    }
    by_name = defaultdict(int)
    for row in found.efficiency:
        assert row.dtype == row.precision == "bfloat16"
        by_name[row.name] += row.flops
    assert by_name == expected
    assert {row.name: row.flops for row in found.operators if row.flops is not None} == expected


NVJET, TENSILE = "nvjet_sss_tf32_128x256_TNT", "Cijk_Ailk_Bljk_{}_MT64x64x64_MI16x16x1"
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}
V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "numSms": 80}
PRECISIONS = [
    (FLOAT, A100, "ampere_sgemm_32x32_sliced1x4_tn", "float32"),
    (FLOAT, A100, "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>", "float32"),
    (FLOAT, A100, "void gemv2T_kernel_val<int, int, float, float>", "float32"),
    (FLOAT, A100, "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>", "tf32"),
    (FLOAT, A100, "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64", "tf32"),
    (FLOAT, A100, NVJET, "tf32"),
    (FLOAT, A100, "an_unknown_gemm", None),
    (FLOAT, A100, "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", None),
    (FLOAT, V100, "an_unknown_gemm", "float32"),  # no TF32
    (FLOAT, MI300X, TENSILE.format("SB"), "float32"),
    (FLOAT, MI300X, TENSILE.format("S_B"), "float32"),
    (FLOAT, MI300X, TENSILE.format("S_MX_B"), "tf32"),
    (FLOAT, {"id": 0, "name": "Another GPU"}, "an_unknown_gemm", None),
    ("double", A100, "an_unknown_gemm", "float64"),
    (BFLOAT, A100, "an_unknown_gemm", "bfloat16"),
    ("signed char", A100, "an_unknown_gemm", "int8"),
    ("c10::complex<float>", A100, "an_unknown_gemm", None),
    ("Odd", A100, "an_unknown_gemm", None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "device", "name", "precision"), PRECISIONS)
def test_precision_from_types_device_and_kernel(tmp_path, kind, device, name, precision) -> None:
    events = product("aten::mm", 0, SQUARE, kind, 1, 500, kernel_name=name)
    (row,) = capture(tmp_path, events, deviceProperties=[device]).efficiency
    assert row.precision == precision
    assert row.flops_per_second == round(137_438_953_472 / 500e-6)
    assert (row.bound_share is None) == (row.peak_share is None) == (precision is None)


on_1 = {"pid": 1}
SMALL = [[64, 64], [64, 64]]
SPLIT = [
    *product("aten::mm", 0, SQUARE, FLOAT, 1, 500, kernel_name="ampere_sgemm_32x32"),
    *product("aten::mm", 100, SQUARE, FLOAT, 2, 100, kernel_name=NVJET, on={"tid": 8}),
    *product("aten::mm", 200, SQUARE, FLOAT, 3, 400, kernel_name=NVJET, on=on_1),
    span("aten::mm", 300, 20, Input_Dims=SQUARE, Input_type=[FLOAT] * 2),  # on both devices
    *launched(NVJET, 301, 320, 30, 4, tid=9),
    *launched(NVJET, 310, 360, 20, 5, pid=1, tid=8),
]
# The second kernel of the second call still ran when recording stopped.
LOST = [
    *product("aten::mm", 0, SQUARE, HALF, 1, 500),
    *product("aten::mm", 100, SQUARE, HALF, 2, 500, on={"tid": 8}),
    call("cudaLaunchKernel", 106, 1, 3),
]
# A call of the driver in one of the runtime is no lost kernel: both have the correlation of the one kernel.
OF_DRIVER = [
    *product("aten::mm", 0, SQUARE, HALF, 1, 500),
    call("urEnqueueKernelLaunch", 6, 1.5, 3),  # of XPU; its kernel is lost
    *product("aten::mm", 100, SQUARE, HALF, 2, 500, on={"tid": 8}),
    {**call("cuLaunchKernel", 102, 3, 2), "cat": "cuda_driver"},
]
# Each step has a product of 1000 µs on a device of 312 TFLOP/s; 137.4 of the 312 MFLOP of each µs.
TRAINING = [
    step(3, 0, 2000),
    *product("aten::mm", 100, SQUARE, HALF, 1, 500),
    *launched("elementwise", 200, 700, 100, 2),
    *launched("ncclDevKernel_AllReduce_Sum", 210, 900, 300, 3, tid=9),
    span("aten::mm", 1500, 8, Input_Dims=SQUARE, Input_type=[HALF, HALF]),  # on the CPU
    # the step ends before its work: 1500 µs of work in 1000 µs
    step(4, 2000, 1000),
    *product("aten::mm", 2100, SQUARE, HALF, 4, 1500),
    # outside of steps
    *product("aten::mm", 5000, SQUARE, HALF, 5, 500),
    step(5, 6000, 100),
]
# Other work takes more than half of the kernels' time.
MOSTLY_OTHER = [*TRAINING[:4], *launched("elementwise", 200, 700, 501, 2)]
MIXED = [
    step(3, 0, 1000),
    *product("aten::mm", 0, SQUARE, FLOAT, 1, 100, kernel_name=NVJET),
    *product("aten::mm", 100, SMALL, HALF, 2, 100),
    *product("aten::mm", 200, SMALL, HALF, 3, 100, on=on_1),
    step(4, 1000, 1000),
    *product("aten::mm", 1000, SQUARE, FLOAT, 4, 100, kernel_name="an_unknown_gemm"),
    *product("aten::mm", 1100, SMALL, HALF, 5, 100),
    step(5, 2000, 1000),
    *product("aten::mm", 2000, SQUARE, HALF, 6, 100),
    *product("aten::mm", 2100, SQUARE, HALF, 7, 100),
]


def again(called_us: float, start_us: float, took: float, correlation: int) -> list:
    """A kernel launched on the thread of the backward."""
    return [
        call("cudaLaunchKernel", called_us, 5, correlation, tid=2),
        kernel("gemm", start_us, took, correlation=correlation),
    ]


HALVES = {"Input_Dims": SQUARE, "Input_type": [HALF, HALF]}
# In the backward node of a checkpoint, the product of the forward runs again, and then its backward.
CHECKPOINTED = [
    node("CheckpointFunctionBackward", 200, 300, 1),
    step(3, 0, 1000),
    made("aten::mm", 10, 8, 1, **HALVES), *launched("gemm", 11, 20, 100, 1),
    made("aten::mm", 210, 8, 5, tid=2, **HALVES), *again(211, 220, 100, 2),
    node("MmBackward0", 300, 50, 5),
    span("aten::mm", 310, 8, tid=2, **HALVES), *again(311, 330, 100, 3),
    made("MyFunction", 600, 100, 2),  # its forward runs a backward
    {**node("MmBackward0", 610, 80, 3), "tid": 1},
    span("aten::mm", 620, 8, **HALVES), *launched("gemm", 621, 630, 100, 4),
]  # fmt: skip
NAMED_TWICE = [A100, {"id": 1, "name": "Another"}, {"id": 0, "name": "An id that is taken"}]
CASES = {
    "rates and roofs": (BY_HAND, [A100]),
    "calls of one operator are split by precision and device": (SPLIT, NAMED_TWICE),
    "a call with a lost kernel has no device time": (LOST, [A100]),
    "a call with a lost kernel, with the kernels first": (
        sorted(LOST, key=lambda event: event["cat"] != "kernel"), [A100],
    ),
    "a call of the driver in one of the runtime": (OF_DRIVER, [A100]),
    "the utilization of steps": (TRAINING, [A100]),
    "a step with mostly other work": (MOSTLY_OTHER, [A100]),
    "the precision of a step is that of most of its FLOPs": (MIXED, [A100, {**A100, "id": 1}]),
    "an unknown device": (MIXED, [A100, {"id": 1, "name": "Another GPU"}]),
    "a forward that is computed again is no model FLOPs": (CHECKPOINTED, [A100]),
}  # fmt: skip


def test_efficiency_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for name, (events, devices) in CASES.items():
        found = capture(tmp_path, events, deviceProperties=devices)
        tables = {"operator": found.efficiency, "step": found.efficiency_steps}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
    golden("efficiency_by_hand.txt", "\n".join(told))


# Peaks.


def test_a_device_is_known_by_its_whole_name_and_size() -> None:
    def bandwidth(name: str | None, multiprocessors: int | None = None) -> float | None:
        return peak_rates(Device(0, name, None, multiprocessors)).bytes_per_second

    assert bandwidth("NVIDIA A100-SXM4-80GB", 108) == bandwidth("NVIDIA A100-SXM4-80GB") == 2039e9
    assert bandwidth("NVIDIA H100 80GB HBM3", 132) == 3350e9
    assert bandwidth("NVIDIA H100 PCIe", 114) == 2039e9
    assert bandwidth("NVIDIA L40S", 142) == bandwidth("NVIDIA L40") == 864e9
    for name in ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-PG509-200", "", None, "A100"):
        assert bandwidth(name) is None, name
    assert bandwidth("AMD Instinct MI300X", 38) is None, "a partition of the device"
    assert peak_rates(None).flops("float16") is None
    both = "AMD Instinct MI250X/MI250"  # two products with one name
    peaks = [peak_rates(Device(0, both, None, n)).flops("float16") for n in (110, 104, None)]
    assert peaks == [191.5e12, 181e12, None]


def test_a_users_pyproject_adds_devices(tmp_path, monkeypatch) -> None:
    text = '[tool.instrument.devices."My GPU"]\nbandwidth = 5e11\nbfloat16 = 58e12\n'
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    mine = peak_rates(Device(0, "My GPU", None, 12))
    got = (mine.bytes_per_second, mine.flops("bfloat16"), mine.flops("float16"))
    assert got == (5e11, 58e12, None)
    assert peak_rates(Device(0, "NVIDIA L4", None, 58)).bytes_per_second == 300e9
    assert peak_rates(Device(0, "My GPU", None, 12), 1e12).flops("bfloat16") == 1e12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("devices = 3", "is no table of tables"),
        ('[tool.instrument.devices."G"]\nbandwidth = -1', "bandwidth' of 'G'.* is -1"),
        ('[tool.instrument.devices."G"]\nfloat17 = 1e12', "unknown precision 'float17'"),
        ("[tool.instrument", "cannot be read"),
    ],
)
def test_a_wrong_device_of_a_user_is_named(tmp_path, monkeypatch, text, sentence) -> None:
    head = "[tool.instrument]\n" if text.startswith("devices") else ""
    (tmp_path / "pyproject.toml").write_text(head + text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        peak_rates(Device(0, "G", None, None))


def test_the_table_of_peaks_is_plausible() -> None:
    names = [row[0] for row in _TABLE]
    assert len(set(names)) == len(names)
    for name, multiprocessors, gigabytes, *rates in _TABLE:
        assert 32 < multiprocessors < 400
        assert 200 < gigabytes < 10_000
        assert len(rates) == len(peak_flops.PRECISIONS)
        peak = dict(zip(peak_flops.PRECISIONS, rates))
        known = [peak[k] for k in ("float64", "float32", "tf32", "float16") if peak[k] is not None]
        assert known == sorted(known), name
        assert peak["float8"] is None or peak["float8"] == pytest.approx(
            2 * peak["float16"], rel=0.02
        )


@pytest.mark.nightly
def test_the_table_of_peaks_equals_lightnings_where_that_is_dense() -> None:
    throughput = pytest.importorskip("lightning_fabric.utilities.throughput")
    same = {
        "v100 sxm": "Tesla V100-SXM2-32GB", "v100 pcie": "Tesla V100-PCIE-16GB", "v100s pcie": "Tesla V100S-PCIE-32GB",
        "a100": "NVIDIA A100-SXM4-40GB", "h100 sxm": "NVIDIA H100 80GB HBM3", "h100 pcie": "NVIDIA H100 PCIe",
        "t4": "Tesla T4", "l4": "NVIDIA L4", "l40": "NVIDIA L40",
    }  # fmt: skip
    kinds = {
        "float32": torch.float32,
        "tf32": "tfloat32",
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }
    for chip, name in same.items():
        theirs = throughput._CUDA_FLOPS[chip]
        ours = peak_rates(Device(0, name, None, None))
        for precision, kind in kinds.items():
            expected = pytest.approx(theirs[kind], rel=0.003) if kind in theirs else None
            assert ours.flops(precision) == expected, (name, precision)


@pytest.mark.parametrize(
    ("given", "peaks"),
    [
        (500e12, [500e12, 500e12]),
        ({"float16": 100e12}, [100e12, 156e12]),
        ({"float16": 100, "tf32": 50}, [100, 50]),
        (None, [312e12, 156e12]),
    ],
)
def test_peaks_that_are_given_replace_those_of_the_device(tmp_path, given, peaks) -> None:
    events = [
        *product("aten::mm", 0, SQUARE, HALF, 1, 1000),
        *product("aten::mm", 2000, SQUARE, FLOAT, 2, 500, kernel_name=NVJET),
    ]
    path = write_trace(tmp_path, events, deviceProperties=[A100])
    loaded = Capture.load(path, peak_flops=given)
    rates = [137_438_953_472 / 1e-3, 137_438_953_472 / 0.5e-3]
    expected = [pytest.approx(rate / peak) for rate, peak in zip(rates, peaks)]
    assert loaded.efficiency.column("peak_share") == expected
    config = json.loads(json.dumps(ProfilerConfig(peak_flops=given).plain()))
    recorded = write_capture(tmp_path, events, config=config)
    recorded.events  # noqa: B018 - reads the trace
    if given is not None:
        only_given = [x if isinstance(given, float) or x in given.values() else None for x in peaks]
        assert recorded.efficiency.column("peak_share") == [
            None if peak is None else pytest.approx(rate / peak)
            for rate, peak in zip(rates, only_given)
        ]
        again = Capture.load(recorded.folder, peak_flops=1e15)
        assert again.efficiency[0].peak_share == pytest.approx(rates[0] / 1e15), "it goes first"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "fast",
            "is 'fast', but it must be a number of FLOP/s such as 989e12, or a mapping such as",
        ),
        (True, "is True, but it must be a number"),
        (-1.0, r"is -1.0, but it must be above 0 and at most 1e\+24"),
        (float("nan"), r"is nan, but it must be above 0 and at most 1e\+24"),
        (10**400, r"but it must be above 0 and at most 1e\+24"),
        ({}, r"is \{\}, but it must be a number"),
        ({"bf16": 1e12}, "names the unknown precision 'bf16'; did you mean 'bfloat16'"),
        ({"bfloat16": "1e12"}, r"\.bfloat16 is '1e12', but it must be a number"),
    ],
)
def test_a_peak_that_cannot_be_is_refused(tmp_path, given, sentence) -> None:
    with pytest.raises(ConfigError, match=rf"^profiler\.peak_flops.*{sentence}"):
        ProfilerConfig(peak_flops=given)
    with pytest.raises(ConfigError, match=rf"^peak_flops.*{sentence}"):
        Capture.load(write_trace(tmp_path, []), peak_flops=given)


@pytest.mark.parametrize("given", [-1, "x", [1], {"bfloat16": 0}, {"bfloat16": None}, True])
def test_a_peak_that_cannot_be_in_a_capture_is_an_error(tmp_path, given) -> None:
    with pytest.raises(CaptureError, match=r"config\.peak_flops"):
        write_capture(tmp_path, [], config={"peak_flops": given})


# Steps.


def test_the_peak_of_a_step_is_the_sum_over_the_devices_that_it_uses(tmp_path) -> None:
    """Each of 60 steps uses a random choice of three devices, some of them twice, or none."""
    random = np.random.default_rng(2)
    peaks, events, expected = (312, 756, 121), [], []
    for at in range(60):
        events.append(step(at + 1, 10_000 * at, 9_000))
        used = random.integers(0, 3, random.integers(0, 5)).tolist()
        for k, device in enumerate(used):
            on = {"pid": device}
            begin = 10_000 * at + 100 + 1000 * k
            events += product("aten::mm", begin, SQUARE, HALF, 10 * at + k + 1, 500, on=on)
        expected.append(sum({k: peaks[k] for k in used}.values()) * 10**12 or None)
    devices = [
        A100,
        {"id": 1, "name": "NVIDIA H100 PCIe", "numSms": 114},
        {"id": 2, "name": "NVIDIA L4", "numSms": 58},
    ]
    found = capture(tmp_path, events, deviceProperties=devices).efficiency_steps
    assert found.column("peak_flops_per_second") == expected


def test_torchs_own_checkpoint_computes_its_forward_again(tmp_path) -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    for reentrant in (False, True):

        def body(*, reentrant: bool = reentrant) -> None:
            with torch.profiler.record_function("ProfilerStep#0"):
                checkpoint(model, x, use_reentrant=reentrant).sum().backward()

        path = tmp_path / f"{reentrant}.json"
        (row,) = record(path, body).capture.efficiency_steps
        product_flops = 2 * 4 * 8 * 8
        assert (row.flops, row.recomputed_flops) == (4 * product_flops, product_flops)
        (row,) = Capture.load(path, peak_flops=1e9).efficiency_steps
        seconds = row.duration_ns / 1e9
        assert row.mfu == pytest.approx(3 * product_flops / 1e9 / seconds), "the peak of the CPU"


# What is missing, and what is absurd.


def test_the_command_shows_tables_or_what_to_do(tmp_path, monkeypatch, transcript, golden) -> None:
    monkeypatch.chdir(tmp_path)
    events = [step(3, 0, 100), span("aten::mm", 10, 5), *launched("gemm", 11, 20, 10, 1)]
    found = capture(tmp_path, events, deviceProperties=[A100])
    assert len(found.efficiency) == len(found.efficiency_steps) == 0
    (tmp_path / "trace.json").rename("without_shapes.json")
    write_trace(tmp_path, TRAINING, deviceProperties=[A100])
    files = ("without_shapes.json", "trace.json")
    text = transcript(f"show {file} --efficiency --efficiency-steps" for file in files)
    golden("efficiency.txt", text)


def hostile() -> Iterator[dict]:
    odd = [
        None,
        5,
        "x",
        [],
        {},
        [[]],
        [5, 5],
        [[2, 3], 4],
        [[2**70, 2**70]] * 2,
        [[1e308, 2]] * 2,
        [["a"], ["b"]],
    ]
    for value in odd:
        yield {"Input_Dims": value, "Input_type": [HALF, HALF]}
        yield {"Input_Dims": SQUARE, "Input_type": value}
        yield {"Input_Dims": SQUARE, "Input_type": [HALF, HALF, "Scalar"], "Concrete_Inputs": value}
        yield {"Input_Dims": [*SQUARE, 5, {"a": [1]}], "Input_type": [HALF, value]}


@contextmanager
def named(given: dict) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"failed on {given}") from error


def test_absurd_arguments_give_no_row_or_unknown_cells(tmp_path) -> None:
    names = (
        "mm",
        "addmm",
        "convolution",
        "convolution_backward",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
    )
    for given in hostile():
        events = [
            event
            for number, name in enumerate(names)
            for event in (
                span(f"aten::{name}", 100 * number, 50, **given),
                *launched("gemm", 100 * number + 1, 100 * number + 10, 5, number + 1),
            )
        ]
        devices = [A100, {"id": "0", "name": 5}, {}, 7, {"id": 0, "name": "late"}]
        with named(given):
            found = capture(tmp_path, events, deviceProperties=devices).efficiency
            for row in found:
                assert row.moved_bytes is None or row.moved_bytes > 0
            str(found)


def test_torchs_numbers_of_types_have_the_sizes_of_their_elements(tmp_path) -> None:
    """The argument `dtype` of `_to_copy` is such a number in a trace."""
    dtypes = [
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
        *(torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
        *(torch.bool, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn),
        *(torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
    ]

    def convert() -> None:
        for dtype in dtypes:
            torch.ops.aten._to_copy(torch.zeros(2, dtype=torch.float32), dtype=dtype)

    found = record(tmp_path / "trace.json", convert, record_shapes=True).capture
    given = found.sql("select concrete from events where name = 'aten::_to_copy' order by id")
    numbers = [int(json.loads(each)[1]) for each in given.column("concrete")]
    assert [_SIZES[number] for number in numbers] == [dtype.itemsize for dtype in dtypes]


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        ("aten::mm", ["float", "c10::BFloat16"], ["float32", "bfloat16"]),
        ("aten::addmm.out", ["float", "c10::Half", "c10::Half"], ["float16"]),
        ("aten::unknown", ["float", "double"], ["float32"]),
    ],
)
def test_the_types_of_operands_are_those_that_are_multiplied(name, types, expected) -> None:
    assert operand_types(name, json.dumps(types).encode()) == expected
