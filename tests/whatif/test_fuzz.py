"""Damaged traces: an answer, or one clear sentence; never another exception."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from builders import WORKERS, Event, annotation, capture, is_harmless, span, synchronous_steps
from hypothesis import given
from hypothesis import strategies as st

from instrument.base.errors import CaptureError, ConfigError, TraceError
from instrument.read.simulate.scenario import Scenario
from whatif.oracle import run
from whatif.programs import Author, Features

ALL = Features(streams=True, backward=True, helper=True, syncs=True, copies=True, loader=True)
SAID = (CaptureError, ConfigError, TraceError)
EDITS = (
    lambda w: w.scale(range="*", by=0.5),
    lambda w: w.scale(operator="*", by=2),
    lambda w: w.scale(kernel="*", by=0),
    lambda w: w.remove(range="*"),
    lambda w: w.remove(kernel="*"),
    lambda w: w.remove(operator="cuda*"),
    lambda w: w.asynchronous(),
    lambda w: w.overlap(),
    lambda w: w.graph_launch(range="*"),
    lambda w: w.workers(3),
    lambda w: w.bandwidth(2),
    lambda w: w.scale_events(np.zeros(1, np.int64), 0),
)


@cache
def events_of(seed: int) -> tuple[Event, ...]:
    """A small program's trace; the last one has collectives."""
    if seed == 2:
        more = [annotation(WORKERS, 100, 20), annotation(WORKERS, 1000, 500), span("x", 1, 2)]
        return (*synchronous_steps(300, device=True), *more)
    return tuple(run(Author(seed, ALL).program()).events)


def answers(found: Scenario) -> None:
    """Ask for everything that a scenario can say, and check what must hold of any trace."""
    assert found.low_ns <= found.saving_ns <= found.high_ns
    assert all(step >= 0 for step in found.steps)
    assert all(is_harmless(note) for note in (*found.notes, repr(found)))
    assert all(row.total_ns for row in found.critical_path)


def check(error: Exception) -> None:
    """An error is one line that a terminal can show."""
    assert str(error).isprintable()


def ask(folder: Path, events: list[Any], *, is_damaged: bool = False) -> None:
    try:
        found = capture(folder, events).whatif
        answers(found)
    except SAID as error:
        check(error)
        return
    model = found.model
    times = model.program.run(model.weights(model.measured))
    # In a damaged trace, a thread can launch work while it waits: no order of events explains it.
    if not is_damaged:
        assert np.array_equal(times, model.moments.time_ns)
    for edit in EDITS:
        try:
            answers(edit(found))
        except SAID as error:
            check(error)
    found.profile(rows=3)


# What happens to one event: its time, duration, thread, correlation or name.
CHANGES = st.one_of(
    st.tuples(st.just("ts"), st.sampled_from([-1e9, -1.0, 0.0, 0.001, 500.5, 1e6, 1e12, 1e15])),
    st.tuples(st.just("dur"), st.sampled_from([-5.0, 0.0, 0.001, 300.0, 1e5, 1e12, 1e15])),
    st.tuples(st.just("tid"), st.sampled_from([1, 2, 3, 7, 9, "stream 7", -1])),
    st.tuples(st.just("pid"), st.sampled_from([0, 1, 2, "x"])),
    st.tuples(st.just("name"), st.sampled_from(["ProfilerStep#1", "a\x1b[2Jb", "", WORKERS])),
    st.tuples(
        st.just("cat"), st.sampled_from(["kernel", "cpu_op", "cuda_runtime", "user_annotation"])
    ),
    st.tuples(st.just("args"), st.sampled_from([{}, {"correlation": 1}, {"correlation": 2**63}])),
)


@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), CHANGES), max_size=8),
    st.sampled_from([0.0, 0.05, 0.5, 0.95]),
    st.integers(0, 2**16),
)
def test_any_damage_gives_an_answer_or_a_sentence(tmp_path, seed, changes, dropped, drawn) -> None:
    random = Random(drawn)
    events = [dict(event) for event in events_of(seed) if random.random() >= dropped]
    for place, (key, value) in changes:
        if events:
            events[int(place * len(events))][key] = value
    if random.random() < 0.3:
        random.shuffle(events)
    ask(tmp_path, events, is_damaged=True)


@pytest.mark.parametrize("seed", range(3))
def test_all_is_asked_of_the_whole_traces_too(tmp_path, seed) -> None:
    ask(tmp_path, list(events_of(seed)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy"]),
            st.sampled_from(
                [
                    "ProfilerStep#0",
                    "ProfilerStep#1",
                    "cudaLaunchKernel",
                    "cudaDeviceSynchronize",
                    "cudaStreamWaitEvent",
                    "cudaMemcpy",
                    "autograd::engine::evaluate_function: MmBackward0",
                    "gemm",
                    WORKERS,
                ]
            ),
            st.integers(0, 6),
            st.integers(0, 6),
            st.integers(1, 3),
            st.integers(0, 4),
        ),
        max_size=14,
    )
)
def test_any_few_events_at_equal_times_give_an_answer_or_a_sentence(tmp_path, made) -> None:
    events = [
        span(name, start, lasts, cat, tid=tid, pid=int(cat in ("cpu_op", "user_annotation", "cuda_runtime")), correlation=number)
        for cat, name, start, lasts, tid, number in made
    ]  # fmt: skip
    ask(tmp_path, events, is_damaged=True)
