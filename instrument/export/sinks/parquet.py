"""A sink that writes the two tables of a trace as a Parquet dataset, for DuckDB or Spark."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

from pydantic import Field

from instrument.base.files import make_folder, replacing
from instrument.export.sinks.sink import Sink
from instrument.read.views import coverage_rows
from instrument.read.views.coverage import losses

if TYPE_CHECKING:
    from instrument.read.capture import Capture

# The metadata of the file says under this key which events are missing.
_INCOMPLETE = "instrument.incomplete"
# In the name of a Hive partition, this text means null.
_UNKNOWN = "__HIVE_DEFAULT_PARTITION__"


class Parquet(Sink):
    """Writes the window's events and segments to `run=…/rank=…/window=…/` in the dataset's folder.

    `events.parquet` and `segments.parquet` are the two tables of [The two tables](tables.md). The
    partitions are columns too: `run` and `window` are text, and `rank` is a number. Quote `window`
    in a query, because it is a keyword of SQL. Unknown values are null.

    If data is missing from the events, the metadata of both files has the key
    `instrument.incomplete`. It holds, as JSON, the rows of `capture.coverage` that say what is
    missing.

    The files get their final names once both are complete. Writing the same run, rank and window
    again replaces the files.

    Cost: 1 to 3 µs and 13 to 45 bytes per event of a long trace, besides reading it.
    """

    sink_name: ClassVar[str] = "parquet"

    dir: str | None = None
    """The dataset's folder, shared by runs; None: `parquet` beside the captures."""

    run: str | None = None
    """The name of the run; None: the name of its folder. If Hydra made the folder, None means the
    date and time of the run."""

    rank: int | None = Field(None, ge=0)
    """The rank to write; None: the rank that the capture or the trace states."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's files; raises CaptureError if the capture holds no trace."""
        ranks = (self.rank, capture.about.rank, capture.events.rank)
        rank = next((each for each in ranks if each is not None), None)
        keys = {"run": self.run or _run(capture, folder), "rank": rank, "window": capture.name}
        beside = folder.absolute().parent
        dataset = (
            make_folder(beside, "parquet") if self.dir is None else Path(self.dir).expanduser()
        )
        missing = losses(capture, coverage_rows.EVENTS)
        metadata = {_INCOMPLETE: json.dumps(missing)} if missing else None
        into = make_folder(dataset, *(_partition(key, value) for key, value in keys.items()))
        events, segments = capture.facts.events(), capture.facts.segments()
        with (
            replacing(into / "events.parquet") as first,
            replacing(into / "segments.parquet") as second,
        ):
            events.write_parquet(first, compression="zstd", metadata=metadata)
            segments.write_parquet(second, compression="zstd", metadata=metadata)


def _partition(key: str, value: str | int | None) -> str:
    return f"{key}={_UNKNOWN if value is None else quote(str(value), safe='')}"


def _run(capture: Capture, folder: Path) -> str:
    """The date and time in the folder's path as `2026-01-02_03-04-05`, else the folder's name."""
    home = (capture.folder or folder).absolute().parent
    parts = [part for part in home.parts if part != "profile"][::-1]
    dated = list(takewhile(re.compile(r"[\d-]+").fullmatch, parts))
    return "_".join(reversed(dated or parts[:1]))
