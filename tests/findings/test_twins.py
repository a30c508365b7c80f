"""Every twin of this folder: its finding fires on the slow program alone, and its saving has the sign of the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import need_collections

from findings.twins import (
    ATTEMPTS,
    Twin,
    all_twins,
    assert_command_runs,
    found,
    predicted_ns,
    recorded,
)


@pytest.mark.parametrize("twin", all_twins(), ids=str)
def test_fires_on_the_problem_alone(twin: Twin, tmp_path: Path) -> None:
    if "record_python_gc_info" in twin.options.get("experimental_config", {}):
        need_collections()
    failure = ""
    for attempt in range(ATTEMPTS):
        both = recorded(twin, tmp_path / str(attempt))
        slow, fixed = found(both.slow, twin.code), found(both.fixed, twin.code)
        assert slow, f"nothing was found in {both.slow.steps}"
        assert {each.code for each in slow} == {twin.code}
        for finding in slow:
            if finding.verify.startswith("instrument "):
                assert_command_runs(finding)
        predicted = predicted_ns(slow)
        print(f"{twin}: {predicted} ns predicted, {both.saving_ns:.0f} ns measured")
        if fixed:  # on a busy machine, the fixed program can have the problem now and then
            failure = f"the fixed program has {fixed}"
        elif predicted is None or (predicted > 0) == (both.saving_ns > 0):
            return
        else:
            failure = (
                f"{predicted} ns were to be saved, but the step changes by {-both.saving_ns} ns"
            )
    pytest.fail(failure)
