"""`layout-and-casts`: copies that only change the layout or the type of tensors take time.

The check looks for three kinds of work. There is a finding for each kind that takes at least the
given share of the step. Even then, there is no finding if the simulation without this work saves
less than 1 % of the step. The kinds are:

- Layout, 5 %: kernels with which cuDNN and MIOpen convert between NCHW and NHWC before and after a
  convolution.
- Casts, 10 %: calls of `aten::to` and `aten::_to_copy` that copy within the device, or within the
  CPU in a trace without device work.
- Copies, 10 %: calls of `aten::contiguous` and `aten::clone` that copy.

Some casts and copies are needed, and healthy programs spend up to 6 % of the step in each kind.
Work of the data loader does not count.

The check does not know which copies are needed. It does not see conversions inside other kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.breakdown import COPY, KERNEL
from instrument.analysis.coverage_rows import LAUNCHERS
from instrument.analysis.places import common_place
from instrument.analysis.steps import is_loading
from instrument.analysis.views import Views
from instrument.findings.costs import cost_share, costs, evidence_of_nodes
from instrument.findings.device_time import LEAST_SAVING, device_share, launched_by
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Finding, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.links.groupby import Groups, isin
from instrument.trace.events import OPERATOR, Ints, split_overload
from instrument.units import counted, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|^batched_transpose_\d", re.IGNORECASE)
_CASTS = frozenset({"aten::to", "aten::_to_copy"})
_COPIES = frozenset({"aten::contiguous", "aten::clone"})
_BETWEEN_DEVICES = re.compile(r"HtoD|DtoH|PtoP|Host", re.IGNORECASE)
_LEAST_LAYOUT, _LEAST_COPIES = 0.05, 0.1
_CHANGES = {
    "cast": "Cast once instead of in each step: keep parameters and constants in the type in which "
    "they are used, such as model.to(torch.bfloat16), or cast the input of the model, not that of "
    "each layer.",
    "copy": "Remove .contiguous() if the next operator can read any layout, and .clone() if "
    "nothing writes to the copy in place; or store the tensor in the layout in which it is read.",
}


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield a finding for each kind of conversion that takes a large part of the step."""
    if len(capture.work.event):
        yield from _layouts(capture, whatif)
    for what, names in (("cast", _CASTS), ("copy", _COPIES)):
        yield from _conversions(capture, whatif, what, names)


def _layouts(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    work, time = capture.work, capture.links.counted_steps
    is_layout = capture.events.named(lambda name: _LAYOUT.search(name) is not None)
    chosen = work.event[(work.kind == KERNEL) & is_layout[work.event]]
    share = device_share(capture, time, chosen)
    if share < _LEAST_LAYOUT:
        return
    saving = scaled(whatif, chosen)
    if not is_worth(saving, LEAST_SAVING):
        return
    path, source = common_place(capture, chosen)
    yield Finding(
        code="layout-and-casts",
        title=f"{percent(share)} of the {time.what} converts tensors between NCHW and NHWC: "
        f"{len(chosen):,} kernels",
        change="Keep one layout: model = model.to(memory_format=torch.channels_last), and "
        "batch = batch.to(memory_format=torch.channels_last).",
        verify=show_command(capture, "--kernels"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=evidence(capture, chosen),
        coverage=LAUNCHERS,
    )


def _conversions(
    capture: Views, whatif: Scenario, what: str, names: frozenset[str]
) -> Iterator[Finding]:
    time, tree = capture.links.counted_steps, capture.links.call_tree
    nodes = _copying(capture, names)
    share = cost_share(capture, time, nodes) if len(nodes) else 0.0
    if share < _LEAST_COPIES:
        return
    chosen = tree.index[nodes]
    saving = scaled(whatif, chosen)
    if not is_worth(saving, LEAST_SAVING):
        return
    path, source = common_place(capture, chosen, costs(capture, nodes))
    does = "casts tensors" if what == "cast" else "copies tensors with contiguous() or clone()"
    yield Finding(
        code="layout-and-casts",
        title=f"{percent(share)} of the {time.what} {does}: "
        f"{counted(round(len(nodes) / time.count), 'call')} a {time.what}",
        change=_CHANGES[what],
        verify=show_command(capture, "--ops --by range" if path else "--ops"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=evidence_of_nodes(capture, nodes),
        coverage=LAUNCHERS,
    )


def _copying(capture: Views, names: frozenset[str]) -> Ints:
    """The outermost calls of the operators in `names`, as nodes of the call tree.

    Only calls that copy within one device are returned. Calls outside the measured steps and calls
    inside the data loader are left out.
    """
    events, tree = capture.events, capture.links.call_tree
    named = events.named(lambda name: split_overload(name)[0] in names) & events.among(OPERATOR)
    other = events.named(lambda name: split_overload(name)[0] in (_CASTS | _COPIES) - names)
    copies = events.named(lambda name: split_overload(name)[0] == "aten::copy_")
    stops = (named | (other & events.among(OPERATOR)) | is_loading(events))[tree.index]
    copying = tree.with_descendants(copies[tree.index].astype(np.int64)) > 0
    nodes = np.flatnonzero(named[tree.index] & ~tree.inside(stops) & copying)
    nodes = nodes[capture.links.counted_steps.holds(tree.start_ns[nodes]) >= 0]
    device, around = launched_by(capture, nodes)
    across = events.named(lambda name: _BETWEEN_DEVICES.search(name) is not None)
    is_copy = isin(device, capture.work.event[capture.work.kind == COPY])
    moves = Groups(around, len(nodes)).number(across[device] & is_copy) > 0
    return nodes[~moves]


CHECK = Check("layout-and-casts", find)
