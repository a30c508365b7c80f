"""What is kept of a run's captures, and what each says that it has cost."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import loguru
import pytest
import torch
import warm
from collected import Log

from instrument import Session, Sink, Trigger
from instrument.base import queue
from instrument.base.errors import ConfigError
from instrument.base.file_lock import FileLock, is_held
from instrument.base.units import size
from instrument.export.sinks.window_scalars import scalars
from instrument.read.capture import Capture
from instrument.read.show.text import render
from instrument.record.config.schema import as_config
from instrument.record.recorder import RecordedWindow, Recorder
from instrument.record.triggers import Step, TriggerCallbacks

pytestmark = pytest.mark.usefixtures("inline_export")


def record(folder: Path, windows: int, **options: Any) -> Session:
    with Session(active=1, repeat=windows, output_dir=str(folder), **options) as session:
        for _ in range(windows):
            torch.ones(2).sum()
            session.step()
    return session


class InTurn:
    """A sink that only the training process can run, because it holds the list of others."""

    def __init__(self, turns: list[str], name: str) -> None:
        self.turns, self.name = turns, name

    def write(self, capture: Capture, folder: Path) -> None:
        self.turns.append(self.name)


@pytest.mark.parametrize(
    ("order", "last", "turns"), [("ab", "a", "ba"), ("ab", "b", "ab"), ("ba", "", "ba")]
)
def test_order_of_sinks(tmp_path: Path, order: str, last: str, turns: str) -> None:
    """The order of the config, but for those that are last; an object need not say what it is."""
    taken: list[str] = []
    sinks = {name: InTurn(taken, name) for name in order}
    if last:
        for name, sink in sinks.items():
            vars(sink)["last"] = name == last
    record(tmp_path, 1, sinks=sinks)
    assert "".join(taken) == turns


def test_a_window_in_which_no_step_ended_has_no_last_step(tmp_path: Path, log: Log) -> None:
    log.expect("exception KeyError")
    with suppress(KeyError), Session(active=3, output_dir=str(tmp_path)) as session:
        raise KeyError
    (capture,) = session.captures
    about = capture.metadata["window"]
    assert (about["first_step"], about["last_step"], about["steps"]) == (0, None, 0)


def test_a_session_that_has_stopped_is_freed(tmp_path: Path) -> None:
    held = weakref.ref(record(tmp_path, 1))
    gc.collect()
    assert held() is None


def test_a_failure_to_close_is_told(tmp_path: Path, log: Log) -> None:
    class Fails(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["held"] = threading.Lock()  # so that no other process can run it

        def write(self, capture: Capture, folder: Path) -> None: ...

        def close(self, timeout_s: float | None = None) -> None:
            raise KeyError("close")

    record(tmp_path, 2, sinks={"own": Fails()})
    told = [error.partition(":")[0] for error in log.at("ERROR")]
    assert told == ["The own sink failed in close()"]


def test_an_exception_after_the_session_has_stopped_is_not_its_own(tmp_path: Path) -> None:
    told: list[BaseException] = []

    class Watches(Trigger):
        def begin(self, folder: Path, ask: Any) -> TriggerCallbacks:
            return TriggerCallbacks(failed=lambda error, _: told.append(error))

    for stops in (False, True):
        with (
            suppress(KeyError),
            Session(active=1, output_dir=str(tmp_path), triggers={"own": Watches()}) as session,
        ):
            session.step()
            if stops:
                session.stop()
            raise KeyError
    assert len(told) == 1


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("warm_exporters")
@pytest.mark.parametrize("export", ["inline", "process"])
def test_keep_leaves_the_last_captures(tmp_path: Path, export: str) -> None:
    record(tmp_path, 1, export=export)  # another run's is nobody's to remove
    session = record(tmp_path, 5, keep=2, export=export)
    last = ["steps_000003-000003_rank0", "steps_000004-000004_rank0"]
    assert [capture.name for capture in session.captures] == last
    assert on_disk(tmp_path) == ["steps_000000-000000_rank0", *last]


def test_a_disk_budget_removes_the_oldest_and_never_the_last(tmp_path: Path) -> None:
    record(tmp_path / "one", 1)
    size = sum(file.stat().st_size for file in (tmp_path / "one").rglob("*.*"))
    session = record(tmp_path / "many", 6, disk_budget=int(size * 2.5))
    assert len(session.captures) == len(on_disk(tmp_path / "many")) == 2
    assert session.captures[-1].name == "steps_000005-000005_rank0"
    tiny = record(tmp_path / "tiny", 3, disk_budget="1 kB")
    assert [capture.name for capture in tiny.captures] == ["steps_000002-000002_rank0"]


def test_a_disk_budget_is_read_as_people_write_it() -> None:
    assert as_config(disk_budget="2GB").disk_budget == 2_000_000_000
    assert as_config(disk_budget="512 MiB").disk_budget == 512 << 20
    with pytest.raises(ConfigError, match=r"^profiler.disk_budget is 'much', but it"):
        as_config(disk_budget="much")


def cost_line(text: str) -> str:
    """The line on the cost of recording; findings may stand below it."""
    (line,) = (each for each in text.splitlines() if each.startswith("Cost of recording: "))
    return line


def taking(now: list[int], took_ns: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, during which the clock goes on."""

    def slowly(*args: Any, **options: Any) -> Any:
        now[0] += took_ns
        return method(*args, **options)

    return slowly


def test_metadata_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[int]) -> None:
    for kind, method, took_ns in (
        (Recorder, "start", 3_000_000),
        (Recorder, "stop", 4_000_000),
        (RecordedWindow, "save", 5_000_000),
    ):
        monkeypatch.setattr(kind, method, taking(now, took_ns, getattr(kind, method)))
    with Session({"wait": 12, "active": 2, "sinks": ["table"]}, output_dir=tmp_path) as session:
        for step in range(14):
            now[0] += 50_000_000 if step >= 12 else 20_000_000 if step else 500_000_000
            session.step()
    (capture,) = session.captures
    cost = capture.metadata["cost"]
    assert cost["unrecorded_step_ns"] == 20_000_000
    assert cost["recorded_step_ns"] == 50_000_000
    assert cost["unrecorded_steps"] == 11, "the first step is like no other"
    assert cost["packed_bytes"] == (capture.folder / "trace.json.gz").stat().st_size
    assert cost["trace_bytes"] > cost["packed_bytes"]
    assert (cost["start_ns"], cost["stop_ns"], cost["save_ns"]) == (3_000_000, 4_000_000, 5_000_000)
    assert cost["export_ns"] > 0
    foot = cost_line((capture.folder / "table.txt").read_text())
    trace = size(cost["packed_bytes"])
    assert foot == f"Cost of recording: steps +150.0 %, start and end 12.00 ms, trace {trace}."
    assert len(foot) <= 80
    assert cost_line(render(capture)) == foot
    told = dict(scalars(capture))
    assert told["cost/recorded_step_ms"] == 50
    assert told["cost/end_ms"] == 9
    assert told["cost/export_ms"] == cost["export_ns"] / 1e6
    assert told["cost/trace_bytes"] == cost["trace_bytes"]


def test_cost_compares_steps_of_one_kind(tmp_path: Path, now: list[int]) -> None:
    """Every fourth step takes 30 ms, the others 1 ms; recording adds 1 ms to each."""
    with Session(wait=20, active=8, output_dir=tmp_path) as session:
        for step in range(28):
            now[0] += (30 if step % 4 == 3 else 1) * 1_000_000 + (step >= 20) * 1_000_000
            session.step()
    cost = session.captures[0].metadata["cost"]
    assert (cost["recorded_step_ns"], cost["unrecorded_step_ns"]) == (9_250_000, 8_250_000)
    assert cost["unrecorded_steps"] == 19


def test_cost_unknown_after_other_steps(tmp_path: Path, now: list[int]) -> None:
    with Session(wait=20, active=4, output_dir=tmp_path) as session:
        for step in range(24):
            now[0] += 30_000_000 if step < 20 and step % 2 else 1_000_000
            session.step()
    cost = session.captures[0].metadata["cost"]
    assert (cost["recorded_step_ns"], cost["unrecorded_step_ns"]) == (1_000_000, None)


def test_what_is_not_known_of_the_cost_is_not_told(tmp_path: Path) -> None:
    (capture,) = record(tmp_path, 1).captures
    assert capture.metadata["cost"]["unrecorded_step_ns"] is None
    assert "steps " not in cost_line(render(capture))
    assert "cost/unrecorded_step_ms" not in dict(scalars(capture))
    about = json.loads((tmp_path / capture.name / "capture.json").read_text())
    del about["cost"]
    (tmp_path / capture.name / "capture.json").write_text(json.dumps(about))
    older = Capture.load(tmp_path / capture.name)
    assert "Cost of recording" not in render(older)
    assert not [tag for tag, _ in scalars(older) if tag.startswith("cost/")]


def test_each_window_counts_its_own_cost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log, now: list[int]
) -> None:
    log.expect("Recording failed and training goes on")
    save = RecordedWindow.save

    def fails_once(self: RecordedWindow, path: Path, **_: Any) -> None:
        monkeypatch.setattr(RecordedWindow, "save", save)
        raise OSError("the disk is gone")

    monkeypatch.setattr(RecordedWindow, "save", fails_once)
    with Session(warmup=1, active=1, repeat=2, output_dir=tmp_path) as session:
        for took_ns in (300, 301, 5, 7):
            now[0] += took_ns
            session.step()
    (capture,) = session.captures
    cost = capture.metadata["cost"]
    assert cost["recorded_step_ns"] == 7, "and nothing of the lost window's step"
    assert cost["unrecorded_steps"] == 0, "steps of the warm-up are none to compare with"


@pytest.mark.parametrize("how", ["trigger", "phase"])
def test_the_beginning_of_a_recording_counts_in_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, now: list[int]
) -> None:
    monkeypatch.setattr(Recorder, "start", taking(now, 1000, Recorder.start))

    class Second(Trigger):
        def fires(self, step: Step) -> bool:
            return step.number == 1

    config: dict[str, Any] = {"active": 1, "output_dir": str(tmp_path)}
    config |= {"at_steps": []} if how == "trigger" else {"phases": ["validation"]}
    triggers = {"second": Second()} if how == "trigger" else {}
    with (
        Session(config, triggers=triggers) as session,
        session.phase("validation") if how == "phase" else nullcontext(),
    ):
        for _ in range(4):
            now[0] += 7
            session.step()
    cost = session.captures[0].metadata["cost"]
    assert (cost["recorded_step_ns"], cost["start_ns"]) == (7, 1000)


def test_a_window_is_compared_with_the_last_fifty_steps(tmp_path: Path) -> None:
    with Session(active=1, wait=60, output_dir=tmp_path) as session:
        for _ in range(61):
            session.step()
    assert session.captures[0].metadata["cost"]["unrecorded_steps"] == 50


def test_freeing_counts_as_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed, save = [], RecordedWindow.save

    def saved(self: RecordedWindow, path: Path, **options: Any) -> None:
        held = weakref.ref(self.profile.profiler)
        save(self, path, **options)
        freed.append(held() is None)

    monkeypatch.setattr(RecordedWindow, "save", saved)
    record(tmp_path, 1)
    assert freed == [True]


SAVES = """
    import signal, sys
    from instrument import Session
    from instrument.record.recorder import RecordedWindow

    def save(*_, **__):
        print("saves", flush=True)
        signal.pause()

    RecordedWindow.save = save
    with Session(active=1, execution_trace=True, output_dir=sys.argv[1]) as session:
        session.step()
"""


def test_what_a_run_writes_is_nobodys_to_remove_until_it_has_ended(tmp_path: Path) -> None:
    other = warm.Script(["-c", dedent(SAVES), str(tmp_path)], tmp_path, os.environ)
    assert other.stdout.readline() == "saves\n"
    queue.remove_stale(tmp_path)
    left = on_disk(tmp_path)
    other.kill()
    other.wait()
    assert len(left) == 3, "whatever its process number is, and on whatever machine it runs"
    queue.remove_stale(tmp_path)
    assert on_disk(tmp_path) == []


def test_windows_that_an_ended_run_has_left_queued_are_named(tmp_path: Path, log: Log) -> None:
    queue.remove_stale(tmp_path)
    assert log == []
    run = "a" * 32
    lock = FileLock(queue.lock_of(tmp_path, run))
    assert lock.hold()
    for name in ("first", "second"):
        queue.queue(queue.stage(tmp_path, name, run), {"run": run})
    queue.queue(queue.stage(tmp_path, "of nobody"), {})
    queue.remove_stale(tmp_path)
    assert log == [], "the run is alive"
    lock.release(done=False)
    queue.remove_stale(tmp_path)
    assert log == [
        "WARNING An earlier run recorded first, second but has not finished them: "
        f"`instrument export {tmp_path}` does, with the default sinks."
    ]


def test_where_no_lock_tells_what_is_half_written_stays_for_a_day(tmp_path: Path) -> None:
    unlocked, unnamed, old = (
        queue.stage(tmp_path, name) for name in ("unlocked", "unnamed", "old")
    )
    (unnamed / "owner").unlink()
    os.utime(old, (0, 0))
    (tmp_path / ".link.partial").symlink_to(tmp_path / "elsewhere")
    queue.remove_stale(tmp_path)
    assert on_disk(tmp_path) == [".link.partial", ".unlocked.partial", ".unnamed.partial"]
    assert unlocked.is_dir()


def test_a_forked_child_does_not_keep_its_parents_run_alive(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "locked")
    (reading, writing), (heard, said) = os.pipe(), os.pipe()
    assert lock.hold()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(said, b"here")
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    os.close(reading)
    os.read(heard, 4)
    assert is_held(tmp_path / "locked")
    os.close(lock.handle or -1)  # as if the parent had been killed
    lock.handle = None
    assert is_held(tmp_path / "locked") is False
    for end in (writing, heard, said):
        os.close(end)
    os.waitpid(child, 0)


def test_a_step_number_set_in_a_window_ends_it(tmp_path: Path, log: Log) -> None:
    log.expect("session.step_number was set")
    options = {"active": 2, "repeat": 0, "wait": 2, "output_dir": str(tmp_path)}
    with Session(options) as session:
        for step in range(12):
            if step == 3:
                session.step_number = 1003
            session.step()
    first, *others = session.captures
    assert first.metadata["window"]["reason"] == "session.step_number was set"
    assert (first.name, len(first.steps)) == ("steps_000002-000002_rank0", 1)
    assert [len(capture.steps) for capture in others] == [2, 2]
    assert [capture.metadata["window"]["first_step"] for capture in others] == [1006, 1010]


def test_step_number_set_in_the_first_step(tmp_path: Path, log: Log) -> None:
    log.expect("is not recorded: session.step_number was set")
    with Session(wait=1, active=2, output_dir=tmp_path) as session:
        session.step()
        session.step_number = 9
        session.step()
    assert session.captures == []


def test_a_run_that_begins_at_a_step_counts_from_there(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")
    with Session(skip_first=4, active=2, output_dir=tmp_path) as session:
        session.step_number = 4
    assert "The run ended after 0 steps" in "".join(log.at("WARNING"))
    session.step_number = 4  # where the run ended: the user sets it, so the next run begins there
    with session:
        session.step()
    assert [capture.name for capture in session.captures] == ["steps_000004-000004_rank0"]


@pytest.mark.usefixtures("warm_exporters")
@pytest.mark.parametrize("export", ["inline", "process"])
def test_on_capture_on_the_training_thread(tmp_path: Path, export: str) -> None:
    seen: list[tuple[int, str, float]] = []

    def note(folder: Path, scalars: dict[str, float]) -> None:
        assert (folder / "capture.json").exists()
        assert scalars["window/steps"] == 1
        seen.append((threading.get_ident(), folder.name, scalars["step"]))

    with Session(active=1, repeat=2, output_dir=tmp_path, export=export, on_capture=note) as run:
        for _ in range(2):
            run.step()
        while not seen:  # at the end of a step, not only at the end of the run
            run.step()
            time.sleep(0.001)
    mine = threading.get_ident()
    assert seen == [(mine, f"steps_{n:06d}-{n:06d}_rank0", n) for n in range(2)]


def test_logged_errors_show_no_values(tmp_path: Path, log: Log) -> None:
    log.expect("profiler.on_capture.function failed")

    def fails(folder: Path, scalars: dict[str, float]) -> None:
        token = "not" + "-for-the-log"
        raise ValueError(f"{len(token)}\nforged")

    written: list[str] = []
    handler = loguru.logger.add(written.append, diagnose=True)
    record(tmp_path, 1, on_capture={"function": fails})
    loguru.logger.remove(handler)
    text = "".join(written)
    assert 'raise ValueError(f"{len(token)}' in text
    assert "\nforged" not in text
    assert "not-for-the-log" not in text


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_failing_callback(tmp_path: Path, log: Log, kind: type[BaseException]) -> None:
    called: list[str] = []

    class Fails:
        def begin(self) -> None:
            called.append("begin")

        def __call__(self, folder: Path, scalars: dict[str, float]) -> None:
            scalars.clear()
            raise kind("'no'" if kind is SystemExit else "no")

        def close(self, timeout_s: float | None) -> None:
            called.append(f"close {timeout_s}")

    callbacks = {"fails": Fails(), "notes": lambda folder, scalars: called.append(folder.name)}
    session = record(tmp_path, 2, on_capture=callbacks)
    names = [capture.name for capture in session.captures]
    assert called == ["begin", *names, "close None"]
    (error,) = log.at("ERROR")
    assert error.startswith("profiler.on_capture.fails failed ('no'); further failures of it are ")


def test_a_callback_may_stop_the_session(tmp_path: Path) -> None:
    with Session(
        active=1, repeat=0, output_dir=tmp_path, on_capture=lambda *_: session.stop()
    ) as session:
        for _ in range(3):
            session.step()
    assert len(session.captures) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_close_timeout_where_training_failed(tmp_path: Path, fails: bool) -> None:
    calls: list[tuple[str, float | None]] = []

    class Records(Sink):
        def write(self, capture: Capture, folder: Path) -> None:
            calls.append(("write", None))

        def close(self, timeout_s: float | None = None) -> None:
            calls.append(("close", timeout_s))

    options: dict[str, Any] = {"active": 1, "sinks": {"records": Records()}}
    with suppress(ZeroDivisionError), Session(options, output_dir=tmp_path) as session:
        session.step()
        assert calls == [("write", None)]
        assert 1 / (not fails)
    assert calls == [("write", None), ("close", 5.0 if fails else None)]
