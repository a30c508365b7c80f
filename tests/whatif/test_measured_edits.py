"""What an edit predicts, beside a program in which the edit was made; see `measured_edits`."""

from __future__ import annotations

import pytest
from findings.twins import ATTEMPTS, recorded

from whatif.measured_edits import EDITS


@pytest.mark.nightly  # `test_oracle` shows in the gate that an edited program runs as predicted
@pytest.mark.parametrize("measured", EDITS, ids=lambda each: each.twin.name)
def test_an_edit_saves_what_the_program_without_it_saves(measured, tmp_path) -> None:
    for attempt in range(ATTEMPTS):
        both = recorded(measured.twin, tmp_path / str(attempt))
        edited = measured.edit(both.slow.whatif)
        assert edited.saving_ns > 0
        # Loose, for machines with other work; `make bench` prints the error.
        if edited.baseline_ns == pytest.approx(
            both.slow_ns, rel=0.05
        ) and edited.step_ns == pytest.approx(both.fixed_ns, abs=0.25 * both.slow_ns):
            return
    pytest.fail(
        f"{edited.baseline_ns} ns became {edited.step_ns} ns in the simulation, but "
        f"{both.slow_ns} ns became {both.fixed_ns} ns in the program"
    )
