"""`thread-oversubscription`: the threads of one operator wait for each other, because CPUs are few.

torch divides an operator among threads, and the operator ends when its last thread ends. If one of
them gets no CPU, the others wait for it. There are two ways to see this.

Counted: the threads for operators and the loader workers of all processes of the job on this
machine, from `capture.json`; the threads only if operators of 50 µs or more that launch nothing,
which torch may divide, take `least_share` of the steps. There must be 1.25 times as many as CPUs,
and fewer to advise; and no session may have seen that the threads hardly ever waited for a CPU.

Measured: on Linux, a session asks the scheduler how long torch's threads wait for a CPU. If they
wait for a tenth of the window, other work uses the CPUs. The saving of one thread is then
estimated: each operator takes as long as its fastest equal calls, times the number of threads if
that is 50 µs or more (below, dividing it saves nothing), and waits for a CPU as much as the thread
of the steps does in the window. A call of 10 ms or more includes such waits already. What one
thread loses on large operators is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import QUIET_CPUS, RECORD_AGAIN, Check, Edit, NotRecorded, Problem
from instrument.read.advise.evidence import evidence
from instrument.read.advise.undisturbed import undisturbed_ns
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT
from instrument.read.trace.events import OPERATOR, Flags, Ints
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.trace.capture_json import CpuWait, Environment

_LEAST_RATIO = 1.25
_LONG_NS = 50_000
# Within this time, the scheduler lets several programs take turns on a CPU.
_SEVERAL_TURNS_NS = 10_000_000


class Waiting(NamedTuple):
    """The operators of the steps whose threads wait for each other.

    Attributes:
        events: the positions of the outermost operators.
        left: the part of their time that one thread would need.
        share: the share of the steps that one thread would save.
    """

    events: Ints
    left: float
    share: float


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if threads wait for each other, or if there are more than CPUs."""
    environment = capture.about.environment
    threads = None if environment is None else environment.threads
    if environment is None or threads is None or not threads.cpus or threads.intra_op is None:
        raise NotRecorded(
            "the capture does not show how many threads and CPUs there were", RECORD_AGAIN
        )
    waits = waiting(capture)
    if counted := _too_many(capture, waits):
        yield counted
    elif waits is not None:
        yield Problem(
            f"For {percent(waits.share)} of the {capture.links.counted_steps.what}, threads of the "
            f"same operator wait for each other: torch divides operators among {threads.intra_op} "
            "threads, and other work uses the CPUs too",
            share=waits.share,
            edit=_edit(waits),
            evidence=evidence(capture, waits.events),
            change=f"{_CHANGE.format(1)}: one thread waits for no other.",
            verify=_VERIFY.format(1),
        )
    elif threads.intra_op > 1 and _is_disturbed(capture.about.cpu_wait):
        raise NotRecorded(
            "other work used the CPUs, so threads may have waited for each other",
            QUIET_CPUS,
        )


CHECK = Check("thread-oversubscription", find, least_share=0.05)
_CHANGE = "torch.set_num_threads({0}), or OMP_NUM_THREADS={0} in the environment"
_VERIFY = "Compare the step times of two runs with profiler=timings, one with OMP_NUM_THREADS={}."


def waiting(capture: Views) -> Waiting | None:
    """Estimate what one thread for operators would save; None if that is less than a finding."""
    return capture.once("thread-oversubscription", lambda: _waiting(capture))


def _waiting(capture: Views) -> Waiting | None:
    environment, wait = capture.about.environment, capture.about.cpu_wait
    threads = None if environment is None else environment.threads
    if threads is None or wait is None or not wait.ran_ns or (threads.intra_op or 1) < 2:
        return None
    if (wait.workers_waited_ns or 0) < DISTURBING_CPU_WAIT * (wait.window_ns or 0):
        return None
    tree, steps = capture.links.call_tree, capture.links.counted_steps
    nodes = np.flatnonzero(_on_cpu(capture) & (steps.holds(tree.start_ns) >= 0))
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
    if share < CHECK.least_share:
        return None
    is_node = np.zeros(len(tree), np.bool_)
    is_node[nodes] = True
    outermost = tree.outermost(is_node)
    spent_ns = int(capture.links.spent_ns[outermost].sum())
    return Waiting(tree.index[outermost], max(1 - saved_ns / max(spent_ns, 1), 0.0), share)


def _edit(waits: Waiting) -> Edit:
    return lambda whatif: whatif.scale_events(waits.events, by=waits.left)


def _waited_little(wait: CpuWait) -> bool:
    """Whether it is known that the threads of this process hardly ever waited for a CPU."""
    times = (wait.waited_ns, wait.workers_waited_ns)
    return all(ns is not None and ns < DISTURBING_CPU_WAIT * (wait.window_ns or 0) for ns in times)


def _is_disturbed(wait: CpuWait | None) -> bool:
    return wait is not None and (wait.share or 0.0) >= DISTURBING_CPU_WAIT


def _too_many(capture: Views, waits: Waiting | None) -> Problem | None:
    """The problem of more working threads than CPUs; None if they fit.

    If it is known what one thread would save, the advice is one thread.
    """
    environment = capture.about.environment
    threads = None if environment is None else environment.threads
    if environment is None or threads is None or not threads.cpus or threads.intra_op is None:
        return None
    wait = capture.about.cpu_wait
    if waits is None and wait is not None and wait.window_ns and _waited_little(wait):
        return None  # such as loader workers that wait for files
    divided, share = _divided(capture)
    busy = threads.intra_op if share >= CHECK.least_share else 1
    ranks, workers = threads.local_ranks or 1, _workers(environment)
    total, own = ranks * (busy + workers), threads.cpus // ranks
    fitting = max(own - workers, 1)
    if total < _LEAST_RATIO * threads.cpus or (
        ranks <= threads.cpus and busy <= fitting and workers <= own
    ):
        return None
    advised = fitting if waits is None else 1
    parts = [f"{busy} threads for operators"] if busy > 1 else []
    parts += [f"{workers} loader workers"] if workers else []
    of_ranks = [f"{ranks} processes"] if ranks > 1 else []
    counted = " with ".join([*of_ranks, *([" and ".join(parts)] if parts else [])])
    return Problem(
        f"{total} threads work on {threads.cpus} CPUs: {counted}",
        edit=None if waits is None else _edit(waits),
        evidence=evidence(capture, divided) if busy > 1 else (),
        change=_CHANGE.format(advised)
        + (", and fewer num_workers of the loaders" if workers > own else "")
        + (", and fewer processes on this machine" if ranks > threads.cpus else ""),
        verify=_VERIFY.format(advised),
    )


def _on_cpu(capture: Views) -> Flags:
    """A mask of the nodes that are operators of torch and launch no device work."""
    events, tree = capture.events, capture.links.call_tree
    launches = np.zeros(len(tree) + 1, np.bool_)
    launches[capture.links.launched[1]] = True
    is_torchs = events.among(OPERATOR) & events.named(lambda name: name.startswith("aten::"))
    return is_torchs[tree.index] & ~launches[:-1]


def _divided(capture: Views) -> tuple[Ints, float]:
    """The operators that may be divided among threads, and their share of the steps' time.

    These are the operators of torch whose own time on the CPU is 50 µs or longer, and that launch
    no device work.
    """
    tree, steps = capture.links.call_tree, capture.links.counted_steps
    own_ns = tree.own(tree.total_ns)
    chosen = _on_cpu(capture) & (own_ns >= _LONG_NS)
    inside = chosen & (steps.holds(tree.start_ns) >= 0)
    return tree.index[chosen], steps.share(int(own_ns[inside].sum()))


def _workers(environment: Environment) -> int:
    """The most loader workers that a process has in one phase, such as train or validation."""
    of_phase: dict[str | None, int] = {}
    for loader in environment.loaders or ():
        of_phase[loader.phase] = of_phase.get(loader.phase, 0) + (loader.workers or 0)
    return max(of_phase.values(), default=0)
