"""`instrument try`: which changes are measured, and how they are judged, with runs made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from instrument.base.errors import ConfigError
from instrument.read.compare import tries
from instrument.read.compare.proof import check, read_proof
from instrument.read.compare.scratch import copy_folder, edited
from instrument.read.compare.trial_runs import (
    Applicable,
    ChangeError,
    ScriptEndedError,
    ScriptError,
    TimeUpError,
)
from instrument.read.compare.tries import Plan, Tries, parts_together, try_changes
from instrument.read.compare.work import Environment, Facts, Parameters, Work
from instrument.read.show.tries import best

ROWS = {
    "fused": {"numbers": "rounding", "findings": ["optimizer-not-fused"], "switchable": True},
    "gc-freeze": {"numbers": "same", "findings": [], "switchable": True},
    "threads=1": {"numbers": "rounding", "findings": [], "switchable": True},
    "workers=2": {"numbers": "same", "findings": ["loader-wait"], "switchable": False},
}


ENVIRONMENT = Environment("2.13.0", "3.11", "Linux", "", [], 2, 2)
FACTS = Facts(
    steps=10, backwards=10, batches=None, loaders=[], training=None, evaluation=None,
    parameters=Parameters(), checked_steps=0, idle_steps=0, gradient_norms=None, counted_steps=0, flops=None,
    precision=None, operators=None, slept_s=0.0, compiles=False, failure=None, environment=ENVIRONMENT,
)  # fmt: skip


class Made:
    """A script made by hand: what each change multiplies the time of a step with.

    Attributes:
        factors: these factors; a change of another name does nothing.
        broken: the changes that fail, with their errors.
        steps: how many steps the script has.
        losses: by change, the loss of each step; 0.5 without.
        started: the changes of each run, in order, and "recorded".
        longest: the most steps that were timed together.
        steps_of_collection: after how many steps garbage is collected, without a change.
    """

    def __init__(self, factors: Mapping[str, float] = {}, steps: int = 100_000) -> None:
        self.factors, self.steps = factors, steps
        self.broken: dict[str, Exception] = {}
        self.losses: dict[str, float] = {}
        self.started: list[str] = []
        self.steps_of_collection, self.longest = 10, 0
        self.noise = np.random.default_rng(0)

    def run(self, command: Sequence[str], here: Path, folder: Path, variables: Any) -> MadeRun:
        words = command[command.index("--with") + 1] if "--with" in command else ""
        is_recorded = "profiler.enabled=false" not in command
        self.started.append("recorded" if is_recorded else words)
        return MadeRun(self, words)


class MadeRun:
    def __init__(self, made: Made, words: str) -> None:
        self._made, self._words = made, words
        self.loss = made.losses.get(words, 0.5)
        self.steps = 0
        self.changes: list[Applicable] = []

    def __enter__(self) -> MadeRun:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def collections(self) -> int:
        return 0 if self._words else self.steps // self._made.steps_of_collection

    def start(self, until: float) -> None:
        common = {"does": "", "by_hand": ""}
        self.changes = [
            msgspec.convert(
                {"name": words.partition("=")[0], "with": words, **common, **row}, Applicable
            )
            for words, row in ROWS.items()
        ]
        if isinstance(error := self._made.broken.get(self._words), ScriptError):
            raise error

    def record(self, until: float) -> list[Path]:
        return [Path("capture")]

    def work(self, until: float) -> Work:
        if self.steps > self._made.steps:
            raise ScriptEndedError("The script has ended.")
        return Work([self.loss.hex()] * self.steps, [], FACTS, 1)

    def run(self, steps: int, until: float, *, lead: int = 0, changes: str = "") -> float:
        if (error := self._made.broken.get(changes)) is not None:
            raise error
        self.steps += steps + lead
        self._made.longest = max(self._made.longest, steps)
        if self.steps > self._made.steps:
            raise ScriptEndedError("The script has ended.")
        factor = self._made.factors.get(changes or self._words, 1.0)
        return 10e6 * factor * float(np.exp(self._made.noise.normal(0, 0.003)))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Tries]:
    """Try the changes of a script made by hand."""

    def call(
        made: Made, *wanted: str, budget_s: float = 1e6, predicted: Mapping[str, Any] = {}
    ) -> Tries:
        monkeypatch.setattr(tries, "ScriptRun", made.run)
        plan = Plan(
            script=["train.py"],
            options=[],
            folder=tmp_path,
            here=tmp_path,
            wanted=wanted,
            until=time.monotonic() + budget_s,
            steps=None,
            gradients=True,
            variables_of=lambda _: {},
            by_hand_of=lambda words: f"by hand {words}",
            predict=lambda _: predicted,
            text_of=lambda _: "",
            say=lambda _: None,
        )
        return try_changes(plan)

    return call


def results(found: Tries) -> dict[str, str]:
    return {each.words: each.result for each in found.tried}


def test_faster_changes_are_measured_and_the_others_are_left_out_after_the_first_run(tried) -> None:
    made = Made({"fused": 0.8, "threads=1": 1.5, "workers=2": 0.5})
    found = tried(made)
    assert results(found) == {
        "fused": "faster", "gc-freeze": "no promise", "threads=1": "no promise",
        "workers=2": "faster",
    }  # fmt: skip
    by_words = {each.words: each for each in found.tried}
    assert by_words["workers=2"].share == pytest.approx(-0.5, abs=0.01)
    low, high = by_words["fused"].low, by_words["fused"].high
    assert low is not None
    assert high is not None
    assert low < -0.2 < high < -0.19
    assert by_words["fused"].verdict == "faster and equal"
    proof = read_proof(Path(by_words["workers=2"].proof))
    assert proof.programs[1].name == "with workers=2"
    assert proof.gradients is not None
    assert not any(each.wrong for each in check(proof, Path(by_words["workers=2"].proof).parent))
    assert found.together is not None
    assert found.together.words == "workers=2,fused"
    assert found.together.result == "same"  # the script made by hand has no such combination


def test_a_change_whose_losses_differ_is_not_recommended(tried: Callable[..., Tries]) -> None:
    made = Made({"fused": 0.5, "workers=2": 0.8})
    made.losses = {"fused": 0.6}
    found = tried(made, "fused", "workers=2")
    by_words = {each.words: each for each in found.tried}
    assert (by_words["fused"].verdict, by_words["fused"].losses) == (
        "faster, numbers differ", "different",
    )  # fmt: skip
    assert best(found) is by_words["workers=2"]
    assert made.started.count("") == 3  # beside each of the two, and to see whether losses repeat


def test_a_script_whose_own_losses_differ_is_said_so(tried: Callable[..., Tries]) -> None:
    made = Made({"fused": 0.5})
    made.losses = {"fused": 0.6}
    run, numbers = made.run, iter((0.5, 0.7))

    def varying(command: Sequence[str], *args: Any) -> MadeRun:
        started = run(command, *args)
        if "--with" not in command and "profiler.enabled=false" in command:
            started.loss = next(numbers)
        return started

    made.run = varying  # type: ignore[method-assign]
    found = tried(made, "fused")
    each = next(each for each in found.tried if each.words == "fused")
    assert (each.verdict, each.losses) == ("undecided", "unknown")
    assert "A's own losses differ" in read_proof(Path(each.proof)).numbers.why
    assert best(found) is None
    assert "threads=1" not in made.started  # it had no run of its own


def test_a_change_is_measured_if_the_budget_ends_before_the_script_has_run_again(tried) -> None:
    made = Made({"fused": 0.5})
    made.losses = {"fused": 0.6}
    run, plain = made.run, iter([True, False])

    def slow(command: Sequence[str], *args: Any) -> MadeRun:
        started = run(command, *args)
        if "--with" not in command and "profiler.enabled=false" in command and not next(plain):
            late = TimeUpError("A step has not ended in time.")
            started.start = Mock(side_effect=late)  # type: ignore[method-assign]
        return started

    made.run = slow  # type: ignore[method-assign]
    each = next(each for each in tried(made, "fused").tried if each.words == "fused")
    assert (each.result, each.losses) == ("faster", "different")


def test_what_a_finding_predicts_is_measured_first_and_in_any_case(tried) -> None:
    made = Made({"workers=2": 0.9})
    found = tried(made, predicted={"optimizer-not-fused": (0.3, 0.2, 0.4)})
    assert found.tried[0].words == "fused"
    assert found.tried[0].predicted == (0.3, 0.2, 0.4)
    assert results(found)["fused"] == "same"
    assert [each for each in made.started if each] == ["recorded", "fused", "workers=2"]


def test_a_change_that_breaks_the_script_is_said_to_fail_and_the_others_are_measured(tried) -> None:
    made = Made({"fused": 0.5})
    made.broken = {"threads=1": ScriptError("it crashed"), "gc-freeze": ChangeError("it cannot")}
    found = tried(made)
    assert results(found) == {
        "fused": "faster", "gc-freeze": "failed", "threads=1": "failed", "workers=2": "same",
    }  # fmt: skip
    assert [each.why for each in found.tried if each.result == "failed"] == [
        "it cannot", "it crashed",
    ]  # fmt: skip


def test_the_blocks_of_gc_freeze_have_full_collections_or_it_is_undecided(tried) -> None:
    made = Made({"gc-freeze": 0.9})
    made.steps_of_collection = 50
    found = tried(made, "gc-freeze")
    each = next(each for each in found.tried if each.words == "gc-freeze")
    assert (each.result, each.verdict) == ("faster", "faster and equal")
    assert made.longest >= 2 * 50
    each.result = "fits"
    made.steps_of_collection = 1000
    tries.save_state(found, Path(each.proof).parents[1])
    each = next(each for each in tried(made, "gc-freeze").tried if each.words == "gc-freeze")
    assert (each.result, each.why) == (
        "undecided", "fewer than 2 full collections of garbage in 600 steps",
    )  # fmt: skip


def test_gc_freeze_is_undecided_in_a_script_that_is_too_short_for_a_block(tried) -> None:
    made = Made({"gc-freeze": 0.9}, steps=200)
    made.steps_of_collection = 50
    each = next(each for each in tried(made, "gc-freeze").tried if each.words == "gc-freeze")
    assert each.result == "undecided"
    assert each.why.startswith("the script ends before a block")
    assert made.started == ["recorded", "", "gc-freeze"]


def test_a_short_script_is_started_again_until_there_are_enough_blocks(tried) -> None:
    made = Made({"workers=2": 0.5}, steps=40)
    found = tried(made, "workers=2")
    assert results(found)["workers=2"] == "faster"
    assert made.started.count("workers=2") == 9  # the blocks of the first run were too long


def test_the_losses_of_a_short_script_are_compared_with_those_of_another_run(tried) -> None:
    made = Made({"fused": 0.5}, steps=150)
    made.losses = {"fused": 0.6}
    run = made.run

    def shorter(command: Sequence[str], here: Path, folder: Path, variables: Any) -> MadeRun:
        made.steps = 70 if folder.name == "again" else 150
        return run(command, here, folder, variables)

    made.run = shorter  # type: ignore[method-assign]
    found = tried(made, "fused")
    each = next(each for each in found.tried if each.words == "fused")
    assert (each.result, each.losses) == ("faster", "different")
    assert found.again is not None
    assert len(found.again.losses) == 60


def test_a_script_with_too_few_steps_is_said_so(tried: Callable[..., Tries]) -> None:
    found = tried(Made({}, steps=5), "workers=2")
    each = next(each for each in found.tried if each.words == "workers=2")
    assert (each.result, each.why) == ("failed", "The script has too few steps to be measured.")


def test_after_the_budget_nothing_more_is_measured_and_the_next_call_goes_on(tried) -> None:
    made = Made({"workers=2": 0.5})
    found = tried(made, "fused", "workers=2", budget_s=-1)
    assert {*results(found).values()} == {"not tried", "fits"}
    made = Made({"workers=2": 0.5})
    found = tried(made, "workers=2")
    assert results(found)["workers=2"] == "faster"
    assert "recorded" not in made.started
    made = Made({})
    assert results(tried(made, "workers=2")) == results(found)
    assert made.started == []
    assert results(tried(Made({}), "fused"))["fused"] == "same"


def test_the_folder_of_another_script_is_refused(tried, tmp_path) -> None:
    tried(Made(), "fused")
    state = (tmp_path / tries.STATE_FILE).read_text()
    (tmp_path / tries.STATE_FILE).write_text(state.replace('"program":"', '"program":"0'))
    with pytest.raises(ConfigError, match="another script"):
        tried(Made(), "threads=1")
    (tmp_path / tries.STATE_FILE).write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        tried(Made(), "fused")


def test_another_value_than_those_that_fit_can_be_asked_for(tried: Callable[..., Tries]) -> None:
    found = tried(Made({"workers=8": 0.5}), "workers=8")
    (each,) = (each for each in found.tried if each.result != "fits")
    assert (each.words, each.result, each.by_hand) == ("workers=8", "faster", "by hand workers=8")
    assert results(tried(Made(), "threads"))["threads=1"] == "same"


def test_nothing_fits(tried: Callable[..., Tries]) -> None:
    with pytest.raises(ConfigError, match="malloc does not fit this script"):
        tried(Made(), "malloc")


def test_changes_that_exclude_each_other_are_not_made_together(tried) -> None:
    found = tried(Made({"fused": 0.8, "workers=2": 0.5, "threads=1": 0.7}))
    for each in found.tried:
        each.verdict = "faster and equal" if each.result == "faster" else ""
    assert [each.words for each in parts_together(found.tried)] == [
        "workers=2", "threads=1", "fused",
    ]  # fmt: skip
    found.tried[0].name = "foreach"
    next(each for each in found.tried if each.words == "threads=1").name = "fused"
    assert len(parts_together(found.tried)) == 2


def test_a_folder_is_copied_without_its_large_parts(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "train.py").write_text("1")
    (folder / "src" / "model.py").write_text("2")
    (folder / "data").mkdir()
    with (folder / "data" / "images").open("wb") as file:
        file.truncate(60 << 20)
    (folder / ".git").mkdir()
    linked = copy_folder(folder, folder / "tried" / "copy", folder / "tried")
    copy = folder / "tried" / "copy"
    assert linked == ["data"]
    assert (copy / "data").is_symlink()
    assert not (copy / "train.py").is_symlink()
    (copy / "src" / "model.py").write_text("changed")
    assert (folder / "src" / "model.py").read_text() == "2"
    assert not (copy / ".git").exists()
    assert not (copy / "tried").exists()
    assert edited(folder, copy) == "src/model.py"
