"""The snapshot of CUDA's allocator, which only a CUDA device can show."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from instrument import Session, profiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]

BYTES = 7 * 1024**2  # a size that nothing else here asks for


def test_a_window_comes_with_the_allocators_own_history(tmp_path: Path) -> None:
    kept = []
    with Session(
        active=1, memory_snapshot=True, profile_memory=True, output_dir=str(tmp_path)
    ) as session:
        with profiled("forward"):
            kept.append(torch.empty(BYTES, dtype=torch.uint8, device="cuda"))
        session.step()
    (capture,) = session.captures
    snapshot = pickle.loads((capture.folder / "memory_snapshot.pickle").read_bytes())
    history = [event for device in snapshot["device_traces"] for event in device]
    assert [event["action"] for event in history if event["size"] == BYTES] == ["alloc"]
    assert BYTES in [
        block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
    ]
    live = capture.memory_live("range", device="cuda:0")
    assert live.where(name="forward")[0].bytes == BYTES

    torch.empty(2 * BYTES, dtype=torch.uint8, device="cuda")
    after = [event for device in torch.cuda.memory._snapshot()["device_traces"] for event in device]
    assert not [event for event in after if event["size"] == 2 * BYTES], (
        "the history went on after the window"
    )
