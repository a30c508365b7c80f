"""`@session.record`: a session driven by the calls of a function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event, Thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from torch import nn

from instrument import Session, profiled
from instrument.annotate import backends
from instrument.base.errors import ConfigError
from instrument.record import limits, step_loop
from instrument.record.step_loop import StepLoop

pytestmark = pytest.mark.usefixtures("inline_export")


def windows(session: Session) -> list[list[int]]:
    return [capture.steps.column("number") for capture in session.captures]


def calls(session: Session, name: str) -> list[int]:
    """How often the range of this name was called, by window."""
    return [
        sum(row.calls for row in capture.ranges.where(name=name)) for capture in session.captures
    ]


def test_without_a_schedule_the_first_call_is_the_window(tmp_path: Path) -> None:
    session = Session(active=None, output_dir=tmp_path)

    @session.record
    def predict(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Doubles."""
        return x.mul(scale)

    assert (predict.__name__, predict.__doc__) == ("predict", "Doubles.")
    for _ in range(3):
        assert predict(torch.ones(2), scale=3.0).tolist() == [3.0, 3.0]
    (capture,) = session.captures
    assert windows(session) == [[0]]
    assert capture.metadata["window"]["truncated"] is False
    (row,) = capture.ranges.where(name=predict.__qualname__)
    assert row.calls == 1
    assert [r.calls for r in capture.operators.where(name="aten::mul")] == [1]


def test_every_window_of_the_schedule_is_recorded_and_then_nothing_is_left(tmp_path: Path) -> None:
    session = Session({"wait": 1, "warmup": 1, "active": 3, "repeat": 2}, output_dir=tmp_path)
    seen = []
    predict = session.record(seen.append)
    for number in range(9):
        predict(number)
        assert session.step_number == number + 1
    assert repr(session) == "<Session: records steps 7–9 (counted from 0); at step 9, 1 capture>"
    predict(9)
    assert windows(session) == [[2, 3, 4], [7, 8, 9]]
    assert "not running" in repr(session)
    assert not backends.armed
    predict(10)
    assert (session.step_number, len(session.captures)) == (10, 2)
    assert seen == list(range(11))


def test_methods_bound_or_not(tmp_path: Path) -> None:
    session = Session(active=3, output_dir=tmp_path)

    class Server:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 1)

        @session.record
        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.predict(x)  # a call within a call is no step of its own

    server = Server()
    server.predict(torch.ones(2))
    session.record(server.other)(torch.ones(2))
    session.record(server.model.__call__, name="model")(torch.ones(2))
    assert windows(session) == [[0, 1, 2]]
    name = f"{test_methods_bound_or_not.__name__}.<locals>.Server."
    assert (calls(session, f"{name}predict"), calls(session, f"{name}other")) == ([2], [1])
    assert calls(session, "model") == [1]


def test_an_exception_comes_out_unchanged_and_the_call_counts(tmp_path: Path) -> None:
    session = Session(active=2, output_dir=tmp_path)
    mine = ZeroDivisionError("mine")

    @session.record
    def predict(fails: bool) -> None:
        if fails:
            raise mine

    with pytest.raises(ZeroDivisionError) as raised:
        predict(True)
    assert raised.value is mine
    predict(False)
    assert windows(session) == [[0, 1]]


def test_coroutines_and_generators_count_when_they_are_through(tmp_path: Path) -> None:
    session = Session(active=3, output_dir=tmp_path)

    @session.record
    async def answer(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    @session.record
    def tokens(count: int) -> Iterator[int]:
        yield from range(count)
        return "end"

    async def both() -> list[int]:
        return await asyncio.gather(answer(1), nested())

    @session.record
    async def nested() -> int:
        return await answer(2)  # a call within a call

    assert asyncio.run(both()) == [2, 3]
    assert session.step_number == 2
    stream = tokens(3)
    assert next(stream) == 0
    assert session.step_number == 2
    assert list(stream) == [1, 2]
    assert windows(session) == [[0, 1, 2]]
    assert (asyncio.run(answer(3)), list(tokens(2))) == (4, [0, 1])
    assert session.step_number == 3


def test_calls_count_from_any_thread(tmp_path: Path) -> None:
    options: dict[str, Any] = {"active": 2, "profile_all_threads": True}
    session = Session(**options, preemption_grace_s=None, output_dir=tmp_path)
    seen: list[Any] = []
    predict = session.record(seen.append)
    predict("first")
    other = Thread(target=predict, args=("other",))
    other.start()
    other.join()
    assert session.step_number == 2
    predict("last")
    assert seen == ["first", "other", "last"]
    assert windows(session) == [[0, 1]]


def test_concurrent_calls_are_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a step waits as long as another thread takes to begin or end the window
    monkeypatch.setattr(step_loop, "_WAIT_S", 120.0)
    session = Session(wait=4, active=12, profile_all_threads=True, output_dir=tmp_path)
    together = Barrier(4)

    @session.record
    def predict(x: torch.Tensor) -> torch.Tensor:
        with profiled("inside"):
            together.wait(120)
        return x.mul(2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(predict, [torch.ones(2)] * 24))
    (capture,) = session.captures
    steps = capture.steps
    assert steps.column("number") == list(range(4, 16))
    assert all(one.start_ns + one.duration_ns <= other.start_ns for one, other in pairwise(steps))
    assert capture.metadata["window"]["truncated"] is False
    (row,) = [row for row in capture.ranges if row.name.endswith("predict")]
    assert 12 <= row.calls <= 16, "those that ended as steps, and those that still ran"
    inside = sum(row.calls for row in capture.ranges.where(name="inside"))
    assert inside == row.calls
    assert "not running" in repr(session)


def test_a_call_that_began_before_the_window_is_none_of_its_steps(tmp_path: Path) -> None:
    session = Session(wait=1, active=2, profile_all_threads=True, output_dir=tmp_path)
    begun, go_on = Event(), Event()

    @session.record
    def predict(waits: bool) -> None:
        if waits:
            begun.set()
            go_on.wait(120)

    early = Thread(target=predict, args=(True,))
    early.start()
    begun.wait(120)
    predict(False)  # the step before the window
    predict(False)
    assert session.step_number == 2
    go_on.set()
    early.join()
    assert session.step_number == 2
    predict(False)
    assert windows(session) == [[1, 2]]


def test_idle_window_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    now = [0.0]
    monkeypatch.setattr(limits, "_LOOK_S", 0.01)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    options: dict[str, Any] = {"active": 5, "profile_all_threads": True, "max_window_s": 10}
    session = Session(**options, output_dir=tmp_path)
    predict = session.record(lambda: torch.ones(2).sum())
    predict()
    (watching,) = [each for each in enumerate_threads() if each.name == "instrument-limits"]
    now[0] = 20.0
    watching.join(120)
    session.wait()
    about = session.capture.metadata["window"]
    assert (about["steps"], about["truncated"]) == (1, True)
    assert about["reason"] == "profiler.max_window_s=10 was reached"
    assert not backends.armed
    predict()
    assert not session.running, "the next call finds that nothing is ahead"
    assert "ended early, after 1 of 5 steps" in log.at("WARNING")[0]


def test_too_few_calls_are_told_as_calls(tmp_path: Path, log: Log) -> None:
    session = Session(wait=3, active=2, output_dir=tmp_path)
    session.record(lambda: None)()
    session.stop()
    assert log.at("WARNING") == [
        "The run ended after 1 call, before the first window (steps 3–4) had recorded a step: lower profiler.wait, or "
        "make more calls."
    ]


def test_a_session_that_runs_stays_its_owners(tmp_path: Path) -> None:
    session = Session(active=2, output_dir=tmp_path)
    predict = session.record(lambda: None)
    with session:
        for _ in range(3):
            predict()
        assert "; at step 3" in repr(session)
    predict()
    assert session.step_number == 3
    assert windows(session) == [[0, 1]]


def test_after_its_own_stop_the_program_may_start_the_session_again(tmp_path: Path) -> None:
    session = Session(active=1, repeat=1, output_dir=tmp_path)
    function = session.record(lambda: torch.ones(1) + 1)
    for _ in range(3):
        function()
    assert not session.running
    with session:
        function()
    assert [len(capture.steps) for capture in session.captures] == [1, 1]


def test_disabled_or_refused_the_function_just_runs(tmp_path: Path, log: Log) -> None:
    log.expect("session.step() was never called")
    predict = Session("disabled").record(lambda x: x + 1)
    assert [predict(1), predict(2)] == [2, 3]
    session = Session(active=None, output_dir=tmp_path / "one")
    company = Session(active=5, output_dir=tmp_path / "two")
    predict = session.record(lambda x: x + 1)
    with company:
        assert [predict(1), predict(2)] == [2, 3]
    (said,) = log.at("ERROR")
    assert said.startswith("session.record cannot start the session, so no call is recorded: ")
    assert session.captures == []


def test_under_compile_the_function_stays_in_the_graph(tmp_path: Path) -> None:
    session = Session(active=None, output_dir=tmp_path)
    predict = torch.compile(session.record(lambda x: x.relu() + 1), backend="eager", fullgraph=True)
    assert predict(torch.ones(2)).tolist() == [2.0, 2.0]
    assert session.captures == []


def test_what_is_no_function_is_refused() -> None:
    async def stream() -> Any:
        yield 1

    session = Session(active=None)
    with pytest.raises(ConfigError) as module:
        session.record(nn.Linear(2, 1))
    assert str(module.value) == (
        "session.record was given a Linear, but it takes a function or method: for a module, pass model.__call__."
    )
    with pytest.raises(
        ConfigError, match=r"^session\.record was given stream, an asynchronous gen"
    ):
        session.record(stream)


def test_calls_while_a_session_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting, go_on = Event(), Event()

    def slowly(_: StepLoop) -> bool:
        starting.set()
        return go_on.wait(120)

    monkeypatch.setattr(StepLoop, "may_record", slowly)
    session = Session(wait=1, active=2, profile_all_threads=True, output_dir=tmp_path)
    predict = session.record(lambda: None)
    first = Thread(target=predict)
    first.start()
    starting.wait(120)
    for _ in range(20):
        predict()
    go_on.set()
    first.join()
    for _ in range(3):
        predict()
    assert windows(session) == [[1, 2]]


@pytest.mark.parametrize(
    "options", [{"triggers": {"file": {}}}, {"timings": {}}], ids=["triggers", "timings"]
)
def test_calls_after_the_last_window(tmp_path: Path, options: Any) -> None:
    session = Session({"active": 1, **options}, output_dir=tmp_path)
    predict = session.record(torch.ones)
    for _ in range(3):
        predict(2)
    assert (session.running, session.step_number, windows(session)) == (True, 3, [[0]])
    session.stop()
    assert windows(session) == [[0]]


def test_waiting_blocks_no_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = Event(), Event()

    def deliver(loop: StepLoop, *about: Any) -> None:
        began.set()
        assert goes_on.wait(60)
        right(loop, *about)

    right = StepLoop.deliver
    monkeypatch.setattr(StepLoop, "deliver", deliver)
    session = Session(active=2, output_dir=tmp_path)

    @session.record
    async def predict(x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return x.mul(2)

    async def others() -> bool:
        while not began.is_set():
            await asyncio.sleep(0)
        goes_on.set()
        return True

    async def main() -> bool:
        task = asyncio.create_task(others())
        for _ in range(3):
            await predict(torch.ones(2))
        return await task

    assert asyncio.run(main())
    assert windows(session) == [[0, 1]]
