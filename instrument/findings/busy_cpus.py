"""`busy-cpus`: the thread of the steps was ready to run, but got no CPU.

On Linux, a session asks the scheduler how long the thread that began the window was ready to run,
but had no CPU. There is a finding if this time is at least 10 % of the window. The scheduler does
not say what used the CPUs: another program, other processes or threads of the job, or the quota of
the process's cgroup. `thread-oversubscription` compares the job's own threads with the CPUs.

No saving is simulated, because the trace does not show when the thread waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.views import Views
from instrument.findings.finding import RECORD_AGAIN, Check, Finding, NotRecorded
from instrument.trace.capture_json import DISTURBING_CPU_WAIT
from instrument.units import duration, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:  # noqa: ARG001
    """Yield one finding if the thread of the steps waits at least 10 % of the window for a CPU."""
    wait = capture.about.cpu_wait
    share = None if wait is None else wait.share
    if wait is None or share is None:
        raise NotRecorded(
            "the capture does not show how long the thread of the steps waited for a CPU",
            f"{RECORD_AGAIN} on Linux",
        )
    if share < DISTURBING_CPU_WAIT:
        return
    yield Finding(
        code=CHECK.code,
        title=f"For {percent(share)} of the window, the thread of the steps was ready to run, but "
        "got no CPU",
        change="Stop other programs on this machine, or give this job more CPUs (a larger quota) "
        "or fewer threads and processes. Then record again: the thread waited "
        f"{duration(wait.waited_ns or 0)}, so the steps may be shorter on an idle machine.",
        verify="Record again on an idle machine, without a CPU quota: this finding is then gone.",
    )


CHECK = Check("busy-cpus", find)
