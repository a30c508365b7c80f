"""`Selection`: the CPU time and the device work that an edit changes, by name, position or kind.

A pattern that matches nothing raises `ConfigError`, which names what there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from instrument.base.errors import CaptureError, ConfigError
from instrument.base.globs import fits
from instrument.read.facts.device_work import COMMUNICATION, COPY
from instrument.read.facts.idle import is_loading
from instrument.read.facts.intervals import Intervals, concatenated
from instrument.read.facts.kernel_names import kernel_class, kernel_label
from instrument.read.simulate.builder import loads_here
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import Model
from instrument.read.trace.events import OPERATOR, Flags, Ints, split_overload

_SHOWN = 3


class Selection(NamedTuple):
    """The parts of a window that an edit changes.

    `cpu` has intervals on `Model.axis`, `rows` is a mask of device rows, and `calls` one of events:
    the runtime calls in the CPU time, and those that launched only chosen rows.
    """

    cpu: Intervals
    rows: Flags
    calls: Flags


def by_range(model: Model, pattern: str) -> Selection:
    """Select ranges by path or name, with their backward pass and device work.

    A pattern that begins with "/" must match the whole path, from the root on; any other the name
    or the path.
    """
    paths = model.links.scopes.paths
    whole = pattern[1:] if pattern.startswith("/") else None
    fitting = (
        fits(pattern, name, text) if whole is None else fits(whole, text)
        for name, text in zip(paths.names, paths.texts)
    )
    chosen = np.fromiter(fitting, np.bool_, len(paths.names))
    if not chosen.any():
        raise _nothing("range", pattern, paths.texts)
    return of_paths(model, chosen)


def of_paths(model: Model, chosen: Flags) -> Selection:
    """Select ranges by a mask of the paths; see `by_range`."""
    scopes = model.links.scopes
    below = np.append(scopes.paths.at_or_below(chosen), False)
    inside = np.append(below[scopes.enclosing] | below[scopes.attributed], False)
    return _below(model, inside[scopes.innermost])


def by_operator(model: Model, pattern: str) -> Selection:
    """Select operators, runtime calls and backward nodes by name, with all that runs inside.

    Their device work is selected too, but not that of runtime calls.
    """
    events = model.links.events
    chosen = events.among(OPERATOR) | model.calls
    named = events.named(lambda name: fits(pattern, name, split_overload(name)[0]))
    if not (chosen & named).any():
        present = (events.names[k] for k in np.unique(events.name[chosen]).tolist())
        raise _nothing("operator or runtime call", pattern, present)
    return of_events(model, chosen & named)


def by_layer(model: Model, pattern: str) -> Selection:
    """Select the device work of layers of the model by name, without their launches' time."""
    found = model.layers()
    names, of = found.names, found.of
    rows: Flags = np.array([*(fits(pattern, name) for name in names), False])[of]
    if not rows.any():
        raise _nothing("layer", pattern, (names[k] for k in np.unique(of[of >= 0]).tolist()))
    return of_rows(model, rows)


def by_kernel(model: Model, pattern: str, *, only_copies: bool = False) -> Selection:
    """Select kernels, copies and memsets by name, label or class, without their launches' time."""
    events, event = model.links.events, model.work.event
    of_kind = model.work.kind == COPY if only_copies else np.ones(len(event), np.bool_)
    present = np.unique(events.name[event[of_kind]]).tolist()
    fitting = np.zeros(len(events.names), np.bool_)
    for k in present:
        name = events.names[k]
        fitting[k] = fits(pattern, name, kernel_label(name)) or pattern == kernel_class(name)
    rows = of_kind & fitting[events.name[event]]
    if not rows.any():
        kind = "copy" if only_copies else "kernel"
        raise _nothing(kind, pattern, [kernel_label(events.names[k]) for k in present])
    return of_rows(model, rows)


def of_events(model: Model, selected: Ints | Flags, *, device: bool = True) -> Selection:
    """Select events by position or mask; a CPU event includes all that runs inside it.

    `device` False selects no device work.
    """
    events, tree = model.links.events, model.links.call_tree
    chosen = np.zeros(len(events), np.bool_)
    chosen[selected] = True
    found = _below(model, chosen[tree.index])
    cpu, rows = found.cpu, found.rows | chosen[model.work.event]
    # Some events have no node, such as collections of Python's garbage collector.
    chosen[tree.index] = chosen[model.work.event] = False
    if chosen.any():
        thread, place = events.thread[chosen], model.axis.place
        begin, end = place(thread, events.start_ns[chosen]), place(thread, events.end_ns[chosen])
        cpu = joined(*concatenated([cpu, (begin, end)]))
    return Selection(cpu, rows & device, found.calls)


def of_spans(model: Model, thread: int, spans: Intervals) -> Selection:
    """Select the CPU time of one thread in the given spans of time, and no device work."""
    threads = np.full(len(spans[0]), thread, np.int64)
    begin, end = (model.axis.place(threads, side) for side in spans)
    rows = np.zeros(len(model.work.event), np.bool_)
    return Selection(joined(begin, end), rows, np.zeros(len(model.links.events), np.bool_))


def of_rows(model: Model, rows: Flags) -> Selection:
    """Select device work and the calls that launched only this work; select no CPU time."""
    launched = np.bincount(model.work.call + 1, minlength=len(model.links.events) + 1)[1:]
    chosen = np.bincount(model.work.call[rows] + 1, minlength=len(launched) + 1)[1:]
    none = np.zeros(0, np.int64)
    return Selection((none, none), rows, (chosen > 0) & (chosen == launched))


def communication(model: Model) -> Selection:
    """Select all communication of the devices."""
    rows = model.work.kind == COMMUNICATION
    if not rows.any():
        raise CaptureError("The capture has no communication whose bandwidth could change.")
    return of_rows(model, rows)


def loading(model: Model) -> Selection:
    """Select the calls in which a data loader loads a batch in the training process."""
    events = model.links.events
    calls = np.flatnonzero(is_loading(events) & events.finished & loads_here(events))
    if not len(calls):
        raise CaptureError(
            "No data loader of this capture loads its batches in the training process, so more "
            "workers cannot be simulated."
        )
    return of_events(model, calls)


def waiting_calls(model: Model, pattern: str) -> Ints:
    """Find calls that wait for the device, by their name or that of an operator around them."""
    events, found = model.links.events, model.links.synchronisations
    calls = np.unique(found.call[np.unique(found.wait)])
    tree = model.links.call_tree
    named = events.named(lambda name: fits(pattern, name, split_overload(name)[0]))
    around = np.append(tree.at_or_inside(named[tree.index]), False)[tree.nodes_of(calls)]
    chosen: Flags = named[calls] | around
    if not chosen.any():
        raise _nothing("synchronising call", pattern, (events.names[k] for k in events.name[calls]))
    return calls[chosen]


def _below(model: Model, nodes: Flags) -> Selection:
    """Select nodes of the call tree, all that runs inside them, and their device work."""
    links, tree = model.links, model.links.call_tree
    around = np.append(tree.at_or_inside(nodes), False)
    # Only the outermost nodes are needed, because their time contains the time of inner nodes.
    top, (start, end) = tree.outermost(nodes), model.node_spans
    cpu = joined(start[top], end[top])
    calls = np.zeros(len(links.events), np.bool_)
    calls[tree.index] = around[:-1]
    calls &= model.calls
    return Selection(cpu, around[links.launched[1]], calls)


def _nothing(kind: str, pattern: str, present: Iterable[str]) -> ConfigError:
    distinct = sorted(set(present))
    near = get_close_matches(pattern, distinct, _SHOWN, cutoff=0.3) or distinct[:_SHOWN]
    others = " and others" if len(distinct) > len(near) else ""
    names = f"{', '.join(near)}{others}" if near else "none"
    return ConfigError(f"No {kind} matches {pattern!r}: the capture has {names}.")
