"""Versions of torch, Python, CUDA and ROCm that are known to record wrongly, with the thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from instrument.read.facts.cuda_graphs import replayed
from instrument.read.trace.events import PYTHON

if TYPE_CHECKING:
    from instrument.read.views.views import Views

_Version = tuple[int, ...]


class _Fault(NamedTuple):
    """A fault of the versions of `product` from `first` to before `until`.

    `concerns` is whether a trace can show it at all.
    """

    product: str
    first: _Version
    until: _Version
    what: str
    thread: str
    concerns: Callable[[Views], bool] = lambda _: True


def _has_graphs(capture: Views) -> bool:
    work = capture.work
    return bool(replayed(capture.events, work.event, work.call).any())


_FAULTS = (
    _Fault(
        "CUDA", (12, 6), (13, 1),
        "kernels at the start of a window are missing or have times of 0, the more of them the "
        "longer the device was idle before (since 12.6 Update 2)",
        "pytorch/pytorch#192021",
    ),
    _Fault(
        "CUDA", (0,), (13, 1), "CUDA graphs are recorded incorrectly",
        "pytorch/kineto#1165", _has_graphs,
    ),
    _Fault(
        "CUDA", (12, 4), (12, 6), "no kernel is recorded (12.4 Update 1 to 12.5)",
        "JuliaGPU/CUDA.jl#2328", lambda capture: not len(capture.work.event),
    ),
    _Fault(
        "ROCm", (6, 2), (6, 3), "kernels of one stream overlap",
        "ROCm/roctracer#104",
    ),
    _Fault(
        "ROCm", (7, 0), (7, 1), "streams are missing, so that kernels of several streams share one",
        "ROCm/rocm-systems#1327",
    ),
    _Fault(
        "ROCm", (7, 2), (7, 3), "some or all kernels are missing (until 7.2.2)",
        "ROCm/legacy-rocm-build#6102",
    ),
    _Fault(
        "Python", (3, 12), (3, 12, 5), "calls of C functions last until the recording ends",
        "pytorch/pytorch#155446", lambda capture: bool(capture.events.among(PYTHON).any()),
    ),
)  # fmt: skip


def faults(capture: Views) -> list[str] | None:
    """Return a text for each known fault of the versions in a trace; None if it names none."""
    versions = _versions(capture)
    return None if not versions else [
        f"{each.product} {'.'.join(map(str, versions[each.product]))}: {each.what} ({each.thread})"
        for each in _FAULTS
        if each.first <= versions.get(each.product, ()) < each.until and each.concerns(capture)
    ]  # fmt: skip


def _versions(capture: Views) -> dict[str, _Version]:
    """The versions by product, such as (12, 4) for CUDA; what the trace does not name is left out.

    CUDA writes 12040 for 12.4, and HIP 60443483 for 6.4.43483.
    """
    found, given = dict[str, _Version](), capture.events.versions
    if (cuda := given.get("cuda_runtime_version")) is not None:
        found["CUDA"] = (cuda // 1000, cuda % 1000 // 10)
    if (hip := given.get("hip_runtime_version")) is not None:
        found["ROCm"] = (hip // 10_000_000, hip // 100_000 % 100)
    python = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", capture.about.versions.get("python", ""))
    if python:
        found["Python"] = tuple(map(int, python.groups()))
    return found
