"""Predictions from a trace against the edited program itself, to the nanosecond.

A wrong model repeats a recording exactly too, because the recorded gaps are kept. Only a second run
with the edit shows whether the model knows what waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from builders import capture
from seeds import seeds

from instrument.base.errors import CaptureError, ConfigError
from instrument.read.simulate import builder
from instrument.read.simulate.scenario import Scenario
from whatif.oracle import Program, removed, run, scaled, without_copies, without_waits
from whatif.programs import Author, Features

FEATURES = {
    "CPU and one stream": Features(),
    "two streams that wait for each other": Features(streams=True),
    "backward": Features(backward=True),
    "a helper thread": Features(helper=True),
    "an unrelated thread": Features(alone=True),
    "synchronising calls": Features(syncs=True),
    "copies": Features(copies=True),
    "loader in the process": Features(loader=True),
    "loader with workers": Features(workers=True),
    "full queue": Features(queue=6),
    "full queue and backward": Features(queue=6, backward=True),
    "full queue and syncs": Features(queue=6, syncs=True),
    "syncs and backward": Features(syncs=True, backward=True),
    "syncs and streams": Features(syncs=True, streams=True),
    "workers, syncs and backward": Features(workers=True, syncs=True, backward=True),
    "copies, streams and an unrelated thread": Features(copies=True, streams=True, alone=True),
    "all": Features(streams=True, backward=True, helper=True, syncs=True, copies=True, loader=True),
}
SEEDS = seeds(2, 8)


class Edit(NamedTuple):
    name: str
    predict: Callable[[Scenario], Scenario]
    apply: Callable[[Program], Program]


def _scaling() -> Iterator[Edit]:
    globs = {
        "range": ("encoder", "decoder*", "*/inner", "enumerate*", "background"),
        "operator": ("aten::mm", "aten::*", "Optimizer.step", "autograd::*", "cudaLaunchKernel"),
        "kernel": ("gemm", "*", "Memcpy*"),
    }
    for kind, patterns in globs.items():
        for glob in patterns:
            for by in (0.5, 0.25, 2.0):
                theirs = "call" if glob.startswith("cuda") else kind
                plain = glob.removeprefix("*/")
                yield Edit(
                    f"{kind} {glob} × {by}",
                    lambda w, kind=kind, glob=glob, by=by: w.scale(**{kind: glob}, by=by),
                    lambda p, kind=theirs, glob=plain, by=by: scaled(p, kind, glob, by),
                )


def _removing() -> Iterator[Edit]:
    for kind, glob in (
        ("range", "encoder"),
        ("range", "enumerate*"),
        ("operator", "aten::mm"),
        ("operator", "aten::item"),
        ("operator", "autograd::*"),
        ("kernel", "relu"),
    ):
        yield Edit(
            f"no {kind} {glob}",
            lambda w, kind=kind, glob=glob: w.remove(**{kind: glob}),
            lambda p, kind=kind, glob=glob: removed(p, kind, glob),
        )
    yield Edit(
        "no syncs",
        lambda w: w.remove(operator="cuda*Synchronize"),
        lambda p: removed(p, "sync", "*"),
    )
    yield Edit("no waits", lambda w: w.asynchronous(sync="cuda*Synchronize"), without_waits)
    yield Edit("overlap", Scenario.overlap, without_copies)


SCALING, REMOVING = tuple(_scaling()), tuple(_removing())


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A queue that a small program can fill; all its launches may come to wait."""

    def patch(queue: int) -> None:
        if queue < builder.FULL_QUEUE:
            monkeypatch.setattr(builder, "FULL_QUEUE", queue)
            monkeypatch.setattr(builder, "_FILLED", 0)

    return patch


def edits_of(seed: int, features: Features) -> list[tuple[Edit, ...]]:
    """Single edits and pairs of them.

    Which launches meet in a full queue is not known if some of them are gone.
    """
    random = Random(seed)
    removing = () if features.queue < builder.FULL_QUEUE else REMOVING
    pairs = [(random.choice(SCALING), random.choice(SCALING + removing)) for _ in range(6)]
    singles = random.sample(SCALING, 8) + list(removing)
    return [(), *((edit,) for edit in singles), *pairs]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FEATURES)
def test_the_edited_program_runs_as_predicted(tmp_path, full_at, name, seed) -> None:
    features = FEATURES[name]
    edits = edits_of(seed, features)
    full_at(features.queue)
    program = Author(seed, features).program()
    recorded = run(program)
    whatif = capture(tmp_path, recorded.events).whatif
    compared = 0
    for chosen in edits:
        predicted, edited = whatif, program
        try:
            for edit in chosen:
                predicted, edited = edit.predict(predicted), edit.apply(edited)
        except (CaptureError, ConfigError):
            assert run(edit.apply(program)).steps == recorded.steps, f"{edit.name} matches nothing"
            continue
        found, right = predicted.steps, run(edited, recorded).steps
        assert found == right, " and ".join(edit.name for edit in chosen) or "no edit"
        compared += found != whatif.steps
    assert compared >= 2, "hardly an edit changed a step"
