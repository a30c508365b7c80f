"""`Capture`: all that can be understood of one recorded window, in one place; without torch."""

from __future__ import annotations

from instrument.analysis.views import Views
from instrument.report.notebook import to_html

__all__ = ["Capture"]


class Capture(Views):
    """One recorded window on one rank, or a bare trace file: its metadata, the views on its events, and its report.

    The trace is read at the first view and kept; a view is computed once. `folder` is None for a bare trace. In a
    notebook a capture shows its ranges and operators, and each view that is a `Table` shows itself. `metadata` is the
    content of `capture.json`, and `about` the part of it that the views use, typed.
    """

    def _repr_html_(self) -> str:
        """What a notebook shows: what was recorded, the range tree and the costliest operators; reads the trace."""
        return to_html(self)
