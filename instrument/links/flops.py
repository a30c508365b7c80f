"""Floating-point operations by formula, from the shapes and arguments that a trace holds.

A multiplication and the addition that follows count as two. An operator that runs another with a rule of its own
(`aten::convolution` running `aten::addmm`) counts once, as the outer one. What has no rule is not counted: the
elementwise operators, norms, pooling, embeddings; `capture.operators.ops_without_flops` names what it was in a trace.

Unless said otherwise the rules are those of `torch.utils.flop_counter`, and the totals equal `FlopCounterMode`.
They differ where it counts nothing (attention on the CPU, recurrent layers of oneDNN, cuDNN and MIOpen, products
with vectors) and for the weights' gradient of a grouped convolution, which it counts once for each group too often.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import msgspec
import numpy as np

from instrument.links.call_tree import CallTree
from instrument.trace.events import OPERATOR, Events, Flags, Ints, decoded, is_step, split_overload

Shapes = list[list[int]]
Rule = Callable[[Shapes, list[str]], int]

UNKNOWN = -1
_ABSURD = 2**60  # an hour of a petaflop device; sums of some such still fit into 64 bits


def node_flops(events: Events, call_tree: CallTree) -> Ints | None:
    """The operations that each node performs itself, -1 where no rule tells; None where the trace has no shapes.

    Cost: one evaluation for each distinct operator and arguments.
    """
    if not (events.shapes >= 0).any():
        return None
    ruled = events.named(has_rule)[call_tree.index] & (events.shapes[call_tree.index] >= 0)
    nodes = np.flatnonzero(ruled)
    event = call_tree.index[nodes]
    keys = np.stack([events.name[event], events.shapes[event], events.concrete[event]])
    distinct, code = np.unique(keys, axis=1, return_inverse=True)
    values = np.array([_evaluate(events, *key) for key in distinct.T.tolist()], np.int64)
    flops = np.full(len(call_tree), UNKNOWN)
    flops[nodes] = values[code.reshape(-1)]
    return _outermost(call_tree, flops)


def has_rule(name: str) -> bool:
    """Whether there is a rule for the operator of this name, with or without its overload."""
    return split_overload(name)[0] in RULES


def nodes_without_flops(events: Events, call_tree: CallTree, own: Ints | None) -> Flags:
    """Which operators no rule counted: neither themselves, nor in what they call, nor in what called them.

    `own` is what `node_flops` gives. Of those inside each other the outermost alone.
    """
    operator = events.among(OPERATOR)[call_tree.index] & ~events.named(is_step)[call_tree.index]
    counted = np.zeros(len(call_tree), np.bool_) if own is None else own != UNKNOWN
    bare = (
        operator
        & (call_tree.with_descendants(counted.astype(np.int64)) == 0)
        & (call_tree.nearest(counted) < 0)
    )
    outer = np.append(call_tree.nearest(bare), -1)[call_tree.parent]
    found: Flags = bare & (outer < 0)
    return found


def _outermost(call_tree: CallTree, flops: Ints) -> Ints:
    """The counts without those of a node below another that counts."""
    counting = call_tree.nearest(flops != UNKNOWN)
    below = (call_tree.parent >= 0) & (counting[call_tree.parent] >= 0)
    return np.where(below, UNKNOWN, flops)


def _evaluate(events: Events, name: int, shapes: int, concrete: int) -> int:
    """One rule's answer; -1 for shapes that the rule does not understand, as of a nested tensor."""
    dims = decoded(events.texts[shapes])
    given = decoded(events.texts[concrete]) if concrete >= 0 else []
    try:
        count = RULES[split_overload(events.names[name])[0]](dims, given)
    except (ValueError, IndexError, TypeError, ArithmeticError, msgspec.DecodeError):
        return UNKNOWN
    return count if isinstance(count, int) and 0 <= count < _ABSURD else UNKNOWN


def _product(a: list[int], b: list[int]) -> int:
    """[m, k] by [k, n]: m*n dot products of length k; with a batch in front, as many times (mm_flop, bmm_flop)."""
    *batch, m, k = a
    *_, n = b
    return 2 * prod(batch) * m * n * k


def _matrices(first: int) -> Rule:
    """The product of the operands at `first` and the next place; what is added before (`addmm`) is not counted."""
    return lambda dims, _: _product(dims[first], dims[first + 1])


def _matrix_vector(first: int) -> Rule:
    """[m, k] by [k]: as `_product` with one column (no rule in flop_counter)."""
    return lambda dims, _: 2 * prod(dims[first])


def _convolution(dims: Shapes, given: list[str]) -> int:
    """conv_flop_count: the filter is applied at each point of the output, or of a transposed one's input.

    The trace does not hold the output's shape; it follows from those of the inputs (torch.nn.Conv2d's formula).
    """
    image, weight = dims[0], dims[1]
    if given[6] == "True":
        return _applications(image, weight)
    stride, padding, dilation = (_numbers(text, len(image) - 2) for text in given[3:6])
    output = [
        (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, dil in zip(image[2:], weight[2:], stride, padding, dilation)
    ]
    return _applications([image[0], 0, *output], weight)


def _applications(points: list[int], weight: list[int]) -> int:
    """A filter [out, in / groups, ...] at every point of [batch, channels, ...]."""
    return 2 * points[0] * prod(points[2:]) * prod(weight)


def _convolution_backward(dims: Shapes, given: list[str]) -> int:
    """conv_backward_flop: the gradients of input and weight each cost as much as the forward pass, if asked for."""
    gradient, image, weight = dims[:3]
    asked = given[10].strip("[]").split(", ")[:2].count("True")
    return asked * _applications(image if given[7] == "True" else gradient, weight)


def _numbers(text: str, length: int) -> list[int]:
    """A list such as "[1, 1]"; a single number stands for all dimensions."""
    values: list[int] = msgspec.json.decode(text, type=list[int])
    return values * length if len(values) == 1 else values


def _attention(dims: Shapes, _: list[str]) -> int:
    """sdpa_flop_count: the scores, then their product with the values; a causal mask saves nothing in this count."""
    query, key, value = dims[:3]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (width + value[3])


def _attention_backward(dims: Shapes, _: list[str]) -> int:
    """sdpa_backward_flop_count: scores again, gradients of scores, values, query and key."""
    _gradient, query, key, value = dims[:4]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (3 * width + 2 * value[3])


def _recurrent(times: int) -> Rule:
    """A oneDNN layer: for each step and sequence one product with each weight matrix (counted by hand).

    Backward asks for the gradient of the inputs and of the weights: twice as much.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        (steps, batch, _width), of_input, of_hidden = dims[:3]
        return times * 2 * steps * batch * (prod(of_input) + prod(of_hidden))

    return rule


def _recurrent_stack(times: int) -> Rule:
    """All layers of cuDNN or MIOpen at once: every weight matrix meets every step of every sequence (by hand).

    The gradients of inputs and weights are taken to be both asked for: twice as much.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        data, weights = dims[:2]
        matrices = [weight for weight in weights if len(weight) == 2]  # type: ignore[arg-type]  # a list of tensors
        return times * 2 * prod(data[:-1]) * sum(map(prod, matrices))  # type: ignore[arg-type]

    return rule


_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

RULES: dict[str, Rule] = {
    "aten::mm": _matrices(0),
    "aten::_int_mm": _matrices(0),
    "aten::_scaled_mm": _matrices(0),
    "aten::bmm": _matrices(0),
    "aten::addmm": _matrices(1),
    "aten::addmm_": _matrices(1),
    "aten::_addmm_activation": _matrices(1),
    "aten::baddbmm": _matrices(1),
    "aten::baddbmm_": _matrices(1),
    "aten::addbmm": _matrices(1),
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
}
