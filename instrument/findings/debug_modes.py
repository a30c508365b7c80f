"""Find out whether anomaly detection, a debugging mode of torch that slows training, is on.

The check reads `anomaly_mode` in `capture.json`. It also looks for the effect of the mode: at the
end of each backward node, the engine searches the gradients for NaN with `aten::isnan`. The mode
has two costs:

- In the backward, the engine searches each gradient, and waits for the device each time.
- In the forward, each operator that makes a backward node also stores the Python stack, which takes
  about 100 µs. The trace has no event for this time: it is part of the operator's self time. The
  check estimates this time as the 25th percentile of the self times of operators that make a node,
  minus the median self time of operators that cannot make a node. The simulation subtracts the
  estimate from each operator that makes a node.

There is a finding even if the mode takes little time, because the mode is only for debugging.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.autograd_nodes import makers
from instrument.findings.event_time import share_of, shortened
from instrument.findings.evidence import evidence
from instrument.findings.finding import RECORD_AGAIN, Check, Finding, NotRecorded, show_command
from instrument.findings.saving import scaled
from instrument.links.autograd import is_backward
from instrument.links.groupby import isin
from instrument.trace.events import OPERATOR, Flags, Ints
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_SEARCH = frozenset({"aten::isnan", "aten::_is_any_true", "aten::any", "aten::item"})
_FIRST = "aten::isnan"
# If a larger share of the backward nodes searches for NaN, anomaly mode is on. A smaller share may
# come from hooks of the user.
_LEAST_SEARCHED = 0.5
# An operator at this percentile of the own times computes almost nothing, such as a view.
_CHEAP = 25


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if anomaly mode was on."""
    environment = capture.about.environment
    recorded = None if environment is None else environment.anomaly_mode
    search, is_searched = _search(capture)
    if not is_searched and not recorded:
        if recorded is None and not is_backward(capture.events).any():
            raise NotRecorded(
                "the trace has no backward, so it does not show whether anomaly detection was on",
                RECORD_AGAIN,
            )
        return
    stored, stack_ns = _stacks(capture)
    share = share_of(capture, search)
    steps = capture.links.counted_steps
    cost = (
        f"; the search for NaN in the gradients takes {percent(share)} of the {steps.what}"
        if len(search)
        else ""
    )
    saving = scaled(whatif, search) if len(search) else None
    if saving is not None:
        saving = shortened(capture, saving, stored, stack_ns)
    yield Finding(
        code=CHECK.code,
        title=f"Anomaly detection is on{cost}",
        change="Call torch.autograd.set_detect_anomaly(False), and remove "
        "torch.autograd.detect_anomaly().",
        verify=show_command(capture, "--ops", "aten::isnan is gone"),
        share=share if len(search) else None,
        saving=saving,
        evidence=evidence(capture, search),
        coverage=("backward time joined to its forward",),
    )


def _search(capture: Views) -> tuple[Ints, bool]:
    """The calls that search gradients for NaN, and whether most backward nodes have such calls."""
    events, tree = capture.events, capture.links.call_tree
    node = is_backward(events)[tree.index] & (events.sequence >= 0)[tree.index]
    outer = node & ~np.append(node, False)[tree.parent]
    in_outer = np.append(outer, False)[tree.parent]
    chosen = in_outer & events.named(_SEARCH.__contains__)[tree.index]
    searched = np.unique(tree.parent[chosen & events.named(_FIRST.__eq__)[tree.index]])
    found: Ints = tree.index[chosen & isin(tree.parent, searched)]
    return found, len(searched) > _LEAST_SEARCHED * max(int(outer.sum()), 1)


def _stacks(capture: Views) -> tuple[Ints, float]:
    """The operators that store a Python stack, and the estimated time to store one stack."""
    events, tree = capture.events, capture.links.call_tree
    made = makers(capture)
    own_ns = tree.own(tree.total_ns)
    is_other: Flags = events.among(OPERATOR)[tree.index] & (events.sequence < 0)[tree.index]
    if not len(made) or not is_other.any():
        return made, 0.0
    cheap_ns = np.percentile(own_ns[tree.nodes_of(made)], _CHEAP)
    return made, max(float(cheap_ns - np.median(own_ns[is_other])), 0.0)


CHECK = Check("debug-modes", find)
