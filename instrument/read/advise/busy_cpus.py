"""`busy-cpus`: the thread of the steps was ready to run, but got no CPU.

On Linux, a session asks the scheduler how long the thread that began the window waited for a CPU.
The scheduler does not say what used the CPUs: another program, other threads of the job, or the
quota of the cgroup. What `thread-oversubscription` explains is left out: in the time that one
thread for operators would save, the thread waits for a CPU as much as in the rest of the window. No
saving is simulated, because the trace does not show when the thread waited.
"""

from __future__ import annotations

from collections.abc import Iterator

from instrument.base.units import duration, percent
from instrument.read.advise import thread_oversubscription
from instrument.read.advise.check import RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT
from instrument.read.views.views import Views


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if the thread of the steps waits too long for a CPU."""
    wait = capture.about.cpu_wait
    share = None if wait is None else wait.share
    if wait is None or share is None:
        raise NotRecorded(
            "the capture does not show how long the thread of the steps waited for a CPU",
            f"{RECORD_AGAIN} on Linux",
        )
    waits = thread_oversubscription.waiting(capture)
    share *= 1.0 if waits is None else 1 - waits.share
    waited = duration(round(share * (wait.window_ns or 0)))
    if share >= CHECK.least_share:
        beside = ", beside what thread-oversubscription explains" if waits else ""
        yield Problem(
            f"For {percent(share)} of the window, the thread of the steps was ready to run, but "
            f"got no CPU{beside}",
            share=share,
            change="Stop other programs on this machine, or give this job more CPUs (a larger "
            "quota) or fewer threads and processes. Then record again: the thread waited "
            f"{waited}, so the steps may be shorter on an idle machine.",
        )


CHECK = Check(
    "busy-cpus",
    find,
    verify="Record again on an idle machine, without a CPU quota: this finding is then gone.",
    least_share=DISTURBING_CPU_WAIT,
    is_caveat=True,
)
