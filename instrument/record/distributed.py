"""Which ranks record, at which step all of them do what a trigger asks for, and into which folder.

They talk in messages of some hundred bytes through the store at MASTER_ADDR:MASTER_PORT that brings a job's ranks
together, over a connection of their own and off the training thread: no collective, and no lock that training shares.
The store outlives a restart of the job, and what stands in it names no age. So each rank says hello, the leader's
process answers if it lives, and all that follows is under the name that its answer gives to the session.

What torch's store does not do: where its server freezes, a thread in it stays there, and one that is still in it when
the interpreter ends aborts the process, if the server dies just then.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from loguru import logger

from instrument.config.schema import ProfilerConfig
from instrument.rank_info import RankInfo
from instrument.worker import queue

# How often messages are looked for, as files and the like are, on the watcher's thread.
POLL_SECONDS = 0.5
# Within how many polls every rank must have heard of a window, besides the one that its message may just have missed.
_POLLS_AHEAD = 3
_LEAST_STEPS_AHEAD = 2
_CONNECT_S = 10.0
# How long the leader may take to answer a hello or an ask: it may start later, and the end of a window holds the GIL.
_ANSWER_S = 30.0
# How often the leader looks for hellos, and for how long at most: until all have met it, where their number is known.
_HELLO_S, _HELLOS_S = 0.1, 600.0

_Given = TypeVar("_Given")


def records(ranks: str | list[int], rank_info: RankInfo) -> bool:
    """Whether this rank is one of those that `profiler.ranks` names; says so where it is not.

    What cannot be meant is warned of on rank 0 alone.
    """
    missing = (
        [rank for rank in ranks if rank >= rank_info.world_size] if isinstance(ranks, list) else []
    )
    if missing and rank_info.rank == 0:
        rest = "nothing is recorded" if len(missing) == len(ranks) else "the others record"
        world = (
            "1 rank, 0"
            if rank_info.world_size == 1
            else f"{rank_info.world_size} ranks, 0 to {rank_info.world_size - 1}"
        )
        named = " and ".join(map(str, missing))
        logger.warning("profiler.ranks names {}, but the run has {}: {}.", named, world, rest)
    chosen = (
        rank_info.rank in ranks
        if isinstance(ranks, list)
        else ranks == "all" or rank_info.local_rank == 0
    )
    if not chosen:
        logger.info("Rank {} records nothing: profiler.ranks is {}.", rank_info.rank, ranks)
    return chosen


def lead(step_ns: int) -> int:
    """How many steps ahead a window is announced, so that every rank hears of it in time."""
    return max(_LEAST_STEPS_AHEAD, math.ceil(_POLLS_AHEAD * POLL_SECONDS * 1e9 / max(1, step_ns)))


class TriggerRequest(NamedTuple):
    """What a trigger of one rank asks for: `steps` to record, None as many as `profiler.active` says."""

    trigger: str
    why: str | None
    steps: int | None
    rank: int
    after_step: int


class AnnouncedWindow(NamedTuple):
    """What all ranks record from step `begin` on, which is the first of the warm-up."""

    trigger: str
    why: str
    steps: int | None
    begin: int


class StepProgress(NamedTuple):
    """How far a rank's training is: the step that runs now, and the median of its steps; None: none is known yet."""

    step: int
    step_ns: int | None


class RankCoordinator:
    """The ranks that record together, as one of them talks to the others; the lowest leads.

    For the watcher's thread. What any method raises means that the store is gone, or the leader.

    Attributes:
        over: whether the leader has ended its session.
    """

    def __init__(
        self,
        store: Any,
        rank_info: RankInfo,
        config: ProfilerConfig,
        progress: Callable[[], StepProgress],
    ) -> None:
        self._leader = _leader(config.ranks)
        self.rank, self.leads, self.over = rank_info.rank, rank_info.rank == self._leader, False
        self._store, self._config, self._progress = store, config, progress
        self._asks, self._calls = _Messages(store, "asks"), _Messages(store, "calls")
        # by number, with the time by which the leader is to hear of it
        self._asked: dict[int, tuple[TriggerRequest, float]] = {}
        self._open: list[TriggerRequest] = []  # until the leader knows how long a step takes
        self._called_at = self._called_until = -1

    def ask(self, ask: TriggerRequest) -> None:
        """Ask the leader for a window of all ranks."""
        self._asked[self._asks.append(ask)] = ask, time.monotonic() + _ANSWER_S

    @property
    def unheard(self) -> list[TriggerRequest]:
        """What this rank has asked for and the leader has not heard of yet."""
        return [ask for ask, _ in self._asked.values()]

    def asks(self) -> Iterator[TriggerRequest]:
        """What was asked for since the last time; for the leader alone, and once its steps have been timed.

        What was asked for before the last window was over is left out: it has had that window.
        """
        if not self.leads:
            return
        known = self._asks.read
        self._open += [TriggerRequest(*message) for message in self._asks.unread()]
        if self._asks.read > known:
            self._store.add("heard", self._asks.read - known)
        while self._open and self._progress().step_ns is not None:
            ask = self._open.pop(0)
            set_back = (
                self._progress().step < self._called_at
            )  # by the user, so that numbers come again
            if ask.after_step > self._called_until or set_back:
                yield ask

    def call(self, ask: TriggerRequest) -> None:
        """Tell all ranks, this one among them, from which step on they record what was asked for."""
        step, step_ns = self._progress()
        begin = step + lead(step_ns or 0)
        why = f"{ask.why}, " if ask.why else ""
        self._calls.append(
            AnnouncedWindow(
                ask.trigger,
                f"{why}on rank {ask.rank} after step {ask.after_step}",
                ask.steps,
                begin,
            )
        )
        self._called_at = step
        self._called_until = (
            begin + self._config.warmup + (ask.steps or self._config.active or 1) - 1
        )

    def calls(self) -> Iterator[AnnouncedWindow]:
        """What all ranks are to record that this one has not heard of yet.

        Raises:
            TimeoutError: the leader does not hear what this rank asks for.
        """
        for message in self._calls.unread():
            if message is None:
                self.over = True
                return
            yield AnnouncedWindow(*message)
        if self._asked:
            heard, now = self._store.add("heard", 0), time.monotonic()
            self._asked = {number: asked for number, asked in self._asked.items() if number > heard}
            if any(now > until for _, until in self._asked.values()):
                raise TimeoutError(
                    f"rank {self._leader}, which leads, does not answer for {_ANSWER_S:g} s"
                )

    def end(self) -> None:
        """Let the others know, if this rank leads, that nobody does any more."""
        if self.leads and not self.over:
            self._calls.append(None)


class _Messages:
    """A list in the store, to which every rank can append.

    Attributes:
        read: how many of them this one has given.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self.read = 0

    def append(self, message: Any) -> int:
        """Its number, from 1."""
        said = json.dumps(message)
        number = int(self._store.add(self._name, 1))
        self._store.set(f"{self._name}/{number}", said)
        return number

    def unread(self) -> Iterator[Any]:
        """Those that this one has not given yet; costs one look at the store where there are none."""
        from torch.distributed import DistStoreError

        written = self._store.add(self._name, 0)
        while self.read < written:
            self.read += 1
            try:  # waits for who is between his two calls
                message = json.loads(self._store.get(f"{self._name}/{self.read}"))
            except (DistStoreError, ValueError):  # who was killed between them
                continue
            yield message


# Sessions of this process by their ranks, so that two do not hear each other: those ranks start the same ones.
_started: Counter[str] = Counter()


def join_ranks(
    config: ProfilerConfig, rank_info: RankInfo, progress: Callable[[], StepProgress]
) -> tuple[Path, RankCoordinator | None]:
    """The session's folder for captures, and with triggers the ranks that record together; None: each by itself.

    Ranks meet where there is more than one, and something that they must agree on. It costs a connection; a rank that
    does not lead waits for the leader's answer, some 0.1 s, and up to 30 s until it starts. Where the store does not
    answer, a rank waits 10 s, in the worst of cases 40 s, and goes by itself.

    Raises:
        ConfigError: the folder cannot be written.
    """
    own, who = queue.output_dir(config), str(config.ranks)
    if _alone(config.ranks, rank_info) or (config.output_dir is not None and not config.triggers):
        return queue.writable(own), None
    coordinator, folder = None, own
    _started[who] += 1
    try:
        store, named = _met(f"{who}/{_started[who]}", config.ranks, rank_info, own)
        coordinator = RankCoordinator(store, rank_info, config, progress)
        folder = queue.writable(named) if config.output_dir is None else own
    except (
        Exception
    ) as error:  # whatever the store raises; or the folder cannot be made on this machine
        what = (
            "records by itself, into its own folder"
            if coordinator is None
            else "records into its own folder"
        )
        logger.warning("Rank {} {}: {}.", rank_info.rank, what, str(error).rstrip("."))
    return queue.writable(folder), coordinator if config.triggers else None


def _leader(ranks: str | list[int]) -> int:
    return min(ranks) if isinstance(ranks, list) else 0


def _met(session: str, ranks: str | list[int], rank_info: RankInfo, own: Path) -> tuple[Any, Path]:
    """The store's place for the session, and the leader's folder; the leader, whose `own` it is, awaits nobody.

    Raises:
        TimeoutError: the store or the leader does not answer in time.
        ConnectionError: there is no store.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every build of torch

    address, port = _address()
    store = _within(_CONNECT_S, partial(_connected, address, port, session))
    if rank_info.rank == _leader(ranks):
        name, folder = _lead(store, _others(ranks, rank_info), own)
    else:
        name, folder = _within(
            _CONNECT_S + _ANSWER_S, partial(_follow, store, rank_info.rank, _leader(ranks))
        )
    return PrefixStore(name, store), folder


def _within(seconds: float, act: Callable[[], _Given]) -> _Given:
    """What `act` gives, on a thread of its own: torch's store heeds no limit where its server is silent."""
    outcome: futures.Future[_Given] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except Exception as error:
            outcome.set_exception(error)

    Thread(target=run, name="instrument-ranks", daemon=True).start()
    if not futures.wait([outcome], seconds).done:
        raise TimeoutError(
            f"the store at MASTER_ADDR:MASTER_PORT does not answer for {seconds:g} s"
        )
    return outcome.result()


def _lead(store: Any, others: int, own: Path) -> tuple[str, Path]:
    """A new name for the session, and the folder, which the others are told by a thread from now on."""
    name, over = uuid4().hex, Event()
    answer = Thread(
        target=_answer, args=(store, name, own, others, over), name="instrument-ranks", daemon=True
    )
    answer.start()
    atexit.register(_leave, answer, over)
    return name, own


def _answer(store: Any, name: str, folder: Path, others: int, over: Event) -> None:
    """Tell each rank that says hello the session's name and folder, until all have heard it.

    Those who said hello before a restart are told too; they do not count, as they do not hear it.
    """
    hellos, began = _Messages(store, "hellos"), time.monotonic()
    with suppress(Exception):  # the store is gone
        while (
            store.add(f"{name}/met", 0) < others
            and time.monotonic() - began < _HELLOS_S
            and not over.wait(_HELLO_S)
        ):
            for hello in hellos.unread():
                store.set(f"answers/{hello}", json.dumps([name, str(folder)]))


def _leave(thread: Thread, over: Event) -> None:
    over.set()
    thread.join(_CONNECT_S)


def _follow(store: Any, rank: int, leader: int) -> tuple[str, Path]:
    """The name and the folder that the leader answers a hello with."""
    hello = uuid4().hex
    _Messages(store, "hellos").append(hello)
    began, said = time.monotonic(), False
    while not store.check([f"answers/{hello}"]):
        waited = time.monotonic() - began
        if waited > _ANSWER_S:
            raise TimeoutError(f"rank {leader} does not answer for {_ANSWER_S:g} s")
        if waited > 1 and not said:
            logger.info(
                "Rank {} waits up to {:g} s for rank {}, which leads.", rank, _ANSWER_S, leader
            )
            said = True
        time.sleep(0.02)
    name, folder = json.loads(store.get(f"answers/{hello}"))
    store.add(f"{name}/met", 1)
    return name, Path(folder)


def _others(ranks: str | list[int], rank_info: RankInfo) -> int:
    """How many ranks are to meet the leader, at most."""
    chosen = range(rank_info.world_size)
    return (
        sum(rank in ranks for rank in chosen) - 1
        if isinstance(ranks, list)
        else rank_info.world_size - 1
    )


def _alone(ranks: str | list[int], rank_info: RankInfo) -> bool:
    return rank_info.world_size == 1 or (
        isinstance(ranks, list)
        and all(rank_info.rank == rank or rank >= rank_info.world_size for rank in ranks)
    )


def _address() -> tuple[str, int]:
    """Where the job's store listens, for sure.

    Raises:
        ConnectionError: there is none, in so many words.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConnectionError("MASTER_ADDR and MASTER_PORT, which torchrun sets, name no store")
    _await_server(address, int(port))
    return address, int(port)


def _connected(address: str, port: int, session: str) -> Any:
    """A connection to the job's store, in a place of its own there for each session of a job."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in every build of torch

    limit = timedelta(seconds=_CONNECT_S)
    store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    return PrefixStore(f"instrument/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{session}", store)


def _await_server(address: str, port: int) -> None:
    """Wait until somebody listens there; torch's own connection would print its stack over and over."""
    until = time.monotonic() + _CONNECT_S
    while (error := _refusal(address, port)) is not None:
        if time.monotonic() > until:
            raise ConnectionError(
                f"nobody listens at MASTER_ADDR:MASTER_PORT, {address}:{port} ({error}); without torchrun, start the "
                "session after torch.distributed.init_process_group"
            )
        time.sleep(0.1)


def _refusal(address: str, port: int) -> OSError | None:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error
    return None
