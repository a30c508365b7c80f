"""Every twin of this folder: its finding fires on the slow program only, and the saving has the right sign."""

from __future__ import annotations

from pathlib import Path

import pytest

from findings.twins import Twin, all_twins, found, predicted_ns, recorded

TWINS = ()  # those of the other modules are taken


@pytest.mark.parametrize("twin", all_twins(), ids=str)
def test_fires_on_the_problem_alone(twin: Twin, tmp_path: Path) -> None:
    both = recorded(twin, tmp_path)
    slow, fixed = found(both.slow, twin.code), found(both.fixed, twin.code)
    assert slow, f"nothing was found in {both.slow.steps}"
    assert not fixed
    assert {each.code for each in slow} == {twin.code}
    predicted = predicted_ns(slow)
    print(f"{twin}: {predicted} ns predicted, {both.saving_ns:.0f} ns measured")
    assert predicted is None or (predicted > 0) == (both.saving_ns > 0)
