"""`float64`: operators on the CPU that compute in double precision.

A model that is float64 by accident is common: numpy's arrays are float64, and `torch.from_numpy`
keeps their type. The check reads the input types of operators (`record_shapes`). An operator counts
if its first input is a float64 tensor. So an operator on a float32 tensor and a Python number, such
as `x * 2.0`, does not count. There is a finding if such operators take at least 10 % of the time of
the steps. Even then, there is no finding if the simulation saves less than 3 % of the step.

The simulation lets these operators take half the time: float32 has half the bytes, and twice as
many numbers fit into a register of the CPU. Operators on small tensors gain less than this.

The check cannot see whether a program needs the precision. If the window has device work, this
check finds nothing: the check `tensor-cores` looks at the kernels instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.event_time import share_of
from instrument.findings.evidence import evidence
from instrument.findings.finding import RECORD_SHAPES, Check, Finding, NotRecorded, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.trace.events import OPERATOR, Ints, decoded
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.1
_LEAST_SAVING = 0.03
_FASTER = 0.5
_LONGEST_DETAIL = 200
_FLOAT64 = "double"  # torch's word for it in a trace


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if operators in float64 take at least 10 % of the steps."""
    if len(capture.work.event):
        return
    if not (capture.events.types >= 0).any():
        raise NotRecorded("the trace has no input types", RECORD_SHAPES)
    operators = _in_float64(capture)
    share = share_of(capture, operators)
    if share < _LEAST_SHARE:
        return
    saving = scaled(whatif, operators, by=_FASTER)
    if not is_worth(saving, _LEAST_SAVING):
        return
    path, source = common_place(capture, operators)
    yield Finding(
        code="float64",
        title=f"{percent(share)} of the {capture.links.counted_steps.what} computes in float64",
        change="Use float32: model.float(), and torch.from_numpy(array).float() for data from "
        "numpy.",
        verify=show_command(
            capture, "--ops --by input_types", "float64 is 'double', and float32 is 'float'"
        ),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=evidence(capture, operators, detail=_types_of_longest(capture, operators)),
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
    """The input types of the longest operator."""
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


CHECK = Check("float64", find)
