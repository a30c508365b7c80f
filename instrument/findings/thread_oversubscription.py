"""`thread-oversubscription`: more threads work than there are CPUs.

Threads of one operator wait for each other, so one thread without a CPU stops them all. Counted are
the threads for operators and the loader workers of all processes of the job on this machine, from
`capture.json`; the threads only if operators of 50 µs or more that launch nothing, which torch may
divide, take `least_share` of the steps. There must be 1.25 times as many as CPUs, and fewer to
advise. No saving is simulated: a trace does not show when a thread waits for a CPU. The check does
not see other programs, or threads of other libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.check import RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.findings.evidence import evidence
from instrument.trace.events import OPERATOR, Ints

if TYPE_CHECKING:
    from instrument.trace.capture_json import Environment

_LEAST_RATIO = 1.25
_LONG_NS = 50_000


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if there are more working threads than CPUs."""
    environment = capture.about.environment
    threads = None if environment is None else environment.threads
    if environment is None or threads is None or not threads.cpus or threads.intra_op is None:
        raise NotRecorded(
            "the capture does not show how many threads and CPUs there were", RECORD_AGAIN
        )
    divided, share = _divided(capture)
    busy = threads.intra_op if share >= CHECK.least_share else 1
    ranks, workers = threads.local_ranks or 1, _workers(environment)
    total, own = ranks * (busy + workers), threads.cpus // ranks
    fitting = max(own - workers, 1)
    if total < _LEAST_RATIO * threads.cpus or (
        ranks <= threads.cpus and busy <= fitting and workers <= own
    ):
        return
    parts = [f"{busy} threads for operators"] if busy > 1 else []
    parts += [f"{workers} loader workers"] if workers else []
    of_ranks = [f"{ranks} processes"] if ranks > 1 else []
    counted = " with ".join([*of_ranks, *([" and ".join(parts)] if parts else [])])
    yield Problem(
        f"{total} threads work on {threads.cpus} CPUs: {counted}",
        evidence=evidence(capture, divided) if busy > 1 else (),
        change=f"torch.set_num_threads({fitting}), or OMP_NUM_THREADS={fitting} in the environment"
        + (", and fewer num_workers of the loaders" if workers > own else "")
        + (", and fewer processes on this machine" if ranks > threads.cpus else ""),
        verify="Compare the step times of two runs with profiler=timings, one with "
        f"OMP_NUM_THREADS={fitting}.",
    )


CHECK = Check("thread-oversubscription", find, least_share=0.05)


def _divided(capture: Views) -> tuple[Ints, float]:
    """The operators that may be divided among threads, and their share of the steps' time.

    These are the operators of torch whose own time on the CPU is 50 µs or longer, and that launch
    no device work.
    """
    events, tree, steps = capture.events, capture.links.call_tree, capture.links.counted_steps
    own_ns = tree.own(tree.total_ns)
    launches = np.zeros(len(tree) + 1, np.bool_)
    launches[capture.links.launched[1]] = True
    is_torchs = events.among(OPERATOR) & events.named(lambda name: name.startswith("aten::"))
    chosen = is_torchs[tree.index] & (own_ns >= _LONG_NS) & ~launches[:-1]
    inside = chosen & (steps.holds(tree.start_ns) >= 0)
    return tree.index[chosen], steps.share(int(own_ns[inside].sum()))


def _workers(environment: Environment) -> int:
    """The most loader workers that a process has in one phase, such as train or validation."""
    of_phase: dict[str | None, int] = {}
    for loader in environment.loaders or ():
        of_phase[loader.phase] = of_phase.get(loader.phase, 0) + (loader.workers or 0)
    return max(of_phase.values(), default=0)
