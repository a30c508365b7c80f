"""A sink that writes the report page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from instrument.base import files
from instrument.export.sinks.sink import Sink

if TYPE_CHECKING:
    from instrument.read.capture import Capture


class Report(Sink):
    """Writes `report.html`, one page with all that the capture shows; it loads no other files.

    The page shows what takes the time of a step, what to change, and how much faster a step would
    be if a range were faster. It also shows the timeline, flame graphs, memory and tables. The
    command `instrument report` writes the same page later, also for several windows and ranks.
    Without `redact`, also writes `diagnosis.json`, as `instrument diagnose --json` prints it.

    Cost: about as much as reading the trace; a page has up to 2 MB.
    """

    sink_name: ClassVar[str] = "report"

    redact: bool = False
    """Whether to leave out the names of files, users and hosts."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Write `report.html` and `diagnosis.json`."""
        from instrument.read.advise.diagnose import Diagnosing
        from instrument.read.advise.diagnosis import as_json
        from instrument.read.show.page.page import page, payload

        diagnosing = Diagnosing()
        content = payload([capture], redact=self.redact, diagnosing=diagnosing)
        files.write(folder / "report.html", page(content).html)
        if not self.redact:  # the findings name files
            files.write(folder / "diagnosis.json", as_json(diagnosing.diagnosis))
