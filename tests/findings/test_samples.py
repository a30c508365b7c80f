"""Checks of the samples of a run: waits, other threads, loader workers, growth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from builders import (
    SINGLE_PROCESS,
    WINDOW,
    WORKERS,
    Event,
    in_steps,
    made,
    node,
    span,
    write_capture,
)

from findings.by_hand import environment
from instrument import Capture
from instrument.base.files import lines_file
from instrument.read.advise.finding import Finding

FETCH = ("library", "torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
NEXT = ("library", "torch/utils/data/dataloader.py", 733, "_BaseDataLoaderIter.__next__")
GET = ("library", "torch/utils/data/dataloader.py", 500, "DataLoader._get_iterator")
START = ("library", "multiprocessing/process.py", 121, "BaseProcess.start")
QUEUE = ("library", "queue.py", 171, "Queue.get")
SELECT = ("library", "selectors.py", 415, "_PollLikeSelector.select")
GLOO = ("library", "torch/distributed/distributed_c10d.py", 9, "all_reduce")
STEP_NS, PART_NS = 10_000_000, 1_000_000_000
# Four steps of 10 ms in one operator.
BUSY = in_steps(4, 10_000, span("aten::mm", 0, 9_900))


def frame(place: Any) -> Any:
    return ("user", "train.py", place, "main") if isinstance(place, int) else place


def table(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Rows of the part, the thread, the number of samples, the stack, and what they wait for, of how many of them."""
    frames, stacks, counts, waits = list[Any](), list[Any](), list[Any](), list[Any]()
    for number, (part, thread, count, stack, *waited) in enumerate(rows):
        for each in map(frame, stack):
            if each not in frames:
                frames.append(each)
        stacks.append([frames.index(frame(each)) for each in stack])
        counts.append([part, "train", thread, number, count])
        waits += [[part, "train", cause, number, of] for cause, of in waited]
    return {"frames": frames, "stacks": stacks, "counts": counts, "waits": waits}


def found(
    tmp_path: Path,
    rows: Sequence[tuple[Any, ...]],
    code: str,
    *,
    events: Sequence[Event] = BUSY,
    about: dict[str, Any] | None = None,
    workers: Sequence[Sequence[tuple[Any, ...]]] = (),
    **file: Any,
) -> list[Finding]:
    """The findings of one check."""
    capture = write_capture(tmp_path, [*events], **(about or {}))
    content = {"format": 1, "times": [], **table(rows), "workers": [*map(table, workers)], **file}
    (tmp_path / lines_file(0)).write_text(json.dumps(content))
    return [
        each for each in Capture.load(capture.folder or "").diagnose().findings if each.code == code
    ]


# What does not train

TRAINS = [
    *BUSY,
    *in_steps(4, 10_000, made("aten::mul", 100, 200, 1), node("MulBackward0", 400, 500, 1)),
]
SAVE = ("library", "torch/serialization.py", 943, "save")
HISTOGRAM = ("library", "torch/utils/tensorboard/writer.py", 502, "SummaryWriter.add_histogram")


@pytest.mark.parametrize(
    ("stack", "what", "place"),
    [
        ([SAVE, ("user", "train.py", 7, "Keeper.put"), 20], "torch.save", "train.py:7 in Keeper.put"),
        ([HISTOGRAM, ("user", "train.py", 9, "note"), 20], "SummaryWriter.add_histogram", "train.py:9 in note"),
        ([("user", "train.py", 9, "evaluate"), 20], "evaluate", "train.py:20 in main"),
        ([SAVE, ("user", "train.py", 9, "Run.validate"), 20], "Run.validate", "train.py:20 in main"),
    ],
)  # fmt: skip
def test_what_does_not_train_is_named_where_it_is_called(tmp_path, stack, what, place) -> None:
    rows = [(0, "", 600, [4]), (0, "", 400, stack)]
    (each,) = found(tmp_path, rows, "beside-training", events=TRAINS)
    assert each.title == f"40 % of the run goes to {what}, not to training"
    assert each.source == place
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("rows", "events"),
    [
        ([(0, "", 950, [SAVE, 7]), (0, "", 50, [4])], TRAINS),  # the program itself
        ([(0, "", 950, [4]), (0, "", 50, [SAVE, 7])], TRAINS),  # seldom
        ([(0, "", 600, [4]), (0, "", 400, [("user", "train.py", 9, "evaluate"), 20])], BUSY),
        ([(0, "", 600, [4]), (0, "", 400, [("user", "model.py", 9, "Net.next_val"), 20])], TRAINS),
        ([(0, "", 600, [4]), (0, "saves", 400, [SAVE, 7])], TRAINS),  # in another thread
    ],
)
def test_what_trains_or_takes_little_is_not(tmp_path, rows, events) -> None:
    assert not found(tmp_path, rows, "beside-training", events=events)


# Waits


@pytest.mark.parametrize(
    ("cause", "title"),
    [
        ("sleep", "sleeps: train.py:7 in main"),
        ("read", "waits for a file or a pipe: train.py:7 in main"),
        ("write", "writes a file: train.py:7 in main"),
        ("of the future", "waits in a call of the system: train.py:7 in main"),
    ],
)
def test_a_line_that_waits_is_named_with_what_it_saves(tmp_path, cause, title) -> None:
    (each,) = found(tmp_path, [(0, "", 600, [4]), (0, "", 400, [7, 9], (cause, 400))], "waiting")
    assert each.title == f"For 40 % of the run, the thread of the steps {title}"
    assert each.source == "train.py:7 in main"
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.4)
    assert 0.36 < each.saving.low_ns / each.saving.baseline_ns < 0.4


def test_a_call_that_mostly_waits_counts_as_a_whole(tmp_path: Path) -> None:
    rows = [(0, "", 600, [4]), (0, "", 300, [7], ("sleep", 200)), (0, "", 100, [8], ("sleep", 10))]
    (each,) = found(tmp_path, rows, "waiting")
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.3)
    assert each.saving.low_ns < 0.2 * each.saving.baseline_ns


def test_who_the_thread_waits_for_is_named_and_nothing_is_sure(tmp_path: Path) -> None:
    rows = [(0, "", 600, [4]), (0, "", 400, [QUEUE, 7], ("thread", 400)), (0, "loads", 900, [20])]
    marks = [[0] * 5, [10 * PART_NS, 9 * PART_NS, 6 * PART_NS, 0, 0]]
    (each,) = found(tmp_path, rows, "waiting", marks=marks, used_ns={"loads": 9 * PART_NS})
    assert each.title.endswith(
        "waits for another thread, while 'loads' runs train.py:20 in main: train.py:7 in main in Queue.get (queue.py)"
    )
    assert each.saving is not None
    assert each.saving.low_ns == 0


@pytest.mark.parametrize(
    "wait",
    [
        ([7], ("sleep", 20)),  # rarely
        ([NEXT, 7], ("poll", 400)),  # a wait for data, which another check finds
        ([GLOO, 7], ("thread", 400)),  # for other ranks
        ([7], ("operator", 400)),  # for threads of the same operator
        ([7],),  # the line computes
    ],
)
def test_no_wait_of_the_programs_own(tmp_path: Path, wait: tuple[Any, ...]) -> None:
    assert not found(tmp_path, [(0, "", 600, [4]), (0, "", 400, *wait)], "waiting")


# Other threads


def threads(tmp_path: Path, ran: float, queued: float, used: float, **more: Any) -> list[Finding]:
    """One other thread; the shares of ten seconds in which the two threads run, or have no CPU."""
    rows = more.pop("rows", [(0, "", 900, [4])])
    marks = [[0] * 5, [10 * PART_NS, 0, *(int(each * 10 * PART_NS) for each in (ran, queued)), 0]]
    used_ns = {"watchdog": int(used * 10 * PART_NS), "idle": 0}
    rows = [*rows, (0, "watchdog", 800, [12]), (0, "watchdog", 100, [13])]
    return found(tmp_path, rows, "busy-thread", marks=marks, used_ns=used_ns)


def test_a_thread_that_holds_the_gil_is_named_with_its_line(tmp_path: Path) -> None:
    (each,) = threads(tmp_path, 0.3, 0.1, 0.9)
    assert each.title == (
        "For 60 % of the run, the thread of the steps waits for the thread 'watchdog', which holds "
        "the GIL: it uses a CPU for 90 % of the run"
    )
    assert each.source == "train.py:12 in main"
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("ran", "queued", "used", "more"),
    [
        (0.97, 0.01, 0.9, {}),  # a thread that computes without the GIL
        (0.3, 0.1, 0.05, {}),  # one that hardly runs
        (0.3, 0.65, 0.9, {}),  # other programs take the CPUs
        (0.3, 0.1, 0.9, {"rows": [(0, "", 300, [4]), (0, "", 600, [7], ("sleep", 600))]}),
        (0.3, 0.1, 0.9, {"rows": [(0, "", 300, [4]), (0, "", 600, [7], ("operator", 600))]}),
    ],
)
def test_no_thread_is_in_the_way(tmp_path, ran, queued, used, more) -> None:
    assert not threads(tmp_path, ran, queued, used, **more)


# Loaders


def about(workers: int = 0, **loader: Any) -> dict[str, Any]:
    threads = {"intra_op": 1, "inter_op": 1, "cpus": 8, "local_ranks": 1}
    return environment(
        threads=threads,
        loaders=[{"phase": "train", "workers": workers, "persistent_workers": False, **loader}],
    )


def loading(name: str = SINGLE_PROCESS, waits_us: float = 8000) -> list[Event]:
    wait = span(name, 0, waits_us, "user_annotation")
    return in_steps(4, 10_000, wait, span("aten::mm", waits_us, 9_900 - waits_us))


OF_ITEMS = [
    (0, "", 400, [("library", "json/decoder.py", 3, "decode"), ("user", "data.py", 12, "Docs.text"), ("user", "data.py", 20, "Docs.__getitem__"), FETCH, NEXT, 5]),
    (0, "", 300, [("user", "data.py", 14, "Docs.text"), ("user", "data.py", 20, "Docs.__getitem__"), FETCH, NEXT, 5]),
    (0, "", 100, [FETCH, NEXT, 5]),
]  # fmt: skip


def test_the_function_that_takes_most_of_the_loading_is_named(tmp_path: Path) -> None:
    rows = [*OF_ITEMS, (0, "", 200, [6])]
    (each,) = found(tmp_path, rows, "loader-wait", events=loading(), about=about())
    assert each.title.endswith("; 88 % of the loading is in data.py:12 in Docs.text")
    assert each.source == "data.py:12 in Docs.text"
    assert each.change.startswith("Make data.py:12 in Docs.text cheaper: ")
    assert "Second best: DataLoader(..., num_workers=" in each.change
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.8 * 0.875, abs=0.01)


def test_the_function_in_the_workers_is_named(tmp_path: Path) -> None:
    rows, events = [(0, "", 800, [SELECT, NEXT, 5]), (0, "", 200, [6])], loading(WORKERS)
    own = [(0, "", count, stack[: stack.index(NEXT)]) for _, _, count, stack in OF_ITEMS]
    (each,) = found(tmp_path, rows, "loader-wait", events=events, about=about(2), workers=[own])
    assert "; worker processes load it; 88 % of the loading is in data.py:12" in each.title
    assert each.saving is not None
    assert 0.5 < each.saving.share < 0.8


def test_workers_that_hardly_work_are_too_many(tmp_path: Path) -> None:
    rows, events = [(0, "", 800, [SELECT, NEXT, 5]), (0, "", 200, [6])], loading(WORKERS)
    own = [(0, "", 10, [FETCH]), (0, "", 990, [SELECT])]
    (each,) = found(tmp_path, rows, "loader-wait", events=events, about=about(2), workers=[own])
    assert "worker processes load it, in 200.0 µs: to take it over" in each.title
    assert each.change.endswith("num_workers=0) is faster, too.")
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.78, abs=0.01)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, "", 800, [FETCH, NEXT, 5])],  # torch's own collation
        [
            (0, "", 200, [("user", "data.py", k, f"f{k}"), FETCH, NEXT, 5]) for k in range(4)
        ],  # many functions
        [
            (0, "", 20, [("user", "data.py", 3, "f"), FETCH, NEXT, 5]),
            (0, "", 900, [6]),
        ],  # few samples
    ],
)
def test_no_function_takes_most_of_the_loading(tmp_path: Path, rows: list[Any]) -> None:
    (each,) = found(tmp_path, rows, "loader-wait", events=loading(), about=about())
    assert each.title.endswith("the training process loads it")
    assert each.change.startswith("DataLoader(..., num_workers=")


def test_the_start_of_workers_in_each_epoch_is_found(tmp_path: Path) -> None:
    rows = [(0, "", 300, [START, GET, 5]), (0, "", 300, [SELECT, NEXT, 5]), (0, "", 400, [6])]
    (each,) = found(tmp_path, rows, "worker-start", about=about(2))
    assert each.title == "30 % of the run goes to the start and the end of loader workers"
    assert each.source == "train.py:5 in main"
    assert "persistent_workers=True" in each.change
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.45)
    assert each.saving.high_ns == pytest.approx(0.6 * each.saving.baseline_ns)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([(0, "", 300, [START, GET, 5]), (0, "", 700, [6])], {"persistent_workers": True}),
        ([(0, "", 8, [START, GET, 5]), (0, "", 992, [6])], {}),  # once
        ([(0, "", 300, [START, 5]), (0, "", 700, [6])], {}),  # a process of the user
    ],
)
def test_workers_that_start_rarely_are_no_problem(tmp_path, rows, settings) -> None:
    assert not found(tmp_path, rows, "worker-start", about=about(2, **settings))


# Growth


def run(
    tmp_path: Path,
    step_ms: Callable[[int], float],
    *,
    memory_mb: Callable[[int], float] = lambda part: 500,
    queued: Callable[[int], float] = lambda part: 0,
    parts: int = 12,
    line: int | None = 7,
    first_step: int = 3,
) -> list[Finding]:
    """Parts of a second, whose steps take so long; what is more than in the first part is spent in one line."""
    steps = [round(1000 / step_ms(part)) for part in range(parts)]
    first_steps = [{"train": step} for step in accumulate([2, *steps])]
    marks, waited = [], 0.0
    for part in range(parts + 2):
        marks.append(
            [part * PART_NS, 0, 0, round(waited * PART_NS), round(memory_mb(part) * 2**20)]
        )
        waited += queued(part)
    rows = []
    for part in range(parts):
        usual = round(100 * min(step_ms(0) / step_ms(part), 1))
        rows.append((part, "", usual, [6]))
        rows.append((part, "", 100 - usual, [line if line is not None else 50 + part]))
    about = {"window": WINDOW | {"first_step": first_step}}
    return found(tmp_path, rows, "growth", about=about, first_steps=first_steps, marks=marks)


def test_steps_that_get_longer_are_found_with_the_line_and_the_step_in_an_hour(tmp_path) -> None:
    (each,) = run(tmp_path, lambda part: 2 + part / 2)
    assert each.title.startswith(
        "A step takes longer and longer in train.py:7 in main: 1.864 ms at "
    )
    assert each.title.endswith(" an hour later")
    assert each.source == "train.py:7 in main"
    assert each.saving is not None
    assert each.saving.share == pytest.approx(0.58, abs=0.01)


def test_growth_in_no_single_line_is_in_the_function(tmp_path: Path) -> None:
    (each,) = run(tmp_path, lambda part: 2 + part / 2, line=None)
    assert each.title.startswith("A step takes longer and longer in train.py in main: ")
    assert each.source == "train.py in main"


@pytest.mark.parametrize(
    "step_ms",
    [
        lambda part: 4 if part == 0 else 2,  # warm-up
        lambda part: 2 + part % 2,  # phases that take turns
        lambda part: 2 + (0.3, 0.9, 0.1, 0.5, 0.4, 0.8, 0.2, 0.0)[part % 8],  # noise
        lambda part: min(2 + part, 5),  # a buffer that fills up
        lambda part: 2 + part / 100,  # hardly
        lambda part: 4 - part / 8,  # it gets shorter
    ],
)
def test_steps_that_do_not_go_on_growing(tmp_path: Path, step_ms: Callable[[int], float]) -> None:
    assert not run(tmp_path, step_ms)


def test_steps_that_wait_longer_for_a_cpu_do_not_grow(tmp_path: Path) -> None:
    assert not run(tmp_path, lambda part: 2 / (1 - part / 20), queued=lambda part: part / 20)


def test_steps_that_are_recorded_at_the_end_do_not_grow(tmp_path: Path) -> None:
    def step_ms(part: int) -> float:
        return (80, 70, 80, 77, 93, 179, 235)[part]

    assert run(tmp_path / "other", step_ms, parts=7)
    assert not run(tmp_path / "recorded", step_ms, parts=7, first_step=66)


def test_few_parts_show_no_growth(tmp_path: Path) -> None:
    assert not run(tmp_path, lambda part: 2 + part, parts=5)


def test_memory_that_grows_all_the_time_is_found(tmp_path: Path) -> None:
    (each,) = run(tmp_path, lambda part: 2, memory_mb=lambda part: 500 + 20 * part)
    assert each.title.startswith("The memory of the process grows by ")
    assert each.saving is None
    assert not each.ends_run


@pytest.mark.parametrize(
    "memory_mb",
    [
        lambda part: min(500 + 50 * part, 650),  # a cache that fills up
        lambda part: 500 + 60 * (part % 3),  # it is freed again
        lambda part: 500 + part,  # little
    ],
)
def test_memory_that_does_not_go_on_growing(tmp_path, memory_mb) -> None:
    assert not run(tmp_path, lambda part: 2, memory_mb=memory_mb)


def test_without_samples_nothing_is_said_of_these_checks(tmp_path: Path) -> None:
    diagnosis = write_capture(tmp_path, BUSY).diagnose()
    assert not {"waiting", "busy-thread", "growth", "worker-start"} & {*diagnosis.passed}
    assert not any("profiler.lines" in each for each in diagnosis.not_checked)
