"""Decides which ranks record, into which folder, and at which step a trigger's window begins.

The ranks agree through the job's store: the key-value store of torch.distributed at
MASTER_ADDR:MASTER_PORT (see docs/architecture.md). None waits for another. No lock is shared with
training: each rank opens its own connection, which the training thread does not use after the
start.

torch's store has two limits. If its server hangs, a thread that uses the store hangs too. If its
server dies while the interpreter exits, a thread that still uses the store aborts the process.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from random import SystemRandom
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from instrument.base.log import logger
from instrument.base.rank_info import RankInfo
from instrument.record.config.schedule import requested_window
from instrument.record.config.schema import ProfilerConfig
from instrument.record.output_folder import output_dir, writable
from instrument.record.triggers.trigger import Request

# How long the polling thread pauses at most before it looks again for files and so on.
POLL_SECONDS = 0.5
# More ranks look for messages less often, so that the store serves at most some 1,400 requests per
# second, which take 1 to 2 % of a core.
_RANKS_AT_FULL_RATE = 500
_LEAST_STEPS_AHEAD = 2
# How long a store may take to listen, and to answer.
_CONNECT_S, _LONGEST_PAUSE_S = 10.0, 2.0
# How long all this may delay the start. torch looks up the name of the store's address, which takes
# 10 to 30 s if name servers do not answer; and the server looks up those of all ranks in turn.
_JOIN_S = 30.0

uniform = SystemRandom().uniform  # the program may have seeded Python's own generator
T = TypeVar("T")


def records(ranks: str | list[int], rank_info: RankInfo) -> bool:
    """Whether `profiler.ranks` includes this rank; logs if not. Rank 0 warns of missing ones."""
    missing = (
        [rank for rank in ranks if rank >= rank_info.world_size] if isinstance(ranks, list) else []
    )
    if missing and rank_info.rank == 0:
        rest = "nothing is recorded" if len(missing) == len(ranks) else "the other ranks record"
        last = rank_info.world_size - 1
        world = f"{last + 1} ranks, 0 to {last}" if last else "only rank 0"
        named = " and ".join(map(str, missing))
        logger.warning("profiler.ranks names {}, but the run has {}: {}.", named, world, rest)
    by_name = ranks in ("all", "one_per_role") or (
        ranks == "first_per_node" and rank_info.local_rank == 0
    )
    if by_name or (isinstance(ranks, list) and rank_info.rank in ranks):
        return True
    logger.info("Rank {} records nothing: profiler.ranks is {}.", rank_info.rank, ranks)
    return False


def recording_ranks(ranks: str | list[int], world_size: int) -> int:
    """How many ranks record, as far as that is known; all ranks of a job get the same number."""
    if isinstance(ranks, list):
        return sum(rank < world_size for rank in ranks)
    nodes = os.environ.get("GROUP_WORLD_SIZE", "") if ranks == "first_per_node" else ""
    return min(int(nodes), world_size) if nodes.isdecimal() else world_size


def exchange_seconds(ranks: int) -> float:
    """How often each of so many recording ranks looks for announcements, in seconds, at least."""
    return POLL_SECONDS * max(1.0, ranks / _RANKS_AT_FULL_RATE)


def steps_ahead(step_ns: int, exchange_s: float) -> int:
    """The number of steps from the announcement of a window to the start of its warm-up."""
    # during these steps, the polling threads of all ranks must read the announcement
    ahead_ns = (exchange_s + 2 * POLL_SECONDS) * 1e9
    return max(_LEAST_STEPS_AHEAD, math.ceil(ahead_ns / max(1, step_ns)))


class AnnouncedWindow(NamedTuple):
    """A window that all ranks record, from the warm-up's first step `begin` to the last step `end`.

    If `steps` is None, the window has `profiler.active` steps. `after_step` is the step after which
    the trigger fired.
    """

    trigger: str
    why: str
    steps: int | None
    after_step: int
    begin: int
    end: int


class StepProgress(NamedTuple):
    """A rank's current step, and the median duration of its steps (None until one is timed)."""

    step: int
    step_ns: int | None


class Announcements:
    """The windows that the ranks of a job announce to each other, in one order for all ranks.

    Only the thread that polls the triggers uses this object. A rank hears of the windows that are
    announced after it has started: earlier ones may be those of a job that was restarted. If the
    store no longer answers, the methods raise its exceptions. A rank should call `new` every
    `exchange_s` seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        config: ProfilerConfig,
        progress: Callable[[], StepProgress],
        exchange_s: float = POLL_SECONDS,
    ) -> None:
        self.rank, self.exchange_s = rank, exchange_s
        self._store, self._config, self._progress = store, config, progress
        self._read = int(store.add("windows", 0))
        while store.check([self._next_key()]):  # its rank was killed before it counted the window
            self._read += 1

    def announce(self, trigger: str, request: Request, after_step: int) -> bool:
        """Tell all ranks, including this one, at which step they begin the window.

        Returns False, and announces nothing, if this rank has not timed a step yet, or if there is
        an announcement that it has not read yet, so that a thousand ranks do not announce the same.
        """
        step, step_ns = self._progress()
        if step_ns is None:
            return False
        why = f"{request.why}, " if request.why else ""
        why += f"on rank {self.rank} after step {after_step}"
        begin = int(step) + steps_ahead(step_ns, self.exchange_s)
        last = requested_window(self._config, begin, request.steps, trigger, why).last
        window = AnnouncedWindow(trigger, why, request.steps, int(after_step), begin, last or begin)
        text = json.dumps(window)
        if self._store.compare_set(self._next_key(), "", text).decode() != text:
            return False
        self._store.add("windows", 1)  # for ranks that start later
        return True

    def new(self) -> Iterator[AnnouncedWindow]:
        """Yield the windows that were announced since the last call.

        Cost: one request to the store, and three more for each new window.
        """
        while self._store.check([self._next_key()]):
            text = self._store.get(self._next_key())
            self._read += 1
            try:
                yield AnnouncedWindow(*json.loads(text))
            except (ValueError, TypeError):  # it comes from the network
                continue

    def _next_key(self) -> str:
        return f"windows/{self._read + 1}"


# How many sessions this process has started, by the value of `profiler.ranks`. All recording ranks
# start the same sessions, so the number separates the messages of two sessions.
_started: Counter[str] = Counter()


def join_ranks(
    config: ProfilerConfig, rank_info: RankInfo, progress: Callable[[], StepProgress]
) -> tuple[Path, Announcements | None]:
    """Agree with the other ranks on the folder for captures; connect to them for triggers.

    No connection is needed if only this rank records, or if `profiler.output_dir` is given and
    there are no triggers. A job that is restarted records into the folder of its first start.

    Cost: a connection to the store. If nobody listens for 10 s, or joining takes longer than 30 s,
    a rank records by itself. The announcements are None then, or without triggers.

    Raises:
        ConfigError: the folder cannot be written.
    """
    own, ranks = output_dir(config), str(config.ranks)
    if _is_alone(config.ranks, rank_info) or (
        config.output_dir is not None and not config.triggers
    ):
        return writable(own), None
    announcements, folder = None, own
    _started[ranks] += 1
    session = f"{ranks}/{_started[ranks]}"

    def join() -> tuple[Announcements, Path]:
        store = _connect(*_store_address(), session)
        first = store.compare_set("folder", "", str(own)).decode()
        exchange_s = exchange_seconds(recording_ranks(config.ranks, rank_info.world_size))
        return Announcements(store, rank_info.rank, config, progress, exchange_s), Path(first)

    try:
        announcements, shared = _with_timeout(_JOIN_S, join)
        folder = writable(shared) if config.output_dir is None else own
    except Exception as error:  # the store failed, or this machine cannot create the folder
        what = "records by itself" if announcements is None else "records"
        if config.output_dir is None:
            what += " into its own folder"
        logger.warning("Rank {} {}: {}.", rank_info.rank, what, str(error).rstrip("."))
    return writable(folder), announcements if config.triggers else None


def _is_alone(ranks: str | list[int], rank_info: RankInfo) -> bool:
    return rank_info.world_size == 1 or (
        isinstance(ranks, list)
        and all(rank_info.rank == rank or rank >= rank_info.world_size for rank in ranks)
    )


def _with_timeout(seconds: float, act: Callable[[], T]) -> T:
    # on a thread: the time limit of torch's store has no effect if the server does not answer
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


def _store_address() -> tuple[str, int]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConnectionError(
            "the address of the job's store is not known, because MASTER_ADDR is not set or "
            "MASTER_PORT is not a number; torchrun sets both"
        )
    # torch's own connection would log its stack again and again if nobody listens
    until, pause_s = time.monotonic() + _CONNECT_S, 0.1
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"nobody listens at MASTER_ADDR:MASTER_PORT, {address}:{port} ({error}); "
                    "without torchrun, start the session after "
                    "torch.distributed.init_process_group"
                ) from error
            time.sleep(uniform(0.5, 1) * pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        else:
            return address, int(port)


def _connect(address: str, port: int, session: str) -> Any:
    """Connect to the job's store; return the part of the store for this session of this job."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=_JOIN_S)
    store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_CONNECT_S))
    return PrefixStore(f"instrument/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{session}", store)
