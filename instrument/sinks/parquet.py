"""A sink that writes the events as a Parquet dataset, for DuckDB, Spark or Trino."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from instrument.base.errors import need_package
from instrument.base.files import make_folder, replacing
from instrument.read.views import coverage_rows
from instrument.read.views.coverage import losses
from instrument.read.views.events_to_arrow import to_arrow
from instrument.sinks.sink import Sink

if TYPE_CHECKING:
    from instrument.read.capture import Capture

# The metadata of the file says under this key which events are missing.
_INCOMPLETE = "instrument.incomplete"
# In the name of a Hive partition, this text means null.
_UNKNOWN = "__HIVE_DEFAULT_PARTITION__"


class Parquet(Sink):
    """Writes the window's events to `run=…/rank=…/window=…/events.parquet` in the dataset's folder.

    The file begins with a row for each event with a duration, in the order of the trace. Rows for
    allocations and frees follow. The partitions are columns too: `run` and `window` are text, and
    `rank` is a number. Quote `window` in a query, because it is a keyword of SQL. Unknown values
    are null. `instrument.read.views.events_to_arrow.EVENTS` describes the columns.

    If data is missing from the events, the file's metadata has the key `instrument.incomplete`. It
    holds, as JSON, the rows of `capture.coverage` that say what is missing.

    A file gets its final name once it is complete. Writing the same run, rank and window again
    replaces the file.

    The file contains no flows (the arrows between events) and no thread labels. Arguments of events
    are left out, except for arguments that have a column.

    Cost: 1 to 2 µs and 13 to 22 bytes per event, besides reading the trace.

    Raises:
        MissingPackage: the package `pyarrow` is not installed.
    """

    sink_name: ClassVar[str] = "parquet"

    dir: str | None = None
    """The dataset's folder, shared by runs; None: `parquet` beside the captures."""

    run: str | None = None
    """The name of the run; None: the name of its folder. If Hydra made the folder, None means the
    date and time of the run."""

    rank: int | None = Field(None, ge=0)
    """The rank to write; None: the rank that the capture or the trace states."""

    def model_post_init(self, _: Any, /) -> None:
        """Raise MissingPackage before the first step if the package is missing."""
        need_package("The parquet sink", "pyarrow", "parquet")

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's file; raises CaptureError if the capture holds no trace."""
        from pyarrow import parquet

        ranks = (self.rank, capture.about.rank, capture.events.rank)
        rank = next((each for each in ranks if each is not None), None)
        keys = {"run": self.run or _run(capture, folder), "rank": rank, "window": capture.name}
        beside = folder.absolute().parent
        dataset = (
            make_folder(beside, "parquet") if self.dir is None else Path(self.dir).expanduser()
        )
        rows = to_arrow(capture.events)
        if missing := losses(capture, coverage_rows.EVENTS):
            rows = rows.replace_schema_metadata({_INCOMPLETE: json.dumps(missing)})
        into = make_folder(dataset, *(_partition(key, value) for key, value in keys.items()))
        with replacing(into / "events.parquet") as raw:
            parquet.write_table(rows, raw, compression="zstd")


def _partition(key: str, value: str | int | None) -> str:
    return f"{key}={_UNKNOWN if value is None else quote(str(value), safe='')}"


def _run(capture: Capture, folder: Path) -> str:
    """The date and time in the folder's path as `2026-01-02_03-04-05`, else the folder's name."""
    home = (capture.folder or folder).absolute().parent
    parts = [part for part in home.parts if part != "profile"][::-1]
    dated = list(takewhile(re.compile(r"[\d-]+").fullmatch, parts))
    return "_".join(reversed(dated or parts[:1]))
