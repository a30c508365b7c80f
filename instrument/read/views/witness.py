"""Whether a trace can be believed: claims that hold for every sound trace, each with its figure.

A profiler loses records, mistakes clocks and counts twice without an error. Each row of `CLAIMS` is
a property that all events of a sound trace have; its `find` counts the events that break it. What
is lost leaves a gap in something else that was recorded: a launch without its kernel, a number
without its event, a total that no allocation explains.

A claim that cannot be judged on a trace is unknown, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.groupby import group_rows, groupby
from instrument.read.facts.launches import ran_first
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Ints,
    is_blocking_copy,
    is_runtime,
    is_step,
)
from instrument.read.views import coverage_rows as rows
from instrument.read.views.coverage import in_order, is_copy, launches, part
from instrument.read.views.graph_replays import lost_nodes
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
_TRACE, _MTIA = frozenset({"Trace"}), frozenset({"mtia_ccp_events"})
_CPU = ANNOTATION | OPERATOR
# Kineto's markers may be early by so much of the recording; measured: up to 2.4 %, few events.
_EARLY_MARKER = 0.01
# A kernel launched by such a call may begin before the one before it on its stream ends
# (programmatic dependent launch); in sound traces, only these overlap by more than 0.1 µs.
_EARLY_LAUNCH = re.compile(r"LaunchKernelEx")
_CLOSE_NS = 1_000
# The clocks of CPU and device may differ by this much.
_SKEW_NS = 10_000
# torch gives the operators of a thread numbers from blocks of this size.
_BLOCK = 512
# If a smaller part of the numbers is in use, they count something else, too.
_MOSTLY = 0.5
# An operator launches work in each call if at least this part of its calls does, of so many.
_ALWAYS, _LEAST_CALLS = 0.9, 10
# A usual request for a buffer took 1.5 ms, 1.8 % of the recording.
_LONG_FLUSH_NS, _LONG_FLUSH = 5_000_000, 0.03


class Found(NamedTuple):
    """How many of `total` events break a claim; `more` is a remark.

    With `is_unmet`, the claim is broken whatever the numbers.
    """

    bad: int
    total: int
    more: str = ""
    is_unmet: bool = False


class Claim(NamedTuple):
    """A property of sound traces, and whether a trace has it.

    `CLAIM_KEYS` describes the attributes; with `is_unmet`, it does not hold whatever the share.
    """

    code: str
    claim: str
    share: float | None
    total: int
    why: str
    means: str
    is_unmet: bool = False

    def holds(self, required: float = REQUIRED) -> bool | None:
        """Whether the claim holds for the required share of the events; None if unknown."""
        if self.is_unmet or self.share is None:
            return False if self.is_unmet else None
        return self.share >= required


class _Row(NamedTuple):
    """A claim; `find` returns what breaks it, or why it cannot be judged.

    `broken` says what is wrong with the events, after their number.
    """

    claim: str
    broken: str
    means: str
    find: Callable[[Views], Found | str] = lambda _: "no capture is given"


def claims(capture: Views) -> list[Claim]:
    """Return the claims about one trace, in the order of `CLAIMS`.

    Cost: a few sorts of the events, and the call tree; about 0.6 µs for each event.
    """
    capture.require_whole("The claims about a trace")
    return [judged(code, row, row.find(capture)) for code, row in CLAIMS.items()]


def judged(code: str, row: _Row, found: Found | str) -> Claim:
    """Return the claim of a row, with what was found."""
    if isinstance(found, str):
        return Claim(code, row.claim, None, 0, found, row.means)
    bad, total = found.bad, found.total
    share = (total - bad) / total if total else None
    broken = f"{bad:,} of {total:,} {row.broken}" if bad else ""
    why = "; ".join(filter(None, [broken, found.more]))
    return Claim(code, row.claim, share, total, why, row.means, found.is_unmet)


def consequences(capture: Views) -> list[str]:
    """Return a sentence for each claim that does not hold, and what that means for the figures.

    Left out is what `capture.coverage` says of the file and of its times. Of a capture that is
    restricted to some steps, nothing is said.
    """
    whole = capture.whole

    def find() -> list[str]:
        found = [
            judged(code, row, row.find(whole))
            for code, row in CLAIMS.items()
            if code not in _IN_HEADING
        ]
        return [
            f"{percent(1 - each.share)} of the {CLAIMS[each.code].broken}: {each.means}."
            for each in found
            if each.share is not None and each.total >= _LEAST_SAID and not each.holds()
        ]

    return whole.once("broken claims", find) if whole.has_all_steps else []


def _read(capture: Views) -> Found | str:
    events, read = capture.events, part(capture, rows.READ)
    if read is None:
        return "the file holds no events"
    lost = events.unreadable + events.no_category + events.unknown_category
    cut = read.why or "" if events.cut_short else ""
    return Found(lost, events.recorded, cut.rstrip("."), is_unmet=events.cut_short)


def _times(capture: Views) -> Found | str:
    """The kind of events with most impossible times: all, or one kind on the CPU, or the device's.

    Unfinished events that last 0 ns ended before they began. In a trace with whole microseconds,
    short work lasts 0.
    """
    events, device = capture.events, capture.work.event
    if not events.recorded:
        return "the file holds no events"
    no_time, kinds = events.end_ns == events.start_ns, list[Found]()
    negative = no_time & ~events.finished
    for kind in (events.among(_CPU), events.among(is_runtime), events.among(PYTHON)):
        kinds.append(Found(int((negative & kind).sum()), int(kind.sum())))
    is_exact = bool((events.start_ns % 1000 != 0).any())
    bad = no_time[device] if is_exact else negative[device]
    unknown = 0 if is_exact else min(events.no_duration, int((no_time & ~negative)[device].sum()))
    kinds.append(Found(int(bad.sum()) + unknown + events.overlapping, len(device)))
    part_of_all = events.negative_durations + events.left_out + events.no_duration
    kinds.append(Found(part_of_all, events.recorded))
    return _worst(kinds)


def _worst(kinds: list[Found]) -> Found:
    """The kind of which the largest share is bad, as all kinds together hide a small one."""
    known = [each for each in kinds if each.total]
    return max(known, key=lambda each: min(each.bad, each.total) / each.total)


def _inside(capture: Views) -> Found | str:
    events = capture.events
    spans = np.flatnonzero(events.among(_TRACE) & events.named(lambda name: name.endswith("(0)")))
    if len(spans) != 1:
        return "the trace does not say when the recording began and ended"
    begin, end = int(events.start_ns[spans[0]]), int(events.end_ns[spans[0]])
    early = int(_EARLY_MARKER * (end - begin))
    outside = (events.start_ns < begin - early) | (events.start_ns > end + early)
    masks = (events.among(_CPU), events.among(is_runtime), capture.facts.is_on_device)
    kinds = [Found(int((outside & mask).sum()), int(mask.sum())) for mask in masks]
    return _worst(kinds) if any(each.total for each in kinds) else "the trace holds no events"


def _launches(capture: Views) -> Found | str:
    if part(capture, rows.LAUNCHES) is None:
        return "the trace has no launches"
    calls, has_work, lost = launches(capture)
    copies = capture.events.named(is_copy)[calls]
    return _worst(
        [
            Found(int(lost[kind].sum()), int((has_work | lost)[kind].sum()))
            for kind in (copies, ~copies)
        ]
    )


def _launched(capture: Views) -> Found | str:
    events, work = capture.events, capture.work
    if not len(work.event):
        return "the trace has no device work"
    if events.among(_MTIA).any() or not events.among(is_runtime).any():
        return "the trace has no calls that launch each of its device work"
    earlier = ran_first(events, work.event, work.call >= 0)
    count = int(earlier.sum())
    total = len(earlier) - count
    more = f"{count:,} more were launched before the recording began" if count else ""
    return Found(int((work.call < 0).sum()) - count, total, more)


def _in_order(capture: Views) -> Found | str:
    known = capture.work.call >= 0
    if not known.any():
        return "the trace has no device work with its launch"
    return Found(int((known & ~in_order(capture)).sum()), int(known.sum()))


def _one_at_a_time(capture: Views) -> Found | str:
    """The device work that the next of its stream overlaps, or lies in wholly, and copies of it.

    Branches of a CUDA graph may overlap.
    """
    events, work = capture.events, capture.work
    if not len(work.event) or events.among(_MTIA).any():
        return "the trace has no streams that run one piece of work at a time"
    stream, call = events.thread[work.event], work.call
    order = np.lexsort((-work.end_ns, work.start_ns, stream))
    one, other = order[:-1], order[1:]
    in_graph = replayed(events, work.event, call)
    same = stream[one] == stream[other]
    may_overlap = in_graph[one] & in_graph[other]
    by_ns = work.end_ns[one] - work.start_ns[other]
    within = (by_ns > 0) & (work.end_ns[one] >= work.end_ns[other])
    may_be_early = events.named(lambda name: _EARLY_LAUNCH.search(name) is not None)
    late = (by_ns > _CLOSE_NS) & ~np.append(may_be_early, False)[call[other]]
    name = events.name[work.event]
    twice = (work.start_ns[one] == work.start_ns[other]) & (work.end_ns[one] == work.end_ns[other])
    twice &= (name[one] == name[other]) & (by_ns > 0)
    return Found(int((same & (twice | ((within | late) & ~may_overlap))).sum()), len(order))


def _waits(capture: Views) -> Found | str:
    """The waits for the device, and for a copy to the CPU, that return before the end of the work.

    A wait for a stream is left out, because the trace seldom says which one.
    """
    events, work = capture.events, capture.work
    calls = events.among(is_runtime)
    waits = np.flatnonzero(calls & events.named(lambda name: name.endswith("DeviceSynchronize")))
    known = np.flatnonzero(work.call >= 0)
    launched_ns = events.start_ns[work.call[known]]
    order = np.argsort(launched_ns)
    reached_ns = np.maximum.accumulate(work.end_ns[known][order])
    before = np.searchsorted(launched_ns[order], events.start_ns[waits])
    judged_ns = reached_ns[before[before > 0] - 1] - events.end_ns[waits[before > 0]]
    to_cpu = events.named(lambda name: "DtoH" in name or "DeviceToHost" in name)[work.event[known]]
    blocking = known[to_cpu & events.named(is_blocking_copy)[work.call[known]]]
    late_ns = np.append(judged_ns, work.end_ns[blocking] - events.end_ns[work.call[blocking]])
    if not len(late_ns):
        return "the trace has no wait for the whole device"
    return Found(int((late_ns > _SKEW_NS).sum()), len(late_ns))


def _nested(capture: Views) -> Found | str:
    trees = (capture.links.call_tree, capture.links.frames)
    kinds = [Found(_overlapped(tree), len(tree)) for tree in trees if len(tree)]
    return _worst(kinds) if kinds else "the trace has no events of the CPU"


def _overlapped(tree: CallTree) -> int:
    """How many nodes end within the next event that is not inside them."""
    after = tree.until.astype(np.int64)
    at = np.minimum(after, len(tree) - 1)
    same = (after < len(tree)) & (tree.thread[at] == tree.thread)
    return int((same & (tree.start_ns[at] < tree.end_ns)).sum())


def _callers(capture: Views) -> Found | str:
    events, operator = capture.events, capture.links.named_operators[:-1]
    calls = np.flatnonzero(events.among(is_runtime) & (operator >= 0))
    if not len(calls):
        return "the trace does not say which operator made a call"
    inside = events.start_ns[calls] >= events.start_ns[operator[calls]]
    inside &= events.end_ns[calls] <= events.end_ns[operator[calls]]
    return Found(int((~inside).sum()), len(calls))


def _numbers(capture: Views) -> Found | str:
    """The operators, frames or, on ROCm, calls whose numbers are missing, or given twice."""
    events = capture.events
    operators = events.among(_CPU) & (events.external_id != 0)
    frames, calls = events.python_id >= 0, events.among(is_runtime) & (events.correlation != 0)
    kinds = [
        _numbered(events.external_id[operators], events.thread[operators]),
        _numbered(events.python_id[frames]),
        _numbered(events.correlation[calls]) if "hip_runtime_version" in events.versions else None,
    ]
    known = [each for each in kinds if each]
    return _worst(known) if known else "the trace does not number its events"


def _numbered(numbers: Ints, thread: Ints | None = None) -> Found | None:
    """The missing and the repeated numbers; None if the numbers have many holes.

    With `thread`, a thread leaves the rest of its last block of numbers.
    """
    if len(numbers) < _BLOCK // 8:
        return None
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    holes = np.maximum(np.diff(ordered) - 1, 0)
    if thread is not None:
        of = thread[order].astype(np.int64)
        last = np.zeros(int(of.max()) + 1, np.int64)
        last[of] = np.arange(len(of))
        ends = np.unique(last[of])
        ends = ends[ends < len(holes)]
        rest = -ordered[ends] % _BLOCK
        holes[ends] -= np.minimum(rest, holes[ends])
    missing, twice = int(holes.sum()), int((np.diff(ordered) == 0).sum())
    total = len(numbers) + missing
    return None if missing > (1 - _MOSTLY) * total else Found(missing + twice, total)


def _always_launch(capture: Views) -> Found | str:
    """The calls of operators that launch work in nearly all calls, but not in these."""
    events, tree = capture.events, capture.links.call_tree
    calls, _, _ = launches(capture)
    has_launch = np.zeros(len(tree) + 1, np.bool_)
    has_launch[tree.parent[tree.nodes_of(calls)]] = True
    operators = np.flatnonzero(events.among(OPERATOR)[tree.index])
    at = tree.index[operators]
    groups = group_rows(events.name[at], events.shapes[at]) if len(at) else None
    if groups is None or not has_launch[:-1].any():
        return "no operator of the trace launches work"
    does = groups.number(has_launch[operators])
    sure = (does >= _ALWAYS * groups.size) & (groups.size >= _LEAST_CALLS)
    total = int(groups.size[sure].sum())
    if not total:
        return "no operator launches work often enough"
    return Found(total - int(does[sure].sum()), total)


def _memory(capture: Views) -> Found | str:
    memory = capture.events.memory
    if not len(memory) or not memory.allocated_bytes.any():
        return "the trace has no totals of memory"
    device = groupby(memory.device_type.astype(np.int64) * 2**20 + memory.device_index)[1]
    order = device.sorted_by(memory.time_ns).order
    same = np.diff(device.of[order]) == 0
    change = np.diff(memory.allocated_bytes[order]) != memory.size_bytes[order][1:]
    return Found(int((same & change).sum()), int(same.sum()))


def _graphs(capture: Views) -> Found | str:
    calls, _, lost = launches(capture)
    found = lost_nodes(capture, calls[lost])
    return found if isinstance(found, str) else Found(*found)


def _flushes(capture: Views) -> Found | str:
    """The time of the recording, in µs, in which the profiler handled its buffers for long."""
    events = capture.events
    kinds = kinds_of(events)
    if not events.among(frozenset({"overhead"})).any():
        return "the trace has no events of the profiler's own work"
    length_ns = events.duration_ns[kinds == PROFILER]
    every = capture.links.finished_steps
    whole_ns = int(every.end_ns.max() - every.start_ns.min())
    is_long = length_ns >= min(_LONG_FLUSH_NS, _LONG_FLUSH * whole_ns)
    spent_ns = int(length_ns[is_long].sum())
    return Found(min(spent_ns, whole_ns) // 1000, max(whole_ns // 1000, 1))


def _steps(capture: Views) -> Found | str:
    """The steps that are missing, repeated, unfinished, or begin before the end of the last one."""
    events, links = capture.events, capture.links
    if not len(links.steps):
        return "no step is marked"
    numbers = np.array(links.step_numbers, np.int64)
    start_ns, end_ns = events.start_ns[links.steps], events.end_ns[links.steps]
    every = events.among(_CPU) & events.named(is_step)
    unfinished = int((every & ~events.finished).sum())
    missing = int(np.ptp(numbers)) + 1 - len(np.unique(numbers))
    planned = capture.about.window.planned_steps or 0
    missing = max(missing, planned - len(numbers)) if planned > 0 else missing
    wrong = (np.diff(numbers) <= 0) | (start_ns[1:] < end_ns[:-1])
    return Found(missing + unfinished + int(wrong.sum()), len(numbers) + missing + unfinished)


def _versions(capture: Views) -> Found | str:
    found = faults(capture)
    if found is None:
        return "the trace does not name the versions of torch and of the device's runtime"
    return "; ".join(found) if found else Found(0, 1)


#: The claims about one trace, by code.
CLAIMS = {
    "file": _Row(
        "the file is whole", "events of the file could not be read", "figures are too small", _read
    ),
    "times": _Row(
        "events have possible times",
        "events have impossible times",
        "times of these events are wrong",
        _times,
    ),
    "inside": _Row(
        "events begin within the recording",
        "events begin outside of the recording",
        "idle time is too large",
        _inside,
    ),
    "launches": _Row(
        "launches have their device work",
        "launches have no device work in the trace",
        "device times are too small",
        _launches,
    ),
    "launched": _Row(
        "device work has its launch",
        "pieces of device work have no launch in the trace",
        "device times of ranges and operators are too small",
        _launched,
    ),
    "order": _Row(
        "device work starts after its launch, in the order of the launches",
        "pieces of device work start at impossible times",
        "delays, and the causes of idle time, are wrong",
        _in_order,
    ),
    "streams": _Row(
        "a stream runs one piece of work at a time",
        "pieces of device work overlap others of their stream",
        "device times are too large",
        _one_at_a_time,
    ),
    "waits": _Row(
        "waits return after the work that they wait for",
        "waits return before the device has finished",
        "the clocks of CPU and device differ, so delays and causes of idle time are wrong",
        _waits,
    ),
    "nesting": _Row(
        "CPU events of a thread lie inside each other, or apart",
        "CPU events overlap partly",
        "own times of operators and ranges are wrong",
        _nested,
    ),
    "callers": _Row(
        "calls lie within the operators that made them",
        "calls lie outside of the operators that made them",
        "device times may count for the wrong operator",
        _callers,
    ),
    "numbers": _Row(
        "the numbers of events have no holes",
        "numbers of events are missing, or given twice",
        "counts and times on the CPU are wrong",
        _numbers,
    ),
    "always": _Row(
        "operators that launch work do so in each call",
        "calls of operators launch nothing, unlike the other calls",
        "launches and device times are too small",
        _always_launch,
    ),
    "graphs": _Row(
        "replays of a CUDA graph hold the same nodes",
        "nodes of replayed CUDA graphs are missing",
        "device times of graphs are too small",
        _graphs,
    ),
    "memory": _Row(
        "allocations explain each total of memory",
        "totals of memory are not explained by allocations",
        "memory in use, and what owns it, is wrong",
        _memory,
    ),
    "flushes": _Row(
        "the profiler does not stop the program",
        "µs of the recording went to the profiler's buffers",
        "idle time is too large",
        _flushes,
    ),
    "steps": _Row(
        "steps are whole",
        "steps are missing, repeated, unfinished or overlap",
        "means per step are wrong",
        _steps,
    ),
    "versions": _Row(
        "no fault of these versions is known",
        "",
        "look at the claims that the fault breaks",
        _versions,
    ),
}
# The heading of a capture says these.
_IN_HEADING = frozenset({"file", "times", "versions"})


class Seen(NamedTuple):
    """What the claims about a job need of a capture; `None` is unknown.

    `window` says which captures belong together. The times are Unix times.
    """

    rank: int | None
    world_size: int
    window: tuple[str, int | None]
    begin_ns: int
    end_ns: int
    has_all_ranks: bool


def seen(capture: Views) -> Seen:
    """Return what `job_claims` needs of a capture."""
    events, about = capture.events, capture.about
    return Seen(
        rank=capture.rank,
        world_size=about.world_size or events.world_size or 1,
        window=(capture.phase, min(capture.links.step_numbers, default=None)),
        begin_ns=events.base_ns + int(capture.links.finished_steps.start_ns.min(initial=2**62)),
        end_ns=events.base_ns + int(capture.links.finished_steps.end_ns.max(initial=0)),
        has_all_ranks=about.config.ranks in (None, "all"),
    )


def job_claims(captures: Sequence[Seen]) -> list[Claim]:
    """Return the claims about the ranks of a job; those of one window belong together."""
    windows: dict[Any, list[Seen]] = {}
    for each in captures:
        if each.world_size > 1 and each.rank is not None and each.has_all_ranks:
            windows.setdefault((each.window, each.world_size), []).append(each)
    several = [window for window in windows.values() if len(window) > 1]
    found: list[Found | str] = ["no two ranks of one job and window are given"] * 2
    if several:
        wanted = sum(window[0].world_size for window in several)
        present = sum(len({each.rank for each in window}) for window in several)
        given = sum(map(len, several))
        apart = sum(_apart(window) for window in several)
        found = [Found(wanted - present + given - present, wanted), Found(apart, given)]
    return [judged(code, row, each) for (code, row), each in zip(JOB_CLAIMS.items(), found)]


def _apart(window: list[Seen]) -> int:
    """How many ranks did not record while the others did."""
    begin, end = (sorted(each) for each in zip(*((w.begin_ns, w.end_ns) for w in window)))
    usual = begin[len(begin) // 2], end[len(end) // 2]
    return sum(each.end_ns < usual[0] or each.begin_ns > usual[1] for each in window)


#: The claims about all captures that are given, by code.
JOB_CLAIMS = {
    "ranks": _Row(
        "each rank of the job is there once",
        "ranks are missing, or given twice",
        "what ranks wait for is wrong",
    ),
    "window": _Row(
        "the ranks recorded at the same time",
        "ranks recorded at another time, or their clocks differ",
        "ranks cannot be compared",
    ),
}
