"""A sink that writes the verdict, the ranges and the operators as text, to the log and a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from instrument.base import files
from instrument.base.errors import ConfigError
from instrument.base.log import lines_logger, logger
from instrument.base.rank_info import lowest_rank
from instrument.export.sinks.sink import Sink
from instrument.read.facts.schema import Grouping

if TYPE_CHECKING:
    from instrument.read.capture import Capture


By = Literal["name", Grouping]
_ALL = -1  # rows, as in torch


class TableSink(Sink):
    """Logs the verdict and the first ranges and operators, and writes all of it to `table.txt`.

    Only the lowest recording rank logs the text. The other ranks log the name of the file.

    Cost: reading the whole trace, about 3 s for a million events. All sinks share this cost.
    """

    sink_name: ClassVar[str] = "table"

    rows: int = 15
    """Maximum number of operators, and of ranges; -1: all, as in torch."""

    sort: str | None = None
    """Column that sorts operators; None: self time, on the device if recorded. torch's names, such
    as `self_cpu_time_total`, work too."""

    columns: list[str] | None = None
    """Columns of both tables besides the name; `[all]`: all with known values."""

    by: By = "name"
    """What to group operator calls by, besides the name. `input_shapes` and `input_types` need
    `record_shapes`, `stack` needs `with_stack`, `overload` needs `capture_overload_names` in
    `experimental_config`."""

    stack_depth: int = Field(5, ge=1)
    """How many of the innermost Python frames form a stack."""

    ranges: bool = True
    """Whether to show the range tree."""

    operators: bool = True
    """Whether to show the operators."""

    @field_validator("rows")
    @classmethod
    def _some(cls, rows: int) -> int:
        if rows < 1 and rows != _ALL:
            raise ConfigError(
                "The table sink's option 'rows' should be a positive number, or -1 for all, "
                f"not {rows}."
            )
        return rows

    @field_validator("sort")
    @classmethod
    def _sortable(cls, sort: str | None) -> str | None:
        if sort is None:
            return None
        from instrument.read.show.text import check_sort  # loads polars

        return check_sort(sort)

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: list[str] | None) -> list[str] | None:
        if columns is None:
            return None
        from instrument.read.show.text import check_columns  # loads polars

        return check_columns(columns)

    @property
    def needs(self) -> tuple[str, ...]:
        """The option of ProfilerConfig that the option `by` needs, if any."""
        flags = {
            "input_shapes": "record_shapes",
            "input_types": "record_shapes",
            "stack": "with_stack",
        }
        return (flags[self.by],) if self.by in flags else ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Log the first 40 lines of the text, and write all of it to `table.txt`.

        Raises:
            CaptureError: the data that the option `by` needs was not recorded.
        """
        from instrument.read.show.text import log_block, render

        options = dict(self)
        files.write(folder / "table.txt", render(capture, **options) + "\n")
        rank = capture.metadata.get("rank")
        lowest = lowest_rank(capture.metadata.get("config", {}).get("ranks"))
        if rank in (None, lowest):
            # In the export process, stdout is what stderr is in the training process.
            width = shutil.get_terminal_size().columns
            # Until all sinks have run, a capture's folder has another name.
            final = Path(capture.place or folder) if folder == capture.folder else folder
            lines_logger.block(log_block(capture, final / "table.txt", width, **options))
        else:
            logger.info(
                "The table of {} is in its file table.txt; only rank {} logs its table.",
                capture.name,
                lowest,
            )
