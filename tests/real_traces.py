"""Traces of real hardware, in the folder that INSTRUMENT_TRACES names, with what other tools say of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from instrument.cli.samples import FOLDER as SAMPLES
from instrument.read.capture import Capture

FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
EXPECTED = FOLDER / "expected.json"
# The values that other tools give, by the name of the trace.
KNOWN: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {}

needs_traces = pytest.mark.skipif(
    not KNOWN, reason="INSTRUMENT_TRACES names no folder of real traces with an expected.json"
)

# One of tensor parallelism, one with several steps and findings, one of inference, one with graphs on AMD.
_GATE = (
    "a100_megatron_tp8_rank0",
    "a100_nccl_2ranks_rank0",
    "h100_qwen_0.5b_inference",
    "mi300x_vllm_graph",
)


def each(cases: Iterable[str | tuple[Any, ...]] = KNOWN) -> list[Any]:
    """Parameters of a test that reads many traces: it reads four in `make test`, and the others in `make nightly`.

    A case is the name of a trace, or a tuple that begins with it. If none of the four is among them, `make test` has
    the first.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases] or [("none",)]
    gate = {row[0] for row in rows} & set(_GATE) or {rows[0][0]}
    return [pytest.param(*row, marks=[] if row[0] in gate else pytest.mark.nightly) for row in rows]


# Traces in the repository, by their names: of samples, and of a V100.
SHIPPED = {
    **{
        f"sample {name}": SAMPLES / name / "steps_000003-000007_rank0"
        for name in ("starved", "two-ranks", "compiled", "inference")
    },
    "resnet50 on a V100": Path(__file__).parent.parent
    / "docs/assets/samples/resnet50_workers0.json.gz",
}


def every() -> list[Any]:
    """Parameters of a test that any trace passes: the cases of `each`, and the traces in the repository."""
    own = (pytest.param(*case.values, marks=[*case.marks, needs_traces]) for case in each())
    return [*SHIPPED, *own]


def path(name: str) -> Path:
    found = SHIPPED.get(name, FOLDER / f"{name}.json.gz")
    return found / "trace.json.gz" if found.is_dir() else found


@cache
def load(name: str) -> Capture:
    """Read a trace once in a process; captures are not changed by tests."""
    return Capture.load(SHIPPED.get(name, path(name)))
