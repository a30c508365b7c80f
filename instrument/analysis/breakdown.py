"""The work of the devices, and the devices' time split into compute, communication and copies."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.analysis.table import Schema, Table, schema
from instrument.errors import ConfigError
from instrument.links.intervals import Intervals, sweep
from instrument.links.links import Links
from instrument.patterns import Pattern
from instrument.trace.events import COPIES, Events, Flags, Ints

KERNEL, COMMUNICATION, COPY, MEMSET = range(4)
KINDS = ("kernel", "communication", "copy", "memset")

# Names of communication kernels, ignoring case. The first two lines match libraries: NCCL and its
# derivatives, NVSHMEM, gloo, MORI, and DeepEP (the namespaces `ep::internode` and `ep::intranode`;
# the layout kernels of DeepEP are compute). The last line matches collectives that run as a single
# kernel: those of torch's symmetric memory (multimem, one-shot and two-shot), of vLLM, of
# FlashInfer and of TensorRT-LLM.
COMMUNICATION_NAMES = (
    r"nccl|rccl|hccl|oneccl|nvshmem|rocshmem|\bgloo"
    r"|(?<![a-z])ep::int(er|ra)node|ep(dispatch|combine)int(er|ra)node"
    r"|multimem|(one|two)_?shot_?all_?reduce|cross_device_reduce|all_?reduce_fusion"
)
_MEMSETS = frozenset({"gpu_memset", "Memset"})
# Some accelerators write all device events in one category, so copies are recognised by their
# names, such as `dma_request` on MTIA.
_COPY_NAME = re.compile(r"dma_|memcpy", re.IGNORECASE)
_LAYERS = ((KERNEL, MEMSET), (COMMUNICATION,), (COPY,))


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels, copies and memsets of the devices, as parallel columns.

    `event` is the position of the device event in `Events`, and `kind` an index into `KINDS`.
    `call` is the position of the CPU call that launched the work; -1 if the trace does not hold
    this call. `operator` is the position of the operator that launched the work, according to the
    trace; -1 if the trace does not hold this operator. See `Launches`. Other device events are
    left out: counters, synchronisations, and annotations on the timelines of devices.
    """

    event: Ints
    kind: Ints
    start_ns: Ints
    end_ns: Ints
    call: Ints
    operator: Ints

    @property
    def launch(self) -> Ints:
        """The CPU event that launched each row: `call`, else `operator`; -1 if neither is known."""
        return np.where(self.call >= 0, self.call, self.operator)

    def of(self, *kinds: int) -> Intervals:
        """The starts and the ends of all work of the given kinds."""
        chosen = np.isin(self.kind, kinds)
        return self.start_ns[chosen], self.end_ns[chosen]


# Every cell is None if the trace has no device events. The first four columns sum to `total_ns`.
BREAKDOWN: Schema = schema(
    compute_ns="time in which a memset, or a kernel that is not communication, ran",
    exposed_communication_ns="time in which communication ran, but no compute",
    exposed_copy_ns="time in which copies ran, but no compute and no communication",
    idle_ns="time in which nothing ran on any device",
    total_ns="time from the start of the first device event to the end of the last one (the sum "
    "of the four columns above)",
    communication_ns="time in which communication ran",
    copy_ns="time in which copies ran",
    overlap_ns="time in which communication and compute ran at the same time",
)


def check_names(communication: str) -> None:
    """Check that `communication` is a regular expression.

    Raises:
        ConfigError: `communication` is not a regular expression.
    """
    try:
        re.compile(communication)
    except re.error as error:
        raise ConfigError(
            f"communication is {communication!r}, which is not a regular expression ({error}); "
            "give one for kernel names, such as 'nccl|my_all_reduce'."
        ) from None


def device_work(
    links: Links, communication: str | None = None, added: Pattern | None = None
) -> Work:
    """Return the kernels, copies and memsets of a trace, on all streams, with their kinds.

    Args:
        links: the relations between the events of the trace.
        communication: a regular expression. Kernels whose names match it are communication.
            None means the default, `COMMUNICATION_NAMES`. The value `"nccl|rccl"` replaces the
            default. The value `COMMUNICATION_NAMES + "|my_all_reduce"` extends it.
        added: a second pattern, which comes from a capture's metadata. Kernels whose names match
            `added` are communication too.
    """
    events, found = links.events, links.launches
    event = found.device
    expression = COMMUNICATION_NAMES if communication is None else communication
    is_communication = re.compile(expression, re.IGNORECASE).search
    present, name = np.unique(events.name[event], return_inverse=True)
    names = [events.names[k] for k in present.tolist()]
    kind = np.full(len(event), KERNEL)
    kind[np.array([is_communication(text) is not None for text in names], np.bool_)[name]] = (
        COMMUNICATION
    )
    if added is not None:
        kind[np.array([added.search(text) for text in names], np.bool_)[name]] = COMMUNICATION
    kind[np.array([_COPY_NAME.match(text) is not None for text in names], np.bool_)[name]] = COPY
    kind[events.among(COPIES)[event]] = COPY
    kind[events.among(_MEMSETS)[event]] = MEMSET
    return Work(
        event, kind, events.start_ns[event], events.end_ns[event], found.call, found.operator
    )


def launched_ns(events: Events, work: Work) -> Ints:
    """The time at which the CPU launched each row of `work`.

    If the launch is not in the trace, the result is the time at which the work began.
    """
    launch = work.launch
    return np.where(launch >= 0, events.start_ns[launch], work.start_ns)


def breakdown(work: Work) -> Table:
    """Return one row for the whole trace; see `BREAKDOWN`.

    A time in which several devices work counts once.
    """
    found = by_group(work, np.zeros(len(work.event), np.int64), 1)
    return Table.of(
        BREAKDOWN, {name: v.tolist() if len(work.event) else [None] for name, v in found.items()}
    )


def by_group(work: Work, group: Ints, groups: int) -> dict[str, Ints]:
    """The columns of `BREAKDOWN` for each group of device events.

    `group` holds the number of the group of each device event. Events with the number -1 are left
    out. `groups` is how many groups there are.
    """
    chosen = [np.flatnonzero(np.isin(work.kind, kinds) & (group >= 0)) for kinds in _LAYERS]
    layers = [(work.start_ns[index], work.end_ns[index]) for index in chosen]
    timeline = sweep(layers, [group[index] for index in chosen])
    found = {
        name: timeline.total_ns(where, groups) for name, where in masks(timeline.active).items()
    }
    return with_idle(found, timeline.total_ns(np.ones_like(timeline.group, np.bool_), groups))


def layers_of(work: Work) -> list[Intervals]:
    """Three lists of intervals: those of compute, of communication and of copies."""
    return [work.of(*kinds) for kinds in _LAYERS]


def masks(active: NDArray[np.bool_]) -> dict[str, Flags]:
    """For each column of `BREAKDOWN`, a mask of the time segments that the column counts.

    The columns `idle_ns` and `total_ns` have no mask. `active` is `Timeline.active`: it has one row
    for each layer, and each row has one flag for each segment of time. The first three rows must
    belong to the layers that `layers_of` returns.
    """
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
    """Insert the idle time and the total into the columns, in the order of `BREAKDOWN`."""
    names = list(found)
    idle = total - sum(found[name] for name in names[:3])
    return {
        **{name: found[name] for name in names[:3]},
        "idle_ns": idle,
        "total_ns": total,
        **{name: found[name] for name in names[3:]},
    }
