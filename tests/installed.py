"""Which packages the environment of the tests has; `make compat` runs them without trainers and experiment trackers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(package: str) -> None:
    """Skip the test where a package is not installed; nothing is imported."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
