"""The work of the devices: kernels, communication, copies and memsets, with their launches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from instrument.base.globs import fits
from instrument.read.facts.groupby import groupby
from instrument.read.facts.intervals import Intervals, merged, sweep
from instrument.read.facts.links import Links
from instrument.read.trace.events import COPIES, Events, Flags, Ints

KERNEL, COMMUNICATION, COPY, MEMSET = range(4)
KINDS = ("kernel", "communication", "copy", "memset")

# Globs for the names of communication kernels, ignoring case. The first lines match libraries: NCCL
# and its derivatives, NVSHMEM, gloo, DeepEP (the namespaces `ep::internode` and `ep::intranode`;
# its layout kernels are compute), and MORI. The others match collectives that run as a single
# kernel: those of torch's symmetric memory (multimem, one-shot and two-shot), of vLLM, of
# FlashInfer and of TensorRT-LLM.
COMMUNICATION_NAMES = (
    "*nccl*", "*rccl*", "*hccl*", "*oneccl*", "*nvshmem*", "*rocshmem*",
    "gloo*", "*[!0-9a-z_]gloo*",
    "ep::internode*", "ep::intranode*", "*[!a-z]ep::internode*", "*[!a-z]ep::intranode*",
    "*epdispatchinternode*", "*epdispatchintranode*",
    "*epcombineinternode*", "*epcombineintranode*",
    "*multimem*",
    "*oneshot*all*reduce*", "*one_shot*all*reduce*",
    "*twoshot*all*reduce*", "*two_shot*all*reduce*",
    "*cross_device_reduce*", "*allreduce_fusion*", "*all_reduce_fusion*",
)  # fmt: skip
_MEMSETS = frozenset({"gpu_memset", "Memset"})
# Some accelerators write all device events in one category, so copies are recognised by their
# names, such as `dma_request` on MTIA.
_COPY_NAME = re.compile(r"dma_|memcpy", re.IGNORECASE)
_LAYERS = ((KERNEL, MEMSET), (COMMUNICATION,), (COPY,))


@dataclass(frozen=True)
class Work:
    """The kernels, copies and memsets of the devices, as parallel columns.

    Attributes:
        event: the positions of the device events in `Events`.
        kind: indexes into `KINDS`.
        start_ns, end_ns: when the device events started and ended.
        call: the position of the runtime or driver call that launched the event; -1 if not known.
        operator: the position of the operator or annotation that the event's `External id` names;
            -1 if not known; see `instrument.read.facts.launches`.
    """

    event: Ints
    kind: Ints
    start_ns: Ints
    end_ns: Ints
    call: Ints
    operator: Ints

    @property
    def duration_ns(self) -> Ints:
        """How long each device event lasted."""
        return self.end_ns - self.start_ns

    @property
    def launch(self) -> Ints:
        """The launch of each device event: `call`, else `operator`; -1 if neither is known."""
        return np.where(self.call >= 0, self.call, self.operator)

    @cached_property
    def busy(self) -> Intervals:
        """The intervals in which any device works, sorted; they do not touch each other."""
        lasting = self.end_ns > self.start_ns
        return merged(self.start_ns[lasting], self.end_ns[lasting])

    @cached_property
    def by_start(self) -> Ints:
        """The rows, sorted by their starts."""
        return np.argsort(self.start_ns, kind="stable")

    def only(self, chosen: Flags) -> Work:
        """The chosen rows."""
        return Work(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def of(self, *kinds: int) -> Intervals:
        """The starts and the ends of all work of the given kinds."""
        chosen = np.isin(self.kind, kinds)
        return self.start_ns[chosen], self.end_ns[chosen]


def device_work(links: Links, communication: Sequence[str] | None = None) -> Work:
    """Return the kernels, copies and memsets of a trace, on all streams, with their kinds.

    `communication` are globs, ignoring case, for the names of kernels that communicate; None means
    `COMMUNICATION_NAMES`.
    """
    events, found = links.events, links.launches
    event = found.device
    globs = [g.lower() for g in (COMMUNICATION_NAMES if communication is None else communication)]
    present, of_name = groupby(events.name[event])
    names, name = [events.names[k] for k in present.tolist()], of_name.of
    kind = np.full(len(event), KERNEL)
    communicates = [any(fits(glob, text) for glob in globs) for text in map(str.lower, names)]
    kind[np.array(communicates, np.bool_)[name]] = COMMUNICATION
    kind[np.array([_COPY_NAME.match(text) is not None for text in names], np.bool_)[name]] = COPY
    kind[events.among(COPIES)[event]] = COPY
    kind[events.among(_MEMSETS)[event]] = MEMSET
    return Work(
        event, kind, events.start_ns[event], events.end_ns[event], found.call, found.operator
    )


def launched_ns(events: Events, work: Work) -> Ints:
    """When the CPU launched each device event, or when the event began if its launch is unknown."""
    launch = work.launch
    return np.where(launch >= 0, events.start_ns[launch], work.start_ns)


def queued_launches(events: Events, work: Work) -> pl.DataFrame:
    """The launches of work on each stream, by stream and start of the call.

    A call that starts several device events is one launch on each of their streams. `row` is the
    row in `work` of the first of them, and `started_ns` its start.
    """
    rows = np.flatnonzero(work.call >= 0)
    call = work.call[rows]
    launches = pl.DataFrame(
        {
            "stream": events.thread[work.event[rows]].astype(np.int64),
            "call": call,
            "row": rows,
            "called_ns": events.start_ns[call],
            "returned_ns": events.end_ns[call],
            "started_ns": work.start_ns[rows],
            "is_cuda": events.named(lambda name: name.startswith("cu"))[call],
        }
    ).sort("stream", "called_ns", "call", "started_ns", maintain_order=True)
    return launches.unique(["stream", "call"], keep="first", maintain_order=True)


def by_group(work: Work, group: Ints, groups: int) -> dict[str, Ints]:
    """The split of the time for each group of device events; -1 is no group."""
    chosen = [np.flatnonzero(np.isin(work.kind, kinds) & (group >= 0)) for kinds in _LAYERS]
    layers = [(work.start_ns[index], work.end_ns[index]) for index in chosen]
    timeline = sweep(layers, [group[index] for index in chosen])
    found = {
        name: timeline.total_ns(where, groups) for name, where in masks(timeline.active).items()
    }
    whole = timeline.total_ns(np.ones_like(timeline.group, np.bool_), groups)
    busy = found["compute_ns"] + found["exposed_communication_ns"] + found["exposed_copy_ns"]
    return found | {"idle_ns": whole - busy, "total_ns": whole}


def layers_of(work: Work) -> list[Intervals]:
    """The intervals of compute (with memsets), communication and copies, for `sweep`."""
    return [work.of(*kinds) for kinds in _LAYERS]


def masks(active: NDArray[np.bool_]) -> dict[str, Flags]:
    """For each part of the time, a mask of segments.

    `active` is that of a `Timeline` whose first three layers are those of `layers_of`.
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


def moved_bytes(events: Events, copy: Ints, call: Ints) -> Ints:
    """The bytes that each copy or memset moves, or else its launching `call`; -1 if not known."""
    own = events.moved_bytes[copy]
    return np.where((own >= 0) | (call < 0), own, events.moved_bytes[call])
