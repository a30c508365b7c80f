"""Captures for the sinks to write from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from builders import steps, write_capture

from instrument.read.capture import Capture

Write = Callable[..., Capture]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Make a capture of events in the folder `profile`."""
    return partial(write_capture, tmp_path / "profile")


@pytest.fixture
def capture(write: Write) -> Capture:
    """The capture that `builders.steps` tells of."""
    return write(steps())
