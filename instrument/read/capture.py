"""`Capture` reads a recorded window and makes its tables and its report. It never loads torch."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.base import files
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.advise.diagnosis import Diagnosis
    from instrument.read.compare.side import Comparable
    from instrument.read.show.page.page import Page
    from instrument.read.simulate.scenario import Scenario

__all__ = ["Capture"]


class Capture(Views):
    """Analyses a recorded window (consecutive steps) of one rank, or a trace file.

    A view is a table or another result that is computed from the trace. The trace is read when a
    view first needs the trace, and then stays in memory. Each view is computed once. In a notebook,
    a capture shows what slows the run most, and tables of its ranges and operators.

    Attributes:
        trace_path: the trace file; None if the capture holds no trace.
        folder: the capture's folder; None for a trace file alone.
        metadata: the content of `capture.json` as a dict. `about` holds the fields of
            `capture.json` that the views use, as attributes with types.
        communication: the argument `communication` of `load`: globs for the names of communication
            kernels, or None.
        peak_flops: the argument `peak_flops` of `load`: the peak FLOP/s of the devices, or None.
    """

    @property
    def whatif(self) -> Scenario:
        """A simulation of the recorded window. Its methods return simulations with edits.

        For example, `capture.whatif.scale(range="attention", by=0.5)` estimates how long the steps
        take if the range "attention" takes half of its time.

        Raises:
            CaptureError: the trace has no CPU events, or is too long to simulate.
        """
        from instrument.read.simulate.scenario import scenario

        self.require_whole("A simulation")
        return scenario(self)

    def diagnose(self) -> Diagnosis:
        """Return what slows the run, what to change, and how much time each change saves.

        `instrument.diagnose` does the same for several windows and ranks.

        Raises:
            CaptureError: the capture holds no trace.
            TraceError: the trace cannot be read.
        """
        from instrument.read.advise.diagnose import diagnose

        self.require_whole("A diagnosis")
        return diagnose(self)

    def report(
        self,
        path: str | PathLike[str] | None = None,
        *,
        before: Comparable | None = None,
        redact: bool = False,
    ) -> Page:
        """Return an HTML page with all results of the capture; a notebook displays the page.

        Args:
            path: the file to write the page to; None writes no file.
            before: what to compare this capture with: a capture, a run, or the path or URL of a
                capture, a trace, or a run's folder. The page gets a section with the changes.
            redact: whether to leave out the names of files, users and hosts.

        Raises:
            CaptureError: the capture holds no trace, or `before` cannot be read.
            TraceError: the trace cannot be read.
            OSError: the file cannot be written.
        """
        from instrument.read.show.page.page import page, payload

        self.require_whole("A report")
        made = page(payload([self], before=before, redact=redact))
        if path is not None:
            files.write(Path(path), made.html)
        return made

    def _repr_html_(self) -> str:
        """Return HTML with what slows the run most, the ranges, and the costliest operators."""
        from instrument.read.show.notebook import to_html

        return to_html(self)
