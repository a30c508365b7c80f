"""Find steps in which torch.compile compiles.

The check reads torch's events around each compilation in all finished steps except the first. The
first step of a window may compile code that every run compiles once; the check `first-step` reports
this. A compilation in a later step usually is a recompilation: a guard has failed, because a shape,
a number or an object has changed. torch numbers the compilations of each Python frame from 0 and
writes the number into the trace. A compilation with a number above 0 is a recompilation.

There is a finding if compilations take at least 1 % of the time of the steps. The limit is low
because a warm program compiles nothing.

The evidence names the guards that failed in the window. `capture.json` has them; a trace alone does
not. torch before 2.6 records no events of compilations. If the trace has no such events, but
`capture.json` counts recompilations, there is a finding without a saving.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.compilations import compilations, frames_compiled_again, reasons
from instrument.findings.event_time import share_of
from instrument.findings.evidence import evidence
from instrument.findings.finding import (
    RECORD_STEPS,
    Check,
    Evidence,
    Finding,
    NotRecorded,
    show_command,
)
from instrument.findings.saving import scaled
from instrument.units import counted, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.01
_CHANGE = (
    "torch.compile(…, dynamic=True), or torch._dynamo.mark_dynamic(tensor, dim) for the dimension "
    "that changes; in compiled functions, do not use Python numbers and objects that change"
)
_UNNAMED = '; TORCH_LOGS="recompiles" prints the guard that fails'


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if compilations take at least 1 % of all steps except the first.

    Without events of compilations, yield one if `capture.json` counts recompilations.
    """
    events, steps = capture.events, capture.links.counted_steps
    found = compilations(capture)
    inside = found[steps.within(events.start_ns[found], events.end_ns[found]) > 0]
    share = share_of(capture, inside)
    dynamo = capture.about.dynamo
    guards = reasons("failed guard", (dynamo and dynamo.failed_guards) or {})
    change = _CHANGE if guards else _CHANGE + _UNNAMED
    if len(found) and len(capture.links.steps) < 2:
        raise NotRecorded(
            "torch.compile compiles in the window, but a window with fewer than two finished steps "
            "does not show whether it compiles again",
            RECORD_STEPS,
        )
    if share >= _LEAST_SHARE:
        count = int((steps.holds(events.start_ns[frames_compiled_again(capture)]) >= 0).sum())
        again = f", {count} of them again after a failed guard" if count else ""
        place, source = common_place(capture, inside)
        yield Finding(
            code=CHECK.code,
            title=f"torch.compile compiles in the window: {percent(share)} of the {steps.what}, "
            f"{len(inside)} compilations{again}",
            change=change,
            verify=show_command(capture, "--interruptions"),
            share=share,
            saving=scaled(whatif, inside),
            range=place,
            source=source,
            evidence=evidence(capture, inside) + guards,
            coverage=("CPU time within finished steps",),
        )
    elif not len(found) and dynamo and dynamo.recompilations:
        yield Finding(
            code=CHECK.code,
            title="torch.compile compiled functions again "
            f"{counted(dynamo.recompilations, 'time')} in the window",
            change=change,
            verify=show_command(capture, "--interruptions"),
            evidence=(Evidence("recompilation", dynamo.recompilations), *guards),
        )


CHECK = Check("recompilation", find)
