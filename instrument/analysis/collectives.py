"""The collectives of a trace, for comparing ranks, and how long steps waited for collectives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, Work
from instrument.analysis.steps import launching_step
from instrument.analysis.table import Schema, Table, schema
from instrument.links.groupby import Groups, intern
from instrument.links.intervals import merged, sweep
from instrument.links.links import Links
from instrument.links.step_index import finished_steps, step_at, step_number
from instrument.trace.events import ANNOTATION, OPERATOR, Events, Ints, is_step

# The annotation of a process group on the CPU lasts as long as its collective. The annotation of
# NCCL ends as soon as the collective is queued.
_ON_CPU = ("gloo:", "mpi:")
_OF_PROCESS_GROUPS = (*_ON_CPU, "nccl:", "ucc:", "xccl:", "hccl:")
# No rank can finish one of these collectives before the last rank has joined it. So they end at
# about the same moment on all ranks.
_SYNCHRONISING = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE
)
# Operators that only start a collective or wait for it.
_STARTING_OR_WAITING = "c10d::"


def is_collective(name: str) -> bool:
    """Whether the name is that of a range of a collective, such as "nccl:all_reduce"."""
    return name.startswith(_OF_PROCESS_GROUPS)


COLLECTIVES: Schema = schema(
    name="the kernel's name without its parameters, or the annotation's name",
    group="the ranks that took part, as Kineto writes them; None if Kineto wrote none",
    step="the number of the step that launched the collective; None outside of all steps",
    ordinal="the index among the collectives of the same name and group in the step, in order of "
    "start, from 0",
    start_ns="the start, on the trace's own clock",
    end_ns="the end",
)


def _is_on_cpu(name: str) -> bool:
    return name.startswith(_ON_CPU)


def collectives(events: Events, work: Work) -> Table:
    """Return the collectives that end at about the same moment on all ranks, in order of their end.

    If a device ran communication kernels, these are the collectives. Otherwise, the collectives are
    the annotations of process groups that work on the CPU (gloo). The first four columns of a
    collective are the same on every rank; see `COLLECTIVES`. Broadcasts and transfers are left out,
    because their ends differ between ranks.

    Lost: the process group, if the trace does not name it.
    """
    device = np.flatnonzero(work.kind == COMMUNICATION)
    steps = finished_steps(events)
    if len(device):
        index, step = work.event[device], launching_step(events, work, steps)[device]
    else:
        index = np.flatnonzero(events.among(ANNOTATION) & events.named(_is_on_cpu))
        step = step_at(events, steps, events.start_ns[index])
    chosen = events.named(lambda name: _SYNCHRONISING.search(name) is not None)[index]
    index, step = index[chosen], step[chosen]
    ordinal = _ordinals(events, index, step)
    order = np.argsort(events.end_ns[index], kind="stable")
    return Table.of(COLLECTIVES, _columns(events, steps, index[order], step[order], ordinal[order]))


def _ordinals(events: Events, index: Ints, step: Ints) -> Ints:
    """The index of each collective among the collectives of the same name, group and step."""
    keys = np.stack([step, events.name[index], intern(_ranks(events, index))[0]])
    same, groups = np.unique(keys, axis=1, return_inverse=True)
    by_start = Groups(groups.reshape(-1), same.shape[1]).sorted_by(events.start_ns[index])
    return by_start.ordinals()


def _ranks(events: Events, index: Ints) -> list[str | None]:
    """The ranks that take part in each collective, as Kineto writes them."""
    codes = events.detail[index].tolist()
    return [events.details[code].ranks if code >= 0 else None for code in codes]


def _columns(
    events: Events, steps: Ints, index: Ints, step: Ints, ordinal: Ints
) -> dict[str, list[Any]]:
    numbers = [step_number(events, k) for k in steps.tolist()]
    return {
        "name": [events.names[k].partition("(")[0] for k in events.name[index].tolist()],
        "group": _ranks(events, index),
        "step": [numbers[k] if k >= 0 else None for k in step.tolist()],
        "ordinal": ordinal.tolist(),
        "start_ns": events.start_ns[index].tolist(),
        "end_ns": events.end_ns[index].tolist(),
    }


def cpu_waits(links: Links) -> dict[str, list[Any] | None]:
    """Return the communication time of each finished step in a trace without device events.

    The columns are `communication_ns` and `exposed_communication_ns`. Communication is exposed
    while no thread runs an operator, except the operators of the collective itself. The result is
    empty if no process group worked on the CPU.
    """
    events, call_tree = links.events, links.call_tree
    communicates = (events.among(ANNOTATION) & events.named(_is_on_cpu))[call_tree.index]
    if not communicates.any():
        return {}
    operator = events.among(OPERATOR) & ~events.named(
        lambda name: name.startswith(_STARTING_OR_WAITING) or is_step(name)
    )
    own_work = operator[call_tree.index] & (call_tree.nearest(communicates) < 0)
    sides = [call_tree.index[chosen] for chosen in (communicates, own_work)]
    timeline = sweep([merged(events.start_ns[k], events.end_ns[k]) for k in sides])
    communicating, working = timeline.active
    steps = finished_steps(events)
    where = {
        "communication_ns": communicating,
        "exposed_communication_ns": communicating & ~working,
    }
    begin, end = events.start_ns[steps], events.end_ns[steps]
    return {name: timeline.within(mask, begin, end).tolist() for name, mask in where.items()}
