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
from builders import (
    allocation,
    annotation,
    call,
    kernel,
    kernels,
    span,
    steps,
    synchronous_steps,
    write_capture,
    write_rank,
)
from pyarrow import dataset, parquet
from recording import record

from instrument.read.capture import Capture
from instrument.read.facts.schema import names_of
from instrument.read.ranks.run import Run
from instrument.read.views.events_to_arrow import EVENTS
from instrument.read.views.operators import UNLAUNCHED_ROW
from instrument.sinks.parquet import Parquet

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
        f"run={tmp_path.name}/rank={rank}/window={window}_rank{rank}/events.parquet"
        for rank in (0, 1)
        for window in ("steps_3-4", "steps_9-9")
    ]
    rows = ask(
        beside,
        """SELECT rank, "window", count(*), run FROM 'lake/**/*.parquet'
        GROUP BY ALL ORDER BY ALL""",
    )
    assert rows[0] == (0, "steps_3-4_rank0", 10, tmp_path.name)
    assert [row[0] for row in rows] == [0, 0, 1, 1]


def test_what_a_row_says(write: Write, tmp_path: Path) -> None:
    Parquet(dir=str(tmp_path / "lake")).write(
        write([*steps(), *kernels(), allocation(260, 512, total=2048, device=2)]), tmp_path
    )
    (path,) = (tmp_path / "lake").rglob("*.parquet")
    rows = parquet.ParquetFile(path).read().to_pylist()
    assert [row["event"] for row in rows] == list(range(15))
    step, forward, attention, product, *_ = rows
    launch, kernel = rows[10:12]
    assert step == dict.fromkeys(names_of(EVENTS)) | {
        "event": 0, "category": "user_annotation", "name": "ProfilerStep#3",
        "process": "1", "thread": "1", "start_ns": 0, "duration_ns": 1_000_000, "self_ns": 350_000,
        "finished": True,
    }  # fmt: skip
    assert (forward["parent"], forward["self_ns"]) == (0, 200_000)
    assert (attention["parent"], attention["self_ns"]) == (1, 100_000)
    assert (product["parent"], product["self_ns"], product["external_id"]) == (2, 290_000, 3)
    assert product["input_shapes"].replace(" ", "") == "[[8,3],[3,4]]"
    assert (launch["parent"], launch["correlation"], launch["launched_by"]) == (3, 3, None)
    kernel = {name: value for name, value in kernel.items() if value is not None}
    assert kernel == {
        "event": 11, "category": "kernel", "name": "gemm", "process": "0", "thread": "7",
        "start_ns": 300_000, "duration_ns": 70_000, "launched_by": 3, "correlation": 3,
        "external_id": 3, "finished": True,
    }  # fmt: skip
    memory = {name: value for name, value in rows[-1].items() if value is not None}
    assert memory == {
        "event": 14, "category": "memory", "name": "[memory]", "process": "1", "thread": "1",
        "start_ns": 260_000, "size_bytes": 512, "device_type": 1, "device_index": 2,
        "allocated_bytes": 2048,
    }  # fmt: skip


def test_work_belongs_to_what_is_around_its_call_or_to_the_operator_that_it_names(
    write: Write, tmp_path: Path
) -> None:
    events = [
        annotation("block", 0, 100),
        span("aten::mm", 10, 50, External_id=9),
        call("cudaLaunchKernel", 20, 30),
        span("cuLaunchKernel", 25, 10, "cuda_driver", correlation=5),
        kernel("gemm", 30, 7, correlation=5),
        call("cudaLaunchKernel", 70, 5, correlation=6, External_id=9),
        kernel("around", 80, 7, correlation=6, External_id=9),
        kernel("named", 80, 7, correlation=8, External_id=9),
        kernel("bare", 90, 7, correlation=7),
    ]
    Parquet(dir=str(tmp_path / "lake")).write(write(events), tmp_path)
    found = ask(
        tmp_path / "lake",
        "SELECT name, launched_by FROM 'lake/**/*.parquet' WHERE category = 'kernel'",
    )
    assert dict(found) == {"gemm": 1, "around": 0, "named": 1, "bare": None}


def test_categories_are_todays(write: Write, tmp_path: Path) -> None:
    old = ["Operator", "Runtime", "Kernel", "Memcpy", "Memset", "Trace"]
    Parquet(dir=str(tmp_path / "lake")).write(
        write([span("x", k, 1, name) for k, name in enumerate(old)]), tmp_path
    )
    found = ask(tmp_path / "lake", "SELECT category FROM 'lake/**/*.parquet' ORDER BY event")
    assert [name for (name,) in found] == [
        "cpu_op",
        "cuda_runtime",
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "Trace",
    ]


@pytest.fixture
def of_ranks(tmp_path: Path) -> Path:
    """The dataset of three ranks, of which the second takes longest."""
    for rank, own_us in enumerate((100, 300, 120)):
        capture = write_rank(tmp_path / "run", rank, synchronous_steps(own_us, device=True), 3)
        Parquet(dir=str(tmp_path / "lake")).write(capture, tmp_path / "run")
    return tmp_path


KERNELS = """SELECT rank,
sum(CASE WHEN name LIKE '%nccl%' THEN duration_ns END) AS communication_ns,
    sum(CASE WHEN name NOT LIKE '%nccl%' THEN duration_ns END) AS compute_ns, count(*) AS kernels
    FROM lake WHERE category = 'kernel' GROUP BY rank ORDER BY rank"""


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
    found = ask(of_ranks / "lake", KERNELS.replace("FROM lake", "FROM 'lake/**/*.parquet'"))
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
spark.read.parquet(sys.argv[1]).createOrReplaceTempView("lake")
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
        SELECT rank, avg(kernel.start_ns - launch.start_ns - launch.duration_ns)
        FROM 'lake/**/*.parquet' kernel JOIN 'lake/**/*.parquet' launch
        USING (run, rank, "window", correlation)
        WHERE kernel.category = 'kernel' AND launch.category = 'cuda_runtime'
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
    assert (
        set(ask(lake, """SELECT DISTINCT run, rank, "window" FROM 'lake/**/*.parquet'"""))
        == expected
    )
    arrow = dataset.dataset(lake, partitioning="hive").to_table(keys).to_pylist()
    assert {tuple(row.values()) for row in arrow} == expected
    frame = (
        polars.scan_parquet(lake / "**" / "*.parquet", hive_partitioning=True)
        .select(keys)
        .unique()
        .collect()
    )
    assert set(frame.rows()) == expected


def test_a_rank_can_be_told_and_a_second_time_replaces_the_first(
    write: Write, tmp_path: Path
) -> None:
    capture = write(steps())
    for events in (steps(), steps()[:3]):
        Parquet(dir=str(tmp_path / "lake"), rank=5).write(
            write(events, f"of_{len(events)}"), tmp_path
        )
    for _ in range(2):
        Parquet(dir=str(tmp_path / "lake"), rank=5).write(capture, capture.folder)
    found = ask(
        tmp_path / "lake",
        """SELECT "window", rank, count(*) FROM 'lake/**/*.parquet' GROUP BY ALL""",
    )
    assert sorted(found) == [("of_10", 5, 10), ("of_3", 5, 3), ("steps_3-4", 5, 10)]


def test_a_failure_halfway_leaves_the_dataset_as_it_was(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, capture = Parquet(dir=str(tmp_path / "lake")), write(steps())
    sink.write(capture, tmp_path)
    whole = {path: path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file()}
    count, written = "SELECT count(*) FROM 'lake/**/*.parquet'", parquet.write_table
    seen: list[Any] = []

    def half(rows: Any, file: Any, **options: Any) -> None:
        written(rows.slice(0, 2), file, **options)
        file.flush()
        seen.append(ask(tmp_path / "lake", count))
        seen.append(dataset.dataset(tmp_path / "lake", partitioning="hive").count_rows())
        raise OSError("No space left on device")

    monkeypatch.setattr(parquet, "write_table", half)
    for each in (capture, write(steps(), "another")):
        with pytest.raises(OSError, match="No space left"):
            sink.write(each, tmp_path)
    assert seen == [[(10,)], 10, [(10,)], 10], "no reader sees the half that is being written"
    assert {
        path: path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file()
    } == whole


def test_an_empty_window_is_a_file_without_rows(write: Write, tmp_path: Path) -> None:
    sink = Parquet(dir=str(tmp_path / "lake"))
    sink.write(write([], "empty"), tmp_path)
    sink.write(write(steps()), tmp_path)
    assert ask(tmp_path / "lake", "SELECT count(*) FROM 'lake/**/*.parquet'") == [(10,)]
    schemas = [parquet.read_schema(path) for path in (tmp_path / "lake").rglob("*.parquet")]
    assert schemas[0].equals(schemas[1])


def test_an_argument_that_is_no_utf8_keeps_the_rest(write: Write, tmp_path: Path) -> None:
    capture = write([span("aten::mm", 0, 1, Concrete_Inputs=["a?b"]), span("aten::relu", 5, 1)])
    (capture.folder / "trace.json.gz").write_bytes(
        gzip.compress(gzip.decompress(capture.trace_path.read_bytes()).replace(b"a?b", b"a\xffb"))
    )
    Parquet(dir=str(tmp_path / "lake")).write(Capture.load(capture.folder), tmp_path)
    found = ask(
        tmp_path / "lake", "SELECT name, concrete_inputs FROM 'lake/**/*.parquet' ORDER BY event"
    )
    assert found == [("aten::mm", '["a\N{REPLACEMENT CHARACTER}b"]'), ("aten::relu", None)]


def test_the_schema_names_every_column_and_its_type(write: Write, tmp_path: Path) -> None:
    Parquet(dir=str(tmp_path / "lake")).write(write(steps()), tmp_path)
    described = ask(
        tmp_path / "lake",
        "DESCRIBE SELECT * EXCLUDE (run, rank, \"window\") FROM 'lake/**/*.parquet'",
    )
    told = {name: re.match(r"\((\w+)\)", doc)[1] for name, doc in EVENTS}
    kinds = {"VARCHAR": "string", "BIGINT": "int64", "BOOLEAN": "bool"}
    kinds |= {"FLOAT": "float", "DOUBLE": "double"}
    assert {name: kinds[kind] for name, kind, *_ in described} == told


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
    expected = Counter((e["name"], str(e["pid"]), str(e["tid"])) for e in events if e["ph"] == "X")
    found = ask(
        tmp_path,
        "SELECT name, process, thread, count(*) FROM 'lake/**/*.parquet' WHERE category != "
        "'memory' GROUP BY ALL",
    )
    assert {row[:3]: row[3] for row in found} == expected
    device = ask(
        tmp_path,
        """SELECT sum(work.duration_ns)
        FROM 'lake/**/*.parquet' work JOIN 'lake/**/*.parquet' operator
        ON work.launched_by = operator.event
        WHERE operator.category IN ('cpu_op', 'user_annotation')""",
    )
    launched = capture.operators.where(f"name != '{UNLAUNCHED_ROW}'")
    assert device == [(sum(launched.column("self_device_ns")),)]


@real_traces.needs_traces
def test_the_query_of_the_documentation_finds_the_ranks_that_the_others_wait_for(
    tmp_path: Path,
) -> None:
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
