"""Which changes make a script faster: tries each from outside, beside the script as it is.

Changes that can be switched between two steps are alternated in one run first; those that do not
look faster are not measured further. The others get two runs, one with the change and one without,
which take turns in blocks of steps (A B B A or B A A B). Both run the same steps of the script, so
their losses can be compared step by step. docs/try.md describes the rules.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np

from instrument.base import files
from instrument.base.errors import ConfigError
from instrument.base.units import percent_change
from instrument.read.compare.ab_runs import LABELS, Label, Program, RunTime, log_ratios, times
from instrument.read.compare.proof import (
    Predicted,
    Proof,
    Verdict,
    Works,
    change_of,
    proof_of,
    save,
    save_work,
)
from instrument.read.compare.statistics import LEVEL
from instrument.read.compare.trial_runs import (
    Applicable,
    ChangeError,
    ScriptEndedError,
    ScriptError,
    ScriptRun,
    StepsError,
    TimeUpError,
    UndecidedError,
)
from instrument.read.compare.work import Declared, Equality, Work, compare_numbers
from instrument.read.trace.capture_json import BAD_JSON

#: The file in the folder of `try` with what was measured so far.
STATE_FILE = "tried.json"
#: A change counts as faster only if the step gets shorter by more than this share.
MARGIN = 0.01
# How many blocks a decision needs, and how many more it gets if nothing is decided.
_BLOCKS = 8
# Blocks of the run in which changes are alternated, and the change that is measured further.
_BLOCKS_OF_SCREEN, _PROMISING = 4, -0.01
# This run, and each change that is measured, take at most this share of the budget that is left,
# but at least 60 s.
_SHARE, _LEAST_S = 0.4, 60.0
_MOST_RUNS = 4  # of the script, to alternate its changes, if it ends early or a change breaks it
_SEED = 0
# Steps of another run without changes, to compare the losses, in all and until they are asked for.
_MOST_AGAIN, _STEPS_AGAIN = 200, 20
_MOST_BYTES = 64 << 20
# A timed block takes about this long; one step before it is not timed.
_BLOCK_NS, _MOST_STEPS = 300e6, 100
_LEAD, _LEAD_AT_FIRST = 1, 5
# To show what the garbage collector costs, a run of a block without the change has so many full
# collections, and takes at most so many times longer than others.
_COLLECTIONS, _MOST_PARTS = 2, 20
_ORDER: tuple[Label, ...] = ("A", "B", "B", "A")
# Of these changes, only one can be made.
_ONE_OF = ({"fused", "foreach"}, {"bf16", "no-float16", "tf32"})

Result = Literal[
    "fits", "no promise", "slower", "faster", "same", "undecided", "failed", "not tried"
]


class Tried(Applicable, kw_only=True):
    """A change, and what was measured.

    Attributes:
        predicted: the saving that a finding predicts, with its bounds, as shares of the step.
        predicted_by: the code of that finding.
        screened: the change of the step in the run in which changes are alternated.
        result: what is known: "fits" if nothing is measured yet.
        why: why it failed or was not tried.
        share, low, high: the change of the step as a share, and its interval.
        before_ns, after_ns: the mean time of a step.
        proof: the folder of its certificate.
        verdict, losses: of the certificate.
    """

    predicted: tuple[float, float, float] | None = None
    predicted_by: str = ""
    screened: float | None = None
    result: Result = "fits"
    why: str = ""
    share: float | None = None
    low: float | None = None
    high: float | None = None
    before_ns: float | None = None
    after_ns: float | None = None
    proof: str = ""
    verdict: Verdict | Literal[""] = ""
    losses: Equality | Literal[""] = ""


@dataclass(slots=True)
class Tries:
    """What `instrument try` has measured of a script.

    Attributes:
        program: a digest of the command.
        again: what another run without changes did, which tells whether its losses repeat.
        tried: the changes that fit the script.
        together: the best combination; None if at most one change is faster.
        longest_s: how long the measurement of a change took at most.
    """

    program: str
    again: Work | None = None
    tried: list[Tried] = field(default_factory=list)
    together: Tried | None = None
    is_screened: bool = False
    longest_s: float = 0.0
    format: Literal[1] = 1


@dataclass(slots=True)
class Pair:
    """What was measured of a run without a change (A) and of one with it (B).

    `most` is the most steps of a timed block: a short script ends before longer ones.
    """

    most: int
    blocks: list[list[RunTime]] = field(default_factory=list)
    work: dict[str, Work] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What `instrument try` was asked for.

    Attributes:
        script: the words after `instrument run --`.
        options: the words of `instrument run`, such as `--step forward`.
        folder: the folder for all that is written; each run has a folder in it.
        here: the folder in which the script runs.
        wanted: the names of the changes to try; all that fit if empty.
        until: the end of the budget, as a time of `time.monotonic`.
        steps: how many steps a timed block has; None means about 0.3 s.
        gradients: whether the certificates compare the norms of gradients.
        variables_of: the environment variables of changes.
        by_hand_of: how to write a change in the script.
        predict: the savings that the findings in captures predict, by code: the share of the step,
            and its bounds.
        text_of: the Markdown of a certificate.
        say: prints a line of progress.
    """

    script: Sequence[str]
    options: Sequence[str]
    folder: Path
    here: Path
    wanted: Sequence[str]
    until: float
    steps: int | None
    gradients: bool
    variables_of: Callable[[str], Mapping[str, str]]
    by_hand_of: Callable[[str], str]
    predict: Callable[[Sequence[Path]], Mapping[str, tuple[float, float, float]]]
    text_of: Callable[[Proof], str]
    say: Callable[[str], object]

    def program(self) -> str:
        """A text that is equal for equal plans, and that does not hold their arguments."""
        content = [*self.script, "", *self.options]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def wants(self, each: Tried) -> bool:
        """Whether a change was asked for."""
        return not self.wanted or bool({each.name, each.words} & {*self.wanted})

    def until_part(self) -> float:
        """The time until which a part of the work may last, so that budget is left for others."""
        now = time.monotonic()
        return min(self.until, now + max(_SHARE * (self.until - now), _LEAST_S))

    def started(self, name: str, words: str = "", *, recorded: bool = False) -> ScriptRun:
        """Start the script with changes, in a run of this name."""
        off = [] if recorded else ["profiler.enabled=false", "profiler.lines=false"]
        command = [sys.executable, "-m", "instrument", "run", *off, *self.options]
        command += ["--with", words] if words else []
        folder = files.make_folder(self.folder, "runs") / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        variables = self.variables_of(words) if words else {}
        return ScriptRun([*command, "--", *self.script], self.here, folder, variables)


def try_changes(plan: Plan) -> Tries:
    """Try the changes that fit the script while the budget lasts; go on where a call has stopped.

    Raises:
        CaptureError: the script has failed, or no steps were found.
        ConfigError: none of the wanted changes fits the script.
    """
    found = read_state(plan.folder, plan.program())
    if not found.tried:
        _run_as_it_is(plan, found)
        save_state(found, plan.folder)
    _add_values(plan, found)
    chosen = [each for each in found.tried if plan.wants(each)]
    if not chosen:
        fit = ", ".join(each.words for each in found.tried) or "none"
        raise ConfigError(
            f"There is nothing to try: {', '.join(plan.wanted) or 'no change'} does not fit this "
            f"script. The changes that fit: {fit}."
        )
    if not (plan.wanted or found.is_screened):
        _screen(plan, found)
        found.is_screened = True
        save_state(found, plan.folder)
    for each in sorted(chosen, key=_expected_saving, reverse=True):
        if each.result in ("fits", "not tried"):
            is_last = len(parts_together(found.tried)) < 2  # else time is left for the combination
            _measure(plan, found, each, 1 if is_last or each.predicted else 2)
    parts = parts_together(found.tried)
    if len(parts) > 1:
        combined = _combined(parts)
        if found.together is None or found.together.words != combined.words:
            found.together = combined
            _measure(plan, found, combined)
    return found


def _add_values(plan: Plan, found: Tries) -> None:
    """Add the changes that were asked for with another value than those that fit."""
    for words in plan.wanted:
        name, _, value = words.partition("=")
        alike = [each for each in found.tried if each.name == name and value]
        if alike and all(each.words != words for each in alike):
            row = {key: getattr(alike[0], key) for key in Applicable.__struct_fields__}
            given = {"words": words, "by_hand": plan.by_hand_of(words)}
            found.tried.append(Tried(**row | given))


def _expected_saving(each: Tried) -> float:
    return max(each.predicted[0] if each.predicted else 0.0, -(each.screened or 0.0))


def parts_together(tried: Sequence[Tried]) -> list[Tried]:
    """The changes to make together: those that are faster and equal, the largest first."""
    chosen: list[Tried] = []
    for each in sorted(tried, key=lambda each: each.share or 0.0):
        taken = {one.name for one in chosen}
        excluded = taken.union(*(group for group in _ONE_OF if group & taken))
        if each.verdict == "faster and equal" and each.name not in excluded:
            chosen.append(each)
    return chosen


def _combined(parts: Sequence[Tried]) -> Tried:
    name, words = (",".join(getattr(each, key) for each in parts) for key in ("name", "words"))
    numbers: Declared = "rounding" if any(each.numbers != "same" for each in parts) else "same"
    by_hand = "; ".join(each.by_hand for each in parts)
    does = "all of these together"
    return Tried(name=name, words=words, does=does, by_hand=by_hand, numbers=numbers)


def _run_as_it_is(plan: Plan, found: Tries) -> None:
    plan.say("Running the script as it is, to diagnose it.")
    with plan.started("as-it-is", recorded=True) as run:
        run.start(plan.until)
        fitting = run.changes
        try:
            captures = run.record(plan.until)
        except TimeUpError as error:
            captures = []
            plan.say(f"The script is not diagnosed: {error}")
    predicted = plan.predict(captures) if captures else {}
    for row in fitting:
        each = Tried(**msgspec.structs.asdict(row))
        if codes := [code for code in each.findings if code in predicted]:
            each.predicted_by = max(codes, key=lambda code: predicted[code])
            each.predicted = predicted[each.predicted_by]
        found.tried.append(each)


def _steps_of_block(plan: Plan, step_ns: float) -> int:
    return plan.steps or min(max(math.ceil(_BLOCK_NS / step_ns), 2), _MOST_STEPS)


def _screen(plan: Plan, found: Tries) -> None:
    """Alternate the changes that can be switched in one run; leave out those without promise."""
    left = [each for each in found.tried if each.switchable and each.result == "fits"]
    if len(left) < 2:
        return
    plan.say(f"Alternating {len(left)} changes in one run of the script.")
    ratios: dict[str, list[float]] = {each.words: [] for each in left}
    until = plan.until_part()
    for _ in range(_MOST_RUNS):
        with plan.started("alternated") as run, suppress(ScriptEndedError, TimeUpError):
            run.start(until)
            steps = _steps_of_block(plan, run.run(3, until, lead=_LEAD_AT_FIRST))
            _alternate(run, left, ratios, steps, until)
        left = [
            each
            for each in left
            if each.result == "fits" and len(ratios[each.words]) < _BLOCKS_OF_SCREEN
        ]
        if not left or time.monotonic() > until:
            break
    for each in found.tried:
        if len(seen := ratios.get(each.words, [])) >= _BLOCKS_OF_SCREEN // 2:
            each.screened = float(np.expm1(np.median(seen)))
            if each.screened > _PROMISING and not each.predicted and each.result == "fits":
                each.result = "no promise"


def _alternate(
    run: ScriptRun, left: list[Tried], ratios: dict[str, list[float]], steps: int, until: float
) -> None:
    for _ in range(_BLOCKS_OF_SCREEN):
        for each in left:
            if each.result != "fits" or len(ratios[each.words]) == _BLOCKS_OF_SCREEN:
                continue
            switched: dict[Label, str] = {"A": "", "B": each.words}
            try:
                block = [
                    RunTime(label, run.run(steps, until, lead=_LEAD, changes=switched[label]))
                    for label in _ORDER
                ]
            except (ChangeError, ScriptError) as failed:
                each.result, each.why = "failed", str(failed)
                if isinstance(failed, ScriptError):
                    return
                continue
            ratios[each.words].append(float(log_ratios([block])[0]))


def _measure(plan: Plan, found: Tries, each: Tried, times: int = 1) -> None:
    """Measure a change in two runs that take turns, if there is time for so many changes."""
    began = time.monotonic()
    if began + times * found.longest_s > plan.until:
        each.result, each.why = "not tried", "the budget was used up"
    else:
        try:
            _compare(replace(plan, until=plan.until_part()), found, each)
            plan.say(f"{each.words}: {each.result}, {percent_change(each.share or 0.0)}")
        except StepsError as error:
            each.result, each.why = error.result, str(error)
            plan.say(f"{each.words}: {each.result}: {each.why}")
        found.longest_s = max(found.longest_s, time.monotonic() - began)
    save_state(found, plan.folder)


def _compare(plan: Plan, found: Tries, each: Tried) -> None:
    """Run blocks until there is a verdict, and write the certificate."""
    pair, collects = Pair(plan.steps or _MOST_STEPS), "gc-freeze" in each.name.split(",")
    try:
        while not _is_decided(pair.blocks):
            done = len(pair.blocks)
            with (
                plan.started("without") as without,
                plan.started("with", each.words) as changed,
                suppress(ScriptEndedError),
            ):
                _take_turns(plan, without, changed, pair, collects)
            if len(pair.blocks) == done:
                if collects:  # shorter blocks would be made as long again
                    raise UndecidedError(
                        "the script ends before a block whose runs have "
                        f"{_COLLECTIONS} full collections of garbage"
                    )
                pair.most //= 3
            if not (pair.most and pair.work):
                raise ScriptEndedError("The script has too few steps to be measured.")
    except TimeUpError:
        if len(pair.blocks) < _BLOCKS:
            raise
        del pair.blocks[_BLOCKS:]  # as many as the first decision had
    level = LEVEL if len(pair.blocks) == _BLOCKS else LEVEL / 2
    change = change_of(pair.blocks, level)
    each.share, each.low, each.high = change.share, change.low, change.high
    runs = [run for block in pair.blocks for run in block]
    each.before_ns, each.after_ns = (median(times(runs, side)) for side in LABELS)
    each.result = change.verdict(MARGIN)
    proof = _certify(plan, found, each, pair, level)
    each.verdict, each.losses = proof.verdict, proof.numbers.equality


def _is_decided(blocks: Sequence[Sequence[RunTime]]) -> bool:
    if len(blocks) != _BLOCKS:
        return len(blocks) == 2 * _BLOCKS
    change = change_of(blocks)
    return change.verdict(MARGIN) != "undecided" or change.share > 0


def _certify(plan: Plan, found: Tries, each: Tried, pair: Pair, level: float) -> Proof:
    works = Works(pair.work["A"], pair.work["B"])
    if compare_numbers(*works).equality != "bit-equal":  # perhaps A does not repeat its losses
        if found.again is None:
            found.again = _run_again(plan, len(works.a.losses))
        works = Works(works.a, works.b, found.again)
    folder = files.make_folder(plan.folder, each.words.replace("=", "-").replace(",", "+"))
    save_work(works := _alike(works), folder)
    run = ["instrument", "run", *plan.options]
    programs = [
        Program("A", "as it is", [*run, "--", *plan.script], plan.here),
        Program(
            "B", f"with {each.words}", [*run, "--with", each.words, "--", *plan.script], plan.here
        ),
    ]
    predicted = Predicted(each.predicted_by, *each.predicted) if each.predicted else None
    proof = proof_of(
        programs,
        pair.blocks,
        works,
        folder,
        margin=MARGIN,
        level=level,
        gradients=plan.gradients,
        declared=each.numbers,
        predicted=predicted,
    )
    each.proof = str(save(proof, plan.text_of(proof), folder))
    return proof


def _run_again(plan: Plan, steps: int) -> Work | None:
    """What the script does without changes in another run; None if not even a part of it ran."""
    work, wanted = None, min(max(steps - 2, 1), _MOST_AGAIN)
    with plan.started("again") as run, suppress(StepsError):  # the script or the budget ends
        run.start(plan.until)
        while run.steps < wanted:
            run.run(min(_STEPS_AGAIN, wanted - run.steps), plan.until)
            work = run.work(plan.until)
    return work


def _alike(works: Works) -> Works:
    """Works with the losses of as many steps as all of them have."""
    known = [each for each in works if each is not None]
    steps, calls = (min(len(getattr(e, name)) for e in known) for name in ("losses", "evaluations"))
    return Works(
        *(
            msgspec.structs.replace(
                each, losses=each.losses[:steps], evaluations=each.evaluations[:calls]
            )
            for each in known
        )
    )


def _take_turns(
    plan: Plan, without: ScriptRun, changed: ScriptRun, pair: Pair, collects: bool
) -> None:
    """Add blocks in which the two runs take turns, A B B A or B A A B, over the same steps.

    If `collects`, the change is one of the garbage collector.
    """
    sides: dict[Label, ScriptRun] = {"A": without, "B": changed}
    for run in sides.values():
        run.start(plan.until)
    first = [run.run(3, plan.until, lead=_LEAD_AT_FIRST) for run in sides.values()]
    steps = pair.most = min(_steps_of_block(plan, max(first)), pair.most)
    if collects:
        steps = pair.most = _steps_with_collections(plan, sides, steps)
    is_first = not pair.blocks
    is_b_first = np.random.default_rng(_SEED).integers(0, 2, 2 * _BLOCKS)
    while True:
        if is_first:  # with the losses of all steps so far
            pair.work = {label: run.work(plan.until) for label, run in sides.items()}
        if _is_decided(pair.blocks):
            return
        labels = [*_ORDER, *_ORDER[:2]][2 * is_b_first[len(pair.blocks)] :][:4]
        pair.blocks.append(
            [RunTime(label, sides[label].run(steps, plan.until, lead=_LEAD)) for label in labels]
        )


def _steps_with_collections(plan: Plan, sides: Mapping[Label, ScriptRun], steps: int) -> int:
    """So many steps that a run without the change has some full collections of garbage.

    Raises:
        UndecidedError: they would be too many.
    """
    before = sides["A"].collections
    for parts in range(1, _MOST_PARTS + 1):
        for run in sides.values():
            run.run(steps, plan.until)
        if sides["A"].collections - before >= _COLLECTIONS:
            return parts * steps
    raise UndecidedError(
        f"fewer than {_COLLECTIONS} full collections of garbage in {_MOST_PARTS * steps} steps"
    )


def save_state(found: Tries, folder: Path) -> None:
    """Write what was measured so far."""
    files.write(folder / STATE_FILE, msgspec.json.encode(found))


def read_state(folder: Path, program: str) -> Tries:
    """Read what was measured of the same program before; new if there is nothing.

    Raises:
        ConfigError: the folder holds measurements of another program, or a damaged file.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return Tries(program)
    try:
        found = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=Tries)
    except BAD_JSON as error:
        raise ConfigError(f"{path} is damaged ({error}): give another --output.") from None
    if found.program != program:
        raise ConfigError(
            f"{folder} holds what was measured of another script, or of other arguments: give "
            "another --output, or remove the folder."
        )
    return found
