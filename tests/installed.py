"""What the environment of the tests has; `make compat` runs them with older torch, without trainers and trackers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from torch._C._profiler import _ExperimentalConfig


def need(package: str) -> None:
    """Skip the test where a package is not installed; nothing is imported."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def records_collections() -> bool:
    """Whether this torch can record Python's garbage collections; torch 2.8 cannot."""
    return "record_python_gc_info" in (_ExperimentalConfig.__init__.__doc__ or "")


def need_collections() -> None:
    """Skip the test where torch cannot record Python's garbage collections."""
    if not records_collections():
        pytest.skip("this torch does not record garbage collections")
