"""What holds for any program: edits compose, faster is never later, and the tables agree with edits."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from builders import capture
from seeds import seeds

from instrument.base.errors import ConfigError
from instrument.read.simulate.scenario import Scenario, combined
from whatif.oracle import run
from whatif.programs import Author, Features

ALL = Features(streams=True, backward=True, helper=True, syncs=True, copies=True, loader=True)
SEEDS = seeds(2, 6)
EDITS = (
    {"range": "encoder"},
    {"operator": "aten::mm"},
    {"kernel": "gemm"},
    {"operator": "cudaLaunchKernel"},
)


@pytest.fixture(scope="module", params=SEEDS)
def whatif(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Scenario:
    folder = tmp_path_factory.mktemp("program")
    return capture(folder, run(Author(request.param, ALL).program()).events).whatif


def ends_ns(found: Scenario) -> np.ndarray:
    model = found.model
    return model.ends_ns(model.program.run(model.weights(found.variants[0].costs)))


def edits_of(whatif: Scenario) -> list[dict[str, str]]:
    """The edits that match something."""
    found = []
    for edit in EDITS:
        try:
            whatif.scale(**edit, by=1)
        except ConfigError:
            continue
        found.append(edit)
    assert len(found) >= 3
    return found


def test_edits_compose(whatif) -> None:
    edits = edits_of(whatif)
    for one, other in pairwise(edits):
        first, second = whatif.scale(**one, by=0.5), whatif.scale(**other, by=0.25)
        both = first.scale(**other, by=0.25)
        assert both.steps == second.scale(**one, by=0.5).steps
        assert len(both.edits) == 2
        got = whatif.scale(**one, by=0.5).scale(**one, by=0.5).steps
        assert got == whatif.scale(**one, by=0.25).steps
        assert first.steps == whatif.scale(**one, by=0.5).steps, "an edit changed another scenario"


def test_several_edits_together_save_what_each_saves_alone_or_more(tmp_path) -> None:
    """But not their sum: where one waits for the other, both are needed."""
    found = capture(tmp_path, run(Author(0, ALL).program()).events)
    edits = [lambda scenario, edit=edit: scenario.remove(**edit) for edit in edits_of(found.whatif)]
    alone = [edit(found.whatif).saving_ns for edit in edits]
    both = combined(found, edits)
    assert both.steps == combined(found, edits[::-1]).steps
    assert len(both.edits) == len(edits)
    assert both.low_ns <= both.saving_ns <= both.high_ns
    assert both.saving_ns >= max(alone)
    assert combined(found, []) is found.whatif


def test_a_factor_of_one_changes_nothing(whatif) -> None:
    for edit in edits_of(whatif):
        same = whatif.scale(**edit, by=1)
        assert (same.steps, same.low_ns, same.high_ns) == (whatif.steps, 0, 0)


def test_faster_is_never_later(whatif) -> None:
    for edit in edits_of(whatif):
        ends = [ends_ns(whatif.scale(**edit, by=by)) for by in (0, 0.25, 0.5, 1, 1.5, 4)]
        assert all((sooner <= later).all() for sooner, later in pairwise(ends))


def test_the_bounds_hold_the_saving(whatif) -> None:
    for edit in edits_of(whatif):
        for found in (whatif.scale(**edit, by=0.5), whatif.remove(**edit)):
            assert found.low_ns <= found.saving_ns <= found.high_ns
            before, after = whatif.steps[1:], found.steps[1:]
            assert found.step_ns == whatif.step_ns - found.saving_ns
            share = 1 - sum(after) / sum(before)
            assert found.saving_ns == pytest.approx(share * mean(before), abs=1)
    assert whatif.saving_ns == whatif.low_ns == whatif.high_ns == 0


def test_the_critical_path_lasts_from_the_first_step_to_the_last(whatif) -> None:
    for found in (whatif, whatif.scale(kernel="*", by=0.25), whatif.scale(operator="*", by=0.25)):
        ends = ends_ns(found)
        rows = list(found.critical_path)
        assert sum(row.total_ns for row in rows) == ends[-1] - ends[0]
        assert all(row.total_ns > 0 for row in rows)
        assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_cell_of_the_profile_is_the_edit(whatif) -> None:
    profile = whatif.profile(rows=4)
    assert len(profile) > 6
    savings = [row.saving_50_ns for row in profile]
    assert savings == sorted(savings, reverse=True)
    for row in profile:
        for by, cell in ((0.9, row.saving_10_ns), (0.5, row.saving_50_ns), (0, row.saving_100_ns)):
            # The table's factors apply to sums, the edit's to single events.
            same = whatif.scale(**{row.kind: row.name}, by=by).saving_ns
            assert cell == pytest.approx(same, abs=200)
        if len(whatif.steps) > 1:
            assert row.saving_50_share == pytest.approx(row.saving_50_ns / whatif.step_ns, abs=1e-6)


def test_a_cell_of_the_profile_after_an_edit_is_the_additional_saving(whatif) -> None:
    for edit in edits_of(whatif):
        edited = whatif.scale(**edit, by=0.25)
        for row in edited.profile(rows=2):
            more = edited.scale(**{row.kind: row.name}, by=0.5).saving_ns - edited.saving_ns
            assert row.saving_50_ns == pytest.approx(more, abs=200)
