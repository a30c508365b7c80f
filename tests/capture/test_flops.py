"""Operations counted from a trace's shapes: equal to torch's counter, and to counts by hand where it has none."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import capture, span, write_trace
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from capture.conftest import record
from instrument.read.capture import Capture
from instrument.read.facts.flops import _LENGTHS, _MASK_TYPES


def counted(tmp_path, body: Callable[[], object]) -> dict[str, int]:
    """What we count for each operator of a run."""
    table = record(tmp_path / "trace.json", body).capture.operators
    return {row.name: row.flops for row in table if row.flops is not None}


def by_torch(body: Callable[[], object]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        body()
    counts = counter.get_flop_counts().get("Global", {})
    return {str(op).replace("aten.", "aten::"): n for op, n in counts.items()}


def convolutional() -> Callable[[], None]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, dilation=2), nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1),
        nn.Flatten(), nn.Linear(4 * 26 * 26, 10),
    )  # fmt: skip
    return lambda: model(torch.randn(2, 3, 32, 32)).sum().backward()


def lines() -> Callable[[], None]:
    model = nn.Sequential(nn.Conv1d(3, 4, 3, padding="same"), nn.Conv1d(4, 2, (5,), stride=3))
    return lambda: model(torch.randn(2, 3, 40)).sum().backward()


def volumes() -> Callable[[], None]:
    model = nn.Conv3d(2, 3, (1, 3, 2), stride=(1, 2, 1), padding=(0, 1, 0))
    return lambda: model(torch.randn(2, 2, 4, 6, 8)).sum().backward()


def attention_in_parts() -> Callable[[], None]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def body() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            model(torch.randn(2, 5, 16)).sum().backward()

    return body


def products() -> Callable[[], None]:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)

    def body() -> None:
        torch.baddbmm(torch.randn(3, 4, 6), a, b).sum().backward()
        (a @ b).sum().backward()
        torch.einsum("bij,bjk->bik", a, b).sum().backward()
        (a[0] @ b[0]).sum().backward()

    return body


@pytest.mark.parametrize("make", [convolutional, lines, volumes, attention_in_parts, products])
def test_forward_and_backward_equal_torchs_counter(tmp_path, make) -> None:
    body = make()
    expected = by_torch(body)
    assert sum(expected.values()) > 1000
    assert len(expected) >= 2
    assert counted(tmp_path, body) == expected


@pytest.mark.nightly
def test_a_resnet_18_equals_torchs_counter(tmp_path) -> None:
    example = Path(__file__).parents[2] / "examples" / "resnet_inference.py"
    model, x = runpy.run_path(str(example))["ResNet18"](), torch.randn(2, 3, 32, 32)

    def body() -> None:
        model(x).sum().backward()

    expected = by_torch(body)
    got = expected.keys()
    assert got == {"aten::convolution", "aten::convolution_backward", "aten::addmm", "aten::mm"}
    assert counted(tmp_path, body) == expected


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_on_a_device_equals_torchs_formula(tmp_path, kind) -> None:
    name = f"_scaled_dot_product_{kind}_attention"
    q, k, v, gradient = (
        [2, 8, 7, 4],
        [2, 2, 9, 4],
        [2, 2, 9, 6],
        [2, 8, 7, 6],
    )  # four queries' heads share one of keys
    forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward")
    events = [
        span(f"aten::{name}", 0, 5, Input_Dims=[q, k, v, [], []]),
        span(f"aten::{name}_backward", 10, 5, Input_Dims=[gradient, q, k, v, gradient, [2, 8, 7]]),
    ]
    try:
        theirs = [flop_registry[forward](q, k, v), flop_registry[backward](gradient, q, k, v)]
    except AssertionError:
        pytest.skip("this torch's formula knows no heads that share keys")
    assert [row.flops for row in capture(tmp_path, events).operators] == theirs
    assert theirs[0] > 1000


def test_attention_on_the_cpu_is_counted_by_hand(tmp_path) -> None:
    q = torch.randn(2, 3, 7, 4, requires_grad=True)
    k, v = torch.randn(2, 3, 9, 4, requires_grad=True), torch.randn(2, 3, 9, 4, requires_grad=True)

    def body() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    assert by_torch(body) == {}, "torch counts it now: compare with that instead"
    product = 2 * (2 * 3) * 7 * 9 * 4  # batch and heads times [7, 4] by [4, 9]
    assert counted(tmp_path, body) == {
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2 * product,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5 * product,
    }


Q, K, V, GRADIENT = [2, 7, 8, 4], [2, 9, 2, 4], [2, 9, 2, 6], [2, 7, 8, 6]
BY_ROWS = [name for name in _LENGTHS if not name.endswith(("backward", "bwd"))]


def by_rows(name: str, lengths: list[int] | None = None) -> list[list[int]]:
    """The shapes of a call of attention by rows, with an argument that holds lengths, if there is one."""
    dims = [GRADIENT, Q, K, V] if name.endswith(("backward", "bwd")) else [Q, K, V]
    dims += [[]] * (16 - len(dims))
    if lengths is not None:
        dims[_LENGTHS[name][0]] = lengths
    return dims


@pytest.mark.parametrize("name", _LENGTHS)
def test_attention_by_rows_is_torchs_formula_for_heads_before_rows(tmp_path, name) -> None:
    q, k, v, gradient = ([each[0], each[2], each[1], each[3]] for each in (Q, K, V, GRADIENT))
    ops, shapes = torch.ops.aten, (q, k, v)
    operator = ops._scaled_dot_product_flash_attention
    if name not in BY_ROWS:
        operator, shapes = ops._scaled_dot_product_flash_attention_backward, (gradient, *shapes)
    try:
        theirs = flop_registry[operator](*shapes)
    except AssertionError:
        pytest.skip("this torch's formula knows no heads that share keys")
    (row,) = capture(tmp_path, [span(name, 0, 5, Input_Dims=by_rows(name))]).operators
    assert row.flops == theirs > 1000


@pytest.mark.parametrize("name", [name for name, lengths in _LENGTHS.items() if lengths])
def test_lengths_of_their_own_are_not_in_the_trace(tmp_path, name) -> None:
    events = [span(name, 0, 5, Input_Dims=by_rows(name, [3]))]
    rows, heads = [14, 8, 4], [18, 2, 4]  # the rows of all sequences, one after another
    flat = [[14, 8, 6], rows, heads, heads] if name not in BY_ROWS else [rows, heads, heads]
    events.append(span(name, 10, 5, Input_Dims=[*flat, *by_rows(name, [3])[len(flat) :]]))
    assert [row.flops for row in capture(tmp_path, events).operators] == [None]


def test_attention_with_lengths_in_its_name_has_no_rule(tmp_path) -> None:
    dims = [[14, 8, 4], [18, 2, 4], [18, 2, 4], [3], [3]]
    names = ("flash_attn::_flash_attn_varlen_forward", "_vllm_fa2_C::varlen_fwd")
    events = [span(name, 10 * k, 5, Input_Dims=dims) for k, name in enumerate(names)]
    found = capture(tmp_path, events)
    assert {row.flops for row in found.operators} == {None}
    assert len(found.operators_without_flops) == 2


def test_the_arguments_with_lengths_are_those_of_torchs_schema() -> None:
    for name, positions in _LENGTHS.items():
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if not name.startswith("aten::") or operator is None:
            continue
        arguments = [each.name for each in operator.default._schema.arguments]
        known = [k for k, each in enumerate(arguments) if "seq" in each and "max" not in each]
        known += [k for k, each in enumerate(arguments) if each in ("block_table", "seqlen_k")]
        assert {*known} == {at for at in positions if at < len(arguments)}, name
        if name in _MASK_TYPES:
            assert arguments[_MASK_TYPES[name]] == "custom_mask_type"


@pytest.mark.parametrize(
    "shapes", [((12, 8), (3, 8, 6)), ((3, 4, 8), (3, 8, 6)), ((8, 12), (12, 6))]
)
def test_a_grouped_product_has_the_operations_of_its_products(tmp_path, shapes) -> None:
    a, b = (torch.randn(*shape) for shape in shapes)
    ends = [3, 8, 12]
    starts = [0, *ends[:-1]]
    parts = {
        (2, 3): lambda: [a[x:y] @ b[k] for k, (x, y) in enumerate(zip(starts, ends))],
        (3, 3): lambda: [torch.mm(x, y) for x, y in zip(a, b)],
        (2, 2): lambda: [a[:, x:y] @ b[x:y] for x, y in zip(starts, ends)],
    }
    events = [span("aten::_grouped_mm", 0, 5, Input_Dims=[*map(list, shapes), [3], [], []])]
    (row,) = capture(tmp_path, events).operators
    assert {"aten::mm": row.flops} == by_torch(parts[a.dim(), b.dim()])


def test_an_lstm_is_counted_by_hand(tmp_path) -> None:
    model, x = nn.LSTM(5, 6, num_layers=2), torch.randn(3, 2, 5)
    found = counted(tmp_path, lambda: model(x)[0].sum().backward())
    first, second = (
        4 * 6 * 5 + 4 * 6 * 6,
        4 * 6 * 6 + 4 * 6 * 6,
    )  # four gates, of input and of hidden state
    forward = 2 * 3 * 2 * (first + second)
    assert found == {
        "aten::mkldnn_rnn_layer": forward,
        "aten::mkldnn_rnn_layer_backward": 2 * forward,
    }


def test_the_recurrent_layers_of_a_device_are_counted_by_hand(tmp_path) -> None:
    weights = [
        [24, 5],
        [24, 6],
        [24],
        [24],
        [24, 6],
        [24, 6],
        [24],
        [24],
    ]  # two layers: of input, of hidden, biases
    forward = 2 * 3 * 2 * 24 * (5 + 6 + 6 + 6)  # steps and sequences times the four matrices
    names = ("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward")
    events = [
        span(f"aten::{n}", 10 * k, 5, Input_Dims=[[3, 2, 5], weights, [], [2, 2, 6]])
        for k, n in enumerate(names)
    ]
    assert [r.flops for r in capture(tmp_path, events).operators] == [forward, 2 * forward] * 2


def test_an_overload_has_the_rule_of_its_operator(tmp_path) -> None:
    table = capture(
        tmp_path, [span("aten::mm.out", 0, 5, Input_Dims=[[2, 3], [3, 4], [2, 4]])]
    ).operators
    assert [(r.name, r.flops) for r in table] == [("aten::mm", 48)]


BY_SHAPES = [
    (("mm", "_int_mm", "_scaled_mm"), [[2, 3], [3, 4]], 2 * 2 * 3 * 4),
    (("bmm",), [[5, 2, 3], [5, 3, 4]], 2 * 5 * 2 * 3 * 4),
    (("addmm", "addmm_", "_addmm_activation"), [[4], [2, 3], [3, 4]], 2 * 2 * 3 * 4),
    (("baddbmm", "baddbmm_", "addbmm"), [[2, 4], [5, 2, 3], [5, 3, 4]], 2 * 5 * 2 * 3 * 4),
    (("mv",), [[2, 3], [3]], 2 * 2 * 3),
    (("addmv", "addmv_"), [[2], [2, 3], [3]], 2 * 2 * 3),
    (("dot", "vdot"), [[3], [3]], 2 * 3),
]


def test_every_product_is_counted_by_its_operands(tmp_path) -> None:
    """What is added before a product, as the bias of `addmm`, counts nothing."""
    calls = [
        (f"aten::{name}", shapes, flops) for names, shapes, flops in BY_SHAPES for name in names
    ]
    events = [span(name, 10 * k, 5, Input_Dims=shapes) for k, (name, shapes, _) in enumerate(calls)]
    assert [(row.name, row.flops) for row in capture(tmp_path, events).operators] == [
        (name, flops) for name, _, flops in calls
    ]


def test_a_grouped_convolution_counts_each_group_once(tmp_path) -> None:
    model = nn.Conv2d(4, 8, 3, groups=2)
    found = counted(
        tmp_path, lambda: model(torch.randn(2, 4, 5, 5, requires_grad=True)).sum().backward()
    )
    forward = 2 * 2 * 9 * 8 * 2 * 9  # two, batch, points, out, in of a group, filter
    assert found == {"aten::convolution": forward, "aten::convolution_backward": 2 * forward}


def test_a_single_value_of_a_convolution_holds_for_all_its_dimensions(tmp_path) -> None:
    given = ["", "", "", "[2]", "[1]", "[1]", "False", "[0]", "1"]
    shapes = [[1, 3, 5, 7], [4, 3, 3, 3], [], [], [], [], [], [], []]
    event = span("aten::convolution", 0, 10, Input_Dims=shapes, Concrete_Inputs=given)
    (row,) = capture(tmp_path, [event]).operators
    assert row.flops == 2 * (3 * 4) * 4 * 27  # points of the output, channels, filter


def test_an_operator_inside_one_that_counts_is_not_counted_again(tmp_path) -> None:
    shapes = [[2, 3, 4, 4], [5, 3, 1, 1], [], [], [], [], [], [], []]
    given = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    table = capture(
        tmp_path,
        [
            span("aten::convolution", 0, 10, Input_Dims=shapes, Concrete_Inputs=given),
            span("aten::mm", 2, 5, Input_Dims=[[5, 3], [3, 32]]),
            span("aten::mm", 20, 5, Input_Dims=[[5, 3], [3, 2]]),
        ],
    ).operators
    got = [(row.name, row.flops) for row in table]
    assert got == [("aten::convolution", 960), ("aten::mm", 60)]


def test_what_has_no_rule_or_no_shapes_or_odd_ones_is_unknown(tmp_path) -> None:
    table = capture(
        tmp_path,
        [
            span("aten::relu", 0, 1, Input_Dims=[[2, 2]]),
            span("aten::mm", 2, 1),
            span("aten::bmm", 4, 1, Input_Dims=[]),
            span("aten::convolution", 6, 1, Input_Dims=[[1, 1, 3], [1, 1, 3]]),
            span("aten::addmm", 8, 1, Input_Dims=[[[1], [2]], [[3], [4]], [[5], [6]]]),
        ],
    ).operators
    assert len(table) == 5
    assert {row.flops for row in table} == {None}


@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [10**30, 2], [1e400, 2], [-3, 2], [2**62] * 20_000]
)
def test_a_shape_that_cannot_be_is_unknown(tmp_path, shape) -> None:
    given = {"Input_Dims": [shape, [shape[1], 2]]}
    path = write_trace(
        tmp_path,
        [span("aten::mm", 0, 5, **given), span("aten::mm", 9, 5, Input_Dims=[[1, 2], [2, 3]])],
    )
    path.write_text(path.read_text().replace("Infinity", "1e400"))
    found = Capture.load(path)
    assert [row.flops for row in found.operators] == [12]
    assert len(found.operators_by("input_shapes")) == 2


def test_a_convolution_without_a_stride_is_unknown(tmp_path) -> None:
    dims, given = [[1, 1, 8], [1, 1, 3], []], ["", "", "", "[0]", "[0]", "[1]", "False", "[0]", "1"]
    row = capture(
        tmp_path, [span("aten::convolution", 0, 5, Input_Dims=dims, Concrete_Inputs=given)]
    ).operators[0]
    assert row.flops is None
