"""`float64`: operators on the CPU that compute in double precision.

An operator counts if its first input is a float64 tensor. The simulation lets these operators take
half the time: float32 has half the bytes, and twice as many numbers fit into a register. The check
cannot see whether a program needs the precision. If the trace has device work, the check
`tensor-cores` looks at the kernels instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.analysis.views import Views
from instrument.base.units import percent
from instrument.findings.check import INPUT_TYPES, Check, Problem
from instrument.findings.evidence import evidence, share_of
from instrument.trace.events import OPERATOR, Ints, decoded

_LONGEST_DETAIL = 200
_FLOAT64 = "double"  # torch's word for it in a trace


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all operators in float64."""
    operators = _in_float64(capture)
    share = share_of(capture, operators)
    if share >= CHECK.least_share:
        yield Problem(
            f"{percent(share)} of the {capture.links.counted_steps.what} computes in float64",
            operators,
            share,
            evidence=evidence(capture, operators, detail=_types_of_longest(capture, operators)),
        )


CHECK = Check(
    "float64",
    find,
    change="Use float32: model.float(), and torch.from_numpy(array).float() for data from numpy.",
    verify="--ops --by input_types  # float64 is 'double', and float32 is 'float'",
    least_share=0.1,
    least_saving=0.03,
    factor=0.5,
    on_device=False,
    needs=(INPUT_TYPES,),
)


def _in_float64(capture: Views) -> Ints:
    """The positions of the outermost operators in float64 within the steps."""
    events, tree = capture.events, capture.links.call_tree
    operators = tree.index[events.among(OPERATOR)[tree.index]]
    codes = np.unique(events.types[operators])
    wanted = [code for code in codes[codes >= 0].tolist() if _is_float64(events.texts[code])]
    in_float64 = np.isin(events.types, wanted)[tree.index] & events.among(OPERATOR)[tree.index]
    in_steps = capture.links.counted_steps.holds(tree.start_ns) >= 0
    found: Ints = tree.index[tree.outermost(in_float64) & in_steps]
    return found


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
