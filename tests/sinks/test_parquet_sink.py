"""The Parquet dataset, read by DuckDB, Arrow and polars, which read partitions differently."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
import real_traces
from builders import kernels, span, steps, synchronous_steps, write_capture, write_rank
from pyarrow import dataset
from recording import record

from instrument.export.sinks.parquet import Parquet
from instrument.read.capture import Capture
from instrument.read.ranks.run import Run
from instrument.read.views.operators import UNLAUNCHED_ROW

Write = Callable[..., Capture]


def ask(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query that calls the dataset `lake`."""
    return duckdb.sql(query.replace("lake/", f"{folder}/")).fetchall()


def test_each_rank_and_window_is_a_partition(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        for window in ("steps_3-4", "steps_9-9"):
            capture = write(steps(), f"{window}_rank{rank}", rank=rank)
            Parquet().write(capture, capture.folder)
    beside = tmp_path / "profile" / "parquet"
    found = sorted(str(path.relative_to(beside)) for path in beside.rglob("*") if path.is_file())
    assert found == [
        f"run={tmp_path.name}/rank={rank}/window={window}_rank{rank}/{table}.parquet"
        for rank in (0, 1)
        for window in ("steps_3-4", "steps_9-9")
        for table in ("events", "segments")
    ]
    rows = ask(
        beside,
        """SELECT rank, "window", count(*), run FROM 'lake/**/events.parquet'
        GROUP BY ALL ORDER BY ALL""",
    )
    assert rows[0] == (0, "steps_3-4_rank0", 10, tmp_path.name)
    assert [row[0] for row in rows] == [0, 0, 1, 1]


def test_what_a_row_says(write: Write, tmp_path: Path) -> None:
    capture = write([*steps(), *kernels()])
    Parquet(dir=str(tmp_path / "lake")).write(capture, tmp_path)
    rows = ask(tmp_path / "lake", "SELECT count(*), max(id) FROM 'lake/**/events.parquet'")
    assert rows == [(14, 13)]
    product = ask(
        tmp_path / "lake",
        """SELECT step.kind, step.name, attention.name, product.own_ns, product.shapes
        FROM 'lake/**/events.parquet' product
        JOIN 'lake/**/events.parquet' attention ON product.parent = attention.id
        JOIN 'lake/**/events.parquet' forward ON attention.parent = forward.id
        JOIN 'lake/**/events.parquet' step ON forward.parent = step.id
        WHERE product.name = 'aten::mm' AND step.step = 3""",
    )
    assert [(*row[:4], json.loads(row[4])) for row in product] == [
        ("step", "ProfilerStep*", "attention", 290_000, [[8, 3], [3, 4]])
    ]
    kernel = ask(
        tmp_path / "lake",
        """SELECT name, kind, label, class, device, stream, start_ns, duration_ns, path, launcher
        FROM 'lake/**/events.parquet' WHERE kind = 'kernel' LIMIT 1""",
    )
    assert kernel == [
        ("gemm", "kernel", "gemm", "matrix product", "0", "7", 300_000, 70_000, "forward/attention", 10)
    ]  # fmt: skip


def test_the_file_has_the_tables_of_the_capture(tmp_path: Path) -> None:
    capture = real_traces.load("resnet50 on a V100")
    Parquet(dir=str(tmp_path)).write(capture, tmp_path)
    for name, frame in (
        ("events", capture.facts.events()), ("segments", capture.facts.segments())
    ):  # fmt: skip
        (path,) = tmp_path.rglob(f"{name}.parquet")
        assert polars.read_parquet(path, hive_partitioning=False).equals(frame)


@pytest.fixture
def of_ranks(tmp_path: Path) -> Path:
    """The dataset of three ranks, of which the second takes longest."""
    for rank, own_us in enumerate((100, 300, 120)):
        capture = write_rank(tmp_path / "run", rank, synchronous_steps(own_us, device=True), 3)
        Parquet(dir=str(tmp_path / "lake")).write(capture, tmp_path / "run")
    return tmp_path


KERNELS = """SELECT rank,
    sum(CASE WHEN kind = 'communication' THEN duration_ns END) AS communication_ns,
    sum(CASE WHEN kind = 'kernel' THEN duration_ns END) AS compute_ns, count(*) AS kernels
    FROM lake WHERE kind IN ('kernel', 'communication') GROUP BY rank ORDER BY rank"""


def of_our_tables(folder: Path) -> list[tuple[int, ...]]:
    """The same rows from the ranks' summaries and captures."""
    (window,) = Run.load(folder / "run").windows
    captures = [Capture.load(path) for path in window.paths]
    rows = [
        (rank, row.communication_ns, row.compute_ns, sum(capture.kernels.column("calls")))
        for rank, capture in enumerate(captures)
        for row in capture.breakdown
    ]
    assert rows == [
        (rank, 2 * (870 - own) * 1000, 2000 * own, 4) for rank, own in enumerate((100, 300, 120))
    ]
    return rows


def test_duckdb_finds_in_the_dataset_of_all_ranks_what_our_tables_say(of_ranks: Path) -> None:
    found = ask(of_ranks / "lake", KERNELS.replace("FROM lake", "FROM 'lake/**/events.parquet'"))
    assert found == of_our_tables(of_ranks)


SPARK = """
import json, sys
from pyspark.sql import SparkSession

quiet = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
quiet |= {"spark.sql.warehouse.dir": sys.argv[3], "spark.driver.bindAddress": "127.0.0.1"}
builder = SparkSession.builder.master("local[1]")
for key, value in {**quiet, "spark.driver.host": "127.0.0.1"}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.read.option("basePath", sys.argv[1]).parquet(sys.argv[1] + "/*/*/*/events.parquet").createOrReplaceTempView("lake")
print(json.dumps([tuple(row) for row in spark.sql(sys.argv[2]).collect()]))
spark.stop()
"""


@pytest.mark.soak
@pytest.mark.skipif(
    shutil.which("java") is None or find_spec("pyspark") is None,
    reason="Spark needs a Java runtime and pyspark",
)
def test_spark_finds_the_same(of_ranks: Path) -> None:
    command = [
        sys.executable,
        "-c",
        SPARK,
        str(of_ranks / "lake"),
        KERNELS,
        str(of_ranks / "warehouse"),
    ]
    done = subprocess.run(command, cwd=of_ranks, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [tuple(row) for row in json.loads(done.stdout)] == of_our_tables(of_ranks)


def test_launch_delay_by_hand(write: Write, tmp_path: Path) -> None:
    """Launched 260 µs into each step, for 10; begun at 300: on rank 1 at 340."""
    for rank in (0, 1):
        late = [{**e, "ts": e["ts"] + 40 * rank} if e["cat"] == "kernel" else e for e in kernels()]
        capture = write(steps() + late, f"rank{rank}", rank=rank)
        Parquet().write(capture, capture.folder)
    query = """
        SELECT kernel.rank, avg(kernel.start_ns - launch.end_ns)
        FROM 'lake/**/events.parquet' kernel JOIN 'lake/**/events.parquet' launch
        ON kernel.launcher = launch.id AND kernel.rank = launch.rank
        GROUP BY ALL ORDER BY ALL
    """
    assert ask(tmp_path / "profile" / "parquet", query) == [(0, 30_000), (1, 70_000)]


@pytest.mark.parametrize(
    ("below", "run"),
    [
        ("outputs/2026-01-02/03-04-05/profile", "2026-01-02_03-04-05"),
        ("multirun/2026-01-02/03-04-05/7/profile", "2026-01-02_03-04-05_7"),
        ("outputs/demo-2026/profile", "demo-2026"),
        ("mine", "mine"),
    ],
)
def test_a_run_is_called_after_its_folder(tmp_path: Path, below: str, run: str) -> None:
    capture = write_capture(tmp_path / below, steps())
    Parquet(dir=str(tmp_path / "lake")).write(capture, capture.folder)
    assert [path.name for path in (tmp_path / "lake").iterdir()] == [f"run={run}"]


def test_every_reader_takes_odd_names_and_an_unknown_rank(write: Write, tmp_path: Path) -> None:
    run, trace = "a/b=c d%20é [x]*?", record(tmp_path / "theirs.json")
    lake = tmp_path / "lake"
    Parquet(dir=str(lake), run=run).write(Capture.load(trace), tmp_path)
    Parquet(dir=str(lake), run="other").write(write(steps(), rank=12), tmp_path)
    expected = {(run, None, "theirs"), ("other", 12, "steps_3-4")}
    keys = ["run", "rank", "window"]
    found = set(ask(lake, """SELECT DISTINCT run, rank, "window" FROM 'lake/**/events.parquet'"""))
    assert found == expected
    arrow = dataset.dataset(lake, partitioning="hive").to_table(keys).to_pylist()
    assert {tuple(row.values()) for row in arrow} == expected
    frame = (
        polars.scan_parquet(lake / "**" / "events.parquet", hive_partitioning=True)
        .select(keys)
        .unique()
        .collect()
    )
    assert set(frame.rows()) == expected


def test_rank_option_and_replacement(write: Write, tmp_path: Path) -> None:
    capture = write(steps())
    for events in (steps(), steps()[:3]):
        Parquet(dir=str(tmp_path / "lake"), rank=5).write(
            write(events, f"of_{len(events)}"), tmp_path
        )
    for _ in range(2):
        Parquet(dir=str(tmp_path / "lake"), rank=5).write(capture, capture.folder)
    found = ask(
        tmp_path / "lake",
        """SELECT "window", rank, count(*) FROM 'lake/**/events.parquet' GROUP BY ALL""",
    )
    assert sorted(found) == [("of_10", 5, 10), ("of_3", 5, 3), ("steps_3-4", 5, 10)]


@pytest.mark.parametrize("table", ["events", "segments"])
def test_a_failure_halfway_leaves_the_dataset_as_it_was(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    sink, capture = Parquet(dir=str(tmp_path / "lake")), write(steps())
    sink.write(capture, tmp_path)
    whole = {path: path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file()}
    count, written = "SELECT count(*) FROM 'lake/**/events.parquet'", polars.DataFrame.write_parquet
    seen: list[Any] = []

    def half(rows: polars.DataFrame, file: Any, **options: Any) -> None:
        if ("lane" in rows.columns) != (table == "segments"):
            return written(rows, file, **options)
        written(rows.head(2), file, **options)
        file.flush()
        seen.append(ask(tmp_path / "lake", count))
        seen.append(dataset.dataset(tmp_path / "lake", partitioning="hive").count_rows())
        raise OSError("No space left on device")

    rows = dataset.dataset(tmp_path / "lake", partitioning="hive").count_rows()
    monkeypatch.setattr(polars.DataFrame, "write_parquet", half)
    for each in (capture, write(steps()[:3], "another")):
        with pytest.raises(OSError, match="No space left"):
            sink.write(each, tmp_path)
    assert seen == [[(10,)], rows, [(10,)], rows], "no reader sees the half that is being written"
    assert {
        path: path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file()
    } == whole


def test_an_empty_window_is_a_file_without_rows(write: Write, tmp_path: Path) -> None:
    sink = Parquet(dir=str(tmp_path / "lake"))
    sink.write(write([], "empty"), tmp_path)
    sink.write(write([*steps(), *kernels()]), tmp_path)
    assert ask(tmp_path / "lake", "SELECT count(*) FROM 'lake/**/events.parquet'") == [(14,)]
    for table in ("events", "segments"):
        empty, other = (
            polars.read_parquet_schema(path)
            for path in sorted((tmp_path / "lake").rglob(f"{table}.parquet"))
        )
        assert empty == other


def test_an_argument_that_is_no_utf8_keeps_the_rest(write: Write, tmp_path: Path) -> None:
    capture = write([span("aten::mm", 0, 1, Concrete_Inputs=["a?b"]), span("aten::relu", 5, 1)])
    (capture.folder / "trace.json.gz").write_bytes(
        gzip.compress(gzip.decompress(capture.trace_path.read_bytes()).replace(b"a?b", b"a\xffb"))
    )
    Parquet(dir=str(tmp_path / "lake")).write(Capture.load(capture.folder), tmp_path)
    found = ask(
        tmp_path / "lake", "SELECT name, concrete FROM 'lake/**/events.parquet' ORDER BY id"
    )
    assert found == [("aten::mm", '["a\N{REPLACEMENT CHARACTER}b"]'), ("aten::relu", None)]


@real_traces.needs_traces
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("v100_216k_events", marks=pytest.mark.nightly),
        "v100_resnet50_workers4",
        pytest.param("mi300x_resnet_checkpoint_train", marks=pytest.mark.nightly),
    ],
)
def test_a_real_trace_answers_as_the_capture_does(tmp_path: Path, name: str) -> None:
    capture = real_traces.load(name)
    Parquet(dir=str(tmp_path)).write(capture, tmp_path)
    packed = (real_traces.FOLDER / f"{name}.json.gz").read_bytes()
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    expected = Counter(e["name"] for e in events if e["ph"] == "X" and e.get("dur") is not None)
    found = ask(
        tmp_path,
        """SELECT name, count(*) FROM 'lake/**/events.parquet'
        WHERE name NOT LIKE 'ProfilerStep%' GROUP BY ALL""",
    )
    assert dict(found) == {
        name: count for name, count in expected.items() if not name.startswith("ProfilerStep")
    }
    device = ask(
        tmp_path,
        """SELECT sum(work.duration_ns)
        FROM 'lake/**/events.parquet' work JOIN 'lake/**/events.parquet' operator
        ON work.operator = operator.id WHERE operator.kind IN ('operator', 'range', 'step')""",
    )
    launched = capture.operators.where(f"name != '{UNLAUNCHED_ROW}'")
    assert device == [(sum(launched.column("self_device_ns")),)]


@real_traces.needs_traces
def test_documented_query_finds_the_late_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    for rank in range(8):
        capture = real_traces.load(f"a100_megatron_tp8_rank{rank}")
        Parquet(dir=str(tmp_path), run="megatron", rank=rank).write(capture, tmp_path)
    found = ask(tmp_path, query)
    for rank, communication_ms, computation_ms in found:
        about = real_traces.KNOWN[f"a100_megatron_tp8_rank{rank}"]
        # no two kernels of these traces run at once, so that the sums are the times of the exact
        # sweep and of HTA
        assert communication_ms == pytest.approx(about["exact"]["exposed_comm_time"])
        assert computation_ms * 1e3 == pytest.approx(about["hta_temporal_us"]["compute_time(us)"])
    assert len(found) == 8
    # HTA sees ranks 0 and 6 idle for 37 and 34 % of the time, and no other for more than 11 %
    assert [row[0] for row in found[:2]] == [0, 6]
