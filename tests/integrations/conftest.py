"""What the tests of all trainers get."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On models as small as these a second thread has nothing to do, and takes most of the time to wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _trainers_frozen() -> None:
    """Trainers collect garbage at the end of each run, which takes a second with what they import."""
    gc.freeze()
