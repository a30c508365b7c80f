"""What it costs a job's store that ranks agree on the folder, and look for windows of triggers; run by `make bench`.

A thousand threads are the ranks, each with its own connections to a real TCPStore in another process. Rank 0 comes
last, a second after the others. With the peer, rank 0 names the folder, and all others ask for it every 20 ms. With
ours, the first rank that comes names it, with one request. The CPU time is that of the store's process.

torch looks up the name of each address that connects, on the thread that serves the store. Here, no name server is
asked, so that the times do not depend on it: a small library answers with the number. It needs a C compiler.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from rounds import Row, report
from torch.distributed import TCPStore

from instrument import ProfilerConfig
from instrument.base.rank_info import RankInfo
from instrument.record import distributed
from instrument.record.distributed import Announcements, StepProgress, join_ranks

RANKS, MANY, ROUNDS, POLLS = 1000, 10_000, 3, 20
LATE_S, OLD_POLL_S = 1.0, 0.02
ADDRESS = "127.0.0.1"


class OneSession(Counter[str]):
    """The ranks are threads of one process, but each starts its first session."""

    def __getitem__(self, _: str) -> int:
        return 1


def serve() -> int:
    """Serve a store; for each line that is read, print the CPU seconds and the open files of this process."""
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), len([*Path("/proc/self/fd").iterdir()]), flush=True)
    return 0


class Server:
    """A store in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.port = int(process.stdout.readline())

    def used(self) -> tuple[float, int]:
        """The CPU seconds of the process, and its open files."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        seconds, files = self._process.stdout.readline().split()
        return float(seconds), int(files)


@contextmanager
def served() -> Iterator[Server]:
    command = [sys.executable, __file__, "serve"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield Server(process)


NO_NAME_SERVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
int getnameinfo(const struct sockaddr *a, socklen_t n, char *h, socklen_t hn, char *s, socklen_t sn, int flags) {
    typeof(&getnameinfo) next = dlsym(RTLD_NEXT, "getnameinfo");
    return next(a, n, h, hn, s, sn, flags | NI_NUMERICHOST);
}
"""

Join = Callable[[int, int], Any]


def ours(rank: int, port: int) -> Announcements | None:
    config = ProfilerConfig(triggers=["signal"])
    return join_ranks(config, RankInfo(rank, RANKS, 0), lambda: StepProgress(0, None))[1]


def polling(rank: int, port: int) -> TCPStore:
    socket.create_connection((ADDRESS, port)).close()
    store = TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False)
    if rank == 0:
        store.set("folder", "profile")
    while not store.check(["folder"]):
        time.sleep(OLD_POLL_S)
    store.get("folder")
    store.add("windows", 0)
    return store


def all_joined(join: Join, server: Server) -> list[Any]:
    """Let all ranks join, and return what each got."""
    got: list[Any] = [None] * RANKS

    def of(rank: int) -> None:
        got[rank] = join(rank, server.port)

    os.environ |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(server.port)}
    threads = [Thread(target=of, args=(rank,)) for rank in range(RANKS)]
    for thread in threads[1:]:
        thread.start()
    time.sleep(LATE_S)
    threads[0].start()
    for thread in threads:
        thread.join()
    assert None not in got
    return got


def requests(join: Join) -> int:
    """How often a rank that joins alone waits for an answer of the store, counted between the two."""
    with served() as server, socket.create_server((ADDRESS, 0)) as proxy:
        answers: list[int] = []

        def relay(source: socket.socket, target: socket.socket, sizes: list[int]) -> None:
            with suppress(OSError):  # the other thread has closed both
                while text := source.recv(1 << 16):
                    sizes.append(len(text))
                    target.sendall(text)
                target.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    rank, _ = proxy.accept()
                    store = socket.create_connection((ADDRESS, server.port))
                    Thread(target=relay, args=(rank, store, []), daemon=True).start()
                    Thread(target=relay, args=(store, rank, answers), daemon=True).start()

        Thread(target=accept, daemon=True).start()
        port = proxy.getsockname()[1]
        os.environ |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port)}
        join(0, port)
        return len(answers)


def measure() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    distributed._started = OneSession()
    cpu_s: dict[Join, list[float]] = {ours: [], polling: []}
    wall_s: dict[Join, list[float]] = {ours: [], polling: []}
    poll_s, most_files = [], 0
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("profile").mkdir()
        sent = {join: requests(join) for join in cpu_s}
        for _ in range(ROUNDS):
            for join in cpu_s:
                with served() as server:
                    (before_s, before), began = server.used(), time.perf_counter()
                    got = all_joined(join, server)
                    wall_s[join].append(time.perf_counter() - began - LATE_S)
                    after_s, files = server.used()
                    cpu_s[join].append((after_s - before_s) / RANKS)
                    if join is ours:
                        most_files = max(most_files, files - before)
                        for _ in range(POLLS):
                            for announcements in got:
                                assert not [*announcements.new()]
                        poll_s.append((server.used()[0] - after_s) / (POLLS * RANKS))
                    del got
        os.chdir("/")
    least = {join: min(values) for join, values in cpu_s.items()}
    poll = min(poll_s)
    # the pauses are between half and all of the interval
    interval_s = 0.75 * distributed.exchange_seconds(MANY)
    print(
        f"{RANKS} ranks: {sent[ours]} requests per join (with the peer, if rank 0 is there: {sent[polling]}), "
        f"{most_files} connections, {min(wall_s[ours]):.2f} s in all "
        f"(peer: {min(wall_s[polling]):.2f} s), without the {LATE_S:g} s of rank 0.\n"
        f"Extrapolated to {MANY} ranks: joining takes the store {MANY * least[ours]:.2f} s of CPU, "
        f"and {MANY * most_files // RANKS} connections.\n"
        f"A look for announcements takes the store {poll * 1e6:.1f} µs: {MANY} ranks take "
        f"{MANY / interval_s:.0f} looks per second and {MANY / interval_s * poll:.1%} of a core; every "
        f"{distributed.POLL_SECONDS:g} s, it would be {MANY / distributed.POLL_SECONDS:.0f} and "
        f"{MANY / distributed.POLL_SECONDS * poll:.1%}."
    )
    peer = f"asking every {OLD_POLL_S * 1000:g} ms, rank 0 comes {LATE_S:g} s late"
    rows = [
        Row("the store's CPU time, each join", least[ours] * 1e9, peer, least[polling] * 1e9, 0.7),
        Row("connections, each join", most_files / RANKS, "one", 1, 1.01, "of each"),
        Row(
            f"looks for announcements, {MANY} ranks",
            MANY / interval_s,
            f"every {distributed.POLL_SECONDS:g} s",
            MANY / distributed.POLL_SECONDS,
            0.1,
            "per s",
        ),
    ]
    return 0 if report(f"{RANKS} ranks join a job's store, torch {torch.__version__}", rows) else 1


def main() -> int:
    """Measure in a process whose torch asks no name server."""
    with TemporaryDirectory() as folder:
        library = f"{folder}/no_name_server.so"
        compile_ = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
        subprocess.run(compile_, input=NO_NAME_SERVER, text=True, check=True)
        return subprocess.run(
            [sys.executable, __file__, "measure"],
            env={**os.environ, "LD_PRELOAD": library},
            check=False,
        ).returncode


if __name__ == "__main__":
    acts = {"serve": serve, "measure": measure}
    sys.exit(acts[sys.argv[1]]() if sys.argv[1:] else main())
