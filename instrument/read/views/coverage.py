"""How complete a capture is: the fraction of the executed work that it shows, and what is missing.

A profile can lack data without an error. Each row of `capture.coverage` measures one such loss. A
view computes only the rows that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from instrument.base.units import counted, duration, percent
from instrument.read.facts.autograd import ACCUMULATE, BACKWARD, UNATTRIBUTED
from instrument.read.facts.cuda_graphs import is_graph_launch, replayed
from instrument.read.facts.device_work import Work
from instrument.read.facts.groupby import groupby
from instrument.read.facts.intervals import within
from instrument.read.facts.launches import have_work, launches_kernel, ran_first
from instrument.read.facts.layers import UNKNOWN
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_bounds
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    called_operators,
    is_runtime,
    is_step,
    is_synchronising,
)
from instrument.read.views import coverage_rows as rows
from instrument.read.views.ranges import work
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

COVERAGE: Schema = schema(
    name="what is measured, such as `device time with a launch`; a row that does not apply to the "
    "trace is left out",
    share="the fraction that the capture shows: 1 if nothing is missing; None if the fraction "
    "cannot be known",
    covered_ns="the time that the capture shows; None if it is not known, and for rows that do not "
    "measure time",
    total_ns="the time of which `share` is a fraction; None for rows that do not measure time",
    why="what is missing, the likely cause, and what to do; None if nothing is missing",
)
#: A row of the coverage is reported as a loss if its `share` is below this fraction.
ENOUGH = 0.95
# The first steps of a run are slow. So recorded steps are compared with the steps before the window
# only if at least this many steps ran before the window.
ENOUGH_STEPS = 10
#: Why steps cannot be compared, and what to record; see `instrument.base.step_times`.
OTHER_KINDS = "steps differ, and those before the window are not known to be of the recorded kinds"
RECORD_ALL_KINDS = "record more steps"

# If fewer of the events are lost, the figures hardly change.
_FEW = 0.01
# The category of the counters that Kineto's range profiler records instead of kernels.
_COUNTERS = frozenset({"cuda_profiler_range"})


class Part(NamedTuple):
    """The cells of a row of `capture.coverage`, except `name`; see `COVERAGE`."""

    share: float | None
    covered_ns: int | None = None
    total_ns: int | None = None
    why: str | None = None


def is_copy(name: str) -> bool:
    """Whether a runtime call of this name copies memory; False for calls that build CUDA graphs."""
    plain = name.lower()
    return "memcpy" in plain and "graph" not in plain


def is_launch(name: str) -> bool:
    """Whether all runtime calls of this name cause device work; a memset of 0 bytes does not."""
    return launches_kernel(name) or is_graph_launch(name) or is_copy(name)


def coverage(capture: Views) -> Table:
    """Return the table `capture.coverage`: the rows that apply to the capture; see `COVERAGE`.

    Cost: the computation of the range tree, and about 0.4 µs per event.
    """
    return _table(capture, rows.ROWS)


def part(capture: Views, name: str) -> Part | None:
    """Return the row `name` of `capture.coverage`, computed once; None if it does not apply."""
    return capture.whole.once(name, lambda: _FINDERS[name](capture.whole))


def incomplete(capture: Views, names: Iterable[str] = rows.EVERY) -> Table:
    """Return the rows of `capture.coverage` that are a loss, and unknown or below `ENOUGH`.

    `names` are the rows to compute, such as `VIEWS[view].coverage`.
    """
    found = _table(capture, (name for name in names if name != rows.UNDISTURBED))
    return found.where(f"why != '' and (share is null or share < {ENOUGH})")


def lost_events(capture: Views) -> str:
    """Sentences on events that were not read or have impossible times; "" if they are few."""
    found = [each for name in (rows.READ, rows.VALID) if (each := part(capture, name))]
    many = [each.why or "" for each in found if each.share is not None and each.share < 1 - _FEW]
    return " ".join(many)


def line(capture: Views, names: Iterable[str] = rows.EVERY) -> str:
    """Return one line that lists the rows of `incomplete`; "" if nothing is missing."""
    below = ENOUGH - 0.001  # 0.9499 is not rounded up
    found = [
        f"{row.name} {'unknown' if row.share is None else f'{100 * min(row.share, below):.1f} %'}"
        for row in incomplete(capture, names)
    ]
    why = "`instrument show --coverage` says why."
    return f"Coverage below {percent(ENOUGH)}: {', '.join(found)}. {why}" if found else ""


def losses(capture: Views, names: Iterable[str] = rows.EVERY) -> list[dict[str, Any]]:
    """Return the rows of `incomplete` as dicts, for JSON; an empty list if nothing is missing."""
    return [row._asdict() for row in incomplete(capture, names)]


def range_advice(capture: Views) -> str:
    """Return what the user can do, so that more of the program's time lies inside ranges."""
    about = capture.about
    if about.annotations_disabled:
        return "INSTRUMENT_DISABLE was set in the environment."
    if about.threads_not_recorded:
        return unrecorded_threads(capture)
    if not len(capture.ranges):
        return "mark code with @profiled, or give the session a model."
    if about.module_types or about.modules_not_seen:
        return "mark the code outside of the model with @profiled."
    return "give the session the model (model=…), or mark code with @profiled."


def unrecorded_threads(capture: Views) -> str:
    """A sentence on the threads that ran modules, but are not recorded; "" if there are none."""
    if not (threads := capture.about.threads_not_recorded):
        return ""
    return (
        f"modules ran on the thread {' and '.join(threads[:3])}, which is not recorded: record all "
        "threads (profiler.profile_all_threads=true, without profile_memory), or call "
        "session.step() on that thread."
    )


def _table(capture: Views, names: Iterable[str]) -> Table:
    found = ((name, part(capture, name)) for name in names)
    return Table.of_rows(COVERAGE, [(name, *cells) for name, cells in found if cells is not None])


def _share(shown: int, total: int, why: str, text: Callable[[int], str] = duration) -> Part | None:
    """A row, None if the total is 0; `why` follows "1 ms of 2 ms " in a sentence.

    `text` is `duration` for times, or the text of another quantity.
    """
    if total <= 0:
        return None
    shown = min(max(shown, 0), total)
    is_time = text is duration
    reason = f"{text(total - shown)} of {text(total)} {why}" if shown < total else None
    return Part(shown / total, shown if is_time else None, total if is_time else None, reason)


def _device_time(work: Work, shown: Flags, why: str, among: Flags | None = None) -> Part | None:
    length = work.duration_ns
    whole = length if among is None else length[among]
    return _share(int(length[shown].sum()), int(whole.sum()), why)


def launches(capture: Views) -> tuple[Ints, Flags, Flags]:
    """Return the launches, which of them have device work, and which of them lack theirs.

    The last two are False for the launches in which a stream was captured, because they ran none.
    """
    events = capture.events
    calls = np.flatnonzero(
        events.among(is_runtime) & events.named(is_launch) & (events.correlation != 0)
    )
    if chosen := _chosen_types(capture):
        copies = events.named(is_copy)[calls]
        calls = calls[np.where(copies, "GPU_MEMCPY" in chosen, "CONCURRENT_KERNEL" in chosen)]
    has_work = have_work(events, capture.work.event, calls)
    return calls, has_work, ~has_work & ~_captures(events, events.start_ns[calls])


def _launches(capture: Views) -> Part | None:
    """The launches that have device work, counted, because missing work has no known time."""
    events, device = capture.events, capture.work.event
    if not len(device) and events.among(_COUNTERS).any():
        return None
    calls, has_work, lost = launches(capture)
    start = events.start_ns[calls]
    covered, missing = int(has_work.sum()), int(lost.sum())
    at_end = int((lost & (start > start[has_work].max(initial=events.begin_ns))).sum())
    if not covered:
        cause = (
            ". The trace holds no device work at all: record a device too, with "
            "profiler.activities."
        )
    elif 2 * at_end > missing:
        cause = (
            f"; {at_end} of these launches came after all launches that have device work. Either "
            "the recording ended before the device ran the work of these last launches, or the "
            "profiler's buffer was full: synchronise before the end of the window, or record fewer "
            "steps."
        )
    else:
        cause = (
            ", most likely because the profiler dropped records of the device. So device times are "
            "too small: record fewer steps."
        )
    why = f"launches have no device work in the trace{cause}"
    return _share(covered, covered + missing, why, str)


def _chosen_types(capture: Views) -> set[str]:
    """The types of device work that `profiler.activities` names; empty if all were recorded."""
    activities = capture.about.config.activities
    return {
        str(kind)
        for each in (activities if isinstance(activities, list) else ())
        if isinstance(each, dict)
        for name, types in each.items()
        if name != "cpu" and isinstance(types, list)
        for kind in types
    }


def _captures(events: Events, time_ns: Ints) -> Flags:
    """For each point in time, whether a CUDA stream capture was in progress on any thread."""
    calls = events.among(is_runtime)
    begins = events.start_ns[calls & events.named(lambda name: "StreamBeginCapture" in name)]
    ends = events.end_ns[calls & events.named(lambda name: "StreamEndCapture" in name)]
    if not len(begins) and not len(ends):
        return np.zeros(len(time_ns), np.bool_)
    begins, ends = np.sort(begins), np.sort(ends)
    begun_by_end = np.searchsorted(begins, ends, "right")
    earlier = int((np.arange(1, len(ends) + 1) - begun_by_end).max(initial=0))
    begun, ended = (np.searchsorted(times, time_ns, "right") for times in (begins, ends))
    return begun + earlier > ended


def _launched(capture: Views) -> Part | None:
    events, work = capture.events, capture.work
    known, length = work.call >= 0, work.duration_ns
    earlier = ran_first(events, work.event, known)
    stream = groupby(events.thread[work.event])[1]
    has_other = (stream.number(known) > 0)[stream.of]
    causes = {
        ", most likely because the work was launched before the recording began: synchronise "
        "before the window begins.": earlier,
        ", although other work of the same stream has a launch. The profiler dropped some calls, "
        "or did not record the thread of these calls.": has_other & ~earlier & ~known,
        ", and no other work of the same stream has a launch. The work was launched before the "
        "recording began, or the profiler did not record the calls.": ~has_other,
    }
    if not events.among(is_runtime).any():
        causes = {
            ", because the trace has no calls of the device's runtime: record these calls too, "
            "with cpu (or the type CUDA_RUNTIME) in profiler.activities.": ~known
        }
    likely = max(causes, key=lambda cause: int(length[causes[cause]].sum()))
    by_id_ns = int(length[~known & (work.operator >= 0)].sum())
    of_operators = (
        f", but for {duration(by_id_ns)}, whose External id names an operator" if by_id_ns else ""
    )
    why = (
        f"device time has no launch in the trace{likely} This time belongs to no range. The table "
        f"of operators shows it as [no launch]{of_operators}."
    )
    return _device_time(work, known, why)


def _in_operator(capture: Views) -> Part | None:
    inside = capture.links.launched[1] >= 0
    why = (
        "device time comes from launches outside of all operators and ranges. Either torch did not "
        "record the operators of the launching thread, or a library launches work by itself: mark "
        "the launching code with @profiled, or record all threads "
        "(profiler.profile_all_threads=true)."
    )
    return _device_time(capture.work, inside, why, inside | (capture.work.call >= 0))


def in_order(capture: Views) -> Flags:
    """A mask of the device work that starts after its launch, and in the order of the launches."""
    events, work = capture.events, capture.work
    launched = work.call >= 0
    called, returned = (side[work.call] for side in (events.start_ns, events.end_ns))
    found: Flags = launched & (work.start_ns >= called)
    known = np.flatnonzero(launched)
    for row in groupby(events.thread[work.event[known]])[1].sorted_by(work.start_ns[known]).rows():
        on_stream = known[row]
        latest_ns = np.maximum.accumulate(called[on_stream])
        found[on_stream[1:]] &= latest_ns[:-1] <= returned[on_stream[1:]]
    return found


def _in_order(capture: Views) -> Part | None:
    work = capture.work
    why = (
        "device time belongs to work that starts at an impossible time. Two starts are impossible: "
        "before the launch of the work begins, and after the start of work that was launched later "
        "on the same stream. Either the clocks of CPU and device disagree, or the trace joins "
        "launches to the wrong work. Do not trust the delays and the causes of idle time."
    )
    return _device_time(work, in_order(capture), why, work.call >= 0)


def _outside_graphs(capture: Views) -> Part | None:
    inside = replayed(capture.events, capture.work.event, capture.work.call)
    if not inside.any():
        return None
    why = (
        "device time was launched by CUDA graphs. This time counts for the operator and the range "
        "around the launch of the graph, because the operators inside the graph are not known. "
        "Lost kernels of a graph would not be noticed: record a window without CUDA graphs."
    )
    return _device_time(capture.work, ~inside, why)


def _layered(capture: Views) -> Part | None:
    from instrument.read.views.layers import layer_evidence

    known = capture.facts.layers.evidence != UNKNOWN
    if not known.any():
        return None
    return _device_time(
        capture.work, known, f"device time has no known layer. {layer_evidence(capture)}"
    )


def _cpu_in_steps(capture: Views) -> Part | None:
    events, links, tree = capture.events, capture.links, capture.links.call_tree
    marked = events.among(ANNOTATION | OPERATOR) & events.named(is_step)
    if not marked.any() and not len(links.steps):
        return None
    waits = (events.among(is_runtime) & events.named(is_synchronising))[tree.index]
    outermost = waits & ~((tree.parent >= 0) & waits[tree.parent])
    steps = step_bounds(events, links.steps)
    in_steps = within(steps, tree.start_ns, tree.ends_before_overlap)
    covered, total = (
        int(spent[tree.parent < 0].sum() - spent[outermost].sum())
        for spent in (in_steps, links.spent_ns)
    )
    why = (
        "CPU time is outside of finished steps, so shares do not count this time: call step() "
        "after each step, and record whole steps."
    )
    return _share(covered, total, why)


def _joined(capture: Views) -> Part | None:
    def spent(*kinds: int) -> int:
        return int(work(capture).filter(pl.col("kind").is_in(kinds))["cpu_ns"].sum())

    joined = spent(BACKWARD, ACCUMULATE)
    total = joined + spent(UNATTRIBUTED)
    why = (
        "backward time has no forward operator in the trace, most likely because the forward ran "
        "before the window or on a thread that was not recorded. So this time belongs to no range: "
        "record whole steps."
    )
    return _share(joined, total, why)


def _valid(capture: Views) -> Part | None:
    events = capture.events
    causes = {
        "end before they begin and are shown without a duration: the clock was perhaps set back "
        "during the recording, so other times may be wrong too": events.negative_durations,
        "are left out because they are at impossible times": events.left_out,
        "have no duration (`dur`)": events.no_duration,
        "are device work that ends after the next work of its stream begins, which cannot be: they "
        "end where it begins": events.overlapping,
    }
    total, bad = events.recorded, min(sum(causes.values()), events.recorded)
    whys = (f"{count} of {total} events {cause}" for cause, count in causes.items() if count)
    return (
        Part((total - bad) / total, why=f"{'; '.join(whys)}." if bad else None) if total else None
    )


def _read(capture: Views) -> Part | None:
    events = capture.events
    if events.cut_short:
        why = f"The trace file is cut short: only its first {events.recorded} events could be read."
        return Part(None, why=why)
    causes = {
        "are not JSON": events.unreadable,
        "have no category (`cat`), and their names show none either; export the trace with "
        "prof.export_chrome_trace": events.no_category,
        "have a category (`cat`) that torch does not write": events.unknown_category,
    }
    if lost := sum(causes.values()):
        whys = (f"{count} {cause}" for cause, count in causes.items() if count)
        why = f"events of the trace file could not be read: {'; '.join(whys)}."
        return _share(events.recorded - lost, events.recorded, why, str)
    why = (
        f"The values of {counted(events.counters, 'counter event')} in the trace, such as the "
        "length of a queue over time, are not read: no table has them."
    )
    return Part(1.0, why=why if events.counters else None) if events.recorded else None


def _planned(capture: Views) -> Part | None:
    window = capture.about.window
    steps, planned, why = window.steps, window.planned_steps, None
    if window.truncated:
        of = f" of {planned}" if planned else ""
        reason = window.reason or "no reason was recorded"
        why = f"Truncated after {'?' if steps is None else steps}{of} steps: {reason}."
    if planned and planned > 0 and steps is not None:
        return Part(min(max(steps / planned, 0.0), 1.0), why=why)
    return None if why is None else Part(None, why=why)


def _inputs(capture: Views) -> Part | None:
    events, about, detail = capture.events, capture.about.detail, capture.detail
    if about is None or events.records_inputs:
        return None
    inside = called_operators(events) & (step_at(events, capture.links.steps, events.start_ns) >= 0)
    if detail is not None:  # of some operators, torch never records inputs
        name, shapes = detail.events.name, detail.events.shapes
        recorded = {detail.events.names[k] for k in set(name[shapes >= 0].tolist())}
        never = {detail.events.names[k] for k in set(name.tolist())} - recorded
        inside &= ~events.named(never.__contains__)
    known = inside & (events.shapes >= 0)
    why = (
        f"operators have no shapes, because the detail window, {counted(about.steps or 0, 'step')} "
        f"from step {about.first_step} on, did not call them, or with shapes that differ between "
        "steps: record with profiler.record_shapes=true."
    )
    return _share(int(known.sum()), int(inside.sum()), why, str)


def _undisturbed(capture: Views) -> Part | None:
    cost = capture.about.cost
    recorded, before = cost.recorded_step_ns, cost.unrecorded_step_ns
    if not recorded or recorded < 0:
        return None
    if (before or 0) < 0 or (cost.unrecorded_steps or 0) < ENOUGH_STEPS:
        why = (
            f"The cost of recording is not known, because fewer than {ENOUGH_STEPS} steps ran "
            "before the window: let the window begin later."
        )
        return Part(None, None, recorded, why)
    if not before:
        why = f"The cost of recording is not known, because {OTHER_KINDS}: {RECORD_ALL_KINDS}."
        return Part(None, None, recorded, why)
    why = (
        "of a recorded step is the cost of recording, so all times are longer than without a "
        "profiler: turn off what you do not need, such as with_stack, record_shapes and "
        "profile_memory."
    )
    return _share(min(before, recorded), recorded, why)


_FINDERS: dict[str, Callable[[Views], Part | None]] = {
    rows.LAUNCHES: _launches,
    rows.LAUNCHED: _launched,
    rows.IN_OPERATOR: _in_operator,
    rows.IN_ORDER: _in_order,
    rows.OUTSIDE_GRAPHS: _outside_graphs,
    rows.LAYERED: _layered,
    rows.CPU_IN_STEPS: _cpu_in_steps,
    rows.JOINED: _joined,
    rows.VALID: _valid,
    rows.READ: _read,
    rows.PLANNED: _planned,
    rows.INPUTS: _inputs,
    rows.UNDISTURBED: _undisturbed,
}
