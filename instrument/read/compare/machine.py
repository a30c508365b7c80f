"""The state of the machine while a program runs: load of other programs, clocks, temperatures."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

# How often clocks and temperatures are read, and how long nvidia-smi may take.
_EVERY_S, _NVIDIA_SMI_S = 5.0, 10.0
_QUERY = ["--query-gpu=clocks.sm,temperature.gpu", "--format=csv,noheader,nounits"]
# The fields in the first line of /proc/stat that count busy time, in clock ticks: the first eight
# fields except idle time (3) and waiting for disks (4).
_BUSY = (0, 1, 2, 5, 6, 7)


class MachineState(NamedTuple):
    """The state of the machine during one run; a value is None if the machine does not offer it.

    Attributes:
        foreign_cpus: how many CPUs other programs used, on average.
        cpu_mhz: the median clock rate of the CPUs.
        cpu_celsius: the highest temperature of the machine's thermal zones.
        gpu_mhz: the clock rate of the slowest NVIDIA GPU; the median of all readings.
        gpu_celsius: the highest temperature of the NVIDIA GPUs.
    """

    foreign_cpus: float | None
    cpu_mhz: float | None
    cpu_celsius: float | None
    gpu_mhz: float | None
    gpu_celsius: float | None


def watch(process: subprocess.Popen[bytes]) -> MachineState:
    """Wait until a process ends, and return the state of the machine while the process ran.

    Clocks and temperatures are read after 1 s and then every 5 s, and once when the process ends.
    Cost of a reading: 1 ms of one CPU; with a GPU, up to 0.1 s.
    """
    began_s, busy_s, own_s = time.monotonic(), _busy_s(), _children_s()
    samples: list[tuple[float | None, ...]] = []
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EVERY_S if samples else _EVERY_S / 5)
        samples.append(_sample())
    lasted_s, ended_busy_s = time.monotonic() - began_s, _busy_s()
    foreign = None
    if busy_s is not None and ended_busy_s is not None:
        foreign = max(ended_busy_s - busy_s - (_children_s() - own_s), 0.0) / lasted_s
    columns = list(zip(*samples)) or [()] * 4
    cpu_mhz, cpu_celsius, gpu_mhz, gpu_celsius = (
        [value for value in column if value is not None] for column in columns
    )
    return MachineState(
        foreign,
        median(cpu_mhz) if cpu_mhz else None,
        max(cpu_celsius, default=None),
        median(gpu_mhz) if gpu_mhz else None,
        max(gpu_celsius, default=None),
    )


def _sample() -> tuple[float | None, ...]:
    """The last four values of `MachineState`, now."""
    clocks = _numbers(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    zones = _numbers(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
    gpus = _gpus()
    return (
        median(clocks) / 1e3 if clocks else None,
        max(zones) / 1e3 if zones else None,
        min((mhz for mhz, _ in gpus), default=None),
        max((celsius for _, celsius in gpus), default=None),
    )


def _numbers(paths: Iterable[Path]) -> list[float]:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            found.append(float(path.read_text()))
    return found


def _gpus() -> list[tuple[float, float]]:
    """The clock in MHz and the temperature in °C of each NVIDIA GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        ).stdout
        rows = [line.split(",") for line in answer.splitlines()]
        return [(float(mhz), float(celsius)) for mhz, celsius in rows]
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
