"""Decides which ranks record, into which folder, and at which step a trigger's window begins.

The ranks exchange messages of a few hundred bytes through the job's store: the key-value store of
torch.distributed, which listens at MASTER_ADDR:MASTER_PORT. Each rank opens its own connection.
The training thread does not use this connection. No collective is called, and no lock is shared
with training.

The store outlives a restart of the job, and its entries have no timestamps. To separate new
messages from old messages, each rank first sends a join message. The lowest recording rank is the
leading rank: it answers with a new name for the session. All later messages are stored under this
name.

torch's store has two limits. If its server hangs, a thread that uses the store hangs too. If its
server dies while the interpreter exits, a thread that still uses the store aborts the process.
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

from instrument.config.schema import ProfilerConfig
from instrument.log import logger
from instrument.rank_info import RankInfo, lowest_rank
from instrument.worker import queue

# How long the polling thread pauses before it looks again for messages, files and so on.
POLL_SECONDS = 0.5
# A window is announced this many polls ahead, so that every rank knows of the window in time.
_POLLS_AHEAD = 3
_LEAST_STEPS_AHEAD = 2
_CONNECT_S = 10.0
# How long the leading rank may take to answer. It may start later than other ranks. While it saves
# a window, torch holds the GIL.
_ANSWER_S = 30.0
# How often the leading rank looks for join messages, and how long it waits for all ranks to join.
_JOIN_POLL_S, _JOIN_LIMIT_S = 0.1, 600.0

T = TypeVar("T")


def records(ranks: str | list[int], rank_info: RankInfo) -> bool:
    """Whether `profiler.ranks` includes this rank; logs a message if the rank is not included.

    Rank 0 also warns if `profiler.ranks` names ranks that do not exist.
    """
    missing = (
        [rank for rank in ranks if rank >= rank_info.world_size] if isinstance(ranks, list) else []
    )
    if missing and rank_info.rank == 0:
        rest = "nothing is recorded" if len(missing) == len(ranks) else "the other ranks record"
        last = rank_info.world_size - 1
        world = f"{last + 1} ranks, 0 to {last}" if last else "only rank 0"
        named = " and ".join(map(str, missing))
        logger.warning("profiler.ranks names {}, but the run has {}: {}.", named, world, rest)
    by_name = ranks == "all" or (ranks == "first_per_node" and rank_info.local_rank == 0)
    if by_name or (isinstance(ranks, list) and rank_info.rank in ranks):
        return True
    logger.info("Rank {} records nothing: profiler.ranks is {}.", rank_info.rank, ranks)
    return False


def steps_ahead(step_ns: int) -> int:
    """The number of steps from the announcement of a window to the start of its warm-up.

    During these steps, the polling threads of all ranks must read the announcement.
    """
    return max(_LEAST_STEPS_AHEAD, math.ceil(_POLLS_AHEAD * POLL_SECONDS * 1e9 / max(1, step_ns)))


class TriggerRequest(NamedTuple):
    """A request for a window, made by a trigger of one rank.

    If `steps` is None, the window has `profiler.active` steps.
    """

    trigger: str
    why: str | None
    steps: int | None
    rank: int
    after_step: int


class AnnouncedWindow(NamedTuple):
    """A window that all ranks record; `begin` is the first step of its warm-up."""

    trigger: str
    why: str
    steps: int | None
    begin: int


class StepProgress(NamedTuple):
    """A rank's current step, and the median duration of its steps.

    `step_ns` is None until a step has been timed.
    """

    step: int
    step_ns: int | None


class RankCoordinator:
    """One rank's connection to the other recording ranks.

    The lowest recording rank is the leading rank: it decides when a requested window begins. Only
    the thread that polls the triggers uses this object. If the store or the leading rank no longer
    answers, the methods raise a TimeoutError, or an exception of the store.

    Attributes:
        rank: the number of this rank.
        leads: whether this rank is the leading rank.
        ended: whether the leading rank has ended its session.
    """

    def __init__(
        self,
        store: Any,
        rank_info: RankInfo,
        config: ProfilerConfig,
        progress: Callable[[], StepProgress],
    ) -> None:
        self._leader = lowest_rank(config.ranks)
        self.rank, self.leads, self.ended = rank_info.rank, rank_info.rank == self._leader, False
        self._store, self._config, self._progress = store, config, progress
        self._requests, self._windows = _Messages(store, "requests"), _Messages(store, "windows")
        # by message number: the request, and when the leading rank must have read this request
        self._sent: dict[int, tuple[TriggerRequest, float]] = {}
        # on the leading rank: requests that wait until this rank has timed a step
        self._waiting: list[TriggerRequest] = []
        self._announced_at = self._announced_until = -1

    def send(self, request: TriggerRequest) -> None:
        """Send a request to the leading rank."""
        self._sent[self._requests.append(request)] = request, time.monotonic() + _ANSWER_S

    @property
    def unanswered(self) -> list[TriggerRequest]:
        """The requests of this rank that the leading rank has not read yet."""
        return [request for request, _ in self._sent.values()]

    def new_requests(self) -> Iterator[TriggerRequest]:
        """On the leading rank, yield the requests that ranks have sent since the last call.

        Requests wait until this rank has timed a step. A request is skipped if it was made before
        the end of the last announced window, because that window answers this request too.
        """
        if not self.leads:
            return
        read_before = self._requests.read
        self._waiting += [TriggerRequest(*message) for message in self._requests.unread()]
        if self._requests.read > read_before:
            self._store.add("read", self._requests.read - read_before)
        while self._waiting and self._progress().step_ns is not None:
            request = self._waiting.pop(0)
            # true if the user has lowered the step number, so that the same numbers come again
            set_back = self._progress().step < self._announced_at
            if request.after_step > self._announced_until or set_back:
                yield request

    def announce(self, request: TriggerRequest) -> None:
        """Tell all ranks, including this one, at which step they begin the window."""
        step, step_ns = self._progress()
        begin = step + steps_ahead(step_ns or 0)
        why = f"{request.why}, " if request.why else ""
        why += f"on rank {request.rank} after step {request.after_step}"
        self._windows.append(AnnouncedWindow(request.trigger, why, request.steps, begin))
        length = self._config.warmup + (request.steps or self._config.active or 1)
        self._announced_at, self._announced_until = step, begin + length - 1

    def new_windows(self) -> Iterator[AnnouncedWindow]:
        """Yield the windows that were announced since the last call.

        Raises:
            TimeoutError: the leading rank does not read this rank's requests.
        """
        for message in self._windows.unread():
            if message is None:
                self.ended = True
                return
            yield AnnouncedWindow(*message)
        if self._sent:
            read, now = self._store.add("read", 0), time.monotonic()
            self._sent = {number: sent for number, sent in self._sent.items() if number > read}
            if any(now > until for _, until in self._sent.values()):
                raise TimeoutError(
                    f"rank {self._leader}, which coordinates the recording ranks, has not answered "
                    f"for {_ANSWER_S:g} s"
                )

    def end(self) -> None:
        """On the leading rank, tell all other ranks that the session has ended."""
        if self.leads and not self.ended:
            self._windows.append(None)


class _Messages:
    """A list in the store to which every rank can append.

    Attributes:
        read: how many messages this object has returned.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self.read = 0

    def append(self, message: Any) -> int:
        """Append a message and return its number, counted from 1."""
        text = json.dumps(message)
        number = int(self._store.add(self._name, 1))
        self._store.set(f"{self._name}/{number}", text)
        return number

    def unread(self) -> Iterator[Any]:
        """Yield the messages that are new since the last call.

        Cost: one request to the store, and one more for each new message.
        """
        from torch.distributed import DistStoreError

        written = self._store.add(self._name, 0)
        while self.read < written:
            self.read += 1
            # `append` takes a number before it stores the text; `get` waits for the text.
            try:
                message = json.loads(self._store.get(f"{self._name}/{self.read}"))
            except (DistStoreError, ValueError):  # the rank was killed before it stored the text
                continue
            yield message


# How many sessions this process has started, by the value of `profiler.ranks`. All recording ranks
# start the same sessions, so the number separates the messages of two sessions.
_started: Counter[str] = Counter()


def join_ranks(
    config: ProfilerConfig, rank_info: RankInfo, progress: Callable[[], StepProgress]
) -> tuple[Path, RankCoordinator | None]:
    """Agree with the other ranks on the folder for captures; connect to them for triggers.

    No connection is needed if only this rank records, or if `profiler.output_dir` is given and
    there are no triggers.

    Cost: a connection to the store. All ranks except the leading rank also wait for the leading
    rank's answer. This takes about 0.1 s, or up to 30 s if the leading rank starts later. If the
    store cannot be reached, a rank waits 10 s and then records by itself. If the store stops
    answering after the rank has connected, the rank waits up to 40 s.

    Returns:
        The folder, and the coordinator. The coordinator is None if there are no triggers, or if
        this rank records by itself.

    Raises:
        ConfigError: the folder cannot be written.
    """
    own, ranks = queue.output_dir(config), str(config.ranks)
    if _is_alone(config.ranks, rank_info) or (
        config.output_dir is not None and not config.triggers
    ):
        return queue.writable(own), None
    coordinator, folder = None, own
    _started[ranks] += 1
    try:
        store, leaders_folder = _join(f"{ranks}/{_started[ranks]}", config.ranks, rank_info, own)
        coordinator = RankCoordinator(store, rank_info, config, progress)
        folder = queue.writable(leaders_folder) if config.output_dir is None else own
    except Exception as error:  # the store failed, or this machine cannot create the folder
        what = "records into its own folder"
        if coordinator is None:
            what = "records by itself, into its own folder"
        logger.warning("Rank {} {}: {}.", rank_info.rank, what, str(error).rstrip("."))
    return queue.writable(folder), coordinator if config.triggers else None


def _is_alone(ranks: str | list[int], rank_info: RankInfo) -> bool:
    return rank_info.world_size == 1 or (
        isinstance(ranks, list)
        and all(rank_info.rank == rank or rank >= rank_info.world_size for rank in ranks)
    )


def _join(session: str, ranks: str | list[int], rank_info: RankInfo, own: Path) -> tuple[Any, Path]:
    """Connect to the store; return the session's part of it, and the folder of the leading rank.

    `own` is this rank's own folder. The leading rank does not wait for other ranks.

    Raises:
        TimeoutError: the store or the leading rank does not answer in time.
        ConnectionError: there is no store.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in all builds

    leader = lowest_rank(ranks)
    address, port = _store_address()
    store = _with_timeout(_CONNECT_S, partial(_connect, address, port, session))
    if rank_info.rank == leader:
        joining = range(rank_info.world_size)
        others = sum(isinstance(ranks, str) or rank in ranks for rank in joining) - 1
        name, folder = _lead(store, others, own), own
    else:
        follow = partial(_follow, store, rank_info.rank, leader)
        name, folder = _with_timeout(_CONNECT_S + _ANSWER_S, follow)
    return PrefixStore(name, store), folder


def _with_timeout(seconds: float, act: Callable[[], T]) -> T:
    """Call `act` on a thread, for at most `seconds`.

    The time limit of torch's store has no effect if the server does not answer.
    """
    outcome: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except Exception as error:
            outcome.set_exception(error)

    Thread(target=run, name="instrument-ranks", daemon=True).start()
    if not futures.wait([outcome], seconds).done:
        raise TimeoutError(
            f"the store at MASTER_ADDR:MASTER_PORT has not answered for {seconds:g} s"
        )
    return outcome.result()


def _lead(store: Any, others: int, own: Path) -> str:
    """Return a new name for the session; a thread sends the name and the folder to other ranks."""
    name, over = uuid4().hex, Event()
    answers = Thread(
        target=_answer_joins,
        args=(store, name, own, others, over),
        name="instrument-ranks",
        daemon=True,
    )
    answers.start()
    atexit.register(_stop_answering, answers, over)
    return name


def _answer_joins(store: Any, name: str, folder: Path, others: int, over: Event) -> None:
    """Answer join messages with the session's name and folder, until all ranks have joined.

    Also stop after ten minutes, or when the process ends. Join messages from before a restart of
    the job are answered too, but no rank reads these answers. A rank has joined when it has read
    its answer.
    """
    joins, began = _Messages(store, "joins"), time.monotonic()
    with suppress(Exception):  # the store may be gone
        while (
            store.add(f"{name}/joined", 0) < others
            and time.monotonic() - began < _JOIN_LIMIT_S
            and not over.wait(_JOIN_POLL_S)
        ):
            for join in joins.unread():
                store.set(f"answers/{join}", json.dumps([name, str(folder)]))


def _stop_answering(answers: Thread, over: Event) -> None:
    over.set()
    answers.join(_CONNECT_S)


def _follow(store: Any, rank: int, leader: int) -> tuple[str, Path]:
    """Send a join message and wait for the leading rank's answer: session name and folder."""
    join = uuid4().hex
    _Messages(store, "joins").append(join)
    began, logged = time.monotonic(), False
    while not store.check([f"answers/{join}"]):
        waited = time.monotonic() - began
        if waited > _ANSWER_S:
            raise TimeoutError(f"rank {leader} has not answered for {_ANSWER_S:g} s")
        if waited > 1 and not logged:
            logger.info(
                "Rank {} waits up to {:g} s for rank {}, which coordinates the recording ranks.",
                rank,
                _ANSWER_S,
                leader,
            )
            logged = True
        time.sleep(0.02)
    name, folder = json.loads(store.get(f"answers/{join}"))
    store.add(f"{name}/joined", 1)
    return name, Path(folder)


def _store_address() -> tuple[str, int]:
    """The address and port of the job's store.

    Raises:
        ConnectionError: the address is not set, or no server listens at the address.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConnectionError(
            "the address of the job's store is not known, because MASTER_ADDR is not set or "
            "MASTER_PORT is not a number; torchrun sets both"
        )
    # torch's own connection would log its stack again and again if nobody listens
    until = time.monotonic() + _CONNECT_S
    while (error := _connection_error(address, int(port))) is not None:
        if time.monotonic() > until:
            raise ConnectionError(
                f"nobody listens at MASTER_ADDR:MASTER_PORT, {address}:{port} ({error}); without "
                "torchrun, start the session after torch.distributed.init_process_group"
            )
        time.sleep(0.1)
    return address, int(port)


def _connection_error(address: str, port: int) -> OSError | None:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error
    return None


def _connect(address: str, port: int, session: str) -> Any:
    """Connect to the job's store; return the part of the store for this session of this job."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=_CONNECT_S)
    store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    return PrefixStore(f"instrument/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{session}", store)
