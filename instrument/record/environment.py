"""Collects facts about a window for the key `environment` of `capture.json`.

The facts are settings of the process, and events that can make the window slower. A trace does not
hold these facts:

- torch's settings, the threads and the hooks, which are read when a window begins;
- Dynamo's compilations, the garbage collections, and how long the training thread waits for a CPU,
  which are measured during the window;
- the data loaders, which `StepLoop` adds.

If a fact cannot be read, its value is None, and no error is raised.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from instrument.annotate.module_calls import skip_in_dynamo
from instrument.annotate.modules import instrumented_models
from instrument.rank_info import rank_info
from instrument.record.compilations import compilations, dynamo_counts
from instrument.record.torch_support import known

# In these attributes of a module or a tensor, torch keeps the object's hooks. torch keeps the hooks
# for every module in variables of torch.nn.modules.module, such as `_global_forward_hooks`.
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_CGROUPS = Path("/sys/fs/cgroup")
# For each launcher, the environment variable with the number of its processes on this machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class WindowEnvironment:
    """The environment of one window; create this object when the window begins.

    When the window begins, `Recorder` adds `collections` to `gc.callbacks`. When the window ends,
    `Recorder` removes `collections`, and calls `count_compilations` if Dynamo's counters differ
    from `counters`.

    Attributes:
        facts: the content of the key `environment`. The value of `cpu_wait` is None until
            `Recorder` ends the window. The value of `loaders` is None until `StepLoop` saves the
            window.
        collections: counts the garbage collections.
        counters: a copy of Dynamo's counters, made when the window began; None if Dynamo was not
            loaded.
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
            "cpu_wait": None,
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
    """Counts the garbage collections while this object is in `gc.callbacks`.

    Python runs one collection at a time, on any thread, and calls this object on that thread. A
    collection is counted only if it both begins and ends while this object is in `gc.callbacks`.

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

    The smaller of two numbers: how many CPUs the process's threads may run on, and the CPU quota of
    the process's cgroups, rounded up.
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


def hook_counts() -> dict[str, int | None]:
    """Count three kinds of torch's hooks: for all modules, on single modules, and on parameters.

    Hooks on single modules and on parameters are counted only in instrumented models. Without an
    instrumented model, these two counts are None.

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


def leave_to_parent() -> None:
    """Stop counting garbage collections in a forked child, such as a worker of a data loader."""
    for callback in list(gc.callbacks):
        if isinstance(callback, Collections):
            gc.callbacks.remove(callback)
