"""What the tests of a device share: its recordings, and the device itself; without one, the CPU stands in."""

from __future__ import annotations

import pytest
import torch
from capture.conftest import recordings

__all__ = ["device", "recordings"]

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test runs on the CPU as well, so that all but the device is tried wherever the tests run."""
    return str(request.param)
