"""Seeds of random tests: the gate tries a few, `make nightly` the others too."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(gate: int, nightly: int) -> list[Any]:
    """The first `gate` of `nightly` seeds, and the others marked as nightly."""
    others = (pytest.param(seed, marks=pytest.mark.nightly) for seed in range(gate, nightly))
    return [*range(gate), *others]
