"""Every check on traces written by hand; the cases stand in the files of their kinds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from golden import Golden

from findings import (
    test_devices,
    test_host_checks,
    test_needless,
    test_run_findings,
    test_samples,
    test_slow,
)
from findings.by_hand import Case, described
from instrument.read.advise.check import NotRecorded

KINDS = {
    "findings_of_devices.txt": test_devices,
    "findings_on_the_host.txt": test_host_checks,
    "findings_of_a_run.txt": test_run_findings,
    "findings_of_slow_operators.txt": test_slow,
    "findings_of_values.txt": test_needless,
    "findings_of_samples.txt": test_samples,
}


def each(table: str) -> Any:
    """A test for each case in a table, of all kinds."""
    cases = [
        pytest.param(case, id=f"{kind.__name__.rpartition('.')[2]}: {name}")
        for kind in KINDS.values()
        for name, case in getattr(kind, table, {}).items()
    ]
    return pytest.mark.parametrize("case", cases)


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_findings(name: str, kind: ModuleType, tmp_path: Path, golden: Golden) -> None:
    golden(name, described(kind.FOUND, tmp_path))


@each("NOT_FOUND")
def test_what_is_no_finding(case: Case, tmp_path: Path) -> None:
    assert not case.findings(tmp_path)


@each("UNKNOWN")
def test_what_was_not_recorded(case: tuple[Case, str], tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=case[1]):
        case[0].findings(tmp_path)
