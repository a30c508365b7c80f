"""What the environment of the tests has: `make compat` runs them with older torch, without trainers and trackers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch


def need(package: str) -> None:
    """Skip the test where a package is not installed; nothing is imported."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def torch_has(option: str) -> bool:
    """Whether this torch knows an experimental option of its profiler."""
    return f" {option}: " in torch._C._profiler._ExperimentalConfig.__init__.__doc__


def needs_option(option: str) -> pytest.MarkDecorator:
    """Skip the test where this torch has no such experimental option."""
    return pytest.mark.skipif(not torch_has(option), reason=f"torch {torch.__version__} has no {option}")
