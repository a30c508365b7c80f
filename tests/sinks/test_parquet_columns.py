"""The columns of `events.parquet` against a plain loop over the JSON of the trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import real_traces
from builders import (
    REDUCES,
    annotation,
    call,
    copy,
    frame,
    kernel,
    made,
    span,
    write_capture,
    write_trace,
)

from instrument.export.sinks.parquet import Parquet
from instrument.read.capture import Capture
from instrument.read.facts.facts import EVENTS
from instrument.read.facts.schema import names_of

Row = dict[str, Any]

# Categories before torch 1.12.
CURRENT = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
KIND = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "memset",
    "python_function": "frame",
}
COPIES = {"gpu_memcpy", "gpu_memset"}
ON_DEVICE = {"kernel", *COPIES}
UNLESS_0 = {"correlation": "correlation", "graph id": "graph"}
JSON = {"Input Dims": "shapes", "Input type": "types", "Concrete Inputs": "concrete", "grid": "grid",
        "block": "block"}  # fmt: skip
# What the loop below finds; other columns follow from other rows.
CHECKED = {
    "id", "kind", "name", "device", "stream", "start_ns", "start_unix_ns", "end_ns", "duration_ns", "finished",
    "bytes", "process_group", "group_size", "stack", "sequence", "blocks_per_sm", "occupancy",
    *UNLESS_0.values(), *JSON.values(),
}  # fmt: skip


def ns(microseconds: Any) -> int:
    return round(Decimal(microseconds) * 1000)


def is_call(event: Row) -> bool:
    return event["cat"] == "Runtime" or event["cat"].endswith(("_runtime", "_driver"))


def recorded(number: int, event: Row, of_call: dict[Any, Row], base_ns: int) -> Row:
    """What the JSON says of an event with a duration."""
    args, category = event.get("args", {}), CURRENT.get(event["cat"], event["cat"])
    start, lasts = ns(event["ts"]), ns(event["dur"])
    row = {
        "id": number, "name": event["name"], "start_ns": start, "duration_ns": lasts, "end_ns": start + lasts,
        "start_unix_ns": start + base_ns if base_ns else None, "finished": bool(args.get("finished", True)),
        "kind": KIND.get(category),
    }  # fmt: skip
    row |= {column: args.get(key) or None for key, column in UNLESS_0.items()}
    row |= {column: args.get(key) for key, column in JSON.items()}
    row["sequence"] = args["Sequence number"] if args.get("Sequence number", -1) >= 0 else None
    if category in ON_DEVICE:
        row |= {"device": str(event["pid"]), "stream": str(event["tid"])}
    if "nccl" in event["name"] and category == "kernel":
        row |= {"kind": "communication", "group_size": args.get("Group size")}
        row["process_group"] = args.get("Process Group Name")
    if "blocks per SM" in args:
        row["blocks_per_sm"] = pytest.approx(float(args["blocks per SM"]))
    if args.get("est. achieved occupancy %"):
        row["occupancy"] = float(args["est. achieved occupancy %"]) / 100
    if category in COPIES:
        caller = of_call.get(args.get("correlation"), {}).get("args", {})
        size = args.get("bytes", caller.get("bytes"))
        row["bytes"] = None if size is None else int(size)  # text in calls of ROCm
    return row


def plain_rows(document: Row) -> list[Row]:
    """The rows of a trace's JSON."""
    events, base_ns = document["traceEvents"], document.get("baseTimeNanoseconds", 0)
    spans = [event for event in events if event["ph"] == "X"]
    has_frames = any(event["cat"] == "python_function" for event in spans)
    of_call = {event["args"].get("correlation"): event for event in spans[::-1] if is_call(event)}
    rows = [recorded(number, event, of_call, base_ns) for number, event in enumerate(spans)]
    for event, row in zip(spans, rows):
        row["stack"] = None if has_frames else event.get("args", {}).get("Call stack")
    return rows


def written(capture: Capture, folder: Path) -> list[Row]:
    """The rows of the file, with JSON decoded."""
    Parquet(dir=str(folder / "lake")).write(capture, folder)
    (path,) = (folder / "lake").rglob("events.parquet")
    frame = pl.read_parquet(path, hive_partitioning=False)
    assert frame.columns == names_of(EVENTS)
    rows = frame.to_dicts()
    for row in rows:
        row |= {
            name: json.loads(row[name], parse_float=Decimal)
            for name in JSON.values()
            if row[name] is not None
        }
    return rows


def compare(rows: list[Row], expected: list[Row]) -> None:
    """What the loop finds is in the file, and nothing where the loop finds nothing."""
    assert len(rows) == len(expected)
    for row, plain in zip(rows, expected):
        about = {name: row[name] for name in CHECKED}
        if row["kind"] == "step" or row["overload"]:
            assert plain["name"].startswith(row["name"].rstrip("*"))
            plain["name"] = row["name"]
        if plain["kind"] is None:
            assert row["device"] is None
            about["kind"] = None
        if row["kind"] != "communication":
            assert row["process_group"] is row["group_size"] is None
        assert about == dict.fromkeys(CHECKED) | plain


def check_derived(rows: list[Row]) -> None:
    """A parent lies around its children on its thread, and has what they leave as its own time."""
    inside: dict[int, int] = defaultdict(int)
    for row in rows:
        if row["parent"] is not None:
            inside[row["parent"]] += row["duration_ns"]
            parent = rows[row["parent"]]
            assert parent["thread"] == row["thread"]
            assert parent["start_ns"] <= row["start_ns"]
            assert row["end_ns"] <= parent["end_ns"]
        if row["operator"] is not None:
            assert row["device"] is not None
            assert rows[row["operator"]]["kind"] in {"operator", "range", "step"}
        if row["launcher"] is not None:
            assert rows[row["launcher"]]["kind"] in {"runtime", "wait"}
        assert (row["label"] is None) == (row["class"] is None) == (row["device"] is None)
    own = {row["id"]: row["own_ns"] for row in rows if row["own_ns"] is not None}
    assert own == {number: rows[number]["duration_ns"] - inside[number] for number in own}
    assert inside.keys() <= own.keys()


COLLECTIVE = {
    "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 2000,
    "Process Group Ranks": "[0, 1]", "Group size": 2, "Process Group Name": "0",
    "Process Group Description": "default_pg", "Seq": 17,
}  # fmt: skip
BY_HAND = [
    annotation("forward", 0, 100),
    made("aten::mm", 10, 30, 5, External_id=2, Input_Dims=[[8, 3], [3, 4]], Input_type=["float"],
         Concrete_Inputs=["", ""], Call_stack="a.py(1): f;b.py(2): g"),
    span("record_param_comms", 45, 5, External_id=4, **COLLECTIVE),
    call("cudaLaunchKernel", 20, 5, 1, External_id=2),
    kernel("gemm", 30, 20, correlation=1, External_id=2, grid=[4, 2, 1], block=[128, 1, 1], blocks_per_SM=0.05,
           **{"est. achieved occupancy %": 49, "graph id": 3, "graph node id": 9}),
    kernel("cutlass", 55, 5, correlation=3, grid=[4, 2, 1], **{"est. achieved occupancy %": 0, "graph id": 0}),
    kernel(REDUCES, 60, 20, correlation=11, External_id=4, **COLLECTIVE),
    kernel(REDUCES, 85, 5, correlation=11, External_id=4, **COLLECTIVE),
    copy(60, 3, correlation=5, bytes=10**6),
    copy(70, 2, correlation=7),  # its call has the bytes
    call("hipMemcpyAsync", 68, 1, 7, bytes="4000"),
    copy(80, 2, correlation=8),  # no size
    span("Memset (Device)", 85, 4, "gpu_memset", correlation=10, bytes=512),
    span("bytes that are no text \udced", 105, 1),
    span("unfinished", 110, 5, tid=4, finished=False, Sequence_number=8),
]  # fmt: skip


def test_columns_by_hand(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, BY_HAND, base_ns=10**18)
    rows = written(capture, tmp_path)
    expected = plain_rows({"traceEvents": BY_HAND, "baseTimeNanoseconds": 10**18})
    expected[13]["name"] = "bytes that are no text \ufffd"
    expected[6]["bytes"] = 8000  # the second kernel of this collective has no bytes of its own
    compare(rows, expected)
    check_derived(rows)
    assert [(row["collective"], row["class"]) for row in rows[4:8]] == [
        (None, "matrix product"), (None, "other"), *[("all_reduce", "communication")] * 2
    ]  # fmt: skip
    assert [rows[k]["class"] for k in (8, 12)] == ["copy", "copy"]
    assert (rows[7]["label"], rows[6]["label"]) == (
        rows[6]["label"],
        "nccl AllReduce sum f32 ring LL",
    )
    assert all(any(row[name] is not None for row in rows) for name in CHECKED)


def test_python_frames_stand_in_the_place_of_stacks(tmp_path: Path) -> None:
    events = [frame("a.py(1): f", 0, 9, Python_id=1), frame("b.py(2): g", 1, 5, Python_id=2,
              Python_parent_id=1), span("aten::mm", 2, 2, Call_stack="a.py(1): f")]  # fmt: skip
    rows = written(Capture.load(write_trace(tmp_path, events)), tmp_path)
    compare(rows, plain_rows({"traceEvents": events}))
    assert [row["kind"] for row in rows] == ["frame", "frame", "operator"]


def test_a_number_of_more_than_64_bits_is_unknown(tmp_path: Path) -> None:
    events = [kernel(REDUCES, 0, 5, **{"Group size": 2**70, "graph id": 2**70})]
    (row,) = written(Capture.load(write_trace(tmp_path, events)), tmp_path)
    assert row["group_size"] is row["graph"] is None


@real_traces.needs_traces
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        pytest.param("a100_nccl_2ranks_rank0", {"process_group", "grid", "occupancy"}, marks=pytest.mark.nightly),
        ("hta_simple_add", {"bytes", "block"}),
        pytest.param("mi300x_resnet_checkpoint_train", {"bytes"}, marks=pytest.mark.nightly),
        pytest.param("v100_resnet50_workers0", {"stack", "blocks_per_sm"}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_columns_of_a_real_trace(tmp_path: Path, name: str, holds: set[str]) -> None:
    path = real_traces.FOLDER / f"{name}.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()), strict=False, parse_float=Decimal)
    rows, expected = written(real_traces.load(name), tmp_path), plain_rows(document)
    calls = real_traces.load(name).collective_calls.where("runs_on is not null").column("bytes")
    moved = [row["bytes"] for row in rows if row["kind"] == "communication"]
    assert sum(filter(None, moved)) == sum(filter(None, calls))
    for row, plain in zip(rows, expected):
        if plain["kind"] == "communication":  # may be in torch's record alone; see above
            plain |= {key: row[key] for key in ("bytes", "process_group", "group_size")}
    compare(rows, expected)
    assert holds <= {column for column in holds for row in rows if row[column] is not None}
    check_derived(rows)
