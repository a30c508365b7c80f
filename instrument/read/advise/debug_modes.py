"""`debug-modes`: anomaly detection, a debugging mode of torch that slows training, is on.

`capture.json` says so, or most backward nodes of the trace search their gradients with
`aten::isnan`. There is a finding even if the mode takes little time. In the forward, each operator
that makes a backward node also stores the Python stack, for which the trace has no event: the time
is estimated as the 25th percentile of the self times of operators that make a node, minus the
median self time of those that cannot. The simulation subtracts both costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.autograd_nodes import makers, shortened
from instrument.read.advise.check import RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.read.advise.evidence import share_with_device
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.groupby import isin
from instrument.read.trace.events import OPERATOR, Flags, Ints
from instrument.read.views.coverage_rows import JOINED
from instrument.read.views.views import Views

_SEARCH = frozenset({"aten::isnan", "aten::_is_any_true", "aten::any", "aten::item"})
_FIRST = "aten::isnan"
# If a larger share of the backward nodes searches for NaN, anomaly mode is on. A smaller share may
# come from hooks of the user.
_LEAST_SEARCHED = 0.5
# An operator at this percentile of the own times computes almost nothing, such as a view.
_CHEAP = 25


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if anomaly mode was on."""
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
    if not len(search):
        yield Problem("Anomaly detection is on")
        return
    stored, stack_ns = _stacks(capture)
    share = share_with_device(capture, search)
    yield Problem(
        "Anomaly detection is on; the search for NaN in the gradients takes "
        f"{percent(share)} of the {capture.links.counted_steps.what}",
        search,
        share,
        edit=lambda whatif: shortened(capture, whatif.scale_events(search, by=0), stored, stack_ns),
        place=(None, None),
    )


CHECK = Check(
    "debug-modes",
    find,
    change="Call torch.autograd.set_detect_anomaly(False), and remove "
    "torch.autograd.detect_anomaly().",
    verify="--ops  # aten::isnan is gone",
    coverage=(JOINED,),
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
