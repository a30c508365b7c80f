"""Which ranks record, at which step all of them do what a trigger asks for, and into which folder.

They talk in messages of some hundred bytes through the store at MASTER_ADDR:MASTER_PORT that brings a job's ranks
together, over a connection of their own and off the training thread: no collective, and no lock that training shares.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from instrument import export
from instrument.config import ProfilerConfig
from instrument.metadata import Place

# How often messages are looked for, as files and the like are, on the watcher's thread.
POLL_SECONDS = 0.5
# Within how many polls every rank must have heard of a window, besides the one that its message may just have missed.
_POLLS_AHEAD = 3
_LEAST_STEPS_AHEAD = 2
_CONNECT_S = 10.0
_FOLDER_S = 30.0


def records(ranks: str | list[int], place: Place) -> bool:
    """Whether this rank is one of those that `profiler.ranks` names; says so where it is not.

    What cannot be meant is warned of on rank 0 alone.
    """
    missing = [rank for rank in ranks if rank >= place.world_size] if isinstance(ranks, list) else []
    if missing and place.rank == 0:
        rest = "nothing is recorded" if len(missing) == len(ranks) else "the others record"
        world = "1 rank, 0" if place.world_size == 1 else f"{place.world_size} ranks, 0 to {place.world_size - 1}"
        named = " and ".join(map(str, missing))
        logger.warning("profiler.ranks names {}, but the run has {}: {}.", named, world, rest)
    chosen = place.rank in ranks if isinstance(ranks, list) else ranks == "all" or place.local_rank == 0
    if not chosen:
        logger.info("Rank {} records nothing: profiler.ranks is {}.", place.rank, ranks)
    return chosen


def lead(step_ns: int) -> int:
    """How many steps ahead a window is announced, so that every rank hears of it in time."""
    return max(_LEAST_STEPS_AHEAD, math.ceil(_POLLS_AHEAD * POLL_SECONDS * 1e9 / max(1, step_ns)))


class Ask(NamedTuple):
    """What a trigger of one rank asks for: `steps` to record, None as many as `profiler.active` says."""

    trigger: str
    why: str | None
    steps: int | None
    rank: int
    after_step: int


class Call(NamedTuple):
    """What all ranks record from step `begin` on, which is the first of the warm-up."""

    trigger: str
    why: str
    steps: int | None
    begin: int


class Pace(NamedTuple):
    """How far a rank's training is: the step that runs now, and the median of its steps; None: none is known yet."""

    step: int
    step_ns: int | None


class Team:
    """The ranks that record together, as one of them talks to the others; the lowest leads.

    For the watcher's thread, but for `folder`. What any method raises means that the store is gone.

    Attributes:
        over: whether the leader has ended its session.
    """

    def __init__(self, store: Any, place: Place, config: ProfilerConfig, pace: Callable[[], Pace]) -> None:
        leader = min(config.ranks) if isinstance(config.ranks, list) else 0
        self.rank, self.leads, self.over = place.rank, place.rank == leader, False
        self._store, self._leader, self._config, self._pace = store, leader, config, pace
        self._asks, self._calls = _Messages(store, "asks"), _Messages(store, "calls")
        self._open: list[Ask] = []  # until the leader knows how long a step takes
        self._called_until = -1

    def ask(self, ask: Ask) -> None:
        """Ask the leader for a window of all ranks."""
        self._asks.append(ask)

    def asks(self) -> Iterator[Ask]:
        """What was asked for since the last time; for the leader alone, and once its steps have been timed.

        What was asked for before the last window was over is left out: it has had that window.
        """
        if not self.leads:
            return
        self._open += [Ask(*message) for message in self._asks.unread()]
        while self._open and self._pace().step_ns is not None:
            ask = self._open.pop(0)
            if ask.after_step > self._called_until:
                yield ask

    def call(self, ask: Ask) -> None:
        """Tell all ranks, this one among them, from which step on they record what was asked for."""
        step, step_ns = self._pace()
        begin = step + lead(step_ns or 0)
        why = f"{ask.why}, " if ask.why else ""
        self._calls.append(Call(ask.trigger, f"{why}on rank {ask.rank} after step {ask.after_step}", ask.steps, begin))
        self._called_until = begin + self._config.warmup + (ask.steps or self._config.active or 1) - 1

    def calls(self) -> Iterator[Call]:
        """What all ranks are to record that this one has not heard of yet."""
        for message in self._calls.unread():
            if message is None:
                self.over = True
                return
            yield Call(*message)

    def end(self) -> None:
        """Let the others know, if this rank leads, that nobody does any more."""
        if self.leads and not self.over:
            self._calls.append(None)

    def folder(self, own: Path) -> Path:
        """The leader's folder for captures; the leader gives its own.

        Raises:
            TimeoutError: the leader has not named it in time.
            ConfigError: this rank cannot write there.
        """
        folders = _Messages(self._store, "folders")
        if self.leads:
            folders.append(str(own))
            return own
        until, named = time.monotonic() + _FOLDER_S, next(folders.unread(), None)
        if named is None:
            logger.info("Rank {} waits up to {:g} s for the folder of rank {}.", self.rank, _FOLDER_S, self._leader)
        while named is None and time.monotonic() < until:
            time.sleep(0.02)
            named = next(folders.unread(), None)
        if named is None:
            raise TimeoutError(f"rank {self._leader} has named no folder for captures in {_FOLDER_S:g} s")
        return export.writable(Path(named))


class _Messages:
    """A list in the store, to which every rank can append."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self._read = 0

    def append(self, message: Any) -> None:
        number = self._store.add(self._name, 1)
        self._store.set(f"{self._name}/{number}", json.dumps(message))

    def unread(self) -> Iterator[Any]:
        """Those that this one has not given yet; costs one look at the store where there are none."""
        written = self._store.add(self._name, 0)
        while self._read < written:
            self._read += 1
            yield json.loads(self._store.get(f"{self._name}/{self._read}"))  # waits for who is between his two calls


# Sessions of this process by their ranks, so that two do not hear each other: those ranks start the same ones.
_started: Counter[str] = Counter()


def gather(config: ProfilerConfig, place: Place, pace: Callable[[], Pace]) -> tuple[Path, Team | None]:
    """The session's folder for captures, and with triggers the ranks that record together; None: each by itself.

    Ranks meet where there is more than one, and something that they must agree on. It costs a connection, and a rank
    that does not lead waits for the leader's start where the folder is not given: up to 30 seconds.

    Raises:
        ConfigError: the folder cannot be written.
    """
    own, who = export.output_dir(config), str(config.ranks)
    _started[who] += 1
    if _alone(config.ranks, place) or (config.output_dir is not None and not config.triggers):
        return export.writable(own), None
    team, folder = None, own
    try:
        team = Team(connected(f"{who}/{_started[who]}"), place, config, pace)
        folder = team.folder(own) if config.output_dir is None else own
    except Exception as error:  # whatever the store raises; or the folder cannot be made on this machine
        what = "records by itself, into its own folder" if team is None else "records into its own folder"
        logger.warning("Rank {} {}: {}.", place.rank, what, str(error).rstrip("."))
    return export.writable(folder), team if config.triggers else None


def _alone(ranks: str | list[int], place: Place) -> bool:
    return place.world_size == 1 or (
        isinstance(ranks, list) and all(place.rank == rank or rank >= place.world_size for rank in ranks)
    )


def connected(session: str) -> Any:
    """A connection to the job's store, in a place of its own there for each session and each restart of the job.

    Raises:
        ConnectionError: there is none, in so many words.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in every build of torch

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConnectionError("MASTER_ADDR and MASTER_PORT, which torchrun sets, name no store")
    _await_server(address, int(port))
    limit = timedelta(seconds=_CONNECT_S)
    store = TCPStore(address, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    return PrefixStore(f"instrument/{run}/{session}", store)


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
