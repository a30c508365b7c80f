"""Count the bytes that an operator must read and write, from shapes and types in a trace.

Each input counts once and each output once (docs/how-to/efficiency.md says what is left out).
There are rules for products of matrices and vectors, convolutions and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from instrument.read.facts.flops import (
    FUSED_ATTENTION,
    Shapes,
    convolution_output,
    elements,
    evaluated,
)
from instrument.read.trace.events import decoded, split_overload

#: For each element type of a trace, its name in torch and the size of an element in bytes.
ELEMENT_TYPES = {
    "double": ("float64", 8),
    "float": ("float32", 4),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
    "c10::Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "c10::complex<double>": ("complex128", 16),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<c10::Half>": ("complex32", 4),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "bool": ("bool", 1),
}
# The size of an element in bytes, by torch's number of the type (c10/core/ScalarType.h). In a
# trace, an argument `out_dtype` is such a number.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 8: 4, 9: 8, 10: 16, 11: 1, 15: 2}
_SIZES |= dict.fromkeys((23, 24, 25, 26), 1)


@dataclass(frozen=True, slots=True)
class _Call:
    """The shapes, types and other arguments of a call, as the trace has them."""

    dims: Shapes
    types: list[str]
    arguments: list[str]

    def size(self, at: int) -> int:
        """The size of an element of an argument, in bytes."""
        return ELEMENT_TYPES[self.types[at]][1]

    def bytes(self, at: int) -> int:
        """The size of an argument, in bytes; 0 for an optional tensor that is not given."""
        return elements(self.dims[at]) * self.size(at) if self.types[at] else 0

    def scalars(self, first: int) -> list[str]:
        """The arguments from the position `first` on that are not tensors."""
        pairs = zip(self.types[first:], self.arguments[first:])
        return [text for kind, text in pairs if kind not in ELEMENT_TYPES]


_Rule = Callable[[_Call], int]


def moved_bytes(name: str, shapes: bytes, types: bytes, arguments: bytes | None) -> int:
    """The number of bytes that a call must at least read and write.

    `UNKNOWN` if there is no rule for the operator, or if a shape or type is not known. `shapes`,
    `types` and `arguments` are items of `Events.texts`.
    """
    if (rule := _RULES.get(split_overload(name)[0])) is None:
        rule = _unknown
    given = decoded(arguments) if arguments is not None else []
    return evaluated(rule, _Call(decoded(shapes), decoded(types), given))


def operand_types(name: str, types: bytes) -> list[str]:
    """The distinct types of the tensors that an operator multiplies, under their names in torch."""
    given, operands = decoded(types), _OPERANDS.get(split_overload(name)[0], slice(0, 1))
    if not isinstance(given, list):
        return []
    found = [kind for kind in given[operands] if isinstance(kind, str)]
    return list(dict.fromkeys(ELEMENT_TYPES.get(kind, (kind, 0))[0] for kind in found))


def _unknown(_: _Call) -> int:
    raise ValueError


def _product(call: _Call, first: int, size: int) -> int:
    """The bytes of both operands of a matrix product, and of its result.

    `first` is the position of the first operand, and `size` the size of an element of the result.
    """
    *batch, rows, _ = call.dims[first]
    result = elements(batch) * rows * call.dims[first + 1][-1] * size
    return call.bytes(first) + call.bytes(first + 1) + result


def _matrix_product(call: _Call) -> int:
    given = call.scalars(2)
    return _product(call, 0, _SIZES[int(given[0])] if given else call.size(0))


def _integer_product(call: _Call) -> int:
    return _product(call, 0, _SIZES[3])


def _scaled_product(call: _Call) -> int:
    """The bytes of `_scaled_mm`, which also reads two scales and a bias."""
    kind = call.arguments[6]
    size = _SIZES[int(kind)] if kind else call.size(0)
    return _product(call, 0, size) + call.bytes(2) + call.bytes(3) + call.bytes(4)


def _added_product(call: _Call) -> int:
    """The bytes of `addmm` or `baddbmm`; the first of three scalars is the type of the result."""
    given = call.scalars(3)
    size = _SIZES[int(given[0])] if len(given) == 3 else call.size(1)
    return _product(call, 1, size) + _addend(call, given[-2:])


def _activated_product(call: _Call) -> int:
    return _product(call, 1, call.size(1)) + _addend(call, call.scalars(3))


def _summed_product(call: _Call) -> int:
    """The bytes of `addbmm`, which sums the products of all pairs of matrices into one matrix."""
    result = call.dims[1][-2] * call.dims[2][-1] * call.size(1)
    return call.bytes(1) + call.bytes(2) + result + _addend(call, call.scalars(3))


def _addend(call: _Call, scalars: list[str]) -> int:
    """The bytes of the tensor that is added to a product; torch does not read it if `beta` is 0."""
    return call.bytes(0) if scalars and scalars[0] and float(scalars[0]) else 0


def _matrix_vector(call: _Call) -> int:
    return call.bytes(0) + call.bytes(1) + call.dims[0][0] * call.size(0)


def _added_matrix_vector(call: _Call) -> int:
    result = call.dims[1][0] * call.size(1)
    return call.bytes(1) + call.bytes(2) + result + _addend(call, call.scalars(3))


def _dot_product(call: _Call) -> int:
    return call.bytes(0) + call.bytes(1) + call.size(0)


def _convolution(call: _Call) -> int:
    output = elements(convolution_output(call.dims, call.arguments)) * call.size(0)
    return call.bytes(0) + call.bytes(1) + call.bytes(2) + output


def _convolution_backward(call: _Call) -> int:
    """The gradient of the output is read once; each gradient reads one tensor and writes one."""
    gradient, image, weight = (call.bytes(at) for at in range(3))
    mask = [text == "True" for text in call.arguments[10].strip("[]").split(", ")]
    total = gradient if any(mask) else 0
    total += (mask[0] + mask[1]) * (image + weight)
    channels = call.dims[0][1]
    return total + mask[2] * channels * call.size(0)


def _attention(call: _Call) -> int:
    query, value = call.dims[0], call.dims[2]
    output = elements(query[:-1]) * value[-1] * call.size(0)
    return call.bytes(0) + call.bytes(1) + call.bytes(2) + output


def _attention_backward(call: _Call) -> int:
    """Query, key, value and output (or its gradient) are read, and as many bytes written."""
    return 2 * sum(call.bytes(at) for at in range(4))


_RULES: dict[str, _Rule] = {
    "aten::mm": _matrix_product,
    "aten::bmm": _matrix_product,
    "aten::_int_mm": _integer_product,
    "aten::_scaled_mm": _scaled_product,
    "aten::addmm": _added_product,
    "aten::addmm_": _added_product,
    "aten::baddbmm": _added_product,
    "aten::baddbmm_": _added_product,
    "aten::_addmm_activation": _activated_product,
    "aten::addbmm": _summed_product,
    "aten::mv": _matrix_vector,
    "aten::addmv": _added_matrix_vector,
    "aten::addmv_": _added_matrix_vector,
    "aten::dot": _dot_product,
    "aten::vdot": _dot_product,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::convolution_backward_overrideable": _convolution_backward,
    **{
        name: _attention_backward if name.endswith("_backward") else _attention
        for name in FUSED_ATTENTION
    },
}
# The arguments that an operator multiplies.
_OPERANDS = {
    name: slice(0, 4)
    if rule is _attention_backward
    else slice(0, 3)
    if rule in (_attention, _convolution_backward)
    else slice(1, 3)
    if rule in (_added_product, _activated_product, _summed_product, _added_matrix_vector)
    else slice(0, 2)
    for name, rule in _RULES.items()
}
