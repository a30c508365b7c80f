"""What an edit predicts, beside a program in which the edit was made; see `measured_edits`."""

from __future__ import annotations

from pathlib import Path

import pytest
from findings.twins import recorded

from whatif.measured_edits import EDITS, MeasuredEdit


@pytest.mark.parametrize("measured", EDITS, ids=lambda each: each.twin.name)
def test_an_edit_saves_what_the_program_without_it_saves(
    measured: MeasuredEdit, tmp_path: Path
) -> None:
    both = recorded(measured.twin, tmp_path)
    edited = measured.edit(both.slow.whatif)
    assert edited.baseline_ns == pytest.approx(both.slow_ns, rel=0.05)
    # Loose, for machines with other work; `make bench` prints the error.
    assert edited.saving_ns > 0
    assert edited.step_ns == pytest.approx(both.fixed_ns, abs=0.25 * both.slow_ns)
