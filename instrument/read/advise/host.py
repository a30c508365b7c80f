"""The host: torch.compile, garbage collection, more threads than CPUs, CPUs that others use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.range_names import REGION
from instrument.base.units import counted, duration, percent
from instrument.read.advise.check import (
    QUIET_CPUS,
    RECORD_AGAIN,
    RECORD_STEPS,
    Check,
    NotRecorded,
    Problem,
)
from instrument.read.advise.evidence import evidence, in_steps, share_with_device, undisturbed_ns
from instrument.read.advise.finding import Evidence
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT
from instrument.read.trace.events import ANNOTATION, OPERATOR, PYTHON, Flags, Ints
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.interruptions import is_compilation
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit
    from instrument.read.trace.capture_json import CpuWait, Environment, Threads

_COLLECTION, _COLLECT_CALL = "Python GC", "<built-in function collect>"
_RECORD = "profiler.with_stack=true profiler.experimental_config={record_python_gc_info: true}"
# There must be so many times as many threads as CPUs.
_LEAST_RATIO = 1.25
# One thread for operators must save this share of the steps. torch may divide operators that launch
# nothing and take `_LONG_NS`; below, this saves nothing.
_LEAST_WAITING, _LONG_NS = 0.05, 50_000
# Within this time, the scheduler lets several programs take turns on a CPU.
_SEVERAL_TURNS_NS = 10_000_000
_ONE_THREAD = "torch.set_num_threads({0}), or OMP_NUM_THREADS={0} in the environment"
_COMPARE = "Compare the step times of two runs with profiler=timings, one with OMP_NUM_THREADS={}."


def garbage_collection(capture: Views) -> Iterator[Problem]:
    """Find the collections: torch's events with `record_python_gc_info`, else `capture.json`."""
    events, steps, frames = capture.events, capture.links.counted_steps, capture.links.frames
    collections = np.flatnonzero(events.among(PYTHON) & events.named(_COLLECTION.__eq__))
    if not len(collections):
        yield from _collections_of_window(capture)
        return
    within_ns = steps.within(events.start_ns[collections], events.end_ns[collections])
    inside = collections[within_ns > 0]
    if not len(inside):
        return
    called = None
    if len(frames):
        is_call = events.named(_COLLECT_CALL.__eq__)[frames.index]
        called = bool((frames.nearest(is_call, frames.nodes_of(inside)) >= 0).mean() > 0.5)
    longest_ns = int(events.duration_ns[inside].max())
    yield Problem(
        f"{steps.what}: {_collections(len(inside), longest_ns)}",
        inside,
        steps.share(int(within_ns.sum())),
        edit=lambda whatif: whatif.scale_events(collections, by=0),
        change=_collect_less(called),
    )


GARBAGE_COLLECTION = Check(
    "garbage-collection",
    garbage_collection,
    title="Python's garbage collector takes {share} of the {what}",
    verify="--interruptions",
    least_share=0.02,
    coverage=(CPU_IN_STEPS,),
)


def _collections_of_window(capture: Views) -> Iterator[Problem]:
    environment = capture.about.environment
    known = None if environment is None else environment.garbage_collection
    record = f"{RECORD_AGAIN}, or with {_RECORD}"
    if known is None or known.total_ns is None or known.collections is None:
        missing = "the capture does not show how long Python's garbage collector ran"
        raise NotRecorded(missing, record)
    if capture.about.window.truncated:  # some of the time may be after the last whole step
        missing = "the window ended early, so the share of Python's garbage collector is not known"
        raise NotRecorded(missing, record)
    span = capture.links.finished_steps
    whole_ns = int(span.end_ns[-1] - span.start_ns[0])
    yield Problem(
        f"window: {_collections(known.collections, known.longest_ns)}",
        share=known.total_ns / whole_ns if whole_ns > 0 else 0.0,
        evidence=(Evidence(_COLLECTION, known.collections, known.total_ns),),
        change=_collect_less(None),
        verify=f"Record with {_RECORD} to see which steps wait for the collector, and where.",
    )


def _collections(number: int, longest_ns: int | None) -> str:
    if number == 1 and longest_ns is not None:
        return f"one collection of {duration(longest_ns)}"
    longest = "" if longest_ns is None else f", the longest {duration(longest_ns)}"
    return counted(number, "collection") + longest


def _collect_less(called: bool | None) -> str:
    """What to do; `called` is whether the program calls `gc.collect()`, None if not known."""
    if called:
        return "Do not call gc.collect() in the steps."
    text = (
        "Call gc.freeze() and gc.disable() after the set-up, and gc.collect() every few hundred "
        "steps."
    )
    remove = " If the step itself calls gc.collect(), remove this call."
    return text + remove if called is None else text


class _Waiting(NamedTuple):
    """The outermost operators of the steps whose threads wait for each other.

    `left` is the part of their time that one thread would need, and `share` the share of the steps
    that it would save.
    """

    events: Ints
    left: float
    share: float

    @property
    def edit(self) -> Edit:
        """One thread for operators."""
        return lambda whatif: whatif.scale_events(self.events, by=self.left)


def thread_oversubscription(capture: Views) -> Iterator[Problem]:
    """Find threads of one operator that wait for each other, or more threads than CPUs."""
    environment, wait = capture.about.environment, capture.about.cpu_wait
    threads = _threads(capture)
    if environment is None or threads is None or not threads.cpus or threads.intra_op is None:
        raise NotRecorded(
            "the capture does not show how many threads and CPUs there were", RECORD_AGAIN
        )
    waits = _waiting(capture)
    if too_many := _too_many(capture, environment, threads, waits):
        yield too_many
    elif waits is not None:
        yield Problem(
            f"For {percent(waits.share)} of the {capture.links.counted_steps.what}, threads of the "
            f"same operator wait for each other: torch divides operators among {threads.intra_op} "
            "threads, and other work uses the CPUs too",
            waits.events,
            waits.share,
            edit=waits.edit,
            place=(None, None),
            change=f"{_ONE_THREAD.format(1)}: one thread waits for no other.",
            verify=_COMPARE.format(1),
        )
    elif threads.intra_op > 1 and wait is not None and (wait.share or 0) >= DISTURBING_CPU_WAIT:
        raise NotRecorded(
            "other work used the CPUs, so threads may have waited for each other", QUIET_CPUS
        )


THREAD_OVERSUBSCRIPTION = Check(
    "thread-oversubscription",
    thread_oversubscription,
    least_share=_LEAST_WAITING,
    lowest=_LEAST_WAITING,
)


def busy_cpus(capture: Views) -> Iterator[Problem]:
    """Find how long the scheduler let the thread of the steps wait for a CPU (Linux only).

    What `thread-oversubscription` explains is left out: in the time that one thread for operators
    would save, the thread waits for a CPU as much as in the rest of the window.
    """
    wait = capture.about.cpu_wait
    if wait is None or wait.share is None:
        raise NotRecorded(
            "the capture does not show how long the thread of the steps waited for a CPU",
            f"{RECORD_AGAIN} on Linux",
        )
    waits = _waiting(capture)
    share = wait.share * (1.0 if waits is None else 1 - waits.share)
    waited = duration(round(share * (wait.window_ns or 0)))
    yield Problem(
        " (without the part that thread-oversubscription explains)" if waits else "",
        share=share,
        change="Stop other programs on this machine, or give this job more CPUs (a larger "
        "quota) or fewer threads and processes. Then record again: the thread waited "
        f"{waited}, so the steps may be shorter on an idle machine.",
    )


BUSY_CPUS = Check(
    "busy-cpus",
    busy_cpus,
    title="For {share} of the window, the thread of the steps was ready to run, but got no CPU"
    "{what}",
    verify="Record again on an idle machine, without a CPU quota: this finding is then gone.",
    least_share=DISTURBING_CPU_WAIT,
    is_caveat=True,
)


def _threads(capture: Views) -> Threads | None:
    environment = capture.about.environment
    return None if environment is None else environment.threads


def _waiting(capture: Views) -> _Waiting | None:
    """Estimate what one thread for operators would save; None if that is less than a finding.

    On Linux, a session asks the scheduler how long torch's threads wait for a CPU. If they wait for
    a tenth of the window, other work uses the CPUs. With one thread, an operator would take as long
    as its fastest equal calls, times the number of threads if it is divided, and wait for a CPU as
    much as the thread of the steps does; a long call includes such waits already.
    """
    return capture.once("waiting threads", lambda: _estimated(capture))


def _estimated(capture: Views) -> _Waiting | None:
    threads, wait = _threads(capture), capture.about.cpu_wait
    if threads is None or wait is None or not wait.ran_ns or (threads.intra_op or 1) < 2:
        return None
    if (wait.workers_waited_ns or 0) < DISTURBING_CPU_WAIT * (wait.window_ns or 0):
        return None
    tree, steps = capture.links.call_tree, capture.links.counted_steps
    is_node = _on_cpu(capture) & (steps.holds(tree.start_ns) >= 0)
    nodes = np.flatnonzero(is_node)
    own_ns = capture.links.own_ns[nodes]
    alone_ns = undisturbed_ns(capture, nodes, own_ns)
    speedup = min(threads.intra_op or 1, threads.cpus or 1)
    is_divided, saved_ns = alone_ns >= _LONG_NS, 0
    beside_ns = alone_ns * np.where(alone_ns < _SEVERAL_TURNS_NS, wait.slowdown, 1.0)
    for times, chosen in ((1, ~is_divided), (speedup, is_divided)):
        took_ns = int(own_ns[chosen].sum())
        # Among other work, one thread needs at most as many times longer as there were threads.
        saved_ns += took_ns - times * min(int(beside_ns[chosen].sum()), took_ns)
    share = steps.share(saved_ns)
    if share < _LEAST_WAITING:
        return None
    outermost = tree.outermost(is_node)
    spent_ns = int(capture.links.spent_ns[outermost].sum())
    return _Waiting(tree.index[outermost], max(1 - saved_ns / max(spent_ns, 1), 0.0), share)


def _waited_little(wait: CpuWait | None) -> bool:
    """Whether it is known that the threads of this process hardly ever waited for a CPU."""
    if wait is None or not wait.window_ns:
        return False
    times, most_ns = (wait.waited_ns, wait.workers_waited_ns), DISTURBING_CPU_WAIT * wait.window_ns
    return all(ns is not None and ns < most_ns for ns in times)


def _too_many(
    capture: Views, environment: Environment, threads: Threads, waits: _Waiting | None
) -> Problem | None:
    """The problem of more working threads than CPUs; None if they fit.

    The threads are those for operators, if these take the time, and the loader workers, of all
    processes of the job on this machine. If it is known what one thread for operators would save,
    the advice is one thread.
    """
    if waits is None and _waited_little(capture.about.cpu_wait):
        return None  # such as loader workers that wait for files
    tree, steps, cpus = capture.links.call_tree, capture.links.counted_steps, threads.cpus or 1
    own_ns = capture.links.own_ns
    divided = _on_cpu(capture) & (own_ns >= _LONG_NS)
    inside_ns = own_ns[divided & (steps.holds(tree.start_ns) >= 0)].sum()
    busy = (threads.intra_op or 1) if steps.share(int(inside_ns)) >= _LEAST_WAITING else 1
    ranks, workers = threads.local_ranks or 1, _workers(environment)
    total, own = ranks * (busy + workers), cpus // ranks
    fitting = max(own - workers, 1)
    fits = ranks <= cpus and busy <= fitting and workers <= own
    if total < _LEAST_RATIO * cpus or fits:
        return None
    advised = fitting if waits is None else 1
    parts = [f"{busy} threads for operators"] if busy > 1 else []
    parts += [f"{workers} loader workers"] if workers else []
    of_ranks = [f"{ranks} processes"] if ranks > 1 else []
    of_threads = " with ".join([*of_ranks, *([" and ".join(parts)] if parts else [])])
    return Problem(
        f"{total} threads work on {cpus} CPUs: {of_threads}",
        edit=None if waits is None else waits.edit,
        evidence=evidence(capture, tree.index[divided]) if busy > 1 else (),
        change=_ONE_THREAD.format(advised)
        + (", and fewer num_workers of the loaders" if workers > own else "")
        + (", and fewer processes on this machine" if ranks > cpus else ""),
        verify=_COMPARE.format(advised),
    )


def _on_cpu(capture: Views) -> Flags:
    """A mask of the nodes that are operators of torch and launch no device work."""
    events, tree = capture.events, capture.links.call_tree
    launches = np.zeros(len(tree) + 1, np.bool_)
    launches[capture.links.launched[1]] = True
    is_torchs = events.among(OPERATOR) & events.named(lambda name: name.startswith("aten::"))
    return is_torchs[tree.index] & ~launches[:-1]


def _workers(environment: Environment) -> int:
    """The most loader workers that a process has in one phase, such as train or validation."""
    of_phase: dict[str | None, int] = {}
    for loader in environment.loaders or ():
        of_phase[loader.phase] = of_phase.get(loader.phase, 0) + (loader.workers or 0)
    return max(of_phase.values(), default=0)


# torch opens these events around each compilation. Inside are events of the parts of the
# compilation, whose names end with "(dynamo_timed)".
_AROUND = frozenset({"dynamo", "entire_frame_compile"})
# For example, "entire_frame_compile_data: …, compile_id=0/2" is the third compilation of frame 0:
# above 0, a guard failed because a shape, a number or an object changed.
_AGAIN = re.compile(r"entire_frame_compile_data: .*compile_id=(?:!\d+/)?\d+/0*[1-9]")
_MOST_REASONS, _LONGEST_REASON = 5, 200
_CHANGE = (
    "torch.compile(…, dynamic=True), or torch._dynamo.mark_dynamic(tensor, dim) for the "
    "dimension that changes; in compiled functions, do not use Python numbers and objects that "
    "change"
)
_UNNAMED = '; TORCH_LOGS="recompiles" prints the guard that fails'


def recompilation(capture: Views) -> Iterator[Problem]:
    """Find the compilations after the first step, or their number in `capture.json`.

    torch before 2.6 records no events of compilations: then no saving is known.
    """
    events, steps, dynamo = capture.events, capture.links.counted_steps, capture.about.dynamo
    found = _compilations(capture)
    if len(found) and len(capture.links.steps) < 2:
        raise NotRecorded(
            "torch.compile compiles in the window, but a window with fewer than two finished steps "
            "does not show whether it compiles again",
            RECORD_STEPS,
        )
    guards = _reasons("failed guard", (dynamo and dynamo.failed_guards) or {})
    change = _CHANGE if guards else _CHANGE + _UNNAMED
    inside = found[steps.within(events.start_ns[found], events.end_ns[found]) > 0]
    if len(found):
        is_again = events.named(lambda name: _AGAIN.match(name) is not None)
        count = len(in_steps(capture, np.flatnonzero(events.among(ANNOTATION) & is_again)))
        again = f", {count} of them again after a failed guard" if count else ""
        share = share_with_device(capture, inside)
        yield Problem(
            f"compiles in the window: {percent(share)} of the {steps.what}, {len(inside)} "
            f"compilations{again}",
            inside,
            share,
            evidence=evidence(capture, inside) + guards,
            change=change,
        )
    elif dynamo and dynamo.recompilations:
        times = counted(dynamo.recompilations, "time")
        yield Problem(
            f"compiled functions again {times} in the window",
            evidence=(Evidence("recompilation", dynamo.recompilations), *guards),
            change=change,
        )


RECOMPILATION = Check(
    "recompilation",
    recompilation,
    title="torch.compile {what}",
    verify="--interruptions",
    least_share=0.01,
    factor=0,
    coverage=(CPU_IN_STEPS,),
)


def graph_breaks(capture: Views) -> Iterator[Problem]:
    """Find the graph breaks that `capture.json` counts; one is enough.

    No saving is simulated, because a trace does not show how long a single graph would take.
    """
    dynamo = capture.about.dynamo
    breaks = None if dynamo is None else dynamo.graph_breaks
    if breaks is None and capture.events.named(lambda name: name.startswith(REGION)).any():
        raise NotRecorded("the capture does not count graph breaks", RECORD_AGAIN)
    if breaks:
        graphs = f" and {dynamo.graphs} graphs" if dynamo and dynamo.graphs else ""
        yield Problem(
            f"{sum(breaks.values())} graph breaks{graphs}", evidence=_reasons("graph break", breaks)
        )


GRAPH_BREAKS = Check(
    "graph-breaks",
    graph_breaks,
    title="torch.compile breaks the graph: {what} in the window",
    change="torch.compile(…, fullgraph=True) raises at the first break: move the code that "
    "breaks the graph (printing, .item(), other libraries) out of the compiled function",
    verify='TORCH_LOGS="graph_breaks" prints each break with its line',
)


def _reasons(name: str, counts: Mapping[str, int]) -> tuple[Evidence, ...]:
    """Make rows of evidence, named `name`, for the most frequent reasons in `counts`."""
    # A text such as "(other reasons)" comes last.
    order = sorted(counts, key=lambda reason: (reason.startswith("("), -counts[reason]))
    return tuple(
        Evidence(name, counts[reason], detail=" ".join(reason.split())[:_LONGEST_REASON])
        for reason in order[:_MOST_REASONS]
    )


def _compilations(capture: Views) -> Ints:
    """The outermost events in which torch.compile compiles, on any thread, sorted by start."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    timed = events.named(is_compilation)[tree.index]
    timed &= is_operator | events.among(ANNOTATION)[tree.index]
    holds_timed = tree.with_descendants(timed.astype(np.int64)) > 0
    around = events.named(_AROUND.__contains__)[tree.index] & is_operator & holds_timed
    found: Ints = tree.index[tree.outermost(timed | around)]
    return found[np.argsort(events.start_ns[found], kind="stable")]
