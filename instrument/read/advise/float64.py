"""`float64`: operators on the CPU that compute in double precision.

An operator counts if its first input is a float64 tensor. Without recorded types, all operators of
the steps count, except those that load data, if nearly all parameters of the session's models are
float64: their layers refuse inputs of another type. The simulation lets these operators take
half the time: float32 has half the bytes, and twice as many numbers fit into a register. Operators
that take as long in float32 (`_AS_LONG`) do not count. The check cannot see whether a program needs
the precision. If the trace has device work, the check `tensor-cores` looks at the kernels instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import INPUT_TYPES, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, share_of
from instrument.read.facts.segments import waits_for_data
from instrument.read.trace.events import OPERATOR, Flags, Ints, called_operators, decoded
from instrument.read.views.views import Views

_LONGEST_DETAIL = 200
# Measured on a CPU (torch 2.13): in float32, these take 84 to 130 % of the time, others 17 to 81 %.
_AS_LONG = re.compile(
    r"::_?(arg)?(sort|topk|unique|nonzero|searchsorted|bucketize|index|scatter|gather|dropout"
    r"|bernoulli)"
)
_FLOAT64 = "double"  # torch's word for it in a trace
_PARAMETER, _NEARLY_ALL = "float64", 0.9
_OF_PARAMETERS = (
    "Record again: this finding must be gone; profiler.record_shapes=true shows the types."
)


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all operators in float64."""
    has_types = INPUT_TYPES.is_met(capture)
    if not has_types and not _are_parameters_float64(capture):
        raise NotRecorded(INPUT_TYPES.missing, INPUT_TYPES.remedy)
    operators = _outermost(capture, _typed(capture) if has_types else _not_loading(capture))
    share = share_of(capture, operators)
    if share < CHECK.least_share:
        return
    what = f"{percent(share)} of the {capture.links.counted_steps.what} computes in float64"
    if has_types:
        detail = _types_of_longest(capture, operators)
        yield Problem(what, operators, share, evidence=evidence(capture, operators, detail=detail))
    else:
        yield Problem(
            f"{what}, the type of the model's parameters", operators, share, verify=_OF_PARAMETERS
        )


CHECK = Check(
    "float64",
    find,
    change="Use float32: model.float(), and torch.from_numpy(array).float() for data from numpy.",
    verify="--ops --by input_types  # float64 is 'double', and float32 is 'float'",
    least_share=0.1,
    least_saving=0.03,
    factor=0.5,
    assumes="in float32",
    on_device=False,
)


def _are_parameters_float64(capture: Views) -> bool:
    """Whether nearly all parameters of the session's models are float64."""
    numbers = capture.about.parameter_types
    return numbers.get(_PARAMETER, 0) > _NEARLY_ALL * sum(numbers.values())


def _outermost(capture: Views, chosen: Flags) -> Ints:
    """The positions of the outermost chosen nodes in the steps that float32 makes faster."""
    tree = capture.links.call_tree
    in_steps = capture.links.counted_steps.holds(tree.start_ns) >= 0
    as_long = capture.events.named(lambda name: _AS_LONG.search(name) is not None)[tree.index]
    found: Ints = tree.index[tree.outermost(chosen) & in_steps & ~as_long]
    return found


def _typed(capture: Views) -> Flags:
    """A mask of the nodes that are operators in float64, by their recorded types."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    codes = np.unique(events.types[tree.index[is_operator]])
    wanted = [code for code in codes[codes >= 0].tolist() if _is_float64(events.texts[code])]
    found: Flags = np.isin(events.types, wanted)[tree.index] & is_operator
    return found


def _not_loading(capture: Views) -> Flags:
    """A mask of the nodes that are operators, but not of a wait for data."""
    tree, loads = capture.links.call_tree, waits_for_data(capture)
    found: Flags = called_operators(capture.events)[tree.index]
    return found & ~tree.at_or_inside(np.isin(tree.index, loads))


def _types_of_longest(capture: Views, operators: Ints) -> str:
    events = capture.events
    longest = operators[np.argmax(events.duration_ns[operators])]
    types = decoded(events.texts[events.types[longest]])
    return f"inputs of the longest: {types}"[:_LONGEST_DETAIL]


def _is_float64(types: bytes) -> bool:
    """Whether the first input is a float64 tensor, or a list that begins with such a tensor."""
    given = decoded(types)
    while isinstance(given, list) and given:
        given = given[0]
    return bool(given == _FLOAT64)
