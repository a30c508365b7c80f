"""`profiler.lines`: which lines a run executes, sampled, written beside the captures, and read."""

from __future__ import annotations

import bdb
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session, window
from scipy.stats import binomtest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from instrument import Capture, Session
from instrument.base.errors import CaptureError
from instrument.base.files import lines_file
from instrument.base.units import percent
from instrument.read.advise.verdict import verdict
from instrument.read.views.lines import heaviest_lines, share_interval
from instrument.record import line_trace, lines, worker_lines
from instrument.record.line_trace import NotedLine, trace_lines
from instrument.record.lines import LineSampler, Moment
from instrument.record.recorder import Recorder

HERE = Path(__file__).name
TRAIN = Moment("train", 1, False)


def line_of(function: Callable[..., object], after: int) -> str:
    """The place of the line so many lines below the `def` of a function."""
    return f"{HERE}:{function.__code__.co_firstlineno + after}"


def waits(ready: Event, go: Event) -> None:
    ready.set()
    go.wait()


def spins(ready: Event, go: Event) -> None:
    ready.set()
    while not go.is_set():
        pass


def sampler(folder: Path, *moments: Moment | None, **options: Any) -> LineSampler:
    """A sampler of this thread that does not sample by itself."""
    now = iter(moments)
    return LineSampler(folder / lines_file(0), lambda: next(now), **options)


def sampled_here(sampler: LineSampler, times: int = 1, act: Callable[..., object] = waits) -> None:
    """Have this thread run `act` while another thread takes samples of it."""
    ready, go = Event(), Event()

    def take() -> None:
        ready.wait()
        for _ in range(times):
            sampler.sample()
        go.set()

    other = Thread(target=take, name="instrument-test")
    other.start()
    act(ready, go)
    other.join()


@contextmanager
def running(act: Callable[..., object], name: str) -> Iterator[None]:
    ready, go = Event(), Event()
    other = Thread(target=act, args=(ready, go), name=name)
    other.start()
    ready.wait()
    try:
        yield
    finally:
        go.set()
        other.join()


def written(sampler: LineSampler, folder: Path) -> dict[str, Any]:
    sampler._save()
    content: dict[str, Any] = json.loads((folder / lines_file(0)).read_text())
    return content


def found(content: dict[str, Any]) -> dict[tuple[str, str, str], int]:
    """The samples by phase, thread and the innermost line of this file."""
    counts: dict[tuple[str, str, str], int] = {}
    for _, phase, thread, stack, count in content["counts"]:
        frames = (content["frames"][k] for k in content["stacks"][stack])
        line = next(f"{file}:{line}" for _, file, line, _ in frames if file == HERE)
        counts[phase, thread, line] = counts.get((phase, thread, line), 0) + count
    return counts


def test_samples_name_line_and_phase(tmp_path: Path) -> None:
    each = sampler(tmp_path, None, TRAIN, TRAIN, Moment("validation", 0, False))
    sampled_here(each, 4)
    line = line_of(waits, 2)
    assert found(written(each, tmp_path)) == {("train", "", line): 2, ("validation", "", line): 1}


def test_a_frame_is_the_users_or_a_librarys(tmp_path: Path) -> None:
    each = sampler(tmp_path, TRAIN)
    sampled_here(each)
    content = written(each, tmp_path)
    kinds = {(file, function): kind for kind, file, _, function in content["frames"]}
    assert kinds[HERE, "waits"] == "user"
    assert kinds["threading.py", "Event.wait"] == "library"
    assert not any(Path(file).is_absolute() for file, _ in kinds)


def test_what_torch_has_generated_is_a_librarys(tmp_path: Path) -> None:
    name = f"/cache/gk/cgk{'a2' * 24}z.py"
    namespace: dict[str, Any] = {}
    exec(compile("def call(function, *given): function(*given)", name, "exec"), namespace)
    each = sampler(tmp_path, TRAIN)
    namespace["call"](sampled_here, each)
    kinds = {function: kind for kind, _, _, function in written(each, tmp_path)["frames"]}
    assert kinds["call"] == "library"


def test_any_place_of_imports_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    lines._file.cache_clear()
    each = sampler(tmp_path, TRAIN)
    sampled_here(each)
    assert sum(found(written(each, tmp_path)).values()) == 1


def test_another_thread_counts_by_its_name_unless_it_waits(tmp_path: Path) -> None:
    each = sampler(tmp_path, TRAIN)
    with running(spins, "busy"), running(waits, "idle"):
        each.find_busy()
        until = time.process_time() + 0.2  # of the CPU, which only the busy thread uses
        while time.process_time() < until:
            time.sleep(0.001)
        each.find_busy()
        sampled_here(each)
    assert {thread for _, thread, _ in found(written(each, tmp_path))} == {"", "busy"}


def test_what_comes_after_the_last_step_is_no_steps(tmp_path: Path) -> None:
    moments = [Moment("train", number, False) for number in (1, 1, 2, 2, 2)]
    each = sampler(tmp_path, *moments)
    sampled_here(each, 5)
    assert sum(found(written(each, tmp_path)).values()) == 5
    each._leave_out_the_end()
    assert sum(found(written(each, tmp_path)).values()) == 2


def test_a_thread_that_waits_is_known_and_for_what(tmp_path: Path) -> None:
    if not Path("/proc/self/syscall").exists():
        pytest.skip("needs Linux")
    times = 2000  # each lets the thread run, which waits some time after it says so
    each = sampler(tmp_path, *[TRAIN] * times)
    sampled_here(each, times)
    assert ["train", "thread"] in [wait[1:3] for wait in written(each, tmp_path)["waits"]]


def test_the_cpu_time_and_the_memory_are_known_for_each_part(tmp_path: Path) -> None:
    clock = iter(range(0, 10**12, 300_000_000))
    each = sampler(tmp_path, *[TRAIN] * 30, clock_ns=lambda: next(clock))
    sampled_here(each, 30)
    content = written(each, tmp_path)
    marks = content["marks"]
    assert len(marks) == len(content["first_steps"]) + 1
    assert marks == sorted(marks)
    assert marks[0][0] < content["part_ns"] <= marks[1][0]
    assert sys.platform != "linux" or all(mark[-1] > 10**7 for mark in marks)


def test_what_the_workers_sampled_is_in_the_file_of_the_run(tmp_path: Path) -> None:
    each = sampler(tmp_path, TRAIN, workers=lambda: [{"frames": []}])
    sampled_here(each)
    assert written(each, tmp_path)["workers"] == [{"frames": []}]


class Rows(Dataset[int]):
    """Rows that take so long that samples of a worker are written."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return index


@pytest.mark.skipif(sys.platform != "linux", reason="workers are not forked")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_forked_worker_samples_itself(tmp_path: Path, context: str) -> None:
    before = worker._worker_loop
    worker_lines.begin()
    try:
        loader = DataLoader(Rows(), num_workers=1, multiprocessing_context=context)
        assert sorted(batch.item() for batch in loader) == [*range(20)]
        found = worker_lines.collected()
    finally:
        worker_lines.end()
    assert worker._worker_loop is before
    assert worker_lines.collected() == []
    functions = {frame[3] for each in found for frame in each["frames"]}
    assert ("Rows.__getitem__" in functions) == (context == "fork")


def test_recording_is_not_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = sampler(tmp_path, TRAIN, TRAIN)
    stop = Recorder.stop

    def slow(self: Recorder) -> Any:
        sampled_here(each)
        return stop(self)

    monkeypatch.setattr(Recorder, "stop", slow)
    window(tmp_path, export="inline", sinks={})
    assert written(each, tmp_path)["counts"] == []
    sampled_here(each)
    assert sum(found(written(each, tmp_path)).values()) == 1


def test_memory_and_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MOST_STACKS", 1)
    each = sampler(tmp_path, *[TRAIN] * 3)
    sampled_here(each)
    namespace: dict[str, Any] = {"wait": waits}
    for k in range(2):
        exec(f"def made_{k}(ready, go):\n    wait(ready, go)", namespace)
        sampled_here(each, act=namespace[f"made_{k}"])
    content = written(each, tmp_path)
    assert len(content["stacks"]) == 2  # and the empty one, whose samples are left out
    assert [count for *_, count in content["counts"]] == [1]


def test_new_names_need_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MOST_COUNTS", 2)
    each = sampler(tmp_path, *(Moment(f"phase {k}", 1, False) for k in (0, 1, 2, 1)))
    sampled_here(each, times=4)
    counted = found(written(each, tmp_path))
    assert {phase: count for (phase, *_), count in counted.items()} == {"phase 0": 1, "phase 1": 2}


def test_parts_of_a_long_run_get_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, seconds = [0], 100
    moments = [Moment("train", 10 * second, False) for second in range(seconds)]
    each = sampler(tmp_path, *moments, clock_ns=lambda: now_ns[0])
    for second in range(seconds):
        now_ns[0] = second * 1_000_000_000
        sampled_here(each)
    content = written(each, tmp_path)
    assert content["part_ns"] == 8_000_000_000
    assert content["first_steps"] == [{"train": 80 * part} for part in range(13)]
    counts: dict[int, int] = {}
    for part, *_, count in content["counts"]:
        counts[part] = counts.get(part, 0) + count
    assert counts == {**dict.fromkeys(range(12), 8), 12: 4}


# A run with a session.


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A window of a run whose steps are one multiplication after another."""
    folder = tmp_path_factory.mktemp("run")
    a = torch.ones(400, 400)
    with Session(lines=True, wait=1, active=2, sinks={}, output_dir=folder) as session:
        sampler = session._loop.run.lines  # type: ignore[union-attr]
        while sum(sampler._counts.values()) < 50 or not session.captures:
            multiply(a)
            session.step()
    return session.captures[0]


def multiply(a: torch.Tensor) -> None:
    for _ in range(20):
        a @ a


def test_the_view_names_the_line_its_share_and_its_operator(capture: Capture) -> None:
    first = capture.lines[0]
    assert (first.line, first.function) == (line_of(multiply, 2), "multiply")
    assert first.thread is None
    assert first.share > 0.5
    assert first.operator in (None, "aten::mm")  # None: no sample fell into the window
    of_steps = capture.lines.where("thread IS NULL").frame
    assert of_steps["share"].sum() == pytest.approx(1)


def test_the_heaviest_line_is_the_one_with_most_samples(capture: Capture) -> None:
    heaviest, row = heaviest_lines(capture)[0], capture.lines[0]
    assert heaviest[:5] == (row.line, row.function, row.share, row.low_share, row.high_share)
    assert heaviest.low < heaviest.share <= heaviest.high + 1e-9


def test_the_verdict_names_the_lines_that_take_most(capture: Capture) -> None:
    first, found = heaviest_lines(capture)[0], capture.diagnose()
    assert found.heaviest.startswith(f"{percent(first.share)} ± ")
    assert f" of it is {first.line} in {first.function}" in found.heaviest
    assert found.heaviest.endswith(f"at most {percent(first.share)} less if that cost nothing.")
    assert found.heaviest in verdict(found)
    assert first.line in found.lines[0]


def test_the_interval_is_wilsons(capture: Capture) -> None:
    samples = capture.lines.where("thread IS NULL").frame["samples"].sum()
    for row in capture.lines:
        interval = binomtest(row.samples, samples).proportion_ci(0.95, "wilson")
        assert (row.low_share, row.high_share) == pytest.approx(interval, rel=1e-3, abs=1e-6)


def test_an_interval_stays_between_0_and_1() -> None:
    ends = [share_interval(part, of) for of in range(1, 2000) for part in (0, of)]
    assert all(low is not None and 0 <= low <= high <= 1 for low, high in ends)


def test_a_capture_never_has_the_lines_of_another_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"active": 1, "lines": True}
    earlier, later = (
        run_session(tmp_path, 3, lambda: time.sleep(0.1), **options).capture for _ in range(2)
    )
    without = window(tmp_path)
    assert (len(earlier.lines), len(without.lines)) == (0, 0)
    assert len(later.lines) > 0


def test_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    start = Thread.start

    def refused(thread: Thread) -> None:
        if thread.name == "instrument-lines":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refused)
    made = window(tmp_path, lines=True)
    assert len(made.lines) == 0
    assert log.at("WARNING") == [
        "No thread can be started (can't start new thread): the lines of the run are not sampled."
    ]


def test_without_the_option_there_is_no_file(tmp_path: Path) -> None:
    made = window(tmp_path)
    assert not (tmp_path / lines_file(0)).exists()
    assert len(made.lines) == 0
    assert not made.diagnose().lines


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 99}, "has format 99, and this version"),
        ({"stacks": [[7]]}, "a frame or stack is missing"),
        ({"counts": [[0, "train", "", 7, 1]]}, "a frame or stack is missing"),
        ({"counts": [[0, "train", "", -1, 1]]}, "does not hold the lines of a run"),
        ({"frames": 3}, "does not hold the lines of a run"),
        ({"traced": [[1], [7]]}, "a frame or stack is missing"),
        ({"traced": [[1], []]}, "a frame or stack is missing"),
    ],
)
def test_refused_file(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    made = window(tmp_path)
    content = {
        "format": 1,
        "frames": [["user", "train.py", 3, "main"]],
        "stacks": [[0]],
        "counts": [[0, "train", "", 0, 1]],
        "times": [],
    }
    (tmp_path / lines_file(0)).write_text(json.dumps({**content, **change}))
    with pytest.raises(CaptureError, match=sentence):
        _ = made.lines
    found = made.diagnose()  # says so, and loses nothing else
    assert not found.lines
    assert found.largest_parts


# The lines of a detail window.


def traced(act: Callable[[], object]) -> tuple[list[NotedLine], bool]:
    """What is noted while this thread calls `act`, and whether it could be traced."""
    noted: list[NotedLine] = []
    end = trace_lines(noted, lambda file: Path(file).name == HERE)
    act()
    if end is not None:
        end()
    assert sys.gettrace() is None
    return noted, end is not None


def called_twice() -> None:
    for _ in range(2):
        inner()


def inner() -> int:
    return sum(json.loads("[1, 2]"))  # calls functions of a library


def test_every_line_of_the_user_is_noted_with_its_time() -> None:
    began_ns = time.time_ns()
    noted, _ = traced(called_twice)
    lines = [
        (code and code.co_name, line - code.co_firstlineno if code else 0)
        for _, code, line in noted
    ]
    call = [("called_twice", 2), ("inner", 1), ("called_twice", 2), ("called_twice", 1)]
    first = lines.index(("called_twice", 1))
    assert lines[first:][:9] == [("called_twice", 1), *call, *call]
    assert lines[first - 1][0] == lines[first + 9][0] == "traced"  # the line that calls
    assert lines[-1] == (None, 0)  # the end
    times = [began_ns, *(at_ns for at_ns, *_ in noted), time.time_ns()]
    assert times == sorted(times)


def test_many_lines_end_the_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_trace, "_MOST_LINES", 3)
    noted, _ = traced(called_twice)
    assert len(noted) == 4
    assert noted[-1][1] is None
    monkeypatch.setattr(line_trace, "_MOST_CALLS", 1)
    noted, _ = traced(called_twice)
    assert noted[-1][1] is None
    assert "inner" not in {code and code.co_name for _, code, _ in noted}


def test_a_debugger_and_compiled_code_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(counters={"frames": {"ok": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", compiler)
    assert traced(called_twice) == ([], False)
    compiler.counters.clear()
    assert traced(called_twice)[1]

    def debugger(*_: object) -> None: ...

    sys.settrace(debugger)
    try:
        assert trace_lines([], bool) is None
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)


def test_a_debugger_that_begins_meanwhile_keeps_its_frames() -> None:
    end = trace_lines([], lambda file: Path(file).name == HERE)
    debugger = bdb.Bdb()
    try:
        debugger.set_trace()
        end()
        assert sys._getframe().f_trace == debugger.trace_dispatch
    finally:
        debugger.set_quit()
        sys.settrace(None)


def train(model: torch.nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    y = torch.relu(y) + 1
    loss = y.exp().sum()
    loss.backward()


def test_with_a_detail_window_every_operator_and_its_backward_has_its_line(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    step = lambda: train(model, x)  # noqa: E731
    options: dict[str, Any] = {"active": 2, "wait": 1, "detail": 1, "sinks": {}, "lines": True}
    (made,) = run_session(tmp_path, 5, step, export="inline", **options).captures
    rows = made.sql("select name, line, pass from events where kind = 'operator'")
    lines = {(row.name, row.line) for row in rows}
    linear, relu, exp, loss = (line_of(train, after) for after in (1, 2, 3, 4))
    expected = {
        "aten::addmm": linear, "AddmmBackward0": linear, "aten::relu": relu, "ReluBackward0": relu,
        "aten::exp": exp, "ExpBackward0": exp, "aten::sum": exp, "SumBackward0": exp,
        "aten::ones_like": loss, "torch::autograd::AccumulateGrad": linear,
    }  # fmt: skip
    assert expected.items() <= lines
    assert None not in {line for _, line in lines}
    assert made.lines.where(f"line = '{loss}'").frame["with_backward_share"].sum() < 0.2


def test_the_tracing_is_not_compiled() -> None:
    from torch._dynamo.utils import counters

    double = torch.compile(lambda x: x + x, backend="eager")
    noted: list[NotedLine] = []
    end = trace_lines(noted, lambda file: Path(file).name == HERE)
    double(torch.ones(2))
    end()
    assert counters["frames"]["total"] == 1
    assert trace_lines(noted, bool) is None
