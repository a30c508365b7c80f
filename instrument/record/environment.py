"""Collects facts about a window for the key `environment` of `capture.json`.

The facts are settings of the process, and events that can make the window slower. A trace does not
hold these facts. torch's settings, the threads and the hooks are read when a window begins.
Dynamo's compilations, the runs of the garbage collector and the data loaders are noted during the
window. If a fact cannot be read, its value is None, and no error is raised.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from instrument.annotate.module_calls import skip_in_dynamo
from instrument.annotate.modules import instrumented_models
from instrument.rank_info import rank_info
from instrument.redact import redact

T = TypeVar("T")

# The attributes of a module and of a tensor in which torch keeps their hooks. The hooks for every
# module are in variables of torch.nn.modules.module: these names after the prefix "_global".
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

# How many reasons for graph breaks are kept (the most frequent), and how many characters of each.
_MOST_REASONS = 20
_REASON_LENGTH = 200
_OTHER_REASONS = "(other reasons)"
# A window rarely iterates more than a training and a validation loader.
_MOST_LOADERS = 16
_CGROUPS = Path("/sys/fs/cgroup")
# For each launcher, the environment variable with the number of its processes on this machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class WindowEnvironment:
    """The environment of one window; create it when the window begins.

    `Recorder` adds `collections` to `gc.callbacks` and removes it when the window ends. If Dynamo's
    counters then differ from `counters`, `Recorder` calls `count_compilations`.

    Attributes:
        facts: the content of the key `environment`. Its `loaders` is None until `StepLoop` saves
            the window.
        collections: counts the runs of the garbage collector.
        counters: a copy of Dynamo's counters when the window began; None if Dynamo was not loaded.
    """

    def __init__(self) -> None:
        self.collections = Collections()
        self._before = known(dynamo_counts)
        loaded = "torch._dynamo.utils" in sys.modules
        self.counters = self._before.counters if loaded and self._before else None
        self.facts: dict[str, Any] = {
            "threads": thread_counts(),
            **settings(),
            "dynamo": None,
            "garbage_collection": self.collections.totals,
            "loaders": None,
            "hooks": known(hook_counts),
        }
        if loaded:
            self.count_compilations()

    def count_compilations(self) -> None:
        """Count what Dynamo compiled since the window began."""
        before, after = self._before, known(dynamo_counts)
        self.facts["dynamo"] = (
            known(lambda: compilations(before, after)) if before and after else None
        )


class Collections:
    """Counts the runs of the garbage collector while this object is in `gc.callbacks`.

    Python runs one collection at a time, on any thread, and calls this object on the same thread. A
    collection is counted only if it both begins and ends while this object is in `gc.callbacks`.

    Attributes:
        totals: the number of collections, and their total and longest duration in nanoseconds.
    """

    def __init__(self) -> None:
        self.totals = {"collections": 0, "total_ns": 0, "longest_ns": 0}
        self._began_ns: int | None = None

    def __call__(self, phase: str, _: Mapping[str, int]) -> None:
        """Count a collection; Python calls this when a collection starts and when it stops."""
        now = time.perf_counter_ns()
        if phase == "start":
            self._began_ns = now
        elif self._began_ns is not None:
            took, self._began_ns = now - self._began_ns, None
            self.totals["collections"] += 1
            self.totals["total_ns"] += took
            self.totals["longest_ns"] = max(self.totals["longest_ns"], took)


# Python may collect garbage inside a compiled region, where Dynamo would compile this method.
skip_in_dynamo(Collections.__call__)


def known(read: Callable[[], T]) -> T | None:
    """Call `read` and return its result; None if `read` raises.

    For example, `read` raises if this version of torch lacks a function that `read` calls.
    """
    try:
        return read()
    except Exception:
        return None


def settings() -> dict[str, Any]:
    """Read, on the current thread, the settings of torch that change the speed of a step."""
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
    """Whether matrix products on CUDA may use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # the program uses the newer setting
        return bool(matmul.fp32_precision == "tf32")


def thread_counts() -> dict[str, int | None]:
    """Count torch's threads, the usable CPUs, and the job's processes on this machine."""
    return {
        "intra_op": known(torch.get_num_threads),
        "inter_op": known(torch.get_num_interop_threads),
        "cpus": known(usable_cpus),
        "local_ranks": known(local_ranks),
    }


def usable_cpus() -> int | None:
    """How many CPUs this process may use.

    This is the smaller of two numbers: the CPUs in the process's affinity, and the quota of its
    cgroup, rounded up.
    """
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
    """The smallest CPU quota of a process's cgroups and their parents, in CPUs.

    None if no cgroup has a quota.

    Args:
        membership: the content of `/proc/self/cgroup`.
        root: where the cgroups are mounted. In a container, this folder may show only the
            container's own cgroup.
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
    """How many processes of this job run on this machine, as the launcher says.

    Raises:
        KeyError: no launcher gives this number.
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


def hook_counts() -> dict[str, int | None]:
    """Count torch's global module hooks, and the hooks on modules and on parameters.

    Hooks on modules and parameters are counted only in instrumented models. Without an instrumented
    model, these two counts are None.

    Cost: about 3 µs for each submodule.
    """
    every_module: Any = sys.modules["torch.nn.modules.module"]
    models = instrumented_models()
    modules = {module for model in models for module in model.modules()}
    parameters = {each for module in modules for each in module._parameters.values()}
    global_hooks = (getattr(every_module, f"_global{name}") for name in _MODULE_HOOKS)
    hooks = (getattr(module, name) for module in modules for name in _MODULE_HOOKS)
    of_parameters = (getattr(each, name, None) for each in parameters for name in _TENSOR_HOOKS)
    return {
        "every_module": sum(map(len, global_hooks)),
        "modules": sum(map(len, hooks)) if models else None,
        "parameters": sum(len(each or ()) for each in of_parameters) if models else None,
    }


class DynamoCounts(NamedTuple):
    """Dynamo's counters in this process.

    Attributes:
        counters: Dynamo's own counters by group and name.
        recompilations: how often a frame was compiled again; None if it is not known.
        failed_guards: how often each guard has failed; None if it is not known.
    """

    counters: dict[str, dict[str, int]]
    recompilations: int | None
    failed_guards: dict[str, int] | None = None


def dynamo_counts() -> DynamoCounts:
    """Copy Dynamo's counters; `counters` is empty if Dynamo is not loaded."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = {} if utils is None else {key: dict(each) for key, each in utils.counters.items()}
    return DynamoCounts(counters, known(_recompilations), known(_failed_guards))


def _recompilations() -> int:
    """How often Dynamo has compiled a frame again; raises if torch does not count this."""
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None:
        return 0
    return sum(times - 1 for times in list(convert.FRAME_COMPILE_COUNTER.values()) if times > 1)


def _failed_guards() -> dict[str, int]:
    """How often each guard has failed, by its function and reason; raises if torch lacks them."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    found = Counter[str]()
    for code, reasons in [] if utils is None else list(utils.guard_failures.items()):
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"
        for reason in list(reasons):
            # Such as "0/1: k == 2   # source code". The numbers are those of the compiled frame.
            line = str(reason).partition("\n")[0]
            text = (line.partition(": ")[2] or line).partition("  #")[0]
            found[f"{place}: {text.strip()}"] += 1
    return dict(found)


def compilations(before: DynamoCounts, after: DynamoCounts) -> dict[str, Any]:
    """Count what Dynamo compiled between two copies of its counters.

    The result has the number of graphs, the number of graph breaks for each reason, the number of
    recompilations, and how often each guard failed. If the counter of graphs has become smaller,
    the program has cleared Dynamo's counters. Then the graphs and the graph breaks are None. The
    recompilations and the guards are None if their counters have become smaller or are not known.
    """
    graphs = _unique_graphs(after) - _unique_graphs(before)
    recompilations = None
    if before.recompilations is not None and after.recompilations is not None:
        recompilations = after.recompilations - before.recompilations
    breaks = _since(before.counters.get("graph_break", {}), after.counters.get("graph_break", {}))
    guards = None
    if before.failed_guards is not None and after.failed_guards is not None:
        is_cleared = sum(after.failed_guards.values()) < sum(before.failed_guards.values())
        guards = None if is_cleared else _since(before.failed_guards, after.failed_guards)
    return {
        "graphs": graphs if graphs >= 0 else None,
        "graph_breaks": shortened(breaks) if graphs >= 0 else None,
        "recompilations": None if recompilations is None or recompilations < 0 else recompilations,
        "failed_guards": None if guards is None else shortened(guards),
    }


def _since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each count has grown, for the counts that have grown."""
    return {
        name: times - before.get(name, 0)
        for name, times in after.items()
        if times > before.get(name, 0)
    }


def _unique_graphs(counts: DynamoCounts) -> int:
    return counts.counters.get("stats", {}).get("unique_graphs", 0)


def shortened(reasons: Mapping[str, int]) -> dict[str, int]:
    """Keep the most frequent reasons, each cut to a short line without secrets."""
    counted = Counter[str]()
    for reason, times in reasons.items():
        # redacted before the cut, which could leave half of a token
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
        """Record the settings of `loader`, over which the block iterates in this phase."""
        iteration = object()
        self._add(iteration, loader, phase)
        try:
            yield
        finally:
            self._open.pop(iteration, None)

    def add(self, loader: Any, phase: str) -> None:
        """Record that a trainer iterates over this loader from now on.

        This loader replaces the trainer's earlier loader of the same phase.
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
    """The settings of a `DataLoader`, or of an object that has the same attributes.

    None for all other objects.
    """
    workers = _of_type(int, loader, "num_workers")
    if workers is None:
        return None
    batch_size = _of_type(int, loader, "batch_size")
    if batch_size is None:  # a loader with a batch sampler has no size of its own
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
    """Whether a dataset is an `IterableDataset`; raises if torch.utils.data is not loaded."""
    return isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def _of_type(kind: type[T], owner: Any, name: str) -> T | None:
    """The value of an attribute; None if it is not of type `kind`, or not between 0 and 2**50."""
    value = known(lambda: getattr(owner, name))
    return value if type(value) is kind and 0 <= value <= 2**50 else None  # type: ignore[operator]


def _leave_to_parent() -> None:
    """Stop counting collections in a forked child, such as a worker of a data loader."""
    for callback in list(gc.callbacks):
        if isinstance(callback, Collections):
            gc.callbacks.remove(callback)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
