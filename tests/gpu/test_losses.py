"""A loss on a busy device is not waited for."""

from __future__ import annotations

import pytest
import torch

from instrument.record.loss_reader import LossReader


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_is_seen_once_the_device_has_it_and_nothing_synchronises() -> None:
    losses, loss = LossReader(), torch.tensor(2.5, device="cuda")
    torch.empty((), pin_memory=True)  # the first pinned memory of a process may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        assert losses.after_step(0, loss) == (None, None)
        assert losses.after_step(1, loss) == (None, None), "the device is still busy"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert losses.after_step(2, None) == (2.5, 0)
