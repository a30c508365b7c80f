"""Every twin of this folder: its finding fires on the slow program alone, and its saving has the sign of the measured one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from collected import Log
from installed import need_collections
from torch import nn

from findings.programs import MIXED, PROGRAMS, TWINS
from findings.twins import (
    ATTEMPTS,
    Recorded,
    Twin,
    assert_command_runs,
    found,
    headline,
    named,
    predicted,
    recorded,
    retimed,
    without_problem,
)
from instrument import Capture, Session, profiled
from instrument.read.advise.finding import Finding

# Which events there are and in which order is the same on every machine, so these tests are of the gate.
BY_ORDER = [twin for twin in TWINS if not twin.is_time]
BY_ORDER += [program for program in PROGRAMS if program.code in ("float64", "unused-autograd")]
STEPS = {"step": 3, "window": 5}


@pytest.fixture(autouse=True)
def _only_compilations_are_warned_of(log: Log) -> Iterator[None]:
    yield
    assert all("torch.compile compiled " in line for line in log.at("WARNING"))


def record(twin: Twin, folder: Path) -> Recorded:
    if "record_python_gc_info" in twin.options.get("experimental_config", {}):
        need_collections()
    return recorded(twin, folder)


def assert_found(twin: Twin, slow: list[Finding]) -> None:
    assert {each.code for each in slow} == {twin.code}
    for finding in slow:
        if finding.verify.startswith("instrument "):
            assert_command_runs(finding)


@pytest.mark.parametrize("twin", BY_ORDER, ids=str)
def test_fires_on_the_problem_alone(twin, tmp_path, log, monkeypatch) -> None:
    if twin.code == "recompilation":
        log.expect("torch.compile compiled")
    if twin.code == "unused-gradients":  # which is not looked for once other tests have compiled
        monkeypatch.setattr("instrument.record.recorder._compiled_graphs", lambda: 0)
    both = record(replace(twin, steps=STEPS[twin.turns]), tmp_path)
    slow, fixed = (
        found(retimed(each, tmp_path / f"{k} retimed"), twin.code)
        for k, each in enumerate((both.slow, both.fixed))
    )
    assert_found(twin, slow)
    assert not fixed
    promised = predicted(slow)
    assert promised is None or promised.saving_ns > 0


@pytest.mark.nightly
@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_the_saving_has_the_sign_of_the_measured_one(twin: Twin, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        both = record(twin, tmp_path / str(attempt))
        slow, fixed = found(both.slow, twin.code), found(both.fixed, twin.code)
        assert_found(twin, slow)
        promised = predicted(slow)
        print(f"{twin}: {promised} predicted, {both.saving_ns:.0f} ns measured")
        if not fixed and (promised is None or promised.saving_ns * both.saving_ns > 0):
            return
    pytest.fail(f"{promised} predicted, {both.saving_ns} ns measured; fixed: {fixed}")


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_log_names_the_fault_of_a_program_first(program: Twin, tmp_path: Path) -> None:
    missed = []
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        both = recorded(program, folder / "both")
        first = headline(both.slow)
        clean = [each.code for each in named(without_problem(program, both, folder / "clean"))]
        promised = predicted(found(both.slow, program.code))
        is_true = promised is None or promised.saving_ns * both.saving_ns > 0
        if first == program.code and not clean and is_true:
            return
        missed.append(f"{first}, without the fault {clean}; {promised}, {both.saving_ns:.0f} ns")
    pytest.fail("; ".join(missed))


@pytest.mark.nightly
def test_what_workers_save_lies_within_the_bounds(tmp_path: Path) -> None:
    """The workers compute and share the CPUs with the training; a tenth of the step is noise."""
    missed = []
    (program,) = (each for each in PROGRAMS if each.code == "loader-wait")
    for attempt in range(ATTEMPTS):
        both = record(program, tmp_path / str(attempt))
        (slow,) = found(both.slow, "loader-wait")
        assert slow.saving is not None
        if found(both.slow, "busy-cpus"):
            continue
        noise_ns = both.slow_ns / 10
        if slow.saving.low_ns - noise_ns <= both.saving_ns <= slow.saving.high_ns + noise_ns:
            return
        missed.append(
            f"{slow.saving} promised, {both.saving_ns:.0f} of {both.slow_ns:.0f} ns measured"
        )
    if not missed:
        pytest.skip("other programs keep the CPUs busy")
    pytest.fail("; ".join(missed))


@pytest.mark.nightly
@pytest.mark.parametrize("twin", MIXED, ids=str)
def test_one_thread_is_promised_to_save_only_if_it_does(twin: Twin, tmp_path: Path) -> None:
    missed = []
    for attempt in range(ATTEMPTS):
        both = record(twin, tmp_path / str(attempt))
        promised = predicted(found(both.slow, twin.code))
        if promised is None or promised.saving_ns * both.saving_ns > 0:
            return
        missed.append(f"{promised}, {both.saving_ns:.0f} of {both.slow_ns:.0f} ns measured")
    pytest.fail("; ".join(missed))


CODES = (
    "debug-modes",
    "first-step",
    "garbage-collection",
    "graph-breaks",
    "memory-growth",
    "recompilation",
    "thread-oversubscription",
    "unused-autograd",
    "unused-gradients",
)


def codes_of(capture: Capture) -> set[str]:
    """The codes of all findings; a check that cannot run has none."""
    return {each.code for code in CODES for each in found(capture, code)}


def test_a_healthy_program(tmp_path: Path) -> None:
    assert not codes_of(retimed(healthy_program(tmp_path), tmp_path / "retimed"))


@pytest.mark.nightly
def test_a_healthy_program_as_it_was_measured(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        if not (codes := codes_of(healthy_program(tmp_path / str(attempt)))):
            return
    pytest.fail(f"{codes} are found in a healthy program")


def healthy_program(folder: Path) -> Capture:
    """A recording of a program without any of the problems."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )
    optimizer = torch.optim.Adam(model.parameters())
    images, losses = torch.ones(8, 1, 8, 8), []
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Session(
            output_dir=folder, export="inline", warmup=2, active=6, model=model, **options
        ) as session:
            for _ in range(8):
                optimizer.zero_grad()
                loss = model(images).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                with profiled("validation"), torch.no_grad():
                    model(images)
                session.step()
    finally:
        torch.set_num_threads(threads)
    return session.captures[0]
