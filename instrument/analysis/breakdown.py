"""What the devices did, of what kind it was, and how the time is made up of it: to the nanosecond."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.analysis.table import Schema, Table, schema
from instrument.errors import ConfigError
from instrument.links.intervals import Intervals, sweep
from instrument.links.launches import launches
from instrument.patterns import Pattern
from instrument.trace.events import Events, Flags, Ints

KERNEL, COMMUNICATION, COPY, MEMSET = range(4)
KINDS = ("kernel", "communication", "copy", "memset")

# What makes a kernel communication, by its name, in any case. The libraries: NCCL and its kin, NVSHMEM, gloo, DeepEP
# (its namespaces `ep::internode` and `ep::intranode`; laying out its tokens is compute) and MORI; then collectives that
# move data by themselves: torch's symmetric memory (multimem, one- and two-shot), vLLM's, FlashInfer's, TensorRT-LLM's.
COMMUNICATION_NAMES = (
    r"nccl|rccl|hccl|oneccl|nvshmem|rocshmem|\bgloo|(?<![a-z])ep::int(er|ra)node|ep(dispatch|combine)int(er|ra)node"
    r"|multimem|(one|two)_?shot_?all_?reduce|cross_device_reduce|all_?reduce_fusion"
)
_COPIES = frozenset({"gpu_memcpy", "Memcpy"})
_MEMSETS = frozenset({"gpu_memset", "Memset"})
# Accelerators that write all device events in one category tell copies by name: MTIA's `dma_request`.
_COPY_NAME = re.compile(r"dma_|memcpy", re.IGNORECASE)
_LAYERS = ((KERNEL, MEMSET), (COMMUNICATION,), (COPY,))


@dataclass(frozen=True, slots=True)
class Work:
    """What ran on the devices: positions among the events, the kind of each, an index into `KINDS`, and its launch.

    `call` is the CPU call that launched it and `operator` the operator it names, as in `Launches`. A device's copies
    of annotations, its counters and its synchronisations are no work.
    """

    event: Ints
    kind: Ints
    start_ns: Ints
    end_ns: Ints
    call: Ints
    operator: Ints

    def of(self, *kinds: int) -> Intervals:
        """The intervals of some kinds."""
        chosen = np.isin(self.kind, kinds)
        return self.start_ns[chosen], self.end_ns[chosen]


# All are None in a trace without device events. The first four sum to `total_ns`.
BREAKDOWN: Schema = schema(
    compute_ns="time in which a kernel that is no communication, or a memset, ran",
    exposed_communication_ns="time in which communication ran and no compute",
    exposed_copy_ns="time in which copies ran, and neither compute nor communication",
    idle_ns="time in which nothing ran on any device",
    total_ns="from the first device event's start to the last one's end: the sum of the four before",
    communication_ns="all time of communication",
    copy_ns="all time of copies",
    overlap_ns="time of communication under compute",
)


def check_names(communication: str) -> None:
    """Refuse a rule for communication that is no regular expression.

    Raises:
        ConfigError: it is none.
    """
    try:
        re.compile(communication)
    except re.error as error:
        raise ConfigError(
            f"communication is {communication!r}, which is no regular expression ({error}); "
            "give one for kernel names, such as 'nccl|my_all_reduce'."
        ) from None


def device_work(
    events: Events, communication: str | None = None, added: Pattern | None = None
) -> Work:
    """The device events of a trace with their kinds, told by category and name, whatever stream they ran on.

    `communication` is a regular expression for the names of communication kernels: `"nccl|rccl"` counts those
    alone, `COMMUNICATION_NAMES + "|my_all_reduce"` one more; None is `COMMUNICATION_NAMES`. `added` are patterns from
    a file, for more of them.
    """
    found = launches(events)
    event = found.device
    names_of_it = COMMUNICATION_NAMES if communication is None else communication
    is_communication = re.compile(names_of_it, re.IGNORECASE).search
    present, name = np.unique(events.name[event], return_inverse=True)
    names = [events.names[k] for k in present.tolist()]
    kind = np.full(len(event), KERNEL)
    kind[np.array([is_communication(text) is not None for text in names], np.bool_)[name]] = (
        COMMUNICATION
    )
    if added is not None:
        kind[np.array([added.search(text) for text in names], np.bool_)[name]] = COMMUNICATION
    kind[np.array([_COPY_NAME.match(text) is not None for text in names], np.bool_)[name]] = COPY
    kind[events.among(_COPIES)[event]] = COPY
    kind[events.among(_MEMSETS)[event]] = MEMSET
    return Work(
        event, kind, events.start_ns[event], events.end_ns[event], found.call, found.operator
    )


def breakdown(work: Work) -> Table:
    """One row for the whole trace, all devices and streams together; see `BREAKDOWN`."""
    found = by_group(work, np.zeros(len(work.event), np.int64), 1)
    return Table.of(
        BREAKDOWN, {name: v.tolist() if len(work.event) else [None] for name, v in found.items()}
    )


def by_group(work: Work, group: Ints, groups: int) -> dict[str, Ints]:
    """The columns of `breakdown` for each group of device events by itself; a group of -1 counts nowhere."""
    chosen = [np.flatnonzero(np.isin(work.kind, kinds) & (group >= 0)) for kinds in _LAYERS]
    layers = [(work.start_ns[index], work.end_ns[index]) for index in chosen]
    timeline = sweep(layers, [group[index] for index in chosen])
    found = {
        name: timeline.total_ns(where, groups) for name, where in masks(timeline.active).items()
    }
    return with_idle(found, timeline.total_ns(np.ones_like(timeline.group, np.bool_), groups))


def layers_of(work: Work) -> list[Intervals]:
    """The three layers that `masks` are of: compute, communication and copies."""
    return [work.of(*kinds) for kinds in _LAYERS]


def masks(active: NDArray[np.bool_]) -> dict[str, Flags]:
    """Which segments count in which column; the first three layers are those of `layers_of`."""
    compute, communication, copy = active[:3]
    return {
        "compute_ns": compute,
        "exposed_communication_ns": communication & ~compute,
        "exposed_copy_ns": copy & ~compute & ~communication,
        "communication_ns": communication,
        "copy_ns": copy,
        "overlap_ns": communication & compute,
    }


def with_idle(found: dict[str, Ints], total: Ints) -> dict[str, Ints]:
    """The columns with what is left of a total, in their order."""
    names = list(found)
    idle = total - sum(found[name] for name in names[:3])
    return {
        **{name: found[name] for name in names[:3]},
        "idle_ns": idle,
        "total_ns": total,
        **{name: found[name] for name in names[3:]},
    }
