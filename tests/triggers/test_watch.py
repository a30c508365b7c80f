"""What all triggers share: cooldown, limit, reason, polling thread; and the triggers' group."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
from collected import Log
from recording import run_session
from waits import end_of_thread

from instrument import Session, Trigger
from instrument.base.errors import ConfigError
from instrument.record import trigger_runner as watching
from instrument.record.trigger_runner import TriggerRunner
from instrument.record.triggers import Request, RequestWindow, Step, TriggerCallbacks

pytestmark = pytest.mark.usefixtures("inline_export")


class Always(Trigger):
    """Fires after every step."""

    def fires(self, step: Step) -> bool:
        return True


def fired(folder: Path, steps: int, **triggers: Any) -> list[tuple[int, str]]:
    """The steps after which a window is asked for, and by which trigger."""
    watch = TriggerRunner(triggers, folder)
    found = [(number, watch.after(number, 1, None, recorded=False)) for number in range(steps)]
    return [(number, asked[0]) for number, asked in found if asked]


def test_a_trigger_rests_and_has_a_last_window(tmp_path: Path, log: Log) -> None:
    found = fired(tmp_path, 20, mine=Always(cooldown=3, max_windows=3))
    assert found == [(0, "mine"), (4, "mine"), (8, "mine")]
    assert log.at("WARNING") == [
        "The trigger mine fired again, but its max_windows allows no further window: no window is "
        "recorded."
    ]
    assert len(fired(tmp_path, 5, mine=Always(cooldown=0, max_windows=None))) == 5


def test_plain_object_has_the_same_limits(tmp_path: Path, log: Log) -> None:
    log.expect("allows no further window")
    plain: Any = SimpleNamespace(fires=lambda step: True)
    assert fired(tmp_path, 1000, mine=plain) == fired(tmp_path, 1000, mine=Always())


def test_of_two_that_fire_at_once_the_second_keeps_its_window(tmp_path: Path) -> None:
    found = fired(tmp_path, 3, one=Always(max_windows=1), two=Always(max_windows=1))
    assert found == [(0, "one"), (1, "two")]


def test_while_a_window_is_open_nothing_is_used_up(tmp_path: Path) -> None:
    watch = TriggerRunner({"mine": Always(max_windows=1)}, tmp_path)
    assert watch.after(0, 1, None, recorded=True) is None
    assert watch.after(1, 1, None, recorded=False) == ("mine", Request())


def test_the_reason_and_the_steps_asked_for_stand_in_the_capture(tmp_path: Path, log: Log) -> None:
    class Asks:
        def fires(self, step: Step) -> Request | None:
            return Request("the moon is full", steps=3) if step.number == 1 else None

    (capture,) = run_session(tmp_path, 8, at_steps=[], triggers={"moon": Asks()}).captures
    about = json.loads((capture.folder / "capture.json").read_text())["window"]
    assert (about["trigger"], about["trigger_reason"]) == ("moon", "the moon is full")
    assert capture.steps.column("number") == [2, 3, 4]
    assert "The trigger moon fired (the moon is full) and records steps 2–4." in log.at("INFO")
    assert "Profiler records the windows that triggers request, on cpu" in log.at("INFO")[0]


def test_a_sentence_is_a_reason(tmp_path: Path) -> None:
    says: Any = SimpleNamespace(fires=lambda step: "it is step 2" if step.number == 2 else None)
    asked = TriggerRunner({"mine": says}, tmp_path).after(2, 1, None, recorded=False)
    assert asked == ("mine", Request("it is step 2"))


def test_a_trigger_without_anything_to_ask_is_refused_when_built() -> None:
    class Nothing(Trigger):
        pass

    with pytest.raises(ConfigError, match=r"The trigger Nothing must define fires\(self, step\)\."):
        Nothing()


class Polled(Trigger):
    """Tells which thread polls it and what was called."""

    calls: list[Any]
    fails: bool = False

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
        calls, done = self.calls, Event()
        self.calls.append(done)

        def poll() -> None:
            calls.append(get_ident())
            done.set()
            if self.fails:
                raise OSError("the network is gone")

        return TriggerCallbacks(poll=poll, end=lambda: calls.append("ended"))


def test_polling_off_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.001)
    trigger = Polled(calls=[])
    calls = trigger.calls
    with Session({"at_steps": [], "output_dir": tmp_path}, triggers={"polled": trigger}):
        assert calls[0].wait()
    ended = calls.index("ended")
    assert set(calls[1:ended]).isdisjoint({get_ident()})


def test_failing_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.001)
    trigger = Polled(calls=[], fails=True)
    watch = TriggerRunner({"polled": trigger}, tmp_path)
    assert trigger.calls[0].wait()
    watch.end()
    end_of_thread("instrument-triggers")
    assert [type(call) for call in trigger.calls[1:]] == [int, str], "polled once, and ended"
    (error,) = log.at("ERROR")
    assert error.startswith("The trigger polled failed and is not called again.")


def test_a_trigger_that_cannot_begin_costs_no_run(tmp_path: Path, log: Log) -> None:
    class Fails(Trigger):
        def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
            raise OSError("no")

    session = run_session(tmp_path, 3, at_steps=[1], active=1, triggers={"mine": Fails()})
    assert len(session.captures) == 1
    assert "The trigger mine could not begin and is never called." in log.at("ERROR")[0]


@pytest.mark.parametrize("where", ["begin", "poll", "failed", "end"])
def test_a_trigger_that_would_leave_the_program_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log, where: str
) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.001)
    left = Event()

    def leave(*_: Any) -> None:
        left.set()
        raise SystemExit(3)

    class Leaves(Trigger):
        def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
            if where == "begin":
                leave()
            return TriggerCallbacks(**{where: leave})

    options = {"at_steps": [1], "active": 1, "export": "inline", "output_dir": tmp_path}
    session = Session(options, triggers={"mine": Leaves()})

    def train() -> None:
        with session:
            for _ in range(3):
                session.step()
            assert where in ("failed", "end") or left.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert left.is_set()
    assert len(session.captures) == 1
    (error,) = log.at("ERROR")
    assert error.startswith("The trigger mine ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_within_a_trigger(tmp_path: Path, error: type[BaseException]) -> None:
    """It may come from a signal handler of the program."""

    class Interrupted(Trigger):
        def fires(self, step: Step) -> bool:
            raise error

    options = {"at_steps": [], "output_dir": tmp_path}
    with pytest.raises(error), Session(options, triggers={"mine": Interrupted()}) as session:
        session.step()


def test_no_window_begins_while_a_run_is_being_ended(tmp_path: Path) -> None:
    class Steps(Trigger):
        def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
            def end() -> None:
                for _ in range(3):  # as another thread may do
                    ask(Request("too late"))
                    session.step()

            return TriggerCallbacks(end=end)

    options = {"active": 1, "repeat": 0, "output_dir": tmp_path, "export": "inline"}
    with Session(**options, triggers={"steps": Steps()}) as session:
        session.step()
    assert session._loop.window is None
    assert [capture.metadata["window"]["first_step"] for capture in session.captures] == [0]
    assert session.step_number == 4


def test_poll_stops_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("session.step() was never called")
    monkeypatch.setattr("instrument.record.trigger_runner.POLL_SECONDS", 0.001)
    begun, over = Event(), Event()

    class Stops(Trigger):
        def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
            def poll() -> None:
                begun.wait()
                session.stop()
                over.set()

            return TriggerCallbacks(poll=poll)

    # no handler of SIGTERM, because only the main thread can remove it
    options = {"active": 9, "output_dir": tmp_path, "preemption_grace_s": None}
    session = Session(**options, profile_all_threads=True, triggers={"s": Stops()})
    session.start()
    begun.set()
    assert over.wait()
    assert not session.running
