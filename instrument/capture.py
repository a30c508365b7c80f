"""`Capture`: a recorded window, its tables and its report, without torch."""

from __future__ import annotations

from instrument.analysis.views import Views
from instrument.report.notebook import to_html

__all__ = ["Capture"]


class Capture(Views):
    """One recorded window on one rank, or a trace file: its metadata, its views, and its report.

    The trace is read when a view first needs it, and kept; a view is computed once. In a notebook a
    capture shows its ranges and operators, and each view that is a `Table` shows itself.

    Attributes:
        trace_path: the trace file; None where the capture holds none.
        folder: the capture's folder; None for a trace file alone.
        metadata: the content of `capture.json`; `about` is the part of it that the views use, as
            types.
        communication: the regular expression for names of communication kernels that was given to
            `load`; None where none was.
    """

    def _repr_html_(self) -> str:
        """The page of a notebook: heading, range tree and costliest operators; reads the trace."""
        return to_html(self)
