"""Every column of the Parquet dataset against a plain loop over the JSON of the trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_traces
from builders import (
    REDUCES,
    allocation,
    annotation,
    call,
    copy,
    frame,
    kernel,
    made,
    span,
    synchronisation,
    write_capture,
    write_trace,
)
from pyarrow import parquet

from instrument.read.capture import Capture
from instrument.read.facts.schema import names_of
from instrument.read.trace.events import Details
from instrument.read.views.events_to_arrow import EVENTS
from instrument.sinks.parquet import Parquet

Row = dict[str, Any]

CURRENT = {"Operator": "cpu_op", "Runtime": "cuda_runtime", "Kernel": "kernel", "Memcpy": "gpu_memcpy",
           "Memset": "gpu_memset"}  # fmt: skip
COPIES = {"gpu_memcpy", "gpu_memset"}
ON_DEVICE = {"kernel", *COPIES}
# The columns that follow from other rows; the tests compute them in another way.
DERIVED = {"event", "self_ns", "parent", "launched_by"}
NUMBERS = {
    "Sequence number": "sequence", "Python id": "python_id", "Python parent id": "python_parent",
    "In msg nelems": "input_elements", "Out msg nelems": "output_elements", "Group size": "group_size",
    "Seq": "collective_number", "Src Rank": "source_rank", "Dst Rank": "destination_rank",
    "wait_on_stream": "waits_for_stream", "wait_on_cuda_event_id": "waits_for_event",
    "wait_on_cuda_event_record_corr_id": "waits_for_correlation",
}  # fmt: skip
UNLESS_0 = {
    "Fwd thread id": "forward_thread", "correlation": "correlation", "graph id": "graph",
    "graph node id": "graph_node",
}  # fmt: skip
TEXTS = {
    "Collective name": "collective", "dtype": "element_type", "Process Group Name": "process_group",
    "Process Group Description": "group_description", "cuda_sync_kind": "sync_kind",
}  # fmt: skip
JSON = {"Input Dims": "input_shapes", "Input type": "input_types", "Concrete Inputs": "concrete_inputs",
        "grid": "grid", "block": "block"}  # fmt: skip


def ns(microseconds: Any) -> int:
    return round(Decimal(microseconds) * 1000)


def is_call(event: Row) -> bool:
    return event["cat"] == "Runtime" or event["cat"].endswith(("_runtime", "_driver"))


def recorded(event: Row, of_call: dict[Any, Row], base_ns: int) -> Row:
    """What the JSON says of an event with a duration; without the columns that are unknown."""
    args = event.get("args", {})
    category = CURRENT.get(event["cat"], event["cat"])
    row = {
        "category": category, "name": event["name"], "process": str(event["pid"]), "thread": str(event["tid"]),
        "start_ns": ns(event["ts"]), "start_unix_ns": ns(event["ts"]) + base_ns if base_ns else None,
        "duration_ns": ns(event["dur"]), "finished": bool(args.get("finished", True)),
        "external_id": args.get("External id") or args.get("external id") or None,
    }  # fmt: skip
    row |= {column: args[key] for key, column in (NUMBERS | TEXTS).items() if key in args}
    row |= {column: args[key] or None for key, column in UNLESS_0.items() if key in args}
    row |= {column: args[key] for key, column in JSON.items() if key in args}
    if row.get("sequence") == -1:
        del row["sequence"]
    if "Process Group Ranks" in args:
        ranks = args["Process Group Ranks"]
        row["ranks"] = ranks if isinstance(ranks, str) else json.dumps(ranks)
    if not (category in ON_DEVICE | {"cuda_sync"} or event["name"] == "record_param_comms"):
        row = {name: value for name, value in row.items() if name not in Details._fields}
    if is_call(event) and "kernel" in args:
        row["launched_kernel"] = args["kernel"]
    if args.get("graph node id") and "str" in args:
        row["annotation"] = args["str"]
    if "blocks per SM" in args:
        row["blocks_per_sm"] = float(np.float32(args["blocks per SM"]))
    if args.get("est. achieved occupancy %"):
        row["occupancy"] = float(args["est. achieved occupancy %"]) / 100
    if category in ON_DEVICE or is_call(event):
        row["moved_bytes"] = args.get("bytes")
    if category in COPIES:
        if row["moved_bytes"] is None:
            caller = of_call.get(row["correlation"], {})
            row["moved_bytes"] = caller.get("args", {}).get("bytes")
        if row["moved_bytes"] is not None and row["duration_ns"]:
            row["bytes_per_second"] = int(row["moved_bytes"]) * 10**9 // row["duration_ns"]
    if row.get("moved_bytes") is not None:
        row["moved_bytes"] = int(row["moved_bytes"])  # text in calls of ROCm
    return row


def remembered(event: Row, base_ns: int) -> Row:
    """What the JSON says of an allocation or free."""
    args = event["args"]
    device = args["Device Id"]
    return {
        "category": "memory", "name": "[memory]", "process": str(event["pid"]), "thread": str(event["tid"]),
        "start_ns": ns(event["ts"]), "start_unix_ns": ns(event["ts"]) + base_ns if base_ns else None,
        "size_bytes": args["Bytes"], "address": args.get("Addr") or None, "device_type": args["Device Type"],
        "device_index": None if device < 0 else device, "allocated_bytes": args.get("Total Allocated"),
        "reserved_bytes": args.get("Total Reserved"),
    }  # fmt: skip


def plain_rows(document: Row) -> list[Row]:
    """The rows of a trace's JSON, without unknown values."""
    events, base_ns = document["traceEvents"], document.get("baseTimeNanoseconds", 0)
    spans = [event for event in events if event["ph"] == "X"]
    has_frames = any(event["cat"] == "python_function" for event in spans)
    of_call = {event["args"].get("correlation"): event for event in spans[::-1] if is_call(event)}
    rows = [recorded(event, of_call, base_ns) for event in spans]
    if not has_frames:
        for event, row in zip(spans, rows):
            row["call_stack"] = event.get("args", {}).get("Call stack")
    rows += [
        remembered(event, base_ns)
        for event in events
        if event["ph"] == "i" and "Bytes" in event.get("args", {})
    ]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def written(capture: Capture, folder: Path) -> list[Row]:
    """The rows of the file, without unknown values, and with JSON decoded."""
    Parquet(dir=str(folder / "lake")).write(capture, folder)
    (path,) = (folder / "lake").rglob("*.parquet")
    table = parquet.ParquetFile(path).read()
    assert table.column_names == names_of(EVENTS)
    rows = [
        {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]
    for row in rows:
        row |= {
            name: json.loads(row[name], parse_float=Decimal)
            for name in JSON.values()
            if name in row
        }
    return rows


def without_derived(rows: list[Row]) -> Iterator[Row]:
    return ({name: value for name, value in row.items() if name not in DERIVED} for row in rows)


def check_derived(rows: list[Row]) -> None:
    """A parent lies around its children on its thread, and has what they leave as its own time."""
    inside: dict[int, int] = defaultdict(int)
    for number, row in enumerate(rows):
        assert row["event"] == number
        if "parent" in row:
            inside[row["parent"]] += row["duration_ns"]
            parent = rows[row["parent"]]
            assert parent["start_ns"] <= row["start_ns"]
            assert (
                row["start_ns"] + row["duration_ns"] <= parent["start_ns"] + parent["duration_ns"]
            )
        if "launched_by" in row:
            assert row["category"] in ON_DEVICE
            assert rows[row["launched_by"]]["category"] in {"cpu_op", "user_annotation"}
    own = {row["event"]: row["self_ns"] for row in rows if "self_ns" in row}
    assert own == {number: rows[number]["duration_ns"] - inside[number] for number in own}
    assert inside.keys() <= own.keys()


COLLECTIVE = {
    "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 2000,
    "Process Group Ranks": "[0, 1]", "Group size": 2, "Process Group Name": "0",
    "Process Group Description": "default_pg", "Seq": 17, "Src Rank": 0, "Dst Rank": 1,
}  # fmt: skip
BY_HAND = [
    annotation("forward", 0, 100),
    made("aten::mm", 10, 30, 5, External_id=2, Input_Dims=[[8, 3], [3, 4]], Input_type=["float"],
         Concrete_Inputs=["", ""], Call_stack="a.py(1): f;b.py(2): g"),
    span("record_param_comms", 45, 5, **COLLECTIVE),
    span("aten::relu", 60, 5, **COLLECTIVE),  # not an event of a collective
    call("cudaLaunchKernel", 20, 5, 1, External_id=2),
    kernel("gemm", 30, 20, correlation=1, External_id=2, grid=[4, 2, 1], block=[128, 1, 1], blocks_per_SM=0.05,
           **{"est. achieved occupancy %": 49, "graph id": 3, "graph node id": 9, "str": "layer 1"}),
    kernel("cutlass", 55, 5, correlation=3, grid=[4, 2, 1], **{"est. achieved occupancy %": 0, "graph id": 0}),
    kernel(REDUCES, 60, 20, correlation=4, **COLLECTIVE),
    copy(60, 3, correlation=5, bytes=10**6),
    copy(65, 0, correlation=6, bytes=10**6),  # a time of 0
    copy(70, 2, correlation=7),  # its call has the bytes
    call("hipMemcpyAsync", 68, 1, 7, bytes="4000"),
    copy(80, 2, correlation=8),  # no size
    copy(90, 0.001, correlation=9, bytes=9 * 10**17),  # more bytes a second than 64 bits hold
    span("Memset (Device)", 85, 4, "gpu_memset", correlation=10, bytes=512),
    synchronisation("Stream Wait Event", 95, 0, wait_on_stream=7, wait_on_cuda_event_id=3,
                    wait_on_cuda_event_record_corr_id=4, stream=8),
    span("bytes that are no text \udced", 105, 1),
    span("unfinished", 110, 5, tid=4, finished=False, Fwd_thread_id=3, Sequence_number=8),
    call("hipLaunchKernel", 120, 2, 11, kernel="gemm"),
    allocation(26, 1024, 4096, 1024, device=0, reserved=8192),
    allocation(27, -512, total=0),
]  # fmt: skip


def test_every_column_by_hand(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, BY_HAND, base_ns=10**18)
    rows = written(capture, tmp_path)
    expected = plain_rows({"traceEvents": BY_HAND, "baseTimeNanoseconds": 10**18})
    del expected[13]["bytes_per_second"]
    expected[16]["name"] = "bytes that are no text \ufffd"
    assert [*without_derived(rows)] == expected
    check_derived(rows)
    assert {name for row in rows for name in row} == {*names_of(EVENTS)} - {
        "python_id", "python_parent"
    }  # fmt: skip
    rates = {row["start_ns"]: row["bytes_per_second"] for row in rows if "bytes_per_second" in row}
    assert rates == {60_000: 333_333_333_333, 70_000: 2_000_000_000, 85_000: 128_000_000}


def test_python_frames_stand_in_the_place_of_stacks(tmp_path: Path) -> None:
    events = [frame("a.py(1): f", 0, 9, Python_id=1), frame("b.py(2): g", 1, 5, Python_id=2,
              Python_parent_id=1), span("aten::mm", 2, 2, Call_stack="a.py(1): f")]  # fmt: skip
    rows = written(Capture.load(write_trace(tmp_path, events)), tmp_path)
    assert [*without_derived(rows)] == plain_rows({"traceEvents": events})
    assert rows[1]["python_parent"] == 1


def test_a_number_of_more_than_64_bits_is_unknown(tmp_path: Path) -> None:
    events = [kernel(REDUCES, 0, 5, Seq=2**70, Group_size=2)]
    (row,) = written(Capture.load(write_trace(tmp_path, events)), tmp_path)
    assert (row.get("collective_number"), row["group_size"]) == (None, 2)


@real_traces.needs_traces
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        pytest.param(
            "a100_nccl_2ranks_rank0", {"collective", "ranks", "grid", "occupancy", "bytes_per_second"},
            marks=pytest.mark.nightly,
        ),
        ("hta_simple_add", {"sync_kind", "moved_bytes", "block"}),
        pytest.param(
            "mi300x_resnet_checkpoint_train", {"python_id", "bytes_per_second", "launched_kernel"},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "v100_resnet50_workers0", {"call_stack", "size_bytes", "blocks_per_sm"}, marks=pytest.mark.nightly
        ),
    ],
)  # fmt: skip
def test_every_column_of_a_real_trace(tmp_path: Path, name: str, holds: set[str]) -> None:
    path = real_traces.FOLDER / f"{name}.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()), strict=False, parse_float=Decimal)
    rows, expected = written(real_traces.load(name), tmp_path), plain_rows(document)
    assert len(rows) == len(expected)
    for found, plain in zip(without_derived(rows), expected):
        assert found == plain
    assert holds <= {name for row in rows for name in row}
    check_derived(rows)
