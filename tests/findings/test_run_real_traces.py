"""What the checks of a run find in the traces of the folder that INSTRUMENT_TRACES names, one by one.

Each program of `FOUND` has the problem: it was recorded with a torch whose `zero_grad` filled gradients by default
(before 2.0), and the fills and the additions after them are in the trace.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from instrument import Capture
from instrument.errors import CaptureError
from instrument.findings.finding import NotRecorded

FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
TRACES = sorted(FOLDER.glob("*.json.gz"))
CODES = (
    "conv-bias-before-norm",
    "debug-modes",
    "first-step",
    "garbage-collection",
    "graph-breaks",
    "memory-growth",
    "recompilation",
    "thread-oversubscription",
    "unused-autograd",
    "zero-grad",
)
# In resnet50_workers4, the same fills cost nothing: the step waits for its loader workers.
FOUND = {"v100_216k_events": {"zero-grad"}, "v100_resnet50_workers0": {"zero-grad"}}


@pytest.mark.skipif(not TRACES, reason="INSTRUMENT_TRACES names no folder of real traces")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_nothing_is_found_without_a_reason(path: Path) -> None:
    capture = Capture.load(path)
    try:
        whatif = capture.whatif
    except CaptureError:
        pytest.skip("the trace cannot be simulated")
    found = set()
    for code in CODES:
        check = import_module(f"instrument.findings.{code.replace('-', '_')}").CHECK
        with suppress(NotRecorded):
            found |= {each.code for each in check.find(capture, whatif)}
    assert found == FOUND.get(path.name.removesuffix(".json.gz"), set())
