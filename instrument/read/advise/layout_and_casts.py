"""`layout-and-casts`: copies that only change the layout or the type of tensors take time.

There is a finding for each kind of such work: kernels with which cuDNN and MIOpen convert between
NCHW and NHWC; calls of `aten::to` that copy within one device; calls of `aten::contiguous` and
`aten::clone` that copy. Healthy programs spend up to 6 % of the step in each kind. Work that the
program cannot change does not count: that of the data loader, of optimizers, and inside torch's own
operators and backward nodes (`_of_program`). The check does not know which copies are needed, and
does not see conversions inside other kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from instrument.base.units import counted, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import (
    cost_share,
    costs,
    device_kind,
    evidence_by_cost,
    launched_by,
    share_of,
)
from instrument.read.facts.attribution import FORWARD, OPTIMIZER, kinds_of_scopes
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.device_work import COPY, KERNEL
from instrument.read.facts.groupby import Groups, groupby, isin
from instrument.read.facts.idle import is_loading
from instrument.read.facts.places import common_place
from instrument.read.trace.events import OPERATOR, Flags, Ints, called_operators, split_overload
from instrument.read.views.coverage_rows import LAUNCHERS
from instrument.read.views.views import Views

_LEAST_LAYOUT, _LEAST_COPIES = 0.05, 0.1
# An operator is named if it makes copies of at least this share of their cost.
_MOSTLY = 0.5
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|^batched_transpose_\d", re.IGNORECASE)
_CASTS = frozenset({"aten::to", "aten::_to_copy"})
_COPIES = frozenset({"aten::contiguous", "aten::clone"})
_BETWEEN_DEVICES = re.compile(r"HtoD|DtoH|PtoP|Host", re.IGNORECASE)
_CHANNELS_LAST = (
    "Keep one layout: model = model.to(memory_format=torch.channels_last), and "
    "batch = batch.to(memory_format=torch.channels_last)."
)
_ON_ROCM = (
    " Set PYTORCH_MIOPEN_SUGGEST_NHWC=1 before the program starts; without it, torch gives MIOpen "
    "NCHW in any case."
)
_CAST_ONCE = (
    "Cast once instead of in each step: keep parameters and constants in the type in which "
    "they are used, such as model.to(torch.bfloat16), or cast the input of the model, not that of "
    "each layer."
)
_COPY_LESS = (
    "Remove .contiguous() if the next operator can read any layout, and .clone() if "
    "nothing writes to the copy in place; or store the tensor in the layout in which it is read."
)

# Names of torch's operators and of the backward nodes of these; not of a user's autograd function.
_TORCHS = re.compile(r"\w+::|.*Backward\d+$")
_OTHER_LAYOUT = (
    "{} copies its input because it cannot read this layout, such as that of .expand(), .t() or a "
    "slice: store the tensor once in a layout that it reads, or use an operator that reads any."
)


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each kind of conversion that takes a large part of the step."""
    if len(capture.work.event):
        yield from _layouts(capture)
    yield from _conversions(capture, _CASTS, "casts tensors", _CAST_ONCE)
    yield from _conversions(
        capture, _COPIES, "copies tensors with contiguous() or clone()", _COPY_LESS
    )


CHECK = Check(
    "layout-and-casts",
    find,
    verify="--ops",
    factor=0,
    coverage=LAUNCHERS,
)


def _layouts(capture: Views) -> Iterator[Problem]:
    work, steps = capture.work, capture.links.counted_steps
    is_layout = capture.events.named(lambda name: _LAYOUT.search(name) is not None)
    kernels = work.event[(work.kind == KERNEL) & is_layout[work.event]]
    share = share_of(capture, kernels)
    if share >= _LEAST_LAYOUT:
        number = int((steps.holds(capture.events.start_ns[kernels]) >= 0).sum()) / steps.count
        yield Problem(
            f"{percent(share)} of the {steps.what} converts tensors between NCHW and NHWC: "
            f"{counted(round(number), 'kernel')} a {steps.what}",
            kernels,
            share,
            variant="layout",
            change=_CHANNELS_LAST + _ON_ROCM * (device_kind(capture) == "hip"),
            verify="--kernels",
        )


def _conversions(
    capture: Views, names: frozenset[str], does: str, change: str
) -> Iterator[Problem]:
    steps, tree = capture.links.counted_steps, capture.links.call_tree
    nodes = _copying(capture, names)
    share = cost_share(capture, nodes) if len(nodes) else 0.0
    if share < _LEAST_COPIES:
        return
    place = common_place(capture, tree.index[nodes], costs(capture, nodes))
    caller = _caller(capture, nodes) if names == _COPIES else None
    if caller is not None:
        does, change = f"copies tensors inside {caller}", _OTHER_LAYOUT.format(caller)
    yield Problem(
        f"{percent(share)} of the {steps.what} {does}: "
        f"{counted(round(len(nodes) / steps.count), 'call')} a {steps.what}",
        tree.index[nodes],
        share,
        place=place,
        evidence=evidence_by_cost(capture, nodes),
        variant=does,
        change=change,
        verify="--ops --by range" if place[0] else "",
    )


def _copying(capture: Views, names: frozenset[str]) -> Ints:
    """The outermost calls of the operators in `names`, as nodes of the call tree.

    Only calls that copy within one device are returned. Calls outside the measured steps, and calls
    of the data loader or of an optimizer itself are left out.
    """
    events, tree = capture.events, capture.links.call_tree
    named = events.named(lambda name: split_overload(name)[0] in names) & events.among(OPERATOR)
    other = events.named(lambda name: split_overload(name)[0] in (_CASTS | _COPIES) - names)
    copies = events.named(lambda name: split_overload(name)[0] == "aten::copy_")
    stops = (named | (other & events.among(OPERATOR)) | is_loading(events))[tree.index]
    copying = tree.with_descendants(copies[tree.index].astype(np.int64)) > 0
    nodes = np.flatnonzero(named[tree.index] & ~tree.inside(stops) & copying)
    nodes = nodes[capture.links.counted_steps.holds(tree.start_ns[nodes]) >= 0]
    nodes = nodes[~_of_optimizer(capture, nodes) & _of_program(capture, nodes, names)]
    device, around = launched_by(capture, nodes)
    across = events.named(lambda name: _BETWEEN_DEVICES.search(name) is not None)
    is_copy = isin(device, capture.work.event[capture.work.kind == COPY])
    moves = Groups(around, len(nodes)).number(across[device] & is_copy) > 0
    return nodes[~moves]


def _caller(capture: Views, nodes: Ints) -> str | None:
    """The operator that itself makes most of the copies; None if the program makes them."""
    events, tree = capture.events, capture.links.call_tree
    cost = costs(capture, nodes)
    parent = tree.index[np.maximum(tree.parent[nodes], 0)]
    calls = (called_operators(events) & ~is_backward(events))[parent] & (tree.parent[nodes] >= 0)
    names, groups = groupby(events.name[parent[calls]].astype(np.int64))
    spent = groups.sum(cost[calls])
    if not len(names) or spent.max() < _MOSTLY * cost.sum():
        return None
    return split_overload(events.names[names[np.argmax(spent)]])[0]


def _of_program(capture: Views, nodes: Ints, names: frozenset[str]) -> Flags:
    """Whether the program can change each cast or copy: its own code calls it.

    A copy inside an operator counts too, as the operator cannot read the layout of its input; but
    not inside the backward, nor where the copy is the result, as `aten::masked_fill` makes one for
    `aten::masked_fill_`.
    """
    events, tree = capture.events, capture.links.call_tree
    by_torch = events.named(lambda name: _TORCHS.match(name) is not None)
    by_torch &= called_operators(events)
    has_parent = tree.parent[nodes] >= 0
    parent = tree.index[np.maximum(tree.parent[nodes], 0)]
    of_program: Flags = ~(by_torch[parent] & has_parent)
    if names == _COPIES:
        known = {split_overload(name)[0] for name in events.names}
        makes = events.named(lambda name: f"{split_overload(name)[0]}_" in known)
        backward = np.append(capture.links.scopes.backward, False)
        in_backward = backward[capture.links.scopes.innermost[nodes]]
        of_program |= ~makes[parent] & ~is_backward(events)[parent] & ~in_backward
    return of_program


def _of_optimizer(capture: Views, nodes: Ints) -> Flags:
    """Whether each node is called by an optimizer itself, and not by the closure of its `step`."""
    scopes = capture.links.scopes
    kind = np.append(kinds_of_scopes(capture.links), FORWARD)[scopes.innermost[nodes]]
    found: Flags = (kind == OPTIMIZER) & ~scopes.recording[nodes]
    return found
