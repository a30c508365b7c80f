"""Count floating-point operations by formula, from the shapes and arguments in a trace.

A multiplication and the addition after it count as two operations. If an operator with a rule calls
another operator with a rule (`aten::convolution` calls `aten::addmm`), only the outer operator
counts. Operators without a rule are not counted: elementwise operators, norms, pooling, embeddings.
`capture.operators.ops_without_flops` lists the operators of a trace that are not counted.

Unless a docstring says otherwise, the rules are those of `torch.utils.flop_counter`, and the totals
equal those of `FlopCounterMode`. The totals differ in two cases. `FlopCounterMode` has no rule for
attention on the CPU, recurrent layers of oneDNN, cuDNN and MIOpen, and products with vectors. And
its count for the weight gradient of a grouped convolution is too high, by a factor of the number of
groups.
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
_TOO_MANY = 2**60  # 20 minutes at 1 PFLOP/s; a sum of a few fits into 64 bits


def node_flops(events: Events, call_tree: CallTree) -> Ints | None:
    """The FLOPs of each node itself, `UNKNOWN` for a node without a rule.

    The result is None if the trace has no shapes.

    Cost: one evaluation for each distinct combination of operator and arguments.
    """
    if not (events.shapes >= 0).any():
        return None
    nodes = np.flatnonzero(
        events.named(has_rule)[call_tree.index] & (events.shapes[call_tree.index] >= 0)
    )
    event = call_tree.index[nodes]
    keys = np.stack([events.name[event], events.shapes[event], events.concrete[event]])
    distinct, code = np.unique(keys, axis=1, return_inverse=True)
    values = np.array([_evaluate(events, *key) for key in distinct.T.tolist()], np.int64)
    flops = np.full(len(call_tree), UNKNOWN)
    flops[nodes] = values[code.reshape(-1)]
    return _outermost(call_tree, flops)


def has_rule(name: str) -> bool:
    """Whether the operator of this name, with or without an overload, has a rule."""
    return split_overload(name)[0] in RULES


def nodes_without_flops(events: Events, call_tree: CallTree, own: Ints | None) -> Flags:
    """A mask of the outermost operators whose FLOPs are not counted.

    For such an operator there is no rule, nor for any operator that it calls or that calls it. If
    several of them are nested, the mask holds the outermost. `own` is the result of `node_flops`.
    """
    operator = events.among(OPERATOR)[call_tree.index] & ~events.named(is_step)[call_tree.index]
    counted = np.zeros(len(call_tree), np.bool_) if own is None else own != UNKNOWN
    uncounted = (
        operator
        & (call_tree.with_descendants(counted.astype(np.int64)) == 0)
        & (call_tree.nearest(counted) < 0)
    )
    outer = np.append(call_tree.nearest(uncounted), -1)[call_tree.parent]
    found: Flags = uncounted & (outer < 0)
    return found


def _outermost(call_tree: CallTree, flops: Ints) -> Ints:
    """Replace the FLOPs of each node below a node with known FLOPs by `UNKNOWN`."""
    counted = call_tree.nearest(flops != UNKNOWN)
    below = (call_tree.parent >= 0) & (counted[call_tree.parent] >= 0)
    return np.where(below, UNKNOWN, flops)


def _evaluate(events: Events, name: int, shapes: int, concrete: int) -> int:
    """The FLOPs by rule; `UNKNOWN` if the shapes do not fit the rule, as for nested tensors."""
    dims = decoded(events.texts[shapes])
    arguments = decoded(events.texts[concrete]) if concrete >= 0 else []
    try:
        count = RULES[split_overload(events.names[name])[0]](dims, arguments)
    except (ValueError, IndexError, TypeError, ArithmeticError, msgspec.DecodeError):
        return UNKNOWN
    return count if isinstance(count, int) and 0 <= count < _TOO_MANY else UNKNOWN


def _product(a: list[int], b: list[int]) -> int:
    """[…, m, k] by [k, n]: m * n dot products of length k for each matrix (mm_flop, bmm_flop)."""
    *batch, m, k = a
    *_, n = b
    return 2 * prod(batch) * m * n * k


def _matrix_product(first: int) -> Rule:
    """The product of arguments `first` and `first + 1`; the addition of `addmm` is not counted."""
    return lambda dims, _: _product(dims[first], dims[first + 1])


def _matrix_vector(first: int) -> Rule:
    """[m, k] by [k], or [k] by [k] (not in flop_counter)."""
    return lambda dims, _: 2 * prod(dims[first])


def _convolution(dims: Shapes, arguments: list[str]) -> int:
    """conv_flop_count: the filter is applied at each point of the output.

    A transposed convolution applies it at each point of the input. A trace does not hold the shape
    of the output, so it is computed from the inputs (the formula of torch.nn.Conv2d).
    """
    image, weight = dims[0], dims[1]
    if arguments[6] == "True":  # transposed
        return _applications(image, weight)
    stride, padding, dilation = (_numbers(text, len(image) - 2) for text in arguments[3:6])
    output = [
        (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, dil in zip(image[2:], weight[2:], stride, padding, dilation)
    ]
    return _applications([image[0], 0, *output], weight)


def _applications(points: list[int], weight: list[int]) -> int:
    """The FLOPs of a filter [out, in / groups, …] at every point of [batch, channels, …]."""
    return 2 * points[0] * prod(points[2:]) * prod(weight)


def _convolution_backward(dims: Shapes, arguments: list[str]) -> int:
    """conv_backward_flop: the FLOPs of the forward pass, once for each gradient (input, weight).

    `output_mask` says which of the two gradients are computed.
    """
    gradient, image, weight = dims[:3]
    gradients = arguments[10].strip("[]").split(", ")[:2].count("True")  # `output_mask`
    is_transposed = arguments[7] == "True"
    return gradients * _applications(image if is_transposed else gradient, weight)


def _numbers(text: str, length: int) -> list[int]:
    """The values of a list such as "[1, 1]"; a single value holds for all dimensions."""
    values: list[int] = msgspec.json.decode(text, type=list[int])
    return values * length if len(values) == 1 else values


def _attention(dims: Shapes, _: list[str]) -> int:
    """sdpa_flop_count: the scores, and their product with the values; a mask changes nothing."""
    query, key, value = dims[:3]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (width + value[3])


def _attention_backward(dims: Shapes, _: list[str]) -> int:
    """sdpa_backward_flop_count: scores again, gradients of scores, values, query and key."""
    _gradient, query, key, value = dims[:4]
    (batch, heads, rows, width), columns = query, key[2]
    return 2 * batch * heads * rows * columns * (3 * width + 2 * value[3])


def _recurrent(times: int) -> Rule:
    """A oneDNN layer: for each step of each sequence, a product with each weight matrix.

    `times` is 2 for the backward pass, which computes the gradients of inputs and of weights. Not
    in flop_counter.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        (steps, batch, _width), of_input, of_hidden = dims[:3]
        return times * 2 * steps * batch * (prod(of_input) + prod(of_hidden))

    return rule


def _recurrent_stack(times: int) -> Rule:
    """All layers of cuDNN or MIOpen: for each step of each sequence, a product with each matrix.

    `times` is 2 for the backward pass, which computes the gradients of inputs and of weights. Not
    in flop_counter.
    """

    def rule(dims: Shapes, _: list[str]) -> int:
        data, weights = dims[:2]
        # `weights` is a list of tensors: a list of shapes.
        matrices = [weight for weight in weights if len(weight) == 2]  # type: ignore[arg-type]
        return times * 2 * prod(data[:-1]) * sum(map(prod, matrices))  # type: ignore[arg-type]

    return rule


_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

RULES: dict[str, Rule] = {
    "aten::mm": _matrix_product(0),
    "aten::_int_mm": _matrix_product(0),
    "aten::_scaled_mm": _matrix_product(0),
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
}
