"""Checks of the samples of a run: waits, other threads, loader workers, growth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

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


class Sampled(NamedTuple):
    """A check, the rows of the samples, and what else is known of the run."""

    code: str
    rows: Sequence[tuple[Any, ...]]
    events: Sequence[Event] = BUSY
    about: dict[str, Any] = {}  # noqa: RUF012
    workers: Sequence[Sequence[tuple[Any, ...]]] = ()
    file: dict[str, Any] = {}  # noqa: RUF012

    def findings(self, folder: Path) -> list[Finding]:
        capture = write_capture(folder, [*self.events], **self.about)
        workers = [*map(table, self.workers)]
        content = {"format": 1, "times": [], **table(self.rows), "workers": workers, **self.file}
        (folder / lines_file(0)).write_text(json.dumps(content))
        found = Capture.load(capture.folder or "").diagnose().findings
        return [each for each in found if each.code == self.code]


# What does not train

TRAINS = [
    *BUSY,
    *in_steps(4, 10_000, made("aten::mul", 100, 200, 1), node("MulBackward0", 400, 500, 1)),
]
SAVE = ("library", "torch/serialization.py", 943, "save")
HISTOGRAM = ("library", "torch/utils/tensorboard/writer.py", 502, "SummaryWriter.add_histogram")


def beside(*stack: Any, share: int = 40, thread: str = "", events: list[Event] = TRAINS) -> Sampled:
    """A share of the samples is in another stack than the training."""
    rows = [(0, "", 1000 - 10 * share, [4]), (0, thread, 10 * share, [*stack])]
    return Sampled("beside-training", rows, events)


# Waits


def waits(*stack: Any, cause: str, count: int = 400) -> Sampled:
    return Sampled("waiting", [(0, "", 600, [4]), (0, "", 400, [*stack], (cause, count))])


MOSTLY = [(0, "", 600, [4]), (0, "", 300, [7], ("sleep", 200)), (0, "", 100, [8], ("sleep", 10))]
FOR_A_THREAD = [
    (0, "", 600, [4]),
    (0, "", 400, [QUEUE, 7], ("thread", 400)),
    (0, "loads", 900, [20]),
]
MARKS_OF_A_THREAD = [[0] * 5, [10 * PART_NS, 9 * PART_NS, 6 * PART_NS, 0, 0]]


# Other threads


def threads(ran: float, queued: float, used: float, *waits: Any) -> Sampled:
    """One other thread; the shares of ten seconds in which the two threads run, or have no CPU."""
    rows = [(0, "", 300, [4]), (0, "", 600, [7], *waits)] if waits else [(0, "", 900, [4])]
    rows += [(0, "watchdog", 800, [12]), (0, "watchdog", 100, [13])]
    marks = [[0] * 5, [10 * PART_NS, 0, *(int(each * 10 * PART_NS) for each in (ran, queued)), 0]]
    used_ns = {"watchdog": int(used * 10 * PART_NS), "idle": 0}
    return Sampled("busy-thread", rows, file={"marks": marks, "used_ns": used_ns})


# Loaders


def about(workers: int = 0, **loader: Any) -> dict[str, Any]:
    threads = {"intra_op": 1, "inter_op": 1, "cpus": 8, "local_ranks": 1}
    given = {"phase": "train", "workers": workers, "persistent_workers": False, **loader}
    return environment(threads=threads, loaders=[given])


def loading(name: str = SINGLE_PROCESS, waits_us: float = 8000) -> list[Event]:
    wait = span(name, 0, waits_us, "user_annotation")
    return in_steps(4, 10_000, wait, span("aten::mm", waits_us, 9_900 - waits_us))


ITEM = ("user", "data.py", 20, "Docs.__getitem__"), FETCH, NEXT, 5
DECODE = ("library", "json/decoder.py", 3, "decode")
OF_ITEMS = [
    (0, "", 400, [DECODE, ("user", "data.py", 12, "Docs.text"), *ITEM]),
    (0, "", 300, [("user", "data.py", 14, "Docs.text"), *ITEM]),
    (0, "", 100, [FETCH, NEXT, 5]),
]
IN_WORKERS = [(0, "", count, stack[: stack.index(NEXT)]) for _, _, count, stack in OF_ITEMS]
TAKES_OVER = [(0, "", 800, [SELECT, NEXT, 5]), (0, "", 200, [6])]
STARTS = [(0, "", 300, [START, GET, 5]), (0, "", 300, [SELECT, NEXT, 5]), (0, "", 400, [6])]


def loads(rows: Sequence[Any], workers: Sequence[Any] | None = None) -> Sampled:
    if workers is None:
        return Sampled("loader-wait", rows, loading(), about())
    return Sampled("loader-wait", rows, loading(WORKERS), about(2), [workers])


def starts(rows: Sequence[Any], **loader: Any) -> Sampled:
    return Sampled("worker-start", rows, about=about(2, **loader))


# Growth


def run(
    step_ms: Callable[[int], float],
    *,
    memory_mb: Callable[[int], float] = lambda part: 500,
    queued: Callable[[int], float] = lambda part: 0,
    parts: int = 12,
    line: int | None = 7,
    first_step: int = 3,
) -> Sampled:
    """Parts of a second, whose steps take so long; what is more than in the first part is spent in one line."""
    steps = [round(1000 / step_ms(part)) for part in range(parts)]
    first_steps = [{"train": step} for step in accumulate([2, *steps])]
    marks, waited = [], 0.0
    for part in range(parts + 2):
        memory = round(memory_mb(part) * 2**20)
        marks.append([part * PART_NS, 0, 0, round(waited * PART_NS), memory])
        waited += queued(part)
    rows = []
    for part in range(parts):
        usual = round(100 * min(step_ms(0) / step_ms(part), 1))
        rows.append((part, "", usual, [6]))
        rows.append((part, "", 100 - usual, [line if line is not None else 50 + part]))
    about = {"window": WINDOW | {"first_step": first_step}}
    return Sampled("growth", rows, about=about, file={"first_steps": first_steps, "marks": marks})


def recorded_at_the_end(part: int) -> float:
    return (80, 70, 80, 77, 93, 179, 235)[part]


NOISE = (0.3, 0.9, 0.1, 0.5, 0.4, 0.8, 0.2, 0.0)
FOUND = {
    "a checkpoint": beside(SAVE, ("user", "train.py", 7, "Keeper.put"), 20),
    "a histogram": beside(HISTOGRAM, ("user", "train.py", 9, "note"), 20),
    "an evaluation": beside(("user", "train.py", 9, "evaluate"), 20),
    "a validation that saves": beside(SAVE, ("user", "train.py", 9, "Run.validate"), 20),
    **{f"a wait: {cause}": waits(7, 9, cause=cause) for cause in ("sleep", "read", "write", "of the future")},
    "a call that mostly waits": Sampled("waiting", MOSTLY),
    "a wait for a thread": Sampled(
        "waiting", FOR_A_THREAD, file={"marks": MARKS_OF_A_THREAD, "used_ns": {"loads": 9 * PART_NS}}
    ),
    "a thread that holds the GIL": threads(0.3, 0.1, 0.9),
    "a function that loads": loads([*OF_ITEMS, (0, "", 200, [6])]),
    "a function in the workers": loads(TAKES_OVER, IN_WORKERS),
    "too many workers": loads(TAKES_OVER, [(0, "", 10, [FETCH]), (0, "", 990, [SELECT])]),
    "torch's own collation": loads([(0, "", 800, [FETCH, NEXT, 5])]),
    "many functions that load": loads([(0, "", 200, [("user", "data.py", k, f"f{k}"), FETCH, NEXT, 5]) for k in range(4)]),
    "few samples of loading": loads([(0, "", 20, [("user", "data.py", 3, "f"), FETCH, NEXT, 5]), (0, "", 900, [6])]),
    "workers that start in each epoch": starts(STARTS),
    "steps that get longer": run(lambda part: 2 + part / 2),
    "steps that get longer in no single line": run(lambda part: 2 + part / 2, line=None),
    "steps that get longer at the end": run(recorded_at_the_end, parts=7),
    "memory that grows": run(lambda part: 2, memory_mb=lambda part: 500 + 20 * part),
}  # fmt: skip
NOT_FOUND = {
    "the program itself saves": Sampled("beside-training", [(0, "", 950, [SAVE, 7]), (0, "", 50, [4])], TRAINS),
    "a checkpoint that is rare": beside(SAVE, 7, share=5),
    "an evaluation without training": beside(("user", "train.py", 9, "evaluate"), 20, events=BUSY),
    "a name like that of a validation": beside(("user", "model.py", 9, "Net.next_val"), 20),
    "a checkpoint in another thread": beside(SAVE, 7, thread="saves"),
    "a line that waits rarely": waits(7, cause="sleep", count=20),
    "a wait for data, which another check finds": waits(NEXT, 7, cause="poll"),
    "a wait for other ranks": waits(GLOO, 7, cause="thread"),
    "a wait for threads of the same operator": waits(7, cause="operator"),
    "a line that computes": Sampled("waiting", [(0, "", 600, [4]), (0, "", 400, [7])]),
    "a thread that computes without the GIL": threads(0.97, 0.01, 0.9),
    "a thread that hardly runs": threads(0.3, 0.1, 0.05),
    "other programs take the CPUs": threads(0.3, 0.65, 0.9),
    "the thread of the steps sleeps": threads(0.3, 0.1, 0.9, ("sleep", 600)),
    "the thread of the steps is in an operator": threads(0.3, 0.1, 0.9, ("operator", 600)),
    "workers that stay": starts([(0, "", 300, [START, GET, 5]), (0, "", 700, [6])], persistent_workers=True),
    "workers that start once": starts([(0, "", 8, [START, GET, 5]), (0, "", 992, [6])]),
    "a process of the user": starts([(0, "", 300, [START, 5]), (0, "", 700, [6])]),
    "warm-up": run(lambda part: 4 if part == 0 else 2),
    "phases that take turns": run(lambda part: 2 + part % 2),
    "noise": run(lambda part: 2 + NOISE[part % 8]),
    "a buffer that fills up": run(lambda part: min(2 + part, 5)),
    "hardly any growth": run(lambda part: 2 + part / 100),
    "steps that get shorter": run(lambda part: 4 - part / 8),
    "steps that wait longer for a CPU": run(lambda part: 2 / (1 - part / 20), queued=lambda part: part / 20),
    "steps that are recorded at the end": run(recorded_at_the_end, parts=7, first_step=66),
    "few parts": run(lambda part: 2 + part, parts=5),
    "a cache that fills up": run(lambda part: 2, memory_mb=lambda part: min(500 + 50 * part, 650)),
    "memory that is freed again": run(lambda part: 2, memory_mb=lambda part: 500 + 60 * (part % 3)),
    "little memory": run(lambda part: 2, memory_mb=lambda part: 500 + part),
}  # fmt: skip


def test_without_samples_nothing_is_said_of_these_checks(tmp_path: Path) -> None:
    diagnosis = write_capture(tmp_path, BUSY).diagnose()
    assert not {"waiting", "busy-thread", "growth", "worker-start"} & {*diagnosis.passed}
    assert not any("profiler.lines" in each for each in diagnosis.not_checked)
