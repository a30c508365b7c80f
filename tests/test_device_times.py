"""Times on the device, with events of the tests' own; tests/gpu has those of a real one."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from collected import Log

from instrument import Session, profiled
from instrument.read.views.timings_file import read_timings
from instrument.record import timings
from instrument.record.timings import DeviceTimes


class FakeEvent:
    made = 0

    def __init__(self, device: FakeCuda) -> None:
        self.device, self.at_ns, self.passed = device, 0, False
        FakeEvent.made += 1

    def record(self) -> None:
        self.at_ns, self.passed = self.device.now_ns, False
        self.device.recorded.append(self)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.passed
        assert end.passed
        return (end.at_ns - self.at_ns) / 1e6


class FakeCuda:
    """As much of torch.cuda as is asked for, with a stream that moves on when the test says so."""

    def __init__(self) -> None:
        self.now_ns, self.device, self.capturing, self.initialized = 0, 0, False, True
        self.recorded: deque[FakeEvent] = deque()
        FakeEvent.made = 0

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        return FakeEvent(self)

    def current_device(self) -> int:
        return self.device

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def passes(self, events: int) -> None:
        for _ in range(events):
            self.recorded.popleft().passed = True


def ranged(times: DeviceTimes, cuda: FakeCuda, name: str, ns: int) -> None:
    handle = times.backend.open(name)
    cuda.now_ns += ns
    times.backend.close(handle)


def device_calls(times: DeviceTimes) -> dict[str, tuple[int, int]]:
    return {
        name: (tally.calls, tally.total_ns)
        for name, row in times.rows.items()
        if (tally := row.take_recent()).calls
    }


def test_device_times_are_read_once_the_device_is_past_them() -> None:
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    ranged(times, cuda, "first", 1_000)
    ranged(times, cuda, "second", 3_000)
    times.collect()
    assert device_calls(times) == {}
    cuda.passes(3)  # in the midst of the second
    times.collect()
    assert device_calls(times) == {"first": (1, 1_000)}
    cuda.passes(1)
    times.collect()
    assert device_calls(times) == {"second": (1, 3_000)}


def test_events_are_used_again() -> None:
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    for _ in range(50):
        ranged(times, cuda, "range", 10)
        cuda.passes(2)
        times.collect()
    assert FakeEvent.made == 2
    assert device_calls(times) == {"range": (50, 500)}


def test_a_device_far_behind_leaves_ranges_unknown_and_memory_bounded() -> None:
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    for _ in range(20_000):
        ranged(times, cuda, "range", 10)
    assert FakeEvent.made == 2 * 16_384
    cuda.passes(2 * 16_384)
    times.collect()
    assert device_calls(times) == {"range": (16_384, 163_840)}
    ranged(times, cuda, "range", 10)
    assert len(cuda.recorded) == 2


def test_where_events_must_not_be_touched_none_is() -> None:
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    cuda.initialized = False
    ranged(times, cuda, "before CUDA", 10)
    cuda.initialized, cuda.capturing = True, True
    ranged(times, cuda, "in a graph's capture", 10)
    times.collect()
    assert not cuda.recorded
    cuda.capturing = False
    handle = times.backend.open("moves")
    cuda.device = 1
    times.backend.close(handle)
    ranged(times, cuda, "there", 10)
    cuda.passes(3)
    times.collect()
    assert device_calls(times) == {"there": (1, 10)}


def test_a_range_that_ends_in_another_stream_waits_for_both() -> None:
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    ranged(times, cuda, "behind", 10)
    ranged(times, cuda, "ahead", -10)  # its stream had passed the end before the other the begin
    begin, *others = list(cuda.recorded)
    for event in others:
        event.passed = True
    times.collect()
    assert device_calls(times) == {}
    begin.passed = True
    times.collect()
    assert device_calls(times) == {"behind": (1, 10)}
    ranged(times, cuda, "later", 5)
    assert FakeEvent.made == 4


def test_failing_device_is_said_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:

    def fails(_: FakeEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "record", fails)
    cuda = FakeCuda()
    times = DeviceTimes(cuda)
    for _ in range(3):
        ranged(times, cuda, "range", 10)
        times.collect()
    assert log.at("ERROR") == [
        "Timings measure no device times from now on: an illegal memory access was encountered"
    ]
    assert FakeEvent.made == 1


def test_device_times_beside_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timings, "DeviceTimes", lambda: DeviceTimes(cuda))
    with Session("timings", output_dir=str(tmp_path)) as session:
        for _ in range(2):
            with profiled("forward"):
                cuda.now_ns += 7_000
            cuda.passes(len(cuda.recorded))
            session.step()
    forward = session.timings.table().where(name="forward")[0]
    assert (forward.calls, forward.device_calls, forward.device_mean_ns) == (2, 2, 7_000)
    assert list(read_timings(tmp_path / "timings_rank0.jsonl")[0]) == list(session.timings.table())
