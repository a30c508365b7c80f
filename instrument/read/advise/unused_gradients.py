"""`unused-gradients`: the end of the backward computes gradients that nothing uses.

An example is a backbone that is not frozen, although only the parameters of the head are in an
optimizer. A session knows the modules whose gradients nothing uses. Only the backward nodes after
the last gradient of any other parameter can be saved: before that, the gradients of the module's
results are needed. There is no finding if the number of gradients at this end is not that of the
modules, because then an input may get a gradient too.

The simulation removes these backward nodes, and 1.5 µs for each node that the forward makes. The
memory that the graph keeps is left out, as for `unused-autograd`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.autograd_nodes import NODE_BOUNDS_NS, NODE_NS, makers, shortened
from instrument.read.advise.check import Check, NotRecorded, Problem
from instrument.read.advise.evidence import share_with_device
from instrument.read.facts.autograd import is_accumulation, is_backward
from instrument.read.facts.groupby import distinct, isin
from instrument.read.trace.events import Ints
from instrument.read.views.coverage_rows import CPU_IN_RANGES, JOINED
from instrument.read.views.views import Views

_MOST_NAMES = 3


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all modules whose gradients nothing uses."""
    events, modules = capture.events, capture.about.unused_gradients
    if not is_backward(events).any():
        return
    if modules is None:
        raise NotRecorded(
            "the capture does not say which parameters are in an optimizer",
            "give the session all models that an optimizer of torch trains",
        )
    made = makers(capture)
    unused, names = _unused(capture, made, modules)
    share = share_with_device(capture, unused)
    if not len(unused) or share < CHECK.least_share:
        return
    number = distinct(events.sequence[unused])
    saved = made[isin(events.sequence[made], number[number >= 0])]
    what = ", ".join(map(repr, names[:_MOST_NAMES]))
    if len(names) > _MOST_NAMES:
        what += f" and {len(names) - _MOST_NAMES} more"
    yield Problem(
        f"{percent(share)} of the {capture.links.counted_steps.what} computes gradients of {what} "
        "that no optimizer uses",
        unused,
        share,
        edit=lambda whatif: shortened(
            capture, whatif.scale_events(unused, by=0), saved, NODE_NS, NODE_BOUNDS_NS
        ),
        change=f"Freeze {what}: call module.requires_grad_(False), or call the module within "
        "torch.no_grad(). If an optimizer should train it, add its parameters.",
    )


CHECK = Check(
    "unused-gradients",
    find,
    verify="Record again: this finding must be gone.",
    least_share=0.03,
    least_saving=0.02,
    assumes="without these gradients and their graph nodes",
    coverage=(JOINED, CPU_IN_RANGES),
)


def _unused(capture: Views, made: Ints, modules: Mapping[str, int]) -> tuple[Ints, list[str]]:
    """The backward nodes at the end of each backward that can be saved, and their modules.

    `made` are the forward operators that made a node. A backward ends where the next one begins.
    """
    events, scopes = capture.events, capture.links.scopes
    names, paths = list(modules), scopes.paths
    index = {name: k for k, name in enumerate(names)}
    module: list[int] = []  # the module of each path, -1 for none; parents come first
    for name, above in zip(paths.names, paths.above.tolist()):
        inherited = module[above] if above >= 0 else -1
        module.append(index.get(name, inherited))
    node = np.flatnonzero(scopes.nodes.outermost(scopes.backward))
    node = node[np.argsort(scopes.nodes.start_ns[node], kind="stable")]
    event, of = scopes.nodes.index[node], np.append(module, -1)[scopes.attributed[node]]
    is_sum, count = is_accumulation(events, event), np.array([*modules.values()], np.int64)
    begun = np.searchsorted(np.sort(events.start_ns[made]), events.start_ns[event])
    unused, found = [np.zeros(0, np.int64)], set[int]()
    for row in np.split(np.arange(len(event)), np.flatnonzero(np.diff(begun)) + 1):
        used = row[is_sum[row] & (of[row] < 0)]
        end = row[row > used.max(initial=-1)]
        own = of[end][is_sum[end]]
        which = np.unique(own)
        if len(own) and len(own) == count[which].sum():
            unused.append(event[end])
            found.update(which.tolist())
    return np.concatenate(unused), [names[k] for k in sorted(found)]
