"""The events as a Parquet dataset, for DuckDB on a laptop and for Spark or Trino over a thousand ranks."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from instrument.analysis.events_to_arrow import to_arrow
from instrument.capture import Capture
from instrument.errors import need_package
from instrument.files import make_folder, replacing
from instrument.sinks import Sink

# How Hive, and all who read its layout, write a partition whose value is not known.
_UNKNOWN = "__HIVE_DEFAULT_PARTITION__"


class Parquet(Sink):
    """Writes the window's events to `run=…/rank=…/window=…/events.parquet` below the dataset's folder.

    One row for each event with a duration, in the order of the trace, then one for each allocation or free. The
    partitions are columns too: `run` and `window` (a word of SQL's own: write "window") are text, `rank` is a number.
    What is not known is null. `instrument.analysis.events_to_arrow.EVENTS` describes the columns.

    A file appears whole or not at all, under a name that no reader takes for a part of the dataset until then; the
    same run, rank and window written again replaces it.

    Lost: flows, thread labels, and those arguments of an event that have no column.

    Cost: 1 to 2 µs and 13 to 22 bytes an event, on top of reading the trace.

    Raises:
        MissingPackage: the package `pyarrow` is not installed; when the sink is built.
    """

    sink_name: ClassVar[str] = "parquet"

    dir: str | None = None
    """The dataset's folder, which many runs may share; None: the folder `parquet` beside the captures."""

    run: str | None = None
    """What the run is called; None: the name of its folder, with Hydra's day before its time."""

    rank: int | None = Field(None, ge=0)
    """The rank, for a trace that does not tell; None: the capture's own."""

    def model_post_init(self, _: Any, /) -> None:
        """Look for the package now, before the first step."""
        need_package("The parquet sink", "pyarrow", "parquet")

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's file.

        Raises:
            CaptureError: the trace has been dropped.
            TraceError: the trace cannot be read.
        """
        from pyarrow import parquet

        ranks = (self.rank, capture.about.rank, capture.events.rank)
        rank = next((each for each in ranks if each is not None), None)
        keys = {"run": self.run or _run(capture, folder), "rank": rank, "window": capture.name}
        beside = folder.absolute().parent
        dataset = (
            make_folder(beside, "parquet") if self.dir is None else Path(self.dir).expanduser()
        )
        rows = to_arrow(capture.events)
        into = make_folder(dataset, *(_partition(key, value) for key, value in keys.items()))
        with replacing(into / "events.parquet") as raw:
            parquet.write_table(rows, raw, compression="zstd")


def _partition(key: str, value: str | int | None) -> str:
    """One folder of the layout; its readers take %XX for the characters that a path cannot hold."""
    return f"{key}={_UNKNOWN if value is None else quote(str(value), safe='')}"


def _run(capture: Capture, folder: Path) -> str:
    """The run's name by its folder: `…/outputs/2026-01-02/03-04-05/profile` gives `2026-01-02_03-04-05`."""
    home = (capture.folder or folder).absolute().parent
    parts = [part for part in home.parts if part != "profile"][::-1]
    dated = list(takewhile(re.compile(r"[\d-]+").fullmatch, parts))
    return "_".join(reversed(dated or parts[:1]))
