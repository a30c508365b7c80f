"""Shards: each machine summarizes a part of a run's captures, and writes them into a Parquet file.

The column `table` says what a row is: a capture (`captures`, with its breakdown), or one of its
`ranges`, `steps`, `collectives` or `collective_groups`. Columns of other tables are null.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from instrument.base.errors import CaptureError, ConfigError, need_package
from instrument.base.files import encodable, is_regular, replacing
from instrument.base.units import few
from instrument.read.facts.schema import names_of
from instrument.read.ranks.parquet_size import memory_of
from instrument.read.ranks.rank_summary import TEXTS, Columns, RankSummary, is_sound, read_all
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.gzip_stream import RATIO_COUNTS_FROM_BYTES, max_ratio
from instrument.read.trace.reader import collector_off
from instrument.read.views.breakdown import BREAKDOWN
from instrument.read.views.find_captures import Place, captures_at, place_of

_FILE = re.compile(r"ranks-(\d{5})-of-(\d{5})\.parquet")
_TABLES = ("ranges", "steps", "collectives", "collective_groups")
_ABOUT = {*RankSummary.__struct_fields__} - {*_TABLES, "breakdown"}
_AS_JSON = ("ranks", "versions", "devices")
_STRINGS = {*TEXTS, *_AS_JSON, "table", "capture", "host", "started_at", "phase"}
_FLAGS = ("truncated", "cut_short")
_UNREAD = b"instrument.unread"
# The captures whose rows are one row group for each table.
_BLOCK = 500
_DAMAGED = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
# Each row has times or a name of its own, so a shard has fewer rows than bytes.
_MOST_ROWS_PER_BYTE = 4


class Shard(NamedTuple):
    """The part `number`, counted from 0, of `parts` parts of a run's captures."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> Shard:
        """Read K/N; /N, where K is the number of the task in the job's array; or `auto`.

        For `auto`, the tasks of Slurm's array count from 0, and N is the number of tasks.

        Raises:
            ConfigError: the text is something else, or the job is not part of an array.
        """
        task, first, step, count = (
            environment.get(f"SLURM_ARRAY_TASK_{name}", "")
            for name in ("ID", "MIN", "STEP", "COUNT")
        )
        given, _, of = text.partition("/")
        try:
            if text == "auto":
                found = cls((int(task) - int(first or 0)) // int(step or 1), int(count))
            else:
                index = task or environment.get("JOB_COMPLETION_INDEX", "")  # of Kubernetes
                found = cls(int(given or index), int(of))
        except (ValueError, ZeroDivisionError):
            found = cls(0, 0)
        if not 0 <= found.number < found.parts < 100_000:
            raise ConfigError(
                f"--shard is {text!r}, but it must be K/N with K from 0 to N - 1, auto in an array "
                "of Slurm, or /N in an array of Slurm or an indexed job of Kubernetes."
            )
        return found

    def part_of(self, places: Sequence[Place], below: Place) -> list[Place]:
        """The places of this part; it does not depend on the other places or their order."""
        names = [str(place).removeprefix(str(below)) for place in places]
        # not a checksum, in which names that differ in one digit leave parts empty
        digests = [blake2b(name.encode("utf-8", "surrogateescape")).digest() for name in names]
        parts = [int.from_bytes(digest[:8], "big") % self.parts for digest in digests]
        return [place for place, part in zip(places, parts) if part == self.number]


def make(paths: Sequence[Place], shard: Shard, folder: Path) -> tuple[Path, list[str]]:
    """Write the summaries of a part of the captures or traces into a file in `folder`.

    Returns the file, and a sentence for each capture that cannot be read.

    Raises:
        MissingPackage: the package pyarrow is not installed.
        CaptureError: there are no captures at a path.
        OSError: the file cannot be written.
    """
    need_package("A shard", "pyarrow", "parquet")
    places = [(path, captures_at(path, or_traces=True)) for path in paths]
    chosen = [each for path, found in places for each in shard.part_of(found, path)]
    answers = read_all(chosen, keep_copies=False)
    unread = [each for each in answers.values() if isinstance(each, str)]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"ranks-{shard.number:05d}-of-{shard.parts:05d}.parquet"
    _write(target, {k: v for k, v in answers.items() if isinstance(v, RankSummary)}, unread)
    return target, unread


def _write(target: Path, found: Mapping[Place, RankSummary], unread: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [(encodable(str(k)), each.rank, _tables(each)) for k, each in found.items()]
    every = (column for *_, tables in rows for table in tables.values() for column in table)
    types = {name: pyarrow.string() for name in _STRINGS} | dict.fromkeys(_FLAGS, pyarrow.bool_())
    names = dict.fromkeys(("table", "capture", "rank", *every))
    fields = [(name, types.get(name, pyarrow.int64())) for name in names]
    schema = pyarrow.schema(fields, {_UNREAD: json.dumps(unread)})
    with replacing(target) as raw, parquet.ParquetWriter(raw, schema, compression="zstd") as file:
        for begin in range(0, len(rows), _BLOCK):
            for table in ("captures", *_TABLES):
                columns: dict[str, list[Any]] = {name: [] for name in names}
                for capture, rank, tables in rows[begin : begin + _BLOCK]:
                    size = max((len(column or ()) for column in tables[table].values()), default=0)
                    of_all = {"table": [table], "capture": [capture], "rank": [rank]}
                    known = tables[table] | {name: cell * size for name, cell in of_all.items()}
                    for name, column in columns.items():
                        column += known.get(name) or [None] * size
                if columns["table"]:
                    whole = pyarrow.table(columns, schema)
                    file.write_table(whole, row_group_size=len(whole))


def _tables(summary: RankSummary) -> dict[str, Columns]:
    about = {name: getattr(summary, name) for name in _ABOUT}
    cells = {k: json.dumps(v) if k in _AS_JSON else v for k, v in about.items()}
    captures: Columns = {name: [cell] for name, cell in (cells | summary.breakdown).items()}
    tables = {name: getattr(summary, name) for name in _TABLES}
    listed = summary.collective_groups.get("kind") or ()
    numbered = {"group": [*range(len(listed))], **summary.collective_groups}
    return {"captures": captures, **tables, "collective_groups": numbered}


def files_at(place: Place) -> list[Path]:
    """The shards in a folder; the file itself, if `place` is a shard."""
    path = Path(place)
    every = [path] if _FILE.fullmatch(path.name) else []
    with suppress(ValueError):  # from Python 3.13 on, for a name that no folder can have
        every = every or sorted(path.glob("ranks-*.parquet"))
    return [file for file in every if _FILE.fullmatch(file.name) and is_regular(file)]


def missing(files: Sequence[Path]) -> list[str]:
    """A sentence that names the missing shards, if there are any.

    Raises:
        CaptureError: the files are parts of different numbers of parts.
    """
    found = [Shard(*map(int, re.findall(r"\d{5}", file.name))) for file in files]
    parts = sorted({shard.parts for shard in found})
    if len(parts) > 1:
        of = few(parts)
        raise CaptureError(f"The shards are of {of} parts: remove those of an earlier run.")
    left = sorted({*range(*parts)} - {shard.number for shard in found}) if found else []
    again = f"make them with --shard K/{parts[0]}" if left else ""
    return [f"shards {few(left)} of {parts[0]}, which are missing: {again}."] if left else []


@collector_off()
def read(file: Path) -> tuple[dict[Place, RankSummary], list[str]]:
    """Return the summaries of a shard, and a sentence for each capture that could not be read.

    Raises:
        MissingPackage: the package pyarrow is not installed.
        CaptureError: the file is not a shard of this version.
    """
    need_package("A shard", "pyarrow", "parquet")
    from pyarrow import ArrowException, parquet

    found: dict[str, dict[str, Any]] = {}
    try:
        metadata = parquet.read_metadata(file)
        leaves = map(metadata.schema.column, range(len(metadata.schema)))
        coded = [each.path for each in leaves if each.physical_type == "BYTE_ARRAY"]
        with parquet.ParquetFile(file, metadata=metadata, read_dictionary=coded) as source:
            unread = msgspec.json.decode(source.schema_arrow.metadata[_UNREAD], type=list[str])
            packed, plain = memory_of(file, metadata)
            most = max(RATIO_COUNTS_FROM_BYTES, max_ratio() * packed)
            if (count := metadata.num_rows) > _MOST_ROWS_PER_BYTE * packed or plain > most:
                raise ValueError(f"{count} rows and {plain} bytes are too many for its size")
            for table, capture, columns in _parts(source, most):
                if found.setdefault(capture, {}).setdefault(table, columns) is not columns:
                    raise ValueError(f"it holds the {table} of a capture twice")
        summaries = {place_of(capture): _summary(tables) for capture, tables in found.items()}
    except (ArrowException, *_DAMAGED) as error:
        raise CaptureError(f"{file} is no shard ({error}): make it again with --shard.") from None
    if not all(map(is_sound, summaries.values())):
        raise CaptureError(f"{file} is of another version, or damaged: make it again with --shard.")
    return summaries, unread


def _parts(source: Any, most: float) -> Iterator[tuple[str, str, Columns]]:
    """Yield the columns of each table of each capture; columns that are all null are None.

    Raises:
        ValueError: the texts take more than `most` bytes, each counted as often as it is used.
    """
    for number in range(source.num_row_groups):
        group = source.metadata.row_group(number)
        every = [group.column(k) for k in range(group.num_columns)]
        nulls = {
            each.path_in_schema: each.statistics and each.statistics.null_count for each in every
        }
        used = [name for name, null in nulls.items() if null != group.num_rows]
        block = source.read_row_group(number, columns=used).combine_chunks()
        most -= sum(map(_text_bytes, block.itercolumns()))
        if most < 0:
            raise ValueError("its texts are too long for its size")
        captures, table = block.column("capture").chunk(0), block.column("table")[0].as_py()
        left_out = {"capture", "table", "rank"} if table != "captures" else {"capture", "table"}
        columns = {k: _cells(block.column(k).chunk(0)) for k in used if k not in left_out}
        numbers = [np.asarray(each) for each in columns.values() if isinstance(each, array)]
        if table == "collectives" and any((abs(k // 2) >= BEYOND_NS // 2).any() for k in numbers):
            raise ValueError("a time is out of range")
        code = captures.indices.to_numpy()
        changes = (np.flatnonzero(np.diff(code)) + 1).tolist()
        for begin, end in pairwise([0, *changes, len(code)]):
            found: Columns = {name: column[begin:end] for name, column in columns.items()}
            for name, cut in found.items():
                if isinstance(cut, list) and cut.count(None) == len(cut):
                    found[name] = None
            yield table, captures.dictionary[int(code[begin])].as_py(), found


def _text_bytes(column: Any) -> int:
    """The bytes of a column of texts, each counted as often as it is used; 0 for other columns."""
    from pyarrow import compute

    if not str(column.type).startswith("dictionary"):
        return 0
    chunk = column.chunk(0)
    sizes = np.append(compute.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False), 0)
    codes = np.nan_to_num(chunk.indices.to_numpy(zero_copy_only=False), nan=-1)
    return int(np.nansum(sizes[codes.astype(np.int64)], dtype=np.float64))


def _cells(column: Any) -> array[int] | list[Any]:
    if str(column.type) == "int64" and not column.null_count:
        return array("q", column.to_numpy().tobytes())
    if not str(column.type).startswith("dictionary"):
        return list(column.to_pylist())
    texts = np.array([*column.dictionary.to_pylist(), None], object)  # equal texts are one object
    codes = np.nan_to_num(column.indices.to_numpy(zero_copy_only=False), nan=-1)
    return list(texts[codes.astype(np.int64)])


def _summary(tables: Mapping[str, Columns]) -> RankSummary:
    about = {name: (column or [None])[0] for name, column in tables["captures"].items()}
    about |= {name: json.loads(str(about[name])) for name in _AS_JSON}
    breakdown = {name: about.pop(name, None) for name in names_of(BREAKDOWN)}
    of_table = {name: dict(tables.get(name, {})) for name in _TABLES}
    of_table["collective_groups"].pop("group", None)
    unknown = {"rank": None, "world_size": None, "breakdown": breakdown}
    lists = {
        table: {name: column for name, column in columns.items() if not isinstance(column, array)}
        for table, columns in of_table.items()
    }
    found = msgspec.convert(unknown | about | lists, RankSummary)
    for table, columns in of_table.items():  # the arrays need no check of their types
        arrays = {name: column for name, column in columns.items() if isinstance(column, array)}
        getattr(found, table).update(arrays)
    return found
