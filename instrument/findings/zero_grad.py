"""Find gradients that are filled with zeros, although they could be set to None.

The check looks for fills inside the range "Optimizer.zero_grad#…", which torch opens. With
`set_to_none=True`, the default, there are no fills. With `set_to_none=False`, the gradients stay,
which has two costs. They are filled with zeros, and the next backward adds the new gradient to each
of them instead of storing the new gradient.

The simulation removes the fills, and the additions in the nodes that accumulate gradients. It
removes only the additions of the first backward after the fills: one addition for each filled
gradient. Later backward passes, as in gradient accumulation, must add.

There is a finding if this work takes at least 1 % of the time of the steps. Even then, there is no
finding if the simulation saves less than 0.5 % of the step. The simulation saves nothing if a step
without this work only waits longer for something else, such as the loader.

The check does not find `module.zero_grad(set_to_none=False)`, which opens no range. If one call
fills all gradients, the trace does not show their number. Then the share and the saving do not
include the additions. The check does not measure the memory that the gradients keep between the
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.event_time import share_of
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Finding, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.links.autograd import ACCUMULATION
from instrument.trace.events import Ints
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.01
_LEAST_SAVING = 0.005
_RANGE = "Optimizer.zero_grad#"
_FILL = "aten::zero_"
_FILL_ALL = "aten::_foreach_zero_"
_ADDS = frozenset({"aten::add_", "aten::add"})


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if zeroing gradients and adding to them takes at least 1 % of the steps."""
    events = capture.events
    fills = _inside(capture, lambda name: name.startswith(_RANGE), {_FILL, _FILL_ALL}.__contains__)
    adds = _additions(capture, fills)
    both = np.concatenate([fills, adds])
    share = share_of(capture, both)
    if share < _LEAST_SHARE:
        return
    saving = scaled(whatif, both)
    if not is_worth(saving, _LEAST_SAVING):
        return
    place, source = common_place(capture, fills)
    steps = capture.links.counted_steps
    count = int((steps.holds(events.start_ns[fills]) >= 0).sum()) // steps.count
    adding = (
        f", and {len(adds) * count // len(fills)} additions to these gradients" if len(adds) else ""
    )
    yield Finding(
        code=CHECK.code,
        title=f"{percent(share)} of the {steps.what} fills gradients with zeros: {count} fills "
        f"a {steps.what}{adding}",
        change="optimizer.zero_grad(set_to_none=True)",
        verify=show_command(
            capture, "--ops --rows 30", "aten::zero_ is gone, and aten::add_ has fewer calls"
        ),
        share=share,
        saving=saving,
        range=place,
        source=source,
        evidence=evidence(capture, both),
        coverage=("CPU time within finished steps",),
    )


def _inside(
    capture: Views, is_around: Callable[[str], bool], is_wanted: Callable[[str], bool]
) -> Ints:
    """The outermost events that `is_wanted` accepts by name, sorted by start.

    Only events inside an event that `is_around` accepts by name are included.
    """
    events, tree = capture.events, capture.links.call_tree
    around = tree.at_or_inside(events.named(is_around)[tree.index])
    found = tree.index[tree.outermost(events.named(is_wanted)[tree.index] & around)]
    return found[np.argsort(events.start_ns[found], kind="stable")]


def _additions(capture: Views, fills: Ints) -> Ints:
    """The additions that would not run if gradients were set to None and not filled with zeros.

    Fills with no addition between them are a group. After a group of n fills, the first n additions
    count. If the next group begins before n additions have run, only the additions before the next
    group count. A fill of all gradients in one call (`_FILL_ALL`) belongs to no group, because the
    number of its gradients is not known.
    """
    events = capture.events
    adds = _inside(capture, lambda name: name.endswith(ACCUMULATION), _ADDS.__contains__)
    single = fills[events.named(_FILL.__eq__)[fills]]
    if not len(adds) or not len(single):
        return adds[:0]
    # The fills between the same two additions follow each other: they are one group.
    before = np.searchsorted(events.start_ns[adds], events.start_ns[single])
    first, count = np.unique(before, return_counts=True)
    number = np.arange(len(adds))
    group = np.searchsorted(first, number, "right") - 1
    found: Ints = adds[(group >= 0) & (number - first[group] < count[group])]
    return found


CHECK = Check("zero-grad", find)
