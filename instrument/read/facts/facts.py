"""`Facts`: the table of events of one trace, with what they caused; every answer asks it.

docs/tables.md lists the columns with the rule by which each is computed. Columns are computed in
groups, each at its first use: a question about kernels does not pay for FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from instrument.base.range_names import STEP
from instrument.read.facts import memory_attribution
from instrument.read.facts.autograd import kinds_of_scopes
from instrument.read.facts.collective_records import (
    collective_events,
    known_count,
)
from instrument.read.facts.device_work import (
    COPY,
    MEMSET,
    Work,
    launched_ns,
    moved_bytes,
)
from instrument.read.facts.device_work import KINDS as WORK
from instrument.read.facts.flops import UNKNOWN
from instrument.read.facts.grammars import STAGES, stages
from instrument.read.facts.groupby import Groups, groupby
from instrument.read.facts.kernel_names import kernel_class, kernel_label
from instrument.read.facts.layers import EVIDENCE, Layers, layers, layers_of_nodes
from instrument.read.facts.layers import UNKNOWN as UNKNOWN_LAYER
from instrument.read.facts.lines import Sampled, lines_of_nodes, sampled
from instrument.read.facts.links import Links
from instrument.read.facts.once import Once
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.facts.segments import LANES, segments
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Codes,
    Flags,
    Ints,
    decoded,
    is_loader,
    is_moment,
    is_runtime,
    is_step,
    is_wait,
    split_overload,
)
from instrument.read.trace.line_samples import LineSamples

#: The kinds of events. The first row of `_KIND_OF_NAME` whose test a name passes counts.
CPU_KINDS = ("operator", "range", "step", "mark", "loader", "runtime", "wait")
_KIND_OF_NAME: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("wait", "runtime", is_wait),
    ("step", "", is_step),
    ("mark", "", is_moment),
    ("loader", "", is_loader),
)
# The pass of each kind of work of a scope, in the order of `autograd.KINDS`.
_PASS_OF_KIND = ("forward", "backward", "backward", "optimizer", "backward", "recompute")
_WAIT_KINDS = {"wait": "device", "loader": "data"}

EVENTS: Schema = schema(
    id="(integer) the number of the row; `parent`, `launcher` and `operator` are such numbers",
    part="(integer) which of the trace files of the window; 0 if there is one file",
    kind="operator, range, step, mark (`instrument.mark`), loader (a wait for a batch), runtime (a "
    "call of the device's runtime or driver), wait (such a call in which the CPU waits for the "
    "device), frame (a Python function), kernel, communication, copy, memset, or other: what torch "
    "and Kineto also write, such as the annotations of a device (`category` says what it is)",
    category="Kineto's category, such as `cpu_op` or `cuda_runtime`",
    name="the name as torch's tables show it: without the number of a step and without an overload",
    label="of a device event, a readable name of at most 40 characters, such as `add<bf16>`; "
    "several names can have the same label. Null on the CPU",
    **{
        "class": "of a device event, matrix product, attention, convolution, elementwise, "
        "normalisation, reduction, copy, communication or other, found from its name; null on the "
        "CPU"
    },
    overload="of an operator; null if the trace does not have it",
    thread='"process/thread" of an event on the CPU; a call of the runtime has the thread of the '
    "operator that its external id names. Null on a device",
    device="(text) the device of a device event; null on the CPU",
    stream="(text) the stream of a device event; null on the CPU",
    start_ns="the start, on the trace's own clock",
    start_unix_ns="the start as Unix time, to compare ranks; null if the trace does not have it",
    end_ns="the end, on the clock of `start_ns`",
    duration_ns="`end_ns` minus `start_ns`",
    finished="(true or false) whether the event ended before the recording did",
    parent="(integer) the innermost operator, range or runtime call around the event on its "
    "thread; null for none, and on a device",
    step="(integer) the number of the finished step in which the event began, on any thread; for "
    "a device event, in which it was launched, or began if its launch is not in the trace",
    counted="(true or false) whether this step counts: all finished steps of the window but the "
    "first, or a single one, or whole periods where steps of several kinds take turns. If no step "
    "finished, all events count",
    path="the ranges around the event, such as `train/forward/layer`; a range's own name is the "
    "last one of its path; a backward operator has the "
    "path of its forward operator, a device event that of the operator that launched it. Null "
    "outside of all ranges",
    phase="the phase of the window, such as `train` or `validation`",
    stage="prefill, decode, mixed (both in a batch), draft or verify (speculative decoding), or in "
    "a pipeline forward, backward or weight gradients: what the ranges of an inference engine or a "
    "pipeline around the event say; of a device event, around its launch. docs/engines.md lists "
    "the programs. Null if no range says it",
    line="the line of the user's code that called the outermost operator around the event, such as "
    "`train.py:31`; a backward operator has the line of its forward operator, a device event that "
    "of the operator that launched it. Known where a detail window (`profiler.detail`) called it "
    "alike, of the others by samples (`profiler.lines`), so mostly for long ones; null if unknown, "
    "and outside of all operators",
    **{
        "pass": "forward, backward, recompute (a forward pass that activation checkpointing "
        "repeats), optimizer, or data (a wait for a batch, and all inside it). Backward includes "
        "the accumulation of gradients. Forward and optimizer are known only inside ranges"
    },
    layer="the layer of the model that a device event belongs to, such as `layers.3`, or `layer 3` "
    "if only its place among the layers is known; null outside of all layers, and if it is not "
    "known. Of an event on the CPU, the layer that was recorded around it, or else that of all "
    "device events that it and all inside it launched; docs/how-to/layers.md",
    evidence="of a device event, what its layer is known from: recorded (a range or module around "
    "the launch), annotation, kernel name, other trace, sequence; or unknown. Null on the CPU",
    confidence="(number) of a device event, the probability that its layer is right, as measured "
    "on traces whose layers are known; null if its layer is not known, and on the CPU",
    launcher="(integer) the runtime call that launched a device event; null if it is not in the "
    "trace",
    operator="(integer) the innermost operator or range around that call, else the one that the "
    "external id of the device event names",
    own_ns="the CPU time of the event without the operators, ranges and calls directly inside it; "
    "where two siblings overlap, the earlier one ends as the later one begins. Null on a device "
    "and for Python frames",
    device_ns="the duration of all device events that the event and all inside it on its thread "
    "launched; of a device event, its own duration. For a step or range with its backward, group "
    "the device events by `step` or `path`. Null if the trace has no device event",
    own_device_ns="the duration of the device events whose `operator` is this event: that of a "
    "runtime call is 0, because its launches count for the operator or range around it; null on a "
    "device",
    counted_own_ns="the part of `own_ns` in the steps that count; all of it if no step finished",
    counted_own_device_ns="the part of `own_device_ns` that was launched in steps that count",
    wait_kind="device (the CPU waits for the device) or data (it waits for a batch); else null",
    call="(true or false) false for an operator or range that is the only one inside another of "
    "the same name; torch counts the two as one call",
    flops="the floating-point operations of an operator without those inside it; null if unknown",
    bytes="of a copy or memset, the bytes that it moves; of a collective, the size of its message "
    "as NCCL counts it, at the first of its kernels; null if unknown",
    collective="of a kernel that communicates, or the annotation of gloo or MPI: all_reduce, "
    "all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send_recv or "
    "barrier; null if the trace does not show it",
    process_group="the process group of such an event by torch's name, such as 0",
    group_size="(integer) how many ranks this group has",
    graph="(integer) the CUDA graph that launched a device event, by its id in the trace",
    cpu_bytes="the memory that the event and all inside it allocated on the CPU, minus what they "
    "freed; null if the trace has no memory events",
    device_bytes="the same, of the devices",
    own_cpu_bytes="the memory that the event itself allocated on the CPU, minus what it freed; "
    "null if the trace has no memory events",
    own_device_bytes="the same, of the devices",
    shapes="the shapes of an operator's inputs as JSON, as recorded",
    types="the types of its inputs as JSON",
    concrete="the values of its inputs that are no tensors as JSON",
    stack="the Python frames around an operator, the innermost first, joined by `;`; null if the "
    "trace has the frames as events",
    sequence="(integer) a number that a forward operator shares with its backward",
    correlation="(integer) a number that a launch shares with its device events",
    grid="of a kernel, the blocks in each dimension as JSON",
    block="of a kernel, the threads of a block in each dimension as JSON",
    blocks_per_sm="(number) of a kernel, blocks per multiprocessor of the device",
    occupancy="(number) of a kernel, Kineto's estimate of the achieved occupancy as a fraction",
)  # fmt: skip


class Facts:
    """What is known of the events of one trace.

    Attributes:
        links: the relations between events.
        work: the work of the devices.
        phase: the phase of the window.
        is_ours: whether a session recorded the trace.
        once: what was computed about the trace; the capture has the same.
        samples: returns the samples of the run's stacks, or None.
        detail: returns the detail window, or None.
        like: returns the facts of another trace of the same program, or None.
    """

    def __init__(
        self,
        links: Links,
        work: Work,
        *,
        phase: str,
        is_ours: bool,
        once: Once,
        samples: Callable[[], LineSamples | None] = lambda: None,
        detail: Callable[[], Links | None] = lambda: None,
        like: Callable[[], Facts | None] = lambda: None,
    ) -> None:
        self.links, self.work, self.phase, self.is_ours = links, work, phase, is_ours
        self.once, self.samples, self._detail, self._like = once, samples, detail, like
        self._columns: dict[str, pl.Series] = {}

    def events(self, *columns: str) -> pl.DataFrame:
        """Return columns of the table of events; all of `EVENTS` if none is named."""
        wanted = columns or tuple(names_of(EVENTS))
        for name in wanted:
            if name not in self._columns:
                found = _COMPUTED_BY[name](self)
                self._columns |= {key: each.alias(key) for key, each in found.items()}
        return pl.DataFrame([self._columns[name] for name in wanted])

    @cached_property
    def nodes(self) -> Ints:
        """The node of each event in the call tree; of a device event, that of its operator."""
        node = np.full(len(self.links.events), -1)
        node[self.links.call_tree.index] = np.arange(len(self.links.call_tree))
        device, launcher = self.links.launched
        node[device] = launcher
        return node

    @cached_property
    def is_on_device(self) -> Flags:
        """A mask of the device events."""
        found = np.zeros(len(self.links.events), np.bool_)
        found[self.work.event] = True
        return found

    @cached_property
    def path_codes(self) -> Ints:
        """The range of each event as an index into `links.scopes.paths`; -1 for none."""
        return self.links.scopes.path_of_node[self.nodes]

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """The events of collectives, and what is known of them; see `collective_events`."""
        return collective_events(self.links, self.work)

    @cached_property
    def layers(self) -> Layers:
        """The layers of the device events."""
        like = self._like()
        return layers(self.links, self.work, None if like is None else (like.links, like.work))

    @cached_property
    def sampled(self) -> Sampled:
        """The samples of the stacks in the window; none without `profiler.lines`."""
        return sampled(self.links, self.samples())

    @cached_property
    def detailed(self) -> tuple[Links, Sampled] | None:
        """The detail window, and the samples in it; None without one."""
        links = self._detail() if self.samples() else None
        return None if links is None else (links, sampled(links, self.samples()))

    def segments(self) -> pl.DataFrame:
        """Return the table of segments, of all lanes; see `instrument.read.facts.segments`."""
        return pl.concat([segments(self, lane) for lane in LANES])

    def of_nodes(self, values: NDArray[Any] | None, known: Flags | None = None) -> pl.Series:
        """Spread the values of nodes of the call tree over the events; null for other events."""
        count, index = len(self.links.events), self.links.call_tree.index
        if values is None:
            return pl.Series([None], dtype=pl.Int64).new_from_index(0, count)
        spread, is_known = np.zeros(count, values.dtype), np.zeros(count, np.bool_)
        spread[index], is_known[index] = values, True if known is None else known
        return nullable(spread, is_known)


def nullable(values: NDArray[Any] | pl.Series, known: Flags) -> pl.Series:
    """Return a series of the values, with null where `known` is False."""
    series = values if isinstance(values, pl.Series) else pl.Series(values)
    return series if known.all() else series.set(pl.Series(~known), None)


def coded(values: Sequence[Any] | pl.Series, codes: Ints | Codes) -> pl.Series:
    """Return `values[code]` for each code, and null for the code -1."""
    return pl.Series(values).gather(nullable(codes.astype(np.int64), codes >= 0))


def _recorded(facts: Facts) -> dict[str, pl.Series]:
    events, count = facts.links.events, len(facts.links.events)
    return {
        "id": pl.Series(np.arange(count)),
        "part": pl.Series(np.zeros(count, np.int64)),
        "start_ns": pl.Series(events.start_ns),
        "start_unix_ns": nullable(
            events.start_ns + events.base_ns, np.full(count, events.base_ns != 0)
        ),
        "end_ns": pl.Series(events.end_ns),
        "duration_ns": pl.Series(events.duration_ns),
        "finished": pl.Series(events.finished),
        "phase": pl.Series([facts.phase]).new_from_index(0, count),
    }


def _numbered(facts: Facts) -> dict[str, pl.Series]:
    events = facts.links.events
    graphs = pl.Series([known_count(each.graph) for each in events.details], dtype=pl.Int64)
    return {
        "sequence": nullable(events.sequence, events.sequence >= 0),
        "correlation": nullable(events.correlation, events.correlation != 0),
        "graph": coded(graphs, events.detail),
    }


def _located(facts: Facts) -> dict[str, pl.Series]:
    events, tree = facts.links.events, facts.links.call_tree
    on_device, thread = facts.is_on_device, events.thread.copy()
    thread[tree.index] = tree.thread
    process, number = (
        pl.Series([str(each[side]) for each in events.threads], dtype=pl.String) for side in (0, 1)
    )
    return {
        "thread": nullable((process + "/" + number).gather(thread), ~on_device),
        "device": nullable(process.gather(thread), on_device),
        "stream": nullable(number.gather(thread), on_device),
    }


def _named(facts: Facts) -> dict[str, pl.Series]:
    """The kind and name of each event, found once for each pair of a category and a name."""
    events = facts.links.events
    pairs, groups = groupby(events.category.astype(np.int64) * len(events.names) + events.name)
    described = [
        _described(events.categories[category], events.names[code])
        for category, code in zip(*(side.tolist() for side in np.divmod(pairs, len(events.names))))
    ]
    kinds, names, overloads = zip(*described) if described else ((), (), ())
    has_overloads = any(overloads)
    kind = pl.Series(kinds, dtype=pl.String).gather(groups.of)
    work = np.full(len(events), -1)
    work[facts.work.event] = facts.work.kind
    of_work = coded(WORK, work)
    kind = kind.zip_with(of_work.is_null(), of_work)
    return {
        "kind": kind,
        "category": pl.Series(events.categories, dtype=pl.String).gather(events.category),
        "name": pl.Series(names, dtype=pl.String).gather(groups.of),
        "overload": pl.Series(
            overloads if has_overloads else [None] * len(names), dtype=pl.String
        ).gather(groups.of),
        "wait_kind": kind.replace_strict(_WAIT_KINDS, default=None, return_dtype=pl.String),
    }


def _labelled(facts: Facts) -> dict[str, pl.Series]:
    events, work = facts.links.events, facts.work
    codes, groups = groupby(events.name[work.event])
    names = [events.names[code] for code in codes.tolist()]
    classes = pl.Series([*map(kernel_class, names)], dtype=pl.String).gather(groups.of)
    of_work = pl.Series(WORK).gather(work.kind)
    is_other = (classes == "communication") & (of_work == "kernel")  # as the user's globs say
    classes = classes.set(is_other, "other").zip_with(
        ~of_work.is_in(["communication", "copy"]), of_work
    )
    labels = pl.Series([*map(kernel_label, names)], dtype=pl.String).gather(groups.of)
    return {
        "label": _scattered(labels, work.event, len(events)),
        "class": _scattered(classes, work.event, len(events)),
    }


def _scattered(values: pl.Series, event: Ints, count: int) -> pl.Series:
    """A series of `count` rows with each value at the position of its event, and null elsewhere."""
    row = np.full(count, -1)
    row[event] = np.arange(len(event))
    return coded(values, row)


def _described(category: str, name: str) -> tuple[str, str, str | None]:
    """The kind of a CPU event, its name in tables, and the overload of an operator."""
    role = (
        "operator" if category in OPERATOR else "range" if category in ANNOTATION
        else "runtime" if is_runtime(category) else "frame" if category in PYTHON else "other"
    )  # fmt: skip
    kind = (
        next((kind for kind, of, test in _KIND_OF_NAME if of in ("", role) and test(name)), role)
        if role in CPU_KINDS
        else role
    )
    if kind == "step":
        return kind, STEP, None
    plain, overload = split_overload(name) if role == "operator" else (name, None)
    return kind, plain, overload


def _nested(facts: Facts) -> dict[str, pl.Series]:
    links, tree, counted_ns = facts.links, facts.links.call_tree, facts.links.own_ns
    if len(links.steps):
        inside_ns = links.counted_steps.within(tree.start_ns, tree.ends_before_overlap)
        counted_ns = tree.own(inside_ns)
    return {
        "parent": facts.of_nodes(np.append(tree.index, -1)[tree.parent], tree.parent >= 0),
        "own_ns": facts.of_nodes(links.own_ns),
        "counted_own_ns": facts.of_nodes(counted_ns),
    }


def _calls(facts: Facts) -> dict[str, pl.Series]:
    tree = facts.links.call_tree
    name = facts.events("name")["name"].gather(tree.index)
    stays = np.ones(len(tree), np.bool_)
    if len(tree):
        # A child directly follows its parent. If it is the only child, both have the same last
        # descendant; no other node has the same last descendant as the node before it.
        is_same = (name == name.shift(1)).fill_null(False).to_numpy()
        stays[1:] = (tree.until[1:] != tree.until[:-1]) | ~is_same[1:]
    return {"call": facts.of_nodes(stays)}


def _of_steps(facts: Facts) -> dict[str, pl.Series]:
    links, work, events = facts.links, facts.work, facts.links.events
    time_ns = events.start_ns.copy()
    time_ns[work.event] = launched_ns(events, work)
    numbers = pl.Series(links.step_numbers, dtype=pl.Int64)
    at = step_at(events, links.steps, time_ns)
    counts = np.zeros(len(links.steps) + 1, np.bool_)  # the last entry is for no step
    counts[:-1][links.counted_steps.kept] = True
    return {
        "step": coded(numbers, at),
        "counted": pl.Series(counts[at] if len(links.steps) else np.ones(len(events), np.bool_)),
    }


def _launched(facts: Facts) -> dict[str, pl.Series]:
    links, work, count = facts.links, facts.work, len(facts.links.events)
    launcher, operator = np.full((2, count), -1)
    device, node = links.launched
    launcher[work.event] = work.call
    operator[device] = np.append(links.call_tree.index, -1)[node]
    own, counted_ns = links.device_own_ns, None
    total = facts.of_nodes(None if own is None else links.call_tree.with_descendants(own))
    if own is not None:
        duration_ns = facts.events("duration_ns", "counted")[device]
        counts = duration_ns["duration_ns"] * duration_ns["counted"]
        counted_ns = Groups(node, len(own)).sum(counts.to_numpy(), node >= 0)
        total = pl.Series(links.events.duration_ns).zip_with(pl.Series(facts.is_on_device), total)
    return {
        "launcher": nullable(launcher, launcher >= 0),
        "operator": nullable(operator, operator >= 0),
        "device_ns": total,
        "own_device_ns": facts.of_nodes(own),
        "counted_own_device_ns": facts.of_nodes(counted_ns),
    }


def _placed(facts: Facts) -> dict[str, pl.Series]:
    links, scopes, path = facts.links, facts.links.scopes, facts.path_codes
    texts = pl.Series(scopes.paths.texts, dtype=pl.String)
    kind = np.append(kinds_of_scopes(links.events, scopes), -1)[
        np.append(scopes.innermost, -1)[facts.nodes]
    ]
    found = coded(_PASS_OF_KIND, kind)
    tree = links.call_tree
    waits = facts.events("wait_kind")["wait_kind"].eq_missing("data").to_numpy()
    is_data = np.append(tree.at_or_inside(waits[tree.index]), False)[facts.nodes]
    data = pl.Series(["data"]).new_from_index(0, len(found))
    return {
        "path": coded(texts, path),
        "pass": data.zip_with(pl.Series(is_data), found),
    }


def _staged(facts: Facts) -> dict[str, pl.Series]:
    return {"stage": coded(STAGES, stages(facts.links)[facts.nodes])}


def _layered(facts: Facts) -> dict[str, pl.Series]:
    found, work, count = facts.layers, facts.work, len(facts.links.events)
    of = np.full(count, -1)
    of[facts.links.call_tree.index] = layers_of_nodes(facts.links, found)
    of[work.event] = found.of
    known = nullable(found.confidence, found.evidence != UNKNOWN_LAYER)
    return {
        "layer": coded(pl.Series(found.names, dtype=pl.String), of),
        "evidence": _scattered(pl.Series(EVIDENCE).gather(found.evidence), work.event, count),
        "confidence": _scattered(known, work.event, count),
    }


def _lines(facts: Facts) -> dict[str, pl.Series]:
    codes, places = lines_of_nodes(facts)
    lines = [place.rpartition(" in ")[0] for place in places]
    return {"line": coded(pl.Series(lines, dtype=pl.String), codes[facts.nodes])}


def _flops(facts: Facts) -> dict[str, pl.Series]:
    flops = facts.links.flops
    return {"flops": facts.of_nodes(flops, None if flops is None else flops != UNKNOWN)}


def _memory(facts: Facts) -> dict[str, pl.Series]:
    tree, memory = facts.links.call_tree, facts.links.events.memory
    found = {}
    for where, size in memory_attribution.sizes(memory).items():
        total = None if size is None else memory_attribution.within(tree, memory, size)
        found[f"{where}_bytes"] = facts.of_nodes(total)
        found[f"own_{where}_bytes"] = facts.of_nodes(None if total is None else tree.own(total))
    return found


def _of_arguments(facts: Facts) -> dict[str, pl.Series]:
    events = facts.links.events
    columns = {"shapes": events.shapes, "types": events.types, "concrete": events.concrete}
    return {
        **{name: _texts(codes, events.texts) for name, codes in columns.items()},
        "stack": _texts(events.call_stack, events.texts, lambda text: str(decoded(text))),
    }


def _moved(facts: Facts) -> dict[str, pl.Series]:
    """The sizes of copies and messages, and the collective of each event that communicates."""
    events, work = facts.links.events, facts.work
    moves = np.isin(work.kind, (COPY, MEMSET))
    moved = moved_bytes(events, work.event[moves], work.call[moves])
    found = facts.collectives.filter(pl.col("runs_on").is_not_null())
    is_first = (found["record"] < 0) | found["record"].is_first_distinct()
    sizes = nullable(moved, moved >= 0).append(found["bytes"].set(~is_first, None))
    event = found["event"].to_numpy()
    columns = {"collective": "kind", "process_group": "process_group", "group_size": "group_size"}
    return {
        "bytes": _scattered(sizes, np.append(work.event[moves], event), len(events)),
        **{name: _scattered(found[of], event, len(events)) for name, of in columns.items()},
    }


def _of_kernels(facts: Facts) -> dict[str, pl.Series]:
    events = facts.links.events
    return {
        "grid": _texts(events.grid, events.grids, lambda text: str(decoded(text))),
        "block": _texts(events.block, events.grids, lambda text: str(decoded(text))),
        "blocks_per_sm": nullable(
            events.blocks_per_sm.astype(np.float64), ~np.isnan(events.blocks_per_sm)
        ),
        "occupancy": nullable(events.occupancy.astype(np.float64) / 100, events.occupancy > 0),
    }


def _texts(
    codes: Codes, texts: Sequence[bytes], shown: Callable[[bytes], str] | None = None
) -> pl.Series:
    """The text of each event; null for the code -1. Only texts that are used are decoded."""
    used = np.zeros(len(texts), np.bool_)
    used[codes[codes >= 0]] = True
    convert = shown or (lambda text: text.decode("utf-8", "replace"))
    found = [convert(text) if is_used else None for text, is_used in zip(texts, used.tolist())]
    return coded(pl.Series(found, dtype=pl.String), codes)


_GROUPS: tuple[tuple[Callable[[Facts], dict[str, pl.Series]], str], ...] = (
    (_recorded, "id part start_ns start_unix_ns end_ns duration_ns finished phase"),
    (_numbered, "sequence correlation graph"),
    (_located, "thread device stream"),
    (_named, "kind category name overload wait_kind"),
    (_labelled, "label class"),
    (_nested, "parent own_ns counted_own_ns"),
    (_calls, "call"),
    (_of_steps, "step counted"),
    (_launched, "launcher operator device_ns own_device_ns counted_own_device_ns"),
    (_placed, "path pass"),
    (_staged, "stage"),
    (_layered, "layer evidence confidence"),
    (_lines, "line"),
    (_flops, "flops"),
    (_memory, "cpu_bytes device_bytes own_cpu_bytes own_device_bytes"),
    (_of_arguments, "shapes types concrete stack"),
    (_moved, "bytes collective process_group group_size"),
    (_of_kernels, "grid block blocks_per_sm occupancy"),
)
_COMPUTED_BY = {name: compute for compute, names in _GROUPS for name in names.split()}
