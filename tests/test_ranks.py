"""Which ranks record, at which step all of them do, and into which folder; in one process here, then in real jobs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import numpy as np
import pytest
import warm
from collected import Log
from torch import distributed as dist
from waits import end_of_thread

from instrument import Capture, ProfilerConfig, Session, Trigger
from instrument.base import queue
from instrument.base.errors import CaptureError, ConfigError
from instrument.base.rank_info import RankInfo, rank_info
from instrument.cli.command import main
from instrument.read.ranks.run import Run
from instrument.record import distributed
from instrument.record import trigger_runner as watching
from instrument.record.distributed import Announcements, StepProgress
from instrument.record.trigger_runner import TriggerRunner
from instrument.record.triggers import Request, Step
from instrument.record.triggers.trigger import TriggerCallbacks

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
MS = 1_000_000


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in LAUNCHED or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("chosen", "recording"),
    [
        ("all", [0, 1, 2, 3]),
        ("one_per_role", [0, 1, 2, 3]),
        ([0, 3], [0, 3]),
        ([3, 9], [3]),
        ("first_per_node", [0, 2]),
        ([7], []),
    ],
)
def test_each_rank_knows_whether_it_records(chosen: Any, recording: list[int], log: Log) -> None:
    if chosen in ([3, 9], [7]):
        log.expect("profiler.ranks names")
    infos = [RankInfo(rank, 4, rank % 2) for rank in range(4)]
    assert [each.rank for each in infos if distributed.records(chosen, each)] == recording


def test_a_rank_that_does_not_exist_is_warned_of_on_rank_0_alone(log: Log) -> None:
    for rank in range(2):
        distributed.records([7], RankInfo(rank, 2, rank))
        distributed.records([1, 7, 8], RankInfo(rank, 2, rank))
    distributed.records([1], RankInfo(0, 1, 0))
    assert log.at("WARNING") == [
        "profiler.ranks names 7, but the run has 2 ranks, 0 to 1: nothing is recorded.",
        "profiler.ranks names 7 and 8, but the run has 2 ranks, 0 to 1: the other ranks record.",
        "profiler.ranks names 1, but the run has only rank 0: nothing is recorded.",
    ]


@pytest.mark.parametrize("value", ["first", [], [-1], [True], 0, ["0"], [0.0], {}])
def test_what_names_no_ranks_is_refused(value: Any) -> None:
    said = re.escape(
        f"profiler.ranks is {value!r}, but it must be all, first_per_node, one_per_role, or a list of ranks such as [0, 3]."
    )
    with pytest.raises(ConfigError, match=said):
        ProfilerConfig(ranks=value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "2"}, (5, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}, (2, 4, 0)),
        # a batch script, which is no task of eight
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
            },
            (3, 4, 3),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3)),
        ({"RANK": "", "WORLD_SIZE": "4"}, (0, 1, 0)),
    ],
)
def test_a_launcher_says_which_rank_this_is(
    environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank_info() == expected


def test_rank_of_torchs_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert rank_info() == (2, 4, 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert rank_info() == (2, 4, 0)


def test_rank_not_in_ranks(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Session(
        active=1, ranks=[0], triggers=["file", "signal"], timings={}, output_dir=tmp_path / "none"
    ) as session:
        for _ in session.steps(range(3)):
            assert threads() == []
    assert (session.captures, session.output_dir, session.step_number) == ([], None, 3)
    assert list(tmp_path.iterdir()) == []
    assert log == ["INFO Rank 1 records nothing: profiler.ranks is [0]."]


def test_rank_in_name_and_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Session(active=1, ranks=[1], export="inline", output_dir=tmp_path) as session:
        session.step()
    (capture,) = session.captures
    assert capture.name == "steps_000000-000000_rank1"
    assert (capture.metadata["rank"], capture.metadata["world_size"]) == (1, 2)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("instrument")]


def test_a_window_is_announced_so_early_that_all_ranks_read_it() -> None:
    steps = (MS, 100 * MS, 700 * MS, 60_000 * MS)
    assert [distributed.steps_ahead(step_ns, 0.5) for step_ns in steps] == [1500, 15, 3, 2]
    assert [distributed.steps_ahead(step_ns, 10) for step_ns in steps] == [11_000, 110, 16, 2]


def test_more_ranks_look_for_announcements_less_often() -> None:
    ranks = (1, 8, 500, 1000, 10_000)
    assert [*map(distributed.exchange_seconds, ranks)] == [0.5, 0.5, 0.5, 1, 10]


class At(Trigger):
    """Fires after these steps on one rank, or on all."""

    steps: list[int]
    rank: int | None = None
    cooldown: int = 0

    def fires(self, step: Step) -> str | None:
        return "it is time" if step.number in self.steps else None


class Rank:
    """One rank of two in this process: its watch, and the windows that it would begin, by their step."""

    running: ClassVar[list[TriggerRunner]] = []

    def __init__(self, rank: int, store: Any, folder: Path, trigger: Any, **options: Any) -> None:
        self.config = ProfilerConfig(triggers={"mine": trigger}, active=3, **options)
        self.step, self.began, self.step_ns = 0, {}, 100 * MS
        announcements = Announcements(
            store, rank, self.config, lambda: StepProgress(self.step, self.step_ns)
        )
        self.watch = TriggerRunner(self.config.triggers, folder, announcements)
        self.running.append(self.watch)

    def goes_on(self, steps: int, *, recorded: bool = False) -> None:
        for number in range(self.step, self.step + steps):
            if asked := self.watch.after(number, self.step_ns, None, recorded=recorded):
                self.began[number + 1] = asked
            self.step = number + 1


@pytest.fixture(autouse=True)
def _ranks_end() -> Iterator[None]:
    yield
    while Rank.running:
        Rank.running.pop().end()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watching, "POLL_SECONDS", 1000)  # by hand
    return dist.HashStore()


@pytest.fixture
def two(store: Any, tmp_path: Path) -> tuple[Rank, Rank]:
    """Rank 0, and rank 1, whose trigger fires after step 1."""
    return Rank(0, store, tmp_path, At(steps=[])), Rank(1, store, tmp_path, At(steps=[1]))


def test_trigger_on_one_rank_starts_all(two: tuple[Rank, Rank], log: Log) -> None:
    first, other = two
    for each in (other, first):
        each.goes_on(2)
        each.watch.exchange()
    for each in two:
        each.goes_on(30)
    # fifteen steps of 100 ms, the three polls, from the step on at which it is announced
    asked = {17: ("mine", Request("it is time, on rank 1 after step 1"))}
    assert first.began == other.began == asked
    assert log.at("WARNING") == []


def test_pending_request(two: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = two
    other.goes_on(2)
    read, pending = other.watch._read, list[bool]()

    def reading(announcements: Any) -> None:
        pending.append(other.watch.is_pending("it is time"))
        read(announcements)
        pending.append(other.watch.is_pending("it is time"))

    monkeypatch.setattr(other.watch, "_read", reading)
    other.watch.exchange()
    assert pending == [True] * 4
    assert not other.watch._unsent


def test_rank_past_the_step_skips_the_window(two: tuple[Rank, Rank], log: Log) -> None:
    first, other = two
    other.goes_on(2)
    other.watch.exchange()
    first.goes_on(32)
    first.watch.exchange()
    for each in two:
        each.goes_on(30)
    assert other.began.keys() == {17}
    assert first.began == {}
    assert log.at("WARNING") == [
        "The window that the trigger mine requested (it is time, on rank 1 after step 1) is not recorded on this rank: all "
        "ranks begin the window with step 17, but this rank is already at step 33."
    ]


def test_an_open_window_puts_the_step_off_by_as_much_on_each_rank(two: tuple[Rank, Rank]) -> None:
    first, other = two
    other.goes_on(2)
    for each in (other, first):
        each.watch.exchange()
    for each in two:
        each.goes_on(15 - each.step)
        each.goes_on(5, recorded=True)
        each.goes_on(10)
    # steps 15 to 19 are recorded, and the one after the next begins it, as where a trigger fires behind a window
    assert first.began.keys() == other.began.keys() == {21}


def test_trigger_on_all_ranks_is_one_window(store: Any, tmp_path: Path, log: Log) -> None:
    steps = [1, 40, 41, 80]
    trigger = At(steps=steps, cooldown=20, max_windows=2)
    pair = [Rank(rank, store, tmp_path, trigger) for rank in range(2)]
    for _ in range(60):
        for each in pair:
            each.goes_on(2)
            each.watch.exchange()
    assert pair[0].began.keys() == pair[1].began.keys() == {17, 57}
    assert len(log.at("WARNING")) == 2, "each says that it has had its last"


def test_a_rank_without_a_timed_step_keeps_what_is_asked(two: tuple[Rank, Rank]) -> None:
    first, other = two
    other.goes_on(2)
    other.step_ns = None
    for each in (other, first):
        each.watch.exchange()
    assert not first.watch._announced
    other.step_ns = 100 * MS
    for each in (other, first):
        each.watch.exchange()
        each.goes_on(20)
    assert first.began.keys() == other.began.keys() == {17}


def test_request_within_a_window(store: Any, tmp_path: Path, log: Log) -> None:
    pair = [Rank(rank, store, tmp_path, At(steps=[1 + rank])) for rank in range(2)]
    for each in pair:
        each.goes_on(3)
    for each in (*pair, *pair):  # both have announced before they read
        each.watch.exchange()
    for each in pair:
        each.goes_on(40)
    assert pair[0].began.keys() == pair[1].began.keys() == {18}
    assert log.at("WARNING") == []


def test_of_all_ranks_that_see_it_at_once_one_announces(store: Any, tmp_path: Path) -> None:
    ranks = [Rank(rank, store, tmp_path, At(steps=[1])) for rank in range(10)]
    for each in ranks:
        each.goes_on(2)
    for each in ranks:
        each.watch.exchange()
    assert store.add("windows", 0) == 1
    for each in ranks:
        each.watch.exchange()
        each.goes_on(20)
    asked = {17: ("mine", Request("it is time, on rank 0 after step 1"))}
    assert [each.began for each in ranks] == [asked] * 10
    assert not any(each.watch._unsent for each in ranks)


def test_who_starts_later_hears_of_no_window_that_was_not_counted(tmp_path: Path) -> None:
    """Its rank was killed after it had announced the window, before it counted it."""
    store = dist.HashStore()
    store.set("windows/1", '["mine", "why", null, 90, 100, 110]')
    assert [*Rank(2, store, tmp_path, At(steps=[])).watch._announcements.new()] == []


def test_first_announcement_wins(two: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = two
    (first.watch._unsent["mine"],) = [(Request("first"), 1)]
    first.goes_on(2)
    other.goes_on(2)
    announce = Announcements.announce

    def after_the_first(self: Announcements, *about: Any) -> bool:
        monkeypatch.setattr(Announcements, "announce", announce)
        first.watch.exchange()
        return self.announce(*about)

    monkeypatch.setattr(Announcements, "announce", after_the_first)
    for _ in range(2):
        other.watch.exchange()
    for each in two:
        each.goes_on(20)
        assert each.began == {17: ("mine", Request("first, on rank 0 after step 1"))}
        assert not each.watch._unsent


class Counted:
    """A store that counts its requests."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


def test_requests_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(distributed, "_store_address", lambda: ("127.0.0.1", 1))
    counted = Counted()
    monkeypatch.setattr(distributed, "_connect", lambda *_: counted)
    for rank in range(3):
        _, announcements = joined(rank, tmp_path / str(rank), monkeypatch, triggers=["file"])
    assert counted.requests == {"compare_set": 3, "add": 3, "check": 3}
    end_of_thread("instrument-ranks")
    counted.requests.clear()
    assert [*announcements.new()] == []
    assert counted.requests == {"check": 1}


def test_poll_store_rarely(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    def highest(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    rank = Rank(0, store, tmp_path, At(steps=[]))
    rank.watch.end()
    monkeypatch.setattr(watching, "uniform", highest)
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(rank.watch, "exchange", lambda: exchanges.append(len(waits)))
    rank.watch._announcements.exchange_s = 10
    waits, exchanges, polls, now = [], [], [], [0.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 50:
            rank.watch._unsent["mine"] = (Request(), 1)
        return len(waits) > 60

    monkeypatch.setattr(rank.watch._over, "wait", wait)
    file = watching._ActiveTrigger("file", TriggerCallbacks(poll=lambda: polls.append(1)), 0, None)
    rank.watch._poll([file])
    assert waits == [0.5] * 61
    assert len(polls) == 60
    # at most 10 s apart, and at once while there is something to announce
    assert exchanges == [19, 38, *range(50, 61)]
    assert set(bounds) == {(0.5, 1), (0, 1)}


@pytest.mark.parametrize("poll_s", [0.0, 0.1, 0.4])
def test_also_slow_polls_leave_time_to_read_an_announcement(
    poll_s: float, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(0, store, tmp_path, At(steps=[]))
    rank.watch.end()
    now, exchanges = [0.0], []

    def spend(seconds: float = poll_s) -> bool:
        now[0] += seconds
        return now[0] > 1000

    monkeypatch.setattr(watching, "uniform", lambda _, high: high)
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(rank.watch, "exchange", lambda: exchanges.append(now[0]))
    monkeypatch.setattr(rank.watch._over, "wait", spend)
    rank.watch._announcements.exchange_s = 10
    rank.watch._poll([watching._ActiveTrigger("file", TriggerCallbacks(poll=spend), 0, None)])
    # steps_ahead allows two polls more
    assert 9 < np.diff(exchanges).max() <= 10 + 2 * 0.5


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        ("all", "4", 32),
        ("one_per_role", "4", 32),
        ([0, 5, 99], "4", 2),
        ("first_per_node", "4", 4),
        ("first_per_node", "", 32),
    ],
)
def test_only_the_ranks_that_record_count(
    ranks: Any, nodes: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    assert distributed.recording_ranks(ranks, 32) == expected


class Gone:
    """A store whose server dies after the start."""

    def add(self, *_: Any) -> int:
        return 0

    def check(self, _: list[str]) -> bool:
        self.checks = getattr(self, "checks", 0) + 1
        if self.checks == 1:
            return False
        raise dist.DistNetworkError("Connection was likely closed.")


def test_lost_store_is_said_once(tmp_path: Path, log: Log, store: Any) -> None:
    alone = Rank(1, Gone(), tmp_path, At(steps=[1, 9]))
    alone.goes_on(3)
    alone.watch.exchange()
    alone.goes_on(9)
    alone.watch.exchange()
    assert alone.began == {4: ("mine", Request("it is time")), 10: ("mine", Request("it is time"))}
    assert [line for line in log.at("INFO") if line.startswith("From")] == [
        "From now on, only rank 1 records the windows that its triggers request: Connection was likely closed."
    ]


def test_a_window_that_one_rank_requests_is_recorded_by_all(store: Any, tmp_path: Path) -> None:
    ranks = first, other = [Rank(each, store, tmp_path, At(steps=[])) for each in range(2)]
    first.watch.requests[watching.REQUEST] = Request("the loss jumped, id 5", 2)
    for act in (lambda: first.goes_on(1), first.watch.exchange, other.watch.exchange):
        assert first.watch.is_pending("id 5")
        act()
    first.goes_on(40)
    assert not first.watch.is_pending("id 5")
    assert other.watch.is_pending("id 5")
    other.goes_on(41)
    assert [*first.began] == [*other.began]
    for rank in ranks:
        ((trigger, request),) = rank.began.values()
        assert (trigger, request.steps) == ("session.request", 2)
        assert request.why == "the loss jumped, id 5, on rank 0 after step 0"


def test_a_trigger_of_one_rank_alone_is_followed_by_all(two: tuple[Rank, Rank]) -> None:
    first, other = two
    first.watch._triggers.clear()
    other.goes_on(2)
    for each in (other, first):
        each.watch.exchange()
        each.goes_on(20)
    assert first.began.keys() == other.began.keys() == {17}


def test_old_announcements_are_not_heard(store: Any, tmp_path: Path) -> None:
    """A job that is restarted finds the old announcements in the store."""
    before = Rank(0, store, tmp_path, At(steps=[1]))
    before.goes_on(2)
    before.watch.exchange()
    restarted = Rank(1, store, tmp_path, At(steps=[]))
    restarted.watch.exchange()
    assert len(before.watch._announced) == 1
    assert restarted.watch._announced == []


@pytest.mark.parametrize("step", [0, 5])
def test_step_number_set_back(step: int, store: Any, tmp_path: Path) -> None:
    rank = Rank(0, store, tmp_path, At(steps=[1000, step]))
    for rank.step in (1000, step):
        rank.goes_on(1)
        rank.watch.exchange()
    assert [call.begin for call in rank.watch._announced] == [1001 + 15, step + 1 + 15]


class Exact(Trigger):
    """Asks in numpy's numbers for as many steps."""

    def fires(self, step: Step) -> Request | None:
        return Request("why", np.int64(3)) if step.number == 1 else None


def test_integers_of_another_kind_are_announced_too(store: Any, tmp_path: Path) -> None:
    rank = Rank(0, store, tmp_path, Exact())
    rank.step = np.int64(1)
    rank.goes_on(1)
    rank.watch.exchange()
    rank.goes_on(20)
    ((begin, (_, request)),) = rank.began.items()
    assert (begin, request) == (2 + 15, Request("why, on rank 0 after step 1", 3))


def test_unreadable_message_costs_only_itself(two: tuple[Rank, Rank], store: Any) -> None:
    first, other = two
    for text in ("not JSON", "[1]"):
        store.set(f"windows/{store.add('windows', 1)}", text)
    other.goes_on(2)
    for each in (other, first):
        each.watch.exchange()
    assert [call.trigger for call in first.watch._announced] == ["mine"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job's store, as torchrun's agent serves it."""
    serving = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(serving.port))
    monkeypatch.setattr(distributed, "_started", Counter())
    monkeypatch.setattr(distributed, "_CONNECT_S", 120)
    return serving


def joined(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Path, Announcements | None]:
    """What a rank of two makes of a session that starts in this folder."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    distributed._started.clear()  # each rank is a process of its own
    return distributed.join_ranks(
        ProfilerConfig(**options), RankInfo(rank, 2, rank), lambda: StepProgress(0, None)
    )


@pytest.mark.usefixtures("server")
def test_first_rank_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert joined(1, one, monkeypatch) == (one / "profile", None)
    assert joined(0, two, monkeypatch) == (one / "profile", None)
    assert joined(1, two, monkeypatch, output_dir="mine") == (two / "mine", None)
    assert joined(1, two, monkeypatch, ranks=[1]) == (two / "profile", None)
    folder, announcements = joined(0, two, monkeypatch, triggers=["file"])
    assert (folder, announcements is not None) == (one / "profile", True)
    assert log == []
    end_of_thread("instrument-ranks")  # which comes after its answer


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_accepts_and_is_silent_costs_a_wait_and_no_more(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setattr(distributed, "_JOIN_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(deaf.getsockname()[1]))
        assert joined(rank, tmp_path / "two", monkeypatch) == (tmp_path / "two" / "profile", None)
    end_of_thread("instrument-ranks")  # which the socket's end wakes
    assert log == [
        f"WARNING Rank {rank} records by itself into its own folder: the store at MASTER_ADDR:MASTER_PORT has not "
        "answered for 0.4 s."
    ]


@pytest.mark.usefixtures("server")
def test_folder_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    joined(0, one, monkeypatch)
    (one / "profile").rmdir()
    (one / "profile").touch()  # what is in the way of a folder
    assert joined(1, two, monkeypatch) == (two / "profile", None)
    (said,) = log.at("WARNING")
    assert said.startswith(
        f"Rank 1 records into its own folder: profiler.output_dir is {str(one / 'profile')!r}"
    )


@pytest.mark.parametrize(("variable", "value"), [("MASTER_ADDR", ""), ("MASTER_PORT", "1")])
@pytest.mark.usefixtures("server")
def test_without_a_store_each_rank_goes_by_itself(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(distributed, "_CONNECT_S", 0.05)
    two = tmp_path / "two"
    assert joined(1, two, monkeypatch, triggers=["file"]) == (two / "profile", None)
    (said,) = log.at("WARNING")
    assert re.match(r"Rank 1 records by itself into its own folder: .*MASTER_ADDR", said)


def test_a_silent_store_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun may be gone, too
    now, tried = [0.0], []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(now[0])
        raise ConnectionRefusedError("refused")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(distributed, "uniform", lambda low, high: {(0.5, 1): high}[low, high])
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ConnectionError, match=r"nobody listens .* 127\.0\.0\.1:1 \(refused\)"):
        distributed._store_address()
    pauses = np.diff(tried)
    assert 10 < tried[-1] < 12
    assert pauses[0] == pytest.approx(0.1)
    assert pauses[1:] == pytest.approx(np.minimum(2, 1.5 * pauses[:-1]))


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <unistd.h>
int getnameinfo(const struct sockaddr *a, socklen_t n, char *h, socklen_t hn, char *s, socklen_t sn, int flags) {
    if (!(flags & NI_NUMERICHOST)) sleep(3);
    return ((typeof(&getnameinfo)) dlsym(RTLD_NEXT, "getnameinfo"))(a, n, h, hn, s, sn, flags);
}
"""
JOIN = """
from instrument import ProfilerConfig
from instrument.base.rank_info import RankInfo
from instrument.record import distributed
distributed._CONNECT_S = 1
print(distributed.join_ranks(ProfilerConfig(), RankInfo(1, 2, 1), None)[0])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("joined", [True, False])
def test_a_slow_name_server_loses_no_rank(
    joined: bool, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch looks up the name of the store's address, within the limit of its connection."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", "shim.so", "-ldl"]
    subprocess.run(command, input=SHIM, text=True, check=True, cwd=tmp_path)
    _, shared = monkeypatch.chdir(tmp_path), tmp_path / "shared"
    distributed._connect("127.0.0.1", server.port, "all/1").set("folder", str(shared))
    script = JOIN if joined else JOIN.replace("_CONNECT_S =", "_JOIN_S = distributed._CONNECT_S =")
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "shim.so")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == str(shared if joined else tmp_path / "profile")
    assert ("records by itself into its own folder" in ran.stderr) is not joined


SCENARIOS = ("all", "two", "first", "roles", "fired", "fired_of_two", "touched", "killed")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four ranks on what torchrun takes for two nodes have gone through all scenarios: their folder, what they said."""
    folder = tmp_path_factory.mktemp("job")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (folder / "log").open("w") as log:
        nodes = [node(folder / f"node{number}", store.port, log) for number in range(2)]
        for each in nodes:
            each.join(600)
            assert not each.is_alive(), (folder / "log").read_text()
    return folder, (folder / "log").read_text()


def node(folder: Path, port: int, log: IO[str]) -> Thread:
    """An agent of torchrun's with two ranks, which meets the other one in a store of the test's, in its own folder."""
    folder.mkdir()
    script = str(Path(__file__).parent / "ranks_training.py")
    # Hydra gives each rank a folder of its own, as it does with the time in its name
    hydra = [f"+scenarios=[{','.join(SCENARIOS)}]", "hydra.run.dir=${oc.env:RANK}"]
    own = {"FOLDER": str(folder.parent), "ENDPOINT": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    command, env = [script, *hydra], warm.environment({**os.environ, **own})
    agent = Thread(target=warm.run_into, args=(command, folder, env, log.fileno()), daemon=True)
    agent.start()
    return agent


def steps_by_rank(folder: Path) -> dict[int, list[int]]:
    """The recorded steps of the only capture of each rank."""
    found = [Capture.load(path.parent) for path in folder.glob("[!.]*/capture.json")]
    steps = {capture.metadata["rank"]: capture.steps.column("number") for capture in found}
    assert len(steps) == len(found), "one for each rank"
    assert {capture.metadata["world_size"] for capture in found} == {4}
    return dict(sorted(steps.items()))


def test_all_ranks_record_the_same_steps_into_one_folder(job: tuple[Path, str]) -> None:
    folder, said = job
    profiles = list(folder.glob("node?/?/profile"))
    assert len(profiles) == 1, said
    assert steps_by_rank(profiles[0]) == {rank: [1, 2] for rank in range(4)}, said


def test_the_communication_of_ddp_is_seen(job: tuple[Path, str]) -> None:
    found = [Capture.load(path.parent) for path in job[0].glob("node?/?/profile/*/capture.json")]
    reduced = [
        row.calls for capture in found for row in capture.operators.where(name="gloo:all_reduce")
    ]
    assert reduced == [2] * 4  # on each rank a bucket of gradients for each step


@pytest.mark.parametrize(("scenario", "chosen"), [("two", [0, 3]), ("first", [0, 2])])
def test_chosen_ranks_alone_record(scenario: str, chosen: list[int], job: tuple[Path, str]) -> None:
    folder, said = job
    assert steps_by_rank(folder / scenario) == {rank: [1, 2] for rank in chosen}, said


def test_one_rank_of_each_role_keeps_its_trace_and_all_are_compared(job: tuple[Path, str]) -> None:
    folder, said = job
    found = {path.parent.name: path.parent for path in folder.glob("roles/*/capture.json")}
    names = [f"steps_000001-000002_rank{rank}" for rank in range(4)]
    files = [sorted(file.name for file in found[name].iterdir()) for name in names]
    small = ["capture.json", "summary.json"]
    whole = [*small, "table.txt", "trace.json.gz"]
    assert files == [whole, whole, small, small], said  # a mesh of (dp, tp)
    (window,) = Run.load(folder / "roles").windows
    assert (window.ranks.column("rank"), window.missing) == ([0, 1, 2, 3], [])
    assert window.collectives[0].recorded_ranks == 4
    said = r"With profiler.ranks=one_per_role, give the capture of"
    with pytest.raises(CaptureError, match=said):
        print(Capture.load(found[names[3]]).operators)


@pytest.mark.parametrize(
    ("scenario", "chosen", "trigger", "why"),
    [
        ("fired", [0, 1, 2, 3], "mine", r"it is time, on rank 1 after step 3"),
        ("fired_of_two", [1, 3], "mine", r"it is time, on rank 3 after step 3"),
        (
            "touched",
            [0, 1, 2, 3],
            "file",
            r"the file record was touched, on rank \d after step \d+",
        ),
    ],
)
def test_what_one_rank_asks_for_is_recorded_at_the_same_steps_by_all(
    scenario: str, chosen: list[int], trigger: str, why: str, job: tuple[Path, str]
) -> None:
    folder, said = job
    steps = steps_by_rank(folder / scenario)
    assert list(steps) == chosen, said
    first = steps[chosen[0]][0]
    assert set(map(tuple, steps.values())) == {(first, first + 1, first + 2)}
    for path in (folder / scenario).glob("*/capture.json"):
        window = Capture.load(path.parent).metadata["window"]
        assert window["trigger"] == trigger
        assert re.fullmatch(why, window["trigger_reason"])


def test_rank_killed_in_its_window(job: tuple[Path, str]) -> None:
    folder, said = job
    if queue.queued(folder / "killed"):  # torchrun ended a rank while it finished the saved window
        assert main(["export", str(folder / "killed")]) == 0
    steps = steps_by_rank(folder / "killed")
    assert list(steps) == [0, 2, 3], said
    for path in (folder / "killed").glob("[!.]*/capture.json"):
        assert Capture.load(path.parent).metadata["window"]["truncated"]
    assert all(numbers[:3] == [0, 1, 2] for numbers in steps.values())  # the steps before are whole
