from __future__ import annotations

import warnings
from itertools import product, takewhile

import pytest
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from instrument.schedule import Window, in_words, windows

STEPS = 60


def planned(**options: int) -> list[Window]:
    return list(takewhile(lambda w: w.warmup_from < STEPS, windows(**options)))


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 1, 3), (0, 1, 2), (1, 4))))
def test_each_step_is_recorded_and_warmed_up_for_as_torch_would(wait: int, warmup: int, active: int) -> None:
    for repeat, skip_first, skip_first_wait in product((0, 1, 3), (0, 5), (0, 1)):
        options = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        options |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
            action = torch_schedule(**options)
        ours = planned(**options)
        for step in range(STEPS):
            recorded = any(w.first <= step <= w.last for w in ours if w.last is not None)
            warming = any(w.warmup_from <= step < w.first for w in ours)
            expected = action(step)
            assert recorded == (expected in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)), (options, step)
            assert warming == (expected == ProfilerAction.WARMUP), (options, step)


def test_without_active_one_window_lasts_until_the_session_stops() -> None:
    options = {"wait": 2, "warmup": 1, "active": None, "repeat": 1, "skip_first": 4, "skip_first_wait": 0}
    assert list(windows(**options)) == [Window(6, 7, None)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([(3, 5), (8, 10)], "records steps 3–5, then 8–10 (counted from 0)"),
        ([(4, 4)], "records step 4 (counted from 0)"),
        ([(0, None)], "records steps 0 and on until stopped (counted from 0)"),
        ([(1, 2), (4, 5), (7, 8), (10, 11)], "records steps 1–2, then 4–5, then 7–8, and so on (counted from 0)"),
    ],
)
def test_the_plan_in_words(plan: list[tuple[int, int | None]], words: str) -> None:
    assert in_words(iter([Window(first, first, last) for first, last in plan])) == words
