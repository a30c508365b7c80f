"""What `capture.json` says about the run and its process: one function for each fact.

`step_loop.py` adds the steps of the window and the cost of recording them; `export/window.py` adds
the cost of finishing.

A trace does not hold these facts. Those of the run are read once, when it begins; the settings
and threads of the process when a window begins. Compilations, garbage collections and data
loaders are counted during the window. A fact that cannot be read is None; no error is raised.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch

from instrument import __version__
from instrument.annotate import backends
from instrument.annotate.module_calls import skip_in_dynamo
from instrument.base.files import FORMAT
from instrument.base.rank_info import RankInfo, rank_info
from instrument.base.redact import redact, redact_words
from instrument.record.config.schema import ProfilerConfig
from instrument.record.limits import machine_bytes
from instrument.record.output_folder import hydra_run
from instrument.record.torch_support import known

T = TypeVar("T")

# How long a run waits for git at its start.
_GIT_S = 2.0

_CGROUPS = Path("/sys/fs/cgroup")
# For each launcher, the environment variable with the number of its processes on this machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

# The id of a compilation, such as "0/1: ", before the reason why a guard failed.
_COMPILATION = re.compile(r"^\S*\d+/\d+: ")
# How many reasons for graph breaks or failed guards are kept, and how many characters of each
# reason. The most frequent reasons are kept.
_MOST_REASONS = 20
_REASON_LENGTH = 200
_OTHER_REASONS = "(other reasons)"

# A window rarely iterates more than a training and a validation loader.
_MOST_LOADERS = 16


# The run.


def run_metadata(config: ProfilerConfig, activities: list[str], rank: RankInfo) -> dict[str, Any]:
    """The part of `capture.json` that all windows of a run share, such as the config."""
    return {
        "format": FORMAT,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "world_size": rank.world_size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "activities": activities,
        "devices": devices(activities),
        "machine": {
            "cpus": os.cpu_count(),
            "memory_bytes": machine_bytes(),
            "system": platform.platform(),
            "processor": platform.processor(),
        },
        "versions": {
            "instrument": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **provenance(),
        "annotations_disabled": backends.disabled,
        "config": config.plain(),
    }


def devices(activities: list[str]) -> list[str]:
    """The names of the CUDA devices; empty if CUDA is not recorded."""
    if "cuda" not in activities:
        return []
    return [str(torch.cuda.get_device_name(each)) for each in range(torch.cuda.device_count())]


def provenance() -> dict[str, Any]:
    """The command line and Hydra's overrides, without secrets, and the state of the script's git.

    `overrides` is None if the program does not use Hydra.
    """
    hydra = hydra_run()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "command": redact_words(sys.argv),
        "overrides": None if hydra is None else redact_words(hydra.overrides.task),
        "git": git_state(Path(main).absolute().parent if main else Path.cwd()),
    }


@cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder's repository, and whether a tracked file differs from it (`dirty`).

    None if there is no git, no repository or no commit, or if git does not answer within two
    seconds. `dirty` is None if the config of the repository itself sets filters: programs that git
    would run to compare files. A repository is read once in a process.
    """
    try:
        commit = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        scopes = _run_git(folder, "config", "--list", "--show-scope", "--name-only")
        own = [line for line in scopes.splitlines() if line.startswith(("local\t", "worktree\t"))]
        if any(line.partition("\t")[2].startswith("filter.") for line in own):
            # to find changed files, git would run the programs that the repository's config names
            return {"commit": commit, "dirty": None}
        changed = _run_git(
            folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _run_git(folder: Path, *arguments: str) -> str:
    # the config of a repository may name programs that git runs; these options prevent that
    safe = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never"]
    command = ["git", *(word for option in safe for word in ("-c", option)), *arguments]
    # write nothing into the user's repository, and fetch nothing for a partial clone
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_GIT_S,
        check=True,
    )
    return done.stdout.strip()


# The process.


def settings() -> dict[str, Any]:
    """The settings of torch, on the current thread, that change the speed of a step."""
    return {
        "grad_enabled": known(torch.is_grad_enabled),
        "anomaly_mode": known(torch.is_anomaly_enabled),
        # raises if the program uses the newer settings of torch 2.9, such as `fp32_precision`
        "float32_matmul_precision": known(torch.get_float32_matmul_precision),
        "allow_tf32": known(_allow_tf32),
        "cudnn_benchmark": known(lambda: bool(torch.backends.cudnn.benchmark)),
        "deterministic_algorithms": known(torch.are_deterministic_algorithms_enabled),
    }


def _allow_tf32() -> bool:
    matmul: Any = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # the program uses the newer setting
        return bool(matmul.fp32_precision == "tf32")


def thread_counts() -> dict[str, int | None]:
    """How many threads torch has, CPUs it may use, and processes the job has on this machine."""
    return {
        "intra_op": known(torch.get_num_threads),
        "inter_op": known(torch.get_num_interop_threads),
        "cpus": known(usable_cpus),
        "local_ranks": known(local_ranks),
    }


def usable_cpus() -> int | None:
    """How many CPUs the process's threads may run on, or its CPU quota, rounded up, if smaller."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return os.cpu_count()
    allowed = set[int]()
    # the union over all threads, because OMP_PROC_BIND binds each OpenMP thread to its own CPU
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            allowed |= os.sched_getaffinity(int(thread.name))
    quota = known(lambda: cpu_quota(Path("/proc/self/cgroup").read_text(), _CGROUPS))
    return len(allowed) if quota is None else min(len(allowed), max(1, math.ceil(quota)))


def cpu_quota(membership: str, root: Path) -> float | None:
    """The smallest CPU quota of a process's cgroups and their parents, in CPUs; None without one.

    `membership` is the content of `/proc/self/cgroup`. `root`, where the cgroups are mounted, may
    show only a container's own cgroup.
    """
    quotas = list[float | None]()
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroups of version 2
            mounts = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / controllers, root / "cpu"]
        else:
            continue
        inside = Path(path.lstrip("/"))
        quotas += [_quota(mount / part) for mount in mounts for part in (inside, *inside.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """The CPU quota of one cgroup, in CPUs; None if its files set no quota or do not exist."""
    with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is no number
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None


def local_ranks() -> int | None:
    """How many processes of this job run on this machine, according to the launcher's variables.

    Raises:
        KeyError: no environment variable gives this number.
    """
    if rank_info().world_size == 1:
        return 1
    for variable in _LOCAL_SIZES:
        if (value := os.environ.get(variable, "")).isdecimal():
            return int(value)
    # such as "4(x2),3": 4 processes on each of two machines, and 3 on another
    per_node, node = os.environ["SLURM_STEP_TASKS_PER_NODE"], int(os.environ["SLURM_NODEID"])
    sizes = list[int]()
    for part in per_node.split(","):
        size, _, times = part.partition("(x")
        sizes += [int(size)] * int(times.rstrip(")") or 1)
    return sizes[node]


# The window.


class WindowFacts:
    """The facts of one window, for the key `environment` of `capture.json`.

    Create this object before the window begins: it reads the settings and threads. Call
    `begin` when recording has begun, and `end` before it ends.
    """

    def __init__(self) -> None:
        self._compiled = before = known(dynamo_counts)
        loaded = "torch._dynamo.utils" in sys.modules
        self._facts: dict[str, Any] = {
            "threads": thread_counts(),
            **settings(),
            "dynamo": known(partial(compilations, before, before)) if loaded and before else None,
            "garbage_collection": None,
            "cpu_wait": None,
            "loaders": None,
        }
        self._collections = Collections()
        self._thread: Thread | None = None
        self._began_ns = 0
        self._scheduled: tuple[int, int] | None = None
        self._workers_waited: dict[str, int] = {}

    def begin(self, thread: Thread) -> None:
        """Begin to count garbage collections, and how long `thread` waits for a CPU."""
        self._thread = thread
        gc.callbacks.append(self._collections)
        self._began_ns, self._scheduled = time.monotonic_ns(), _scheduled(thread.native_id)
        self._workers_waited = _workers_waited()

    def end(self) -> None:
        """Stop counting."""
        if self._collections not in gc.callbacks or self._thread is None:
            return
        gc.callbacks.remove(self._collections)
        after, before, now_ns = (
            _scheduled(self._thread.native_id),
            self._scheduled,
            time.monotonic_ns(),
        )
        # if it is less than before, the thread has ended, and another one has its id
        if after is not None and before is not None and after[1] >= before[1]:
            before_ns, workers = self._workers_waited, _workers_waited()
            since = [max(ns - before_ns.get(each, 0), 0) for each, ns in workers.items()]
            self._facts["cpu_wait"] = {
                "waited_ns": after[1] - before[1],
                "ran_ns": after[0] - before[0],
                "workers_waited_ns": sum(since),
                "window_ns": now_ns - self._began_ns,
            }

    def environment(self) -> dict[str, Any]:
        """The content of the key `environment`; `loaders` is None."""
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        with suppress(Exception):  # another thread may compile, and so change the counters
            if self._compiled is None or counters != self._compiled.counters:
                self._facts["dynamo"] = known(lambda: compiled_since(self._compiled))
        return {**self._facts, "garbage_collection": self._collections.totals}


def _scheduled(thread: int | str | None) -> tuple[int, int] | None:
    """How long a thread of this process has run, and how long it has waited for a CPU, in ns.

    `thread` is the system's id. Only Linux measures these times; None if they are not known. Cost:
    15 µs.
    """
    try:
        times = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        ran_ns, waited_ns, _ = map(int, times)
    except (OSError, ValueError):
        return None
    return (ran_ns, waited_ns) if ran_ns else None  # 0: this Linux measures nothing


def _workers_waited() -> dict[str, int]:
    """How long each thread that Python did not start has waited for a CPU, in nanoseconds.

    On the CPU, these are torch's threads for operators. Threads that idle do not wait. Cost: 15 µs
    for each thread.
    """
    try:
        threads = {each.name for each in Path("/proc/self/task").iterdir()}
    except OSError:
        return {}
    threads -= {str(each.native_id) for each in threading.enumerate()}
    return {each: found[1] for each in threads if (found := _scheduled(each)) is not None}


class Collections:
    """Counts the garbage collections that begin and end while this object is in `gc.callbacks`.

    Python runs one collection at a time, on any thread, and calls this object on that thread.

    Attributes:
        totals: the number of collections, and their total and longest duration in nanoseconds.
    """

    def __init__(self) -> None:
        self.totals = {"collections": 0, "total_ns": 0, "longest_ns": 0}
        self._began_ns: int | None = None

    def __call__(self, phase: str, _: Mapping[str, int]) -> None:
        """Count garbage collections; Python calls this at the start and at the end of each one."""
        now = time.perf_counter_ns()
        if phase == "start":
            self._began_ns = now
        elif self._began_ns is not None:
            took, self._began_ns = now - self._began_ns, None
            self.totals["collections"] += 1
            self.totals["total_ns"] += took
            self.totals["longest_ns"] = max(self.totals["longest_ns"], took)


# Python may collect garbage inside a compiled region; Dynamo would then compile this method.
skip_in_dynamo(Collections.__call__)


def leave_to_parent() -> None:
    """Stop counting garbage collections in a forked child, such as a worker of a data loader."""
    for callback in list(gc.callbacks):
        if isinstance(callback, Collections):
            gc.callbacks.remove(callback)


class DynamoCounts(NamedTuple):
    """The counters of torch.compile (Dynamo) in this process.

    Attributes:
        counters: Dynamo's own counters, by group of counters and by name.
        recompilations: how often Dynamo has compiled code again; None if this is not known.
        failed_guards: how often each guard has failed; None if this is not known.
    """

    counters: dict[str, dict[str, int]]
    recompilations: int | None
    failed_guards: dict[str, int] | None = None


def dynamo_counts() -> DynamoCounts:
    """Copy Dynamo's counters; all are zero if Dynamo is not loaded."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return DynamoCounts({}, 0, {})
    counters = {key: dict(each) for key, each in utils.counters.items()}
    guards = known(lambda: _failed_guards(utils.guard_failures))
    return DynamoCounts(counters, known(_recompilations), guards)


def _recompilations() -> int:
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None:
        return 0
    return sum(times - 1 for times in list(convert.FRAME_COMPILE_COUNTER.values()) if times > 1)


def _failed_guards(failures: Mapping[CodeType, Iterable[object]]) -> dict[str, int]:
    """How often each guard has failed, by a key such as "train.py:3 in forward: k == 2"."""
    found = Counter[str]()
    for code, reasons in list(failures.items()):
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"
        for reason in list(reasons):
            # Such as "0/1: k == 2   # source code".
            line = _COMPILATION.sub("", str(reason).partition("\n")[0])
            found[f"{place}: {line.partition('  #')[0].strip()}"] += 1
    return dict(found)


def compiled_since(before: DynamoCounts | None) -> dict[str, Any] | None:
    """`compilations` between `before` and now; None if `before` is, or without Dynamo."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if before is None or utils is None:
        return None
    return compilations(before, dynamo_counts())


def compilations(before: DynamoCounts, after: DynamoCounts) -> dict[str, Any]:
    """What Dynamo compiled between two copies of its counters.

    The number of graphs and of recompilations, and how often each reason broke a graph and each
    guard failed. A value is None if its counter is not known or has become smaller, because the
    program has cleared Dynamo's counters. The graph breaks are None if the number of graphs is.
    """
    graphs = _growth(_graphs(before), _graphs(after))
    breaks = _grown(before.counters.get("graph_break", {}), after.counters.get("graph_break", {}))
    old, new = before.failed_guards, after.failed_guards
    guards = None
    if old is not None and new is not None and sum(new.values()) >= sum(old.values()):
        guards = shortened(_grown(old, new))
    return {
        "graphs": graphs,
        "graph_breaks": None if graphs is None else shortened(breaks),
        "recompilations": _growth(before.recompilations, after.recompilations),
        "failed_guards": guards,
    }


def _graphs(counts: DynamoCounts) -> int:
    return counts.counters.get("stats", {}).get("unique_graphs", 0)


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None or after < before else after - before


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    return Counter(after) - Counter(before)  # leaves out the counts that have not grown


def shortened(reasons: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons (graph breaks, failed guards) as short lines without secrets.

    The counts of all other reasons are added up under one key.
    """
    counted = Counter[str]()
    for reason, times in reasons.items():
        # redacted before the cut, because `redact` would not recognise half of a token
        counted[str(redact(" ".join(str(reason).split())))[:_REASON_LENGTH]] += times
    kept = dict(counted.most_common(_MOST_REASONS))
    if others := sum(counted.values()) - sum(kept.values()):
        kept[_OTHER_REASONS] = others
    return kept


class Loaders:
    """The settings of the data loaders over which a run iterates.

    Attributes:
        seen: the settings of the loaders over which the run has iterated in the current window,
            without duplicates.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._open: dict[object, dict[str, Any]] = {}

    @contextmanager
    def iterating(self, loader: Any, phase: str) -> Iterator[None]:
        """Record the settings of `loader` while the `with` block iterates over it in `phase`."""
        iteration = object()
        self._add(iteration, loader, phase)
        try:
            yield
        finally:
            self._open.pop(iteration, None)

    def add(self, loader: Any, phase: str) -> None:
        """Record that a trainer, such as Lightning's, iterates over `loader` from now on.

        `loader` replaces the trainer's earlier loader of the same phase.
        """
        self._open.pop(phase, None)
        self._add(phase, loader, phase)

    def end_run(self) -> None:
        """Forget the loaders that `add` has recorded, because the run has ended."""
        for phase in [each for each in list(self._open) if isinstance(each, str)]:
            del self._open[phase]

    def begin_window(self) -> None:
        """Remove from `seen` the loaders over which the run no longer iterates."""
        self.seen = {tuple(facts.values()): facts for facts in list(self._open.values())}

    def _add(self, iteration: object, loader: Any, phase: str) -> None:
        facts = known(lambda: loader_settings(loader))
        if facts is None:
            return
        self._open[iteration] = facts = {"phase": phase, **facts}
        if len(self.seen) < _MOST_LOADERS:
            self.seen[tuple(facts.values())] = facts


def loader_settings(loader: Any) -> dict[str, Any] | None:
    """The settings of a `DataLoader` or of what has its attributes; None for all other objects."""
    workers = _of_type(int, loader, "num_workers")
    if workers is None:
        return None
    batch_size = _of_type(int, loader, "batch_size")
    if batch_size is None:  # a loader with a batch sampler has no batch size of its own
        sampler = known(lambda: loader.batch_sampler)
        batch_size = _of_type(int, sampler, "batch_size")
    return {
        "workers": workers,
        "batch_size": batch_size,
        "pin_memory": _of_type(bool, loader, "pin_memory"),
        "persistent_workers": _of_type(bool, loader, "persistent_workers"),
        "prefetch_factor": _of_type(int, loader, "prefetch_factor"),
        "iterable": known(lambda: _is_iterable(loader.dataset)),
    }


def _is_iterable(dataset: Any) -> bool:
    # through sys.modules, so that this loads no module of torch
    return isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def _of_type(kind: type[T], owner: Any, name: str) -> T | None:
    """The value of an attribute; None unless it is of type `kind` and between 0 and 2**50."""
    value = known(lambda: getattr(owner, name))
    return value if type(value) is kind and 0 <= value <= 2**50 else None  # type: ignore[operator]
