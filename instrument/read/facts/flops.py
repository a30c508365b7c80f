"""Count floating-point operations by formula, from the shapes and arguments in a trace.

A multiplication and the addition after it are two operations. The formula of an operator is called
its rule. Unless a docstring says otherwise, the rules are those of `torch.utils.flop_counter`;
docs/explanation/joins.md says where the totals differ from those of `FlopCounterMode`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np

from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.groupby import groupby_rows, intern
from instrument.read.trace.events import (
    OPERATOR,
    Events,
    Flags,
    Ints,
    decoded,
    is_step,
    split_overload,
)

Shapes = list[list[int]]
Rule = Callable[[Shapes, list[str]], int]

UNKNOWN = -1
# The most FLOPs of one call: 9 seconds at 1 PFLOP/s. The sum of a thousand such calls fits into 64
# bits.
_TOO_MANY = 2**53
_MOST_DIMS = 64  # torch allows no more


def node_flops(events: Events, call_tree: CallTree) -> Ints | None:
    """The FLOPs of each node of the call tree; None if the trace has no input shapes.

    Also None if they come from a detail window and those of an operator are unknown, because sums
    would be too small.

    A node is `UNKNOWN` if it has no rule, or if its FLOPs are in the count of an ancestor or of a
    descendant.

    Cost: one evaluation for each distinct combination of operator and arguments.
    """
    if not (events.shapes >= 0).any():
        return None
    nodes = np.flatnonzero(
        events.named(has_rule)[call_tree.index] & (events.shapes[call_tree.index] >= 0)
    )
    event = call_tree.index[nodes]
    keys, groups = groupby_rows(events.name[event], events.shapes[event], events.concrete[event])
    values = np.array([_evaluate(events, *key) for key in keys.T.tolist()], np.int64)
    flops = np.full(len(call_tree), UNKNOWN)
    flops[nodes] = values[groups.of]
    if not events.records_inputs:
        ruled = events.named(has_rule)[call_tree.index]
        counted = flops != UNKNOWN
        is_known = call_tree.at_or_inside(counted)
        is_known |= call_tree.with_descendants(counted.astype(np.int64)) > 0
        if (ruled & ~is_known & (events.shapes[call_tree.index] < 0)).any():
            return None
    flops = _without_outer_calls(events, call_tree, flops)
    return np.where(call_tree.inside(flops != UNKNOWN), UNKNOWN, flops)


def needed_flops(events: Events, call_tree: CallTree, flops: Ints) -> Ints:
    """The FLOPs of each node without the products that a causal mask makes unnecessary.

    `flops` is the result of `node_flops`. A node is `UNKNOWN` if the trace does not say whether its
    attention is causal.
    """
    index = call_tree.index
    nodes = np.flatnonzero(events.named(is_fused_attention)[index] & (flops != UNKNOWN))
    event = index[nodes]
    keys, groups = groupby_rows(
        events.name[event], events.shapes[event], events.concrete[event], flops[nodes]
    )
    values = np.array([_unmasked(events, *key) for key in keys.T.tolist()], np.int64)
    needed = flops.copy()
    needed[nodes] = values[groups.of]
    return needed


def has_rule(name: str) -> bool:
    """Whether the operator of this name, with or without an overload, has a rule."""
    return split_overload(name)[0] in RULES


def nodes_without_flops(events: Events, call_tree: CallTree, own: Ints | None) -> Flags:
    """A mask of the outermost operators without FLOPs of their own, above or below.

    `own` is the result of `node_flops`.
    """
    operator = events.among(OPERATOR)[call_tree.index] & ~events.named(is_step)[call_tree.index]
    counted = np.zeros(len(call_tree), np.bool_) if own is None else own != UNKNOWN
    uncounted = (
        operator
        & (call_tree.with_descendants(counted.astype(np.int64)) == 0)
        & ~call_tree.at_or_inside(counted)
    )
    return call_tree.outermost(uncounted)


def is_fused_attention(name: str) -> bool:
    """Whether the operator of this name computes attention in one kernel."""
    plain = split_overload(name)[0]
    return plain in FUSED_ATTENTION or plain in _LENGTHS


def _without_outer_calls(events: Events, call_tree: CallTree, flops: Ints) -> Ints:
    """If one inner call has the name and FLOPs of its outer call, the outer becomes `UNKNOWN`."""
    codes, _ = intern([split_overload(name)[0] for name in events.names])
    name = codes[events.name[call_tree.index]]
    inner = np.flatnonzero(flops != UNKNOWN)
    outer = call_tree.nearest(flops != UNKNOWN, call_tree.parent[inner])
    same = (outer >= 0) & (name[outer] == name[inner]) & (flops[outer] == flops[inner])
    repeated = np.bincount(outer[same], minlength=len(call_tree)) == 1
    return np.where(repeated, UNKNOWN, flops)


def _evaluate(events: Events, name: int, shapes: int, concrete: int) -> int:
    """The FLOPs of a call; `UNKNOWN` if its shapes do not fit the rule, as for nested tensors."""
    dims = decoded(events.texts[shapes])
    arguments = decoded(events.texts[concrete]) if concrete >= 0 else []
    return evaluated(RULES[split_overload(events.names[name])[0]], dims, arguments)


def evaluated(rule: Callable[..., int], *arguments: Any) -> int:
    """The result of a rule; `UNKNOWN` if the rule fails or the result is negative or too large."""
    try:
        count = rule(*arguments)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
        return UNKNOWN
    return count if isinstance(count, int) and 0 <= count < _TOO_MANY else UNKNOWN


def elements(dims: list[int]) -> int:
    """The number of elements of a tensor.

    Raises:
        ValueError: there are more dimensions than torch allows.
    """
    if len(dims) > _MOST_DIMS:
        raise ValueError
    return prod(dims)


def _product(a: list[int], b: list[int]) -> int:
    """The FLOPs of a matrix product, [*, m, k] by [*, k, n]: torch's mm_flop and bmm_flop."""
    *batch, m, k = a
    *_, n = b
    return 2 * elements(batch) * m * n * k


def _matrix_product(first: int) -> Rule:
    """A rule for a matrix product of the arguments at the positions `first` and `first + 1`."""
    return lambda dims, _: _product(dims[first], dims[first + 1])


def _matrix_vector(first: int) -> Rule:
    """A rule for a product with a vector; torch.utils.flop_counter has none."""
    return lambda dims, _: 2 * elements(dims[first])


def _convolution(dims: Shapes, arguments: list[str]) -> int:
    """The FLOPs of a convolution: torch's conv_flop_count.

    The filter is applied at each point of the output, or of the input if it is transposed.
    """
    image, weight = dims[0], dims[1]
    is_transposed = arguments[6] == "True"
    return _applications(image if is_transposed else convolution_output(dims, arguments), weight)


def convolution_output(dims: Shapes, arguments: list[str]) -> list[int]:
    """The shape of the output of `aten::convolution`, transposed or not.

    The formulas are in the documentation of torch.nn.Conv2d and torch.nn.ConvTranspose2d.
    """
    image, weight = dims[0], dims[1]
    stride, padding, dilation = (_numbers(text, len(image) - 2) for text in arguments[3:6])
    sizes = zip(image[2:], weight[2:], stride, padding, dilation)
    if arguments[6] != "True":
        output = [
            (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, dil in sizes
        ]
        return [image[0], weight[0], *output]
    extra = _numbers(arguments[7], len(image) - 2)
    output = [
        (size - 1) * step - 2 * pad + dil * (kernel - 1) + more + 1
        for (size, kernel, step, pad, dil), more in zip(sizes, extra)
    ]
    return [image[0], weight[1] * int(arguments[8]), *output]


def _applications(points: list[int], weight: list[int]) -> int:
    """The FLOPs to apply a filter [out, in / groups, …] at each point of [batch, channels, …]."""
    return 2 * points[0] * elements(points[2:]) * elements(weight)


def _convolution_backward(dims: Shapes, arguments: list[str]) -> int:
    """The FLOPs of the backward of a convolution: torch's conv_backward_flop.

    The FLOPs of the forward count once for each of the gradients of input and weight that is
    computed.
    """
    gradient, image, weight = dims[:3]
    gradients = arguments[10].strip("[]").split(", ")[:2].count("True")  # `output_mask`
    is_transposed = arguments[7] == "True"
    return gradients * _applications(image if is_transposed else gradient, weight)


def _numbers(text: str, length: int) -> list[int]:
    """The values of a list such as "[1, 1]"; a single value is repeated `length` times."""
    values: list[int] = msgspec.json.decode(text, type=list[int])
    return values * length if len(values) == 1 else values


def _attention(dims: Shapes, _: list[str]) -> int:
    """The FLOPs of attention: torch's sdpa_flop_count.

    Query by key gives the scores, and scores by value the output. A mask does not change the count.
    """
    query, key, value = dims[:3]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (width + value[3])


def _attention_backward(dims: Shapes, _: list[str]) -> int:
    """The FLOPs of the backward of attention: torch's sdpa_backward_flop_count.

    The scores are computed again, then four gradients: of scores, values, query and key.
    """
    _gradient, query, key, value = dims[:4]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (3 * width + 2 * value[3])


def _attention_by_rows(first: int, lengths: tuple[int, ...]) -> Rule:
    """A rule for attention of tensors [batch, rows, heads, width], as in flash-attn.

    `first` is the position of the query; 1 is a backward, which has the gradient before it. If one
    of the arguments at the positions `lengths` is given, sequences have lengths of their own, which
    are not in the trace: the FLOPs are not known.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        query, key, value = dims[first : first + 3]
        (batch, rows, heads, width), (batches, columns, _heads, _width) = query, key
        if batch != batches or any(dims[at] for at in lengths if at < len(dims)):
            raise ValueError
        widths = 3 * width + 2 * value[3] if first else width + value[3]
        return 2 * batch * heads * rows * columns * widths

    return rule


def _grouped_product(dims: Shapes, _: list[str]) -> int:
    """The FLOPs of matrix products of groups; torch.utils.flop_counter has no rule.

    Either there is a matrix for each group, or the groups are parts of the rows, the columns or the
    inner dimension, which offsets separate. Rows after the last offset count, too.
    """
    a, b = dims[:2]
    if len(a) == len(b) == 3 and a[0] != b[0]:
        raise ValueError
    return 2 * elements(a) * b[-1]


def _unmasked(events: Events, name: int, shapes: int, concrete: int, flops: int) -> int:
    """The FLOPs of an attention call; products that its mask makes unnecessary do not count.

    With a causal mask, row i of the scores needs only the first i columns (i counts from 1), as in
    torch.nn.functional.scaled_dot_product_attention. `flops` is the number with all products.
    """
    dims: Shapes = decoded(events.texts[shapes])
    arguments: list[str] = decoded(events.texts[concrete]) if concrete >= 0 else []
    operator = split_overload(events.names[name])[0]

    def needed() -> int:
        flags = [text for text in arguments if text in ("True", "False")]
        by_rows = from_last_row = operator in _LENGTHS
        if operator in _MASK_TYPES:
            mask = arguments[_MASK_TYPES[operator]]
            is_causal, from_last_row = mask != "0", mask != "1"
        else:  # the first flag of the operators of flash-attn
            is_causal = flags[0 if by_rows else FUSED_ATTENTION[operator]] == "True"
        if not is_causal:
            return flops
        query, key = dims[1:3] if operator.endswith(("_backward", "bwd")) else dims[:2]
        rows, columns = query[1 if by_rows else 2], key[1 if by_rows else 2]
        square = min(rows, columns)
        pairs = square * (square + 1) // 2
        if not from_last_row:  # the first row needs the first column
            pairs += (rows - square) * columns
        elif columns > rows:  # the last row needs all columns, as in flash-attn
            pairs += (columns - rows) * rows
        return flops // (rows * columns) * pairs

    return evaluated(needed)


def _recurrent(times: int) -> Rule:
    """A rule for a recurrent layer of oneDNN; torch.utils.flop_counter has none.

    For each time step of each sequence, there is a product with each weight matrix. `times` is 1
    for the forward, and 2 for the backward: the gradients of the inputs and of the weights.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        (steps, batch, _width), of_input, of_hidden = dims[:3]
        return times * 2 * steps * batch * (elements(of_input) + elements(of_hidden))

    return rule


def _recurrent_stack(times: int) -> Rule:
    """A rule for all layers of a recurrent network of cuDNN or MIOpen; see `_recurrent`."""

    def rule(dims: Shapes, _: list[str]) -> int:
        data, weights = dims[:2]
        # The argument `weights` is a list of tensors, so here it is a list of shapes.
        matrices = [weight for weight in weights if len(weight) == 2]  # type: ignore[arg-type]
        count = sum(map(elements, matrices))  # type: ignore[arg-type]
        return times * 2 * elements(data[:-1]) * count

    return rule


# For each fused attention, two positions of `is_causal` among the boolean arguments: in the forward
# operator and in the backward operator. Positions are counted from the last boolean argument,
# because versions of torch differ in the arguments before `is_causal`.
_FUSED = {
    "flash_attention": (-2, -1),
    "flash_attention_for_cpu": (-1, -1),
    "efficient_attention": (-1, -1),
    "cudnn_attention": (-2, -1),
    "fused_attention_overrideable": (-2, -1),
}
#: For each operator that computes attention in one kernel, the position of `is_causal`.
FUSED_ATTENTION = {
    f"aten::_scaled_dot_product_{kind}{suffix}": positions[backward]
    for kind, positions in _FUSED.items()
    for backward, suffix in enumerate(("", "_backward"))
}

# For each attention of tensors [batch, rows, heads, width] in one kernel: positions of arguments
# that give sequences lengths of their own, or pages. Sources: `flash_attn_interface.py` and
# `hopper/flash_api.cpp` of flash-attn 2.8, `ops/fmha/flash.py` of xFormers 0.0.30, and
# `native_functions.yaml` of torch 2.13, whose operators also run inside the fused ones above.
_FLASH_3, _FLASH_3_BACKWARD = (3, 7, 8, 9, 10, 11, 14), (9, 10, 11, 12)
_LENGTHS: dict[str, tuple[int, ...]] = {
    "flash_attn::_flash_attn_forward": (),
    "flash_attn::_flash_attn_backward": (),
    **dict.fromkeys(
        ("flash_attn_3::fwd", "_C_flashattention3::fwd", "_vllm_fa3_C::fwd", "sgl_kernel::fwd"),
        _FLASH_3,
    ),
    **dict.fromkeys(("flash_attn_3::bwd", "_C_flashattention3::bwd"), _FLASH_3_BACKWARD),
    "xformers_flash::flash_fwd": (3, 4, 5),
    "xformers_flash::flash_bwd": (9, 10),
    "xformers_flash3::flash_fwd": (3, 4, 5),
    "xformers_flash3::flash_bwd": (9, 10),
    "xformers::efficient_attention_forward_cutlass": (4, 5, 11),
    "aten::_flash_attention_forward": (3, 4, 13, 15),
    "aten::_flash_attention_backward": (6, 7),
    "aten::_efficient_attention_forward": (4, 5, 12),
    "aten::_efficient_attention_backward": (6, 7),
}
# The position of an argument that is 0 without a causal mask, 1 if this mask leaves the first row
# only the first column, and 2 if it leaves the last row all columns.
_MASK_TYPES = {
    "xformers::efficient_attention_forward_cutlass": 9,
    "aten::_efficient_attention_forward": 9,
    "aten::_efficient_attention_backward": 14,
}

RULES: dict[str, Rule] = {
    "aten::mm": _matrix_product(0),
    "aten::_int_mm": _matrix_product(0),
    "aten::_scaled_mm": _matrix_product(0),
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "aten::bmm": _matrix_product(0),
    "aten::addmm": _matrix_product(1),
    "aten::addmm_": _matrix_product(1),
    "aten::_addmm_activation": _matrix_product(1),
    "aten::baddbmm": _matrix_product(1),
    "aten::baddbmm_": _matrix_product(1),
    "aten::addbmm": _matrix_product(1),
    "aten::mv": _matrix_vector(0),
    "aten::addmv": _matrix_vector(1),
    "aten::addmv_": _matrix_vector(1),
    "aten::dot": _matrix_vector(0),
    "aten::vdot": _matrix_vector(0),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent(1),
    "aten::mkldnn_rnn_layer_backward": _recurrent(2),
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::miopen_rnn"), _recurrent_stack(1)),
    **dict.fromkeys(
        ("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward"), _recurrent_stack(2)
    ),
    **{f"aten::_scaled_dot_product_{kind}": _attention for kind in _FUSED},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention_backward for kind in _FUSED},
    **{
        name: _attention_by_rows(int(name.endswith(("_backward", "bwd"))), lengths)
        for name, lengths in _LENGTHS.items()
    },
}
