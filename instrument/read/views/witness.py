"""Whether a trace can be believed: claims that hold for every sound trace, each with its figure.

A profiler loses records, mistakes clocks and counts twice without an error. But what is lost leaves
a gap in something else: a launch without its kernel, a number without its event, a total of memory
that no allocation explains. A claim that cannot be judged on a trace is unknown, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.facts.cuda_graphs import graph_ids, is_graph_launch, replayed
from instrument.read.facts.groupby import distinct, group_rows, groupby, groupby_rows
from instrument.read.facts.launches import find, ran_first
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Flags,
    Ints,
    is_runtime,
    is_step,
)
from instrument.read.views import coverage_rows as rows
from instrument.read.views.coverage import in_order, is_copy, launches, lost_events, part
from instrument.read.views.interruptions import PROFILER, kinds_of
from instrument.read.views.known_faults import faults

if TYPE_CHECKING:
    from instrument.read.views.views import Views

#: What the keys of the JSON of `instrument check` mean.
JSON_KEYS = {
    "required": "the share of the events for which each claim must hold",
    "holds": "whether no claim is broken; claims that cannot be judged do not count",
    "captures": "for each capture, its name (`capture`), and the claims about it (`claims`)",
    "job": "the claims about all captures together; empty for one capture",
}
#: What the keys of a claim mean.
CLAIM_KEYS = {
    "code": "the name of the claim, such as `launches`",
    "claim": "the claim as a sentence",
    "share": "the fraction of the events for which it holds; `null` if unknown",
    "total": "the number of these events; 0 if unknown",
    "why": "what breaks the claim, or why it cannot be judged",
    "means": "what follows for the figures if the claim does not hold",
    "holds": "whether it holds for the required share; `null` if unknown",
}
#: The share of the events for which a claim must hold, if nobody says otherwise.
REQUIRED = 0.99
# A diagnosis says nothing of fewer events: one of ten may be chance.
_LEAST_SAID = 100
_CPU = ANNOTATION | OPERATOR
_TRACE = frozenset({"Trace"})
# Devices whose work has no stream, and no launch for each piece.
_OTHER_DEVICES = frozenset({"mtia_ccp_events", "hpu_op"})
# Kineto's marks of begin and end may be wrong by so much of the recording. In sound traces, fewer
# than 0.1 % of the events lie further outside.
_MARGIN = 0.01
# A kernel launched by such a call may begin before the one before it on its stream ends
# (programmatic dependent launch); in sound traces, only these overlap by more than 0.1 µs.
_EARLY_LAUNCH, _CLOSE_NS = re.compile(r"LaunchKernelEx"), 1_000
# Of the kernels of a name, some last 0 µs only if most are shorter than this.
_SHORT_NS = 5_000
# The clocks of CPU and device may differ by this much.
_SKEW_NS = 10_000
# torch gives the operators of a thread numbers from blocks of this size. If fewer than half of the
# numbers of a trace are in use, they count something else, too.
_BLOCK, _MOST_HOLES = 512, 0.5
# An operator launches work in each call if at least this part of its calls does, of so many.
_ALWAYS, _LEAST_CALLS = 0.9, 10
# A usual request for a buffer took 1.5 ms, 1.8 % of the recording.
_LONG_FLUSH_NS, _LONG_FLUSH = 5_000_000, 0.03


# How many events of a kind break a claim, and how many there are.
_Pair = tuple[int, int]


class Claim(NamedTuple):
    """A property of sound traces, and whether a trace has it; `CLAIM_KEYS` has the attributes."""

    code: str
    claim: str
    share: float | None
    total: int
    why: str
    means: str

    def holds(self, required: float = REQUIRED) -> bool | None:
        """Whether the claim holds for the required share of the events; None if unknown."""
        return None if self.share is None else self.share >= required


class _Row(NamedTuple):
    """A claim; `broken` says what is wrong with events, `unknown` why there are none to judge."""

    claim: str
    broken: str
    means: str
    unknown: str
    find: Callable[[Views], Iterable[_Pair]] = lambda _: ()

    def judged(self, code: str, pairs: Iterable[_Pair]) -> Claim:
        """Judge the kind with the largest bad share; all kinds together would hide a small one."""
        known = [pair for pair in pairs if pair[1]]
        if not known:
            return Claim(code, self.claim, None, 0, self.unknown, self.means)
        bad, total = max(known, key=lambda pair: pair[0] / pair[1])
        why = f"{bad:,} of {total:,} {self.broken}" if bad else ""
        return Claim(code, self.claim, (total - bad) / total, total, why, self.means)


def claims(capture: Views) -> list[Claim]:
    """Return the claims about one trace, in the order of `CLAIMS`.

    Cost: a few sorts of the events, and the call tree; about 0.4 µs for each event.
    """
    found = {code: row.judged(code, row.find(capture)) for code, row in CLAIMS.items()}
    if known := faults(capture):
        found["versions"] = found["versions"]._replace(share=None, why="; ".join(known))
    if capture.events.cut_short:
        found["file"] = found["file"]._replace(share=0.0, why="the file is cut short")
    return [*found.values()]


def consequences(capture: Views) -> list[str]:
    """Return a sentence for each broken claim, with what that means for the figures.

    Left out is what `lost_events` says of the file and its times; and of a capture that is
    restricted to some steps, nothing is said.
    """
    whole = capture.whole

    def find() -> list[str]:
        said = {"file", "versions", *(["times"] if lost_events(whole) else [])}
        return [
            f"{percent(1 - each.share)} of the {CLAIMS[each.code].broken}: {each.means}."
            for each in claims(whole)
            if each.code not in said and each.total >= _LEAST_SAID
            if each.share is not None and not each.holds()
        ]

    return whole.once("broken claims", find) if whole.has_all_steps else []


def _counts(bad: Flags, *kinds: Flags) -> list[_Pair]:
    return [(int((bad & kind).sum()), int(kind.sum())) for kind in kinds]


def _read(capture: Views) -> list[_Pair]:
    events = capture.events
    lost = events.unreadable + events.no_category + events.unknown_category
    return [(lost, events.recorded)]


def _times(capture: Views) -> list[_Pair]:
    """Unfinished events that last 0 ns ended before they began; most work of a name cannot last 0.

    In a trace with whole microseconds, short work of a device lasts 0.
    """
    events, work, length_ns = capture.events, capture.work, capture.work.duration_ns
    negative = (events.end_ns == events.start_ns) & ~events.finished
    pairs = _counts(negative, events.among(_CPU), events.among(is_runtime), events.among(PYTHON))
    name = groupby(events.name[work.event])[1]
    usual_ns = length_ns[name.sorted_by(length_ns).row(50)]
    is_exact = bool((events.start_ns % 1000).any())
    no_time = (length_ns == 0) & (negative[work.event] | is_exact | (usual_ns > _SHORT_NS)[name.of])
    of_all = events.negative_durations + events.left_out + events.no_duration
    pairs.append((int(no_time.sum()) + events.overlapping, len(work.event)))
    return [*pairs, (of_all, events.recorded)]


def _inside(capture: Views) -> list[_Pair]:
    events = capture.events
    marks = np.flatnonzero(events.among(_TRACE) & events.named(lambda name: name.endswith("(0)")))
    if len(marks) != 1:
        return []
    begin, end = int(events.start_ns[marks[0]]), int(events.end_ns[marks[0]])
    margin = int(_MARGIN * (end - begin))
    outside = (events.start_ns < begin - margin) | (events.start_ns > end + margin)
    kinds = events.among(_CPU), events.among(is_runtime), capture.facts.is_on_device
    return _counts(outside, *kinds)


def _launches(capture: Views) -> list[_Pair]:
    calls, has_work, lost = launches(capture)
    copies = capture.events.named(is_copy)[calls]
    if part(capture, rows.LAUNCHES) is None:  # the trace has counters instead of device work
        return []
    return _counts(lost, copies & (has_work | lost), ~copies & (has_work | lost))


def _launched(capture: Views) -> list[_Pair]:
    """Work that was launched before the recording began does not count."""
    events, work = capture.events, capture.work
    if events.among(_OTHER_DEVICES).any() or not events.among(is_runtime).any():
        return []
    unknown = work.call < 0
    return _counts(unknown, ~ran_first(events, work.event, ~unknown))


def _in_order(capture: Views) -> list[_Pair]:
    return _counts(~in_order(capture), capture.work.call >= 0)


def _one_at_a_time(capture: Views) -> list[_Pair]:
    """Work that the next of its stream overlaps, or is the same as; graphs may have branches."""
    events, work = capture.events, capture.work
    stream, name = events.thread[work.event], events.name[work.event]
    order = np.lexsort((-work.end_ns, work.start_ns, stream))
    one, other = order[:-1], order[1:]
    overlap_ns = work.end_ns[one] - work.start_ns[other]
    may_be_early = events.named(lambda name: _EARLY_LAUNCH.search(name) is not None)
    late = (overlap_ns > _CLOSE_NS) & ~np.append(may_be_early, False)[work.call[other]]
    in_graph = replayed(events, work.event, work.call)
    bad = (late | (work.end_ns[one] >= work.end_ns[other])) & ~(in_graph[one] & in_graph[other])
    same = (work.start_ns[one] == work.start_ns[other]) & (work.end_ns[one] == work.end_ns[other])
    bad = (bad | (same & (name[one] == name[other]))) & (overlap_ns > 0)
    bad &= stream[one] == stream[other]
    return [] if events.among(_OTHER_DEVICES).any() else [(int(bad.sum()), len(order))]


def _waits(capture: Views) -> list[_Pair]:
    """Waits for the device that return early; the stream of other waits is seldom known."""
    events, work = capture.events, capture.work
    waits = events.among(is_runtime) & events.named(lambda name: name.endswith("DeviceSynchronize"))
    if len({events.threads[k][0] for k in distinct(events.thread[work.event]).tolist()}) != 1:
        return []  # a wait is for one device
    known = np.flatnonzero(work.call >= 0)
    known = known[np.argsort(events.end_ns[work.call[known]])]
    before = np.searchsorted(events.end_ns[work.call[known]], events.start_ns[waits])
    reached_ns = np.maximum.accumulate(work.end_ns[known])[before[before > 0] - 1]
    early = reached_ns - events.end_ns[waits][before > 0] > _SKEW_NS
    return [(int(early.sum()), len(early))]


def _nested(capture: Views) -> list[_Pair]:
    events, pairs = capture.events, list[_Pair]()
    frames = np.flatnonzero(events.python_id >= 0)
    caller = find(events.python_id, events.python_id >= 0, events.python_parent[frames])
    same = (caller >= 0) & (events.thread[caller] == events.thread[frames])
    outside = events.start_ns[frames] < events.start_ns[caller]
    pairs += _counts(outside | (events.end_ns[frames] > events.end_ns[caller]), same)
    for tree in (capture.links.call_tree, capture.links.frames):
        following = np.minimum(tree.until.astype(np.int64), len(tree) - 1)
        ends_within = tree.start_ns[following] < tree.end_ns
        ends_within &= (tree.until < len(tree)) & (tree.thread[following] == tree.thread)
        pairs.append((int(ends_within.sum()), len(tree)))
    return pairs


def _numbers(capture: Views) -> list[_Pair]:
    """Operators, frames and, on ROCm, calls have successive numbers."""
    events = capture.events
    operators = events.among(_CPU) & (events.external_id != 0)
    calls = events.among(is_runtime) & (events.correlation != 0)
    calls &= "hip_runtime_version" in events.versions
    return [
        _holes(events.external_id[operators], events.thread[operators]),
        _holes(events.python_id[events.python_id >= 0]),
        _holes(events.correlation[calls]),
    ]


def _holes(numbers: Ints, thread: Ints | None = None) -> tuple[int, int]:
    """The missing and repeated numbers; (0, 0) if they are few, or have many holes.

    With `thread`, a thread leaves the rest of its last block of numbers.
    """
    order = np.argsort(numbers, kind="stable")
    step = np.diff(numbers[order])
    holes = np.clip(step - 1, 0, 2**40)  # so that sums of ids from a stranger fit into 64 bits
    if thread is not None and len(order):
        last = np.zeros(int(thread.max()) + 1, np.int64)
        last[thread[order]] = np.arange(len(order))
        last = distinct(last[thread])
        last = last[last < len(holes)]
        holes[last] = np.maximum(holes[last] - -numbers[order[last]] % _BLOCK, 0)
    missing, twice = int(holes.sum()), int((step == 0).sum())
    total = len(numbers) + missing
    is_known = len(numbers) >= _LEAST_SAID and missing <= _MOST_HOLES * total
    return (missing + twice, total) if is_known else (0, 0)


def _always_launch(capture: Views) -> list[_Pair]:
    """The calls of operators that launch work in nearly all other calls with the same inputs."""
    events, tree = capture.events, capture.links.call_tree
    has_launch = np.zeros(len(tree) + 1, np.bool_)
    has_launch[tree.parent[tree.nodes_of(launches(capture)[0])]] = True
    operators = np.flatnonzero(events.among(OPERATOR)[tree.index])
    at = tree.index[operators]
    groups = group_rows(events.name[at], events.shapes[at])
    does = groups.number(has_launch[operators])
    sure = (does >= _ALWAYS * groups.size) & (groups.size >= _LEAST_CALLS)
    total = int(groups.size[sure].sum())
    return [(total - int(does[sure].sum()), total)]


def _memory(capture: Views) -> list[_Pair]:
    memory = capture.events.memory
    device = groupby(memory.device_type.astype(np.int64) * 2**20 + memory.device_index)[1]
    order = device.sorted_by(memory.time_ns).order
    wrong = np.diff(memory.allocated_bytes[order]) != memory.size_bytes[order][1:]
    has_totals = bool(memory.allocated_bytes.any())
    return _counts(wrong, (np.diff(device.of[order]) == 0) & has_totals)


def _graphs(capture: Views) -> list[_Pair]:
    """A replay holds each node that any replay of its graph holds; a launch without work, as many.

    ROCm gives nodes no ids, so that other nodes are not known to be of the same graph.
    """
    events, work = capture.events, capture.work
    graph, node, _, _ = graph_ids(events, work.event)
    rows = (node >= 0) & (events.correlation[work.event] != 0)
    graph, node, replay = graph[rows], node[rows], groupby(events.correlation[work.event[rows]])[1]
    if replay.count < 2:
        return []
    of_replay = np.zeros(replay.count, np.int64)
    np.maximum.at(of_replay, replay.of, graph)  # a graph may hold others, with their own ids
    (of_node, _), _ = groupby_rows(of_replay[replay.of], node)
    total = int(np.bincount(of_node, minlength=int(of_replay.max()) + 1)[of_replay].sum())
    missing = total - group_rows(replay.of, node).count
    calls, _, lost = launches(capture)
    lost_launches = int(events.named(is_graph_launch)[calls[lost]].sum())
    more = lost_launches * int(np.median(replay.size))
    return [(missing + more, total + more)]


def _flushes(capture: Views) -> list[_Pair]:
    """The µs of the recording in which the profiler handled its buffers for long."""
    events, recorded = capture.events, capture.links.finished_steps
    whole_ns = int(recorded.end_ns.max() - recorded.start_ns.min())
    length_ns = events.duration_ns[kinds_of(events) == PROFILER]
    long_ns = length_ns[length_ns >= min(_LONG_FLUSH_NS, _LONG_FLUSH * whole_ns)]
    total = whole_ns // 1000 if events.among(frozenset({"overhead"})).any() else 0
    return [(min(int(long_ns.sum()) // 1000, total), total)]


def _steps(capture: Views) -> list[_Pair]:
    """Steps that are missing, repeated, unfinished, or begin before the end of the last one."""
    events, links = capture.events, capture.links
    if not len(links.steps):
        return []
    numbers = np.array(links.step_numbers, np.int64)
    marked = events.among(_CPU) & events.named(is_step)
    missing = int(np.ptp(numbers)) + 1 - len(distinct(numbers))
    missing += int((marked & ~events.finished).sum())
    overlap = events.start_ns[links.steps][1:] < events.end_ns[links.steps][:-1]
    wrong = int(((np.diff(numbers) <= 0) | overlap).sum())
    return [(missing + wrong, len(numbers) + missing)]


#: The claims about one trace, by code: what holds, what breaks it, what that means, why it is
#: unknown if there is nothing to judge, and what counts it.
CLAIMS = {
    "file": _Row(
        "the file is whole", "events of the file could not be read", "figures are too small",
        "the file holds no events", _read),
    "times": _Row(
        "events have possible times", "events have impossible times",
        "times of these events are wrong", "the file holds no events", _times),
    "inside": _Row(
        "events begin within the recording", "events begin outside of the recording",
        "idle time is too large", "the trace does not say when the recording began", _inside),
    "launches": _Row(
        "launches have their device work", "launches have no device work in the trace",
        "device times are too small", "the trace has no launches", _launches),
    "launched": _Row(
        "device work has its launch", "pieces of device work have no launch in the trace",
        "device times of ranges and operators are too small",
        "the trace has no device work, or not all launches", _launched),
    "order": _Row(
        "device work starts after its launch, in the order of the launches",
        "pieces of device work start at impossible times", "the causes of idle time are wrong",
        "the trace has no device work with its launch", _in_order),
    "streams": _Row(
        "a stream runs one piece of work at a time",
        "pieces of device work overlap others of their stream", "device times are too large",
        "the trace has no streams of a GPU", _one_at_a_time),
    "waits": _Row(
        "waits return after the work that they wait for",
        "waits return before the device has finished",
        "the clocks of CPU and device differ, and the causes of idle time are wrong",
        "the trace has no wait for its only device", _waits),
    "nesting": _Row(
        "CPU events of a thread lie inside each other, or apart", "CPU events overlap partly",
        "own times of operators and ranges are wrong", "the trace has no CPU events", _nested),
    "numbers": _Row(
        "the numbers of events have no holes", "numbers of events are missing, or given twice",
        "counts and times on the CPU are wrong", "events have no successive numbers", _numbers),
    "always": _Row(
        "operators that launch work do so in each call",
        "calls of operators launch nothing, unlike the other calls",
        "launches and device times are too small", "no operator launches work often enough",
        _always_launch),
    "graphs": _Row(
        "replays of a CUDA graph hold the same nodes",
        "nodes of replayed CUDA graphs are missing", "device times of graphs are too small",
        "the trace has no two replays of a graph with ids of nodes", _graphs),
    "memory": _Row(
        "allocations explain each total of memory",
        "totals of memory are not explained by allocations",
        "memory in use, and what owns it, is wrong", "the trace has no totals of memory", _memory),
    "flushes": _Row(
        "the profiler does not stop the program",
        "µs of the recording went to the profiler's buffers", "idle time is too large",
        "the trace has no events of the profiler's own work", _flushes),
    "steps": _Row(
        "steps are whole", "steps are missing, repeated, unfinished or overlap",
        "means per step are wrong", "no step is marked", _steps),
    "versions": _Row(
        "the versions have no known fault", "", "see the thread",
        "the trace names no version of the device's runtime or of Python",
        lambda capture: [] if faults(capture) is None else [(0, 1)]),
}  # fmt: skip
#: The claims about all captures that are given, by code.
JOB_CLAIMS = {
    "ranks": _Row(
        "each rank of the job is there once", "ranks are missing, or given twice",
        "what ranks wait for is wrong", "no two ranks of a window are given"),
    "window": _Row(
        "the ranks recorded at the same time",
        "ranks recorded at another time, or their clocks differ", "ranks cannot be compared",
        "no two ranks of a window are given"),
}  # fmt: skip


class Seen(NamedTuple):
    """What the claims about a job need of a capture; times are Unix times.

    `job` says which captures belong together; None for a capture that is no rank of a job.
    """

    job: Any
    world_size: int
    rank: int | None
    begin_ns: int
    end_ns: int


def seen(capture: Views) -> Seen:
    """Return what `job_claims` needs of a capture."""
    events, about, spans = capture.events, capture.about, capture.links.finished_steps
    world_size = about.world_size or events.world_size or 1
    window = (capture.phase, min(capture.links.step_numbers, default=None), world_size)
    is_one = world_size > 1 and capture.rank is not None and about.config.ranks in (None, "all")
    times = (events.base_ns + int(each) for each in (spans.start_ns.min(), spans.end_ns.max()))
    return Seen(window if is_one else None, world_size, capture.rank, *times)


def job_claims(captures: Sequence[Seen]) -> list[Claim]:
    """Return the claims about the ranks of a job; those of one window belong together."""
    windows: dict[Any, list[Seen]] = {}
    for each in captures:
        windows.setdefault(each.job, []).append(each)
    missing, apart = [0, 0], [0, 0]
    for job, ranks in windows.items():
        if job is not None and len(ranks) > 1:
            present, wanted = len({each.rank for each in ranks}), ranks[0].world_size
            missing = [missing[0] + wanted + len(ranks) - 2 * present, missing[1] + wanted]
            begin, end = (sorted(side)[len(ranks) // 2] for side in list(zip(*ranks))[-2:])
            alone = sum(each.end_ns < begin or each.begin_ns > end for each in ranks)
            apart = [apart[0] + alone, apart[1] + len(ranks)]
    pairs = (missing[0], missing[1]), (apart[0], apart[1])
    return [row.judged(code, [pair]) for (code, row), pair in zip(JOB_CLAIMS.items(), pairs)]
