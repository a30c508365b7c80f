"""The state of the machine while a program runs: the load of other programs, and GPU clocks."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

# How often clocks are read, and how long nvidia-smi may take.
_EVERY_S, _NVIDIA_SMI_S = 5.0, 10.0
_QUERY = ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
# The fields in the first line of /proc/stat that count busy time, in clock ticks: the first eight
# fields except idle time (3) and waiting for disks (4).
_BUSY = (0, 1, 2, 5, 6, 7)


class MachineState(NamedTuple):
    """The state of the machine during one run; a value is None if the machine does not offer it.

    Attributes:
        foreign_cpus: how many CPUs other programs used, on average.
        gpu_mhz: the clock rate of the slowest NVIDIA GPU; the median of all readings.
    """

    foreign_cpus: float | None
    gpu_mhz: float | None


def watch(process: subprocess.Popen[bytes]) -> MachineState:
    """Wait until a process ends, and return the state of the machine while the process ran.

    Clocks are read after 1 s and then every 5 s, and once when the process ends; a reading takes up
    to 0.1 s of one CPU if there is a GPU.
    """
    began_s, busy_s, own_s = time.monotonic(), _busy_s(), _children_s()
    clocks: list[float] = []
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EVERY_S if clocks else _EVERY_S / 5)
        clocks += _slowest_gpu_mhz()
    lasted_s, ended_busy_s = time.monotonic() - began_s, _busy_s()
    foreign = None
    if busy_s is not None and ended_busy_s is not None:
        foreign = max(ended_busy_s - busy_s - (_children_s() - own_s), 0.0) / lasted_s
    return MachineState(foreign, median(clocks) if clocks else None)


def _slowest_gpu_mhz() -> list[float]:
    """The clock rate of the slowest NVIDIA GPU; empty if it is not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        ).stdout
        return [min(map(float, answer.split()))]
    except (OSError, subprocess.SubprocessError, ValueError):  # some values are [N/A]
        return []


def _busy_s() -> float | None:
    """The busy time of all CPUs together since the machine started, in s."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(float(fields[k]) for k in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _children_s() -> float:
    """The CPU time of all ended child processes of this process, in s."""
    times = os.times()
    return times.children_user + times.children_system
