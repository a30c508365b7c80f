"""Traces of real hardware, in the folder that INSTRUMENT_TRACES names, with what other tools say of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from instrument.capture import Capture

FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
EXPECTED = FOLDER / "expected.json"
# The values that other tools give, by the name of the trace.
KNOWN: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {}

needs_traces = pytest.mark.skipif(
    not KNOWN, reason="INSTRUMENT_TRACES names no folder of real traces with an expected.json"
)

# One with steps and NCCL, one with steps and expert parallelism, one of inference, one with graphs on AMD.
_GATE = (
    "a100_megatron_tp8_rank0",
    "h800_deepseek_train",
    "h100_qwen_0.5b_inference",
    "mi300x_vllm_graph",
)


def each(names: Iterable[str] = KNOWN) -> list[Any]:
    """Parameters of a test that reads many traces: it reads four in `make test`, and the others in `make nightly`."""
    return [
        pytest.param(name, marks=[] if name in _GATE else pytest.mark.nightly) for name in names
    ] or ["none"]


@cache
def load(name: str) -> Capture:
    """Read a trace once in a process; captures are not changed by tests."""
    return Capture.load(FOLDER / f"{name}.json.gz")
