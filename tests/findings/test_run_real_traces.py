"""The checks of a run find nothing in a healthy program, and nothing in the traces that INSTRUMENT_TRACES names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from findings.twins import ATTEMPTS, found
from instrument import Capture, Session, profiled
from instrument.errors import CaptureError

FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
TRACES = sorted(FOLDER.glob("*.json.gz"))
CODES = (
    "debug-modes",
    "first-step",
    "garbage-collection",
    "graph-breaks",
    "memory-growth",
    "recompilation",
    "thread-oversubscription",
    "unused-autograd",
)


def codes_of(capture: Capture) -> set[str]:
    """The codes of all findings; a check that cannot run has none."""
    return {each.code for code in CODES for each in found(capture, code)}


def test_a_healthy_program(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        if not (codes := codes_of(healthy_program(tmp_path / str(attempt)))):
            return
    pytest.fail(f"{codes} are found in a healthy program")


def healthy_program(folder: Path) -> Capture:
    """A recording of a program without any of the problems."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )
    optimizer = torch.optim.Adam(model.parameters())
    images, losses = torch.ones(8, 1, 8, 8), []
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Session(
            output_dir=folder, export="inline", warmup=2, active=6, model=model, **options
        ) as session:
            for _ in range(8):
                optimizer.zero_grad()
                loss = model(images).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                with profiled("validation"), torch.no_grad():
                    model(images)
                session.step()
    finally:
        torch.set_num_threads(threads)
    return session.captures[0]


@pytest.mark.skipif(not TRACES, reason="INSTRUMENT_TRACES names no folder of real traces")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_nothing_is_found_without_a_reason(path: Path) -> None:
    capture = Capture.load(path)
    try:
        codes = codes_of(capture)
    except CaptureError:
        pytest.skip("the trace cannot be simulated")
    assert not codes
