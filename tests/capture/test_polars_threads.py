"""No answer depends on the number of threads of polars, to the last byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import real_traces
from builders import (
    REDUCES,
    allocation,
    annotation,
    call,
    kernel,
    launched,
    span,
    step,
    write_trace,
)

ANSWERS = """
import hashlib, json, os, sys
import polars
from pathlib import Path
from typing import get_args
from instrument.read.advise.diagnosis import as_json
from instrument.read.capture import Capture
from instrument.read.facts.schema import Grouping
from instrument.read.views.views import VIEWS
from instrument.export.sinks.parquet import Parquet

assert polars.thread_pool_size() == int(os.environ["POLARS_MAX_THREADS"])
trace, lake = map(Path, sys.argv[1:])
found = Capture.load(trace)
answers = {name: lambda name=name: getattr(found, name).to_dicts() for name in VIEWS if "()" not in name}
answers |= {by: lambda by=by: found.operators_by(by).to_dicts() for by in get_args(Grouping)}
queries = [
    "select name, sum(own_ns) as own_ns from events group by name",
    "select k.label, c.name, count(*) as n from events k join events c on k.launcher = c.id group by k.label, c.name",
    "select k.id, c.name from events k join events c on k.launcher = c.id",
    "select distinct name, kind from events",
    "select name, count(*) as n, sum(own_ns) as ns, avg(duration_ns) as mean from events group by name order by n, name",
    "select lane, kind, path, sum(duration_ns) as ns from segments group by lane, kind, path order by lane, kind, path",
    "select k.label, c.name, avg(k.duration_ns) as mean from events k join events c on k.launcher = c.id"
    " group by k.label, c.name order by k.label, c.name",
]
answers |= {query: lambda query=query: found.sql(query).to_dicts() for query in queries}
answers["diagnosis"] = lambda: as_json(found.diagnose())
hashes = {name: hashlib.sha256(repr(ask()).encode()).hexdigest() for name, ask in answers.items()}
Parquet(dir=str(lake), run="r", rank=0).write(found, lake)
files = sorted(lake.rglob("*.parquet"))
hashes |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
print(json.dumps(hashes))
"""


def made_trace(folder: Path) -> Path:
    events = [annotation("train", 0, 4000)]
    for number in range(4):
        at = 1000 * number
        events += [
            step(number, at, 1000),
            annotation("forward", at + 100, 400),
            *[span(f"aten::op{k % 3}", at + 110 + 10 * k, 8) for k in range(9)],
            *launched("gemm", at + 410, at + 420, 100 + number, 1 + 3 * number),
            call("cudaLaunchKernel", at + 610, 5, 2 + 3 * number),
            kernel(REDUCES, at + 620, 80, correlation=2 + 3 * number),
            allocation(at + 300, 512, total=512 * (number + 1), device=0),
        ]
    return write_trace(folder, events)


@pytest.mark.parametrize(
    "name",
    [
        None,
        "resnet50 on a V100",
        pytest.param(
            "a100_nccl_2ranks_rank0", marks=[real_traces.needs_traces, pytest.mark.nightly]
        ),
    ],
)
def test_answers_with_one_thread_and_with_four(name: str | None, tmp_path: Path) -> None:
    trace = made_trace(tmp_path) if name is None else real_traces.path(name)
    found = []
    for threads in ("1", "4"):
        done = subprocess.run(
            [sys.executable, "-c", ANSWERS, str(trace), str(tmp_path / threads)],
            env=os.environ | {"POLARS_MAX_THREADS": threads},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    one, four = found
    assert one == four
    assert {"operators", "kernels", "events.parquet", "segments.parquet"} <= one.keys()
