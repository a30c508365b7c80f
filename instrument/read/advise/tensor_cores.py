"""`tensor-cores`: matrix products and convolutions that run on the slow units of the device.

There is a finding for each row of `_KINDS`, found by the names of the kernels of cuBLAS, cuDNN and
CUTLASS: float64, float32 without tensor cores, unaligned sizes. The device must multiply twice as
fast in a precision that the finding advises; on many devices, TF32 is not faster than float32. The
simulation lets the kernels take half the time, a cautious guess: the peak rates differ by factors
of 2 to 16. The check cannot see whether the training still converges. Kernels of AMD are left out,
because matrix cores of AMD multiply float32 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, share_of
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import KERNEL
from instrument.read.facts.groupby import groupby_rows
from instrument.read.trace.events import Device, Ints
from instrument.read.views.coverage_rows import LAUNCHERS
from instrument.read.views.operator_keys import shape_text
from instrument.read.views.peak_rates import peak_rates
from instrument.read.views.views import Views


class _Kind(NamedTuple):
    """A kind of kernel that tensor cores could replace.

    Attributes:
        name: the pattern of the kernels' names.
        does: what the kernels do, for the title.
        precision: the precision in which they multiply; None for kernels of any precision.
        least_share: there is a finding if such kernels take at least this share of the step.
        advice: what to change to multiply in other precisions, the least change first.
    """

    name: re.Pattern[str]
    does: str
    precision: str | None
    least_share: float
    advice: Mapping[str, str]


_AUTOCAST = (
    "Run the forward in torch.autocast('cuda', dtype=torch.float16), with "
    "torch.amp.GradScaler('cuda') for the backward."
)
_BFLOAT16 = "Run the forward in torch.autocast('cuda', dtype=torch.bfloat16)."
_OF_FLOAT32 = {
    "tf32": "Allow TF32: torch.set_float32_matmul_precision('high') and "
    "torch.backends.cudnn.allow_tf32 = True; or run the forward in torch.autocast('cuda', "
    "dtype=torch.bfloat16).",
    "bfloat16": _BFLOAT16,
    "float16": _AUTOCAST,
}
_OF_FLOAT64 = {
    "float32": "Use float32 or less: model.float(), and no float64 from numpy (torch.from_numpy("
    "array).float()).",
    "tf32": "Use float32 with TF32: model.float(), and torch.set_float32_matmul_precision('high').",
    "bfloat16": f"Use float32: model.float(). {_BFLOAT16}",
    "float16": f"Use float32: model.float(). {_AUTOCAST}",
}
_ANY = "any"  # for kernels of any precision
_KINDS = (
    _Kind(
        re.compile(
            r"(?<![a-z0-9])dgemm|d884gemm|d1688gemm|_f64f64_|convolve_dgemm"
            r"|[dw]grad\w{0,300}_engine<double|(?<![a-z])dcudnn",
            re.IGNORECASE,
        ),
        "multiply float64",
        "float64",
        0.1,
        _OF_FLOAT64,
    ),
    _Kind(
        re.compile(
            r"(?<![a-z0-9])sgemm|scudnn|_simt_sgemm|convolve_sgemm|[dw]grad\w{0,300}_engine<float"
            r"|gemm_f32f32_f32f32|(fprop|[dw]grad)\w{0,300}_f32f32_f32f32",
            re.IGNORECASE,
        ),
        "multiply float32 without tensor cores",
        "float32",
        0.1,
        _OF_FLOAT32,
    ),
    _Kind(
        re.compile(
            r"(tensorop|16816gemm|1688gemm|884gemm)\w{0,300}align1(?!\d)"
            r"|tensorop_(b?f16|h)\w{0,300}align[24](?!\d)",
            re.IGNORECASE,
        ),
        "multiply matrices whose sizes are not aligned to 16 bytes",
        None,
        0.05,
        {
            _ANY: "Pad the sizes to a multiple of 8 (16-bit types), 4 (float32) or 16 (8-bit "
            "types); for attention, use torch.nn.functional.scaled_dot_product_attention, which "
            "pads by itself."
        },
    ),
)
_LEAST_FACTOR = 1.9  # vendors round the rates


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each kind of kernel that takes a large part of the step."""
    work, step = capture.work, capture.links.counted_steps.what
    kernels = work.event[work.kind == KERNEL]
    for kind in _KINDS:
        is_kind = partial(_is_named, kind.name)
        chosen = kernels[capture.events.named(is_kind)[kernels]]
        share = share_of(capture, chosen)
        if share >= kind.least_share and (change := _change(capture, chosen, kind)):
            yield Problem(
                f"For {percent(share)} of the {step}, kernels {kind.does}",
                chosen,
                share,
                evidence=(*evidence(capture, chosen, most=4), *_shapes(capture, chosen)),
                variant=kind.does,
                change=change,
            )


CHECK = Check(
    "tensor-cores",
    find,
    verify="--kernels --efficiency",
    factor=0.5,
    on_device=True,
    coverage=LAUNCHERS,
)


def _is_named(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.search(name) is not None


def _device(capture: Views, kernels: Ints) -> Device | None:
    """The device that ran the first of the given kernels."""
    process, _ = capture.events.threads[capture.events.thread[kernels[0]]]
    return capture.events.devices_of([process])[0]


def _change(capture: Views, kernels: Ints, kind: _Kind) -> str | None:
    """The first advice to a precision that is at least twice as fast on this device, if any is.

    Raises:
        NotRecorded: the rates of the device are not known.
    """
    if kind.precision is None:
        return kind.advice[_ANY]
    device = _device(capture, kernels)
    given = capture.peak_flops or capture.about.config.peak_flops
    # One number for all precisions does not show which is faster: the built-in table does.
    rates = peak_rates(device, given if isinstance(given, Mapping) else None).flops_per_second
    advised = [precision for precision in kind.advice if precision in rates]
    if kind.precision not in rates or not advised:
        name = "unknown" if device is None or device.name is None else device.name
        raise NotRecorded(
            f"the peak rates of the device {name} are not known",
            "load the capture with peak_flops={'float32': ..., 'float16': ...}",
        )
    least = _LEAST_FACTOR * rates[kind.precision]
    return next((kind.advice[each] for each in advised if rates[each] >= least), None)


def _shapes(capture: Views, kernels: Ints) -> tuple[Evidence, ...]:
    """Make a row for the operator and input shapes that take the most time in the given kernels.

    The result is empty if no shapes were recorded.
    """
    events, tree = capture.events, capture.links.call_tree
    device, launcher = capture.links.launched
    chosen = np.isin(device, kernels)
    device, launcher = device[chosen], launcher[chosen]
    nearest = tree.nearest(events.shapes[tree.index] >= 0, launcher)
    device, nearest = device[nearest >= 0], nearest[nearest >= 0]
    if not len(device):
        return ()
    event = tree.index[nearest]
    keys, groups = groupby_rows(events.name[event], events.shapes[event])
    total_ns = groups.sum(events.duration_ns[device])
    most = int(np.argmax(total_ns))
    name, shapes = keys[:, most].tolist()
    return (
        Evidence(
            events.names[name],
            len(np.unique(event[groups.of == most])),
            int(total_ns[most]),
            detail=f"inputs {shape_text(events.texts[shapes])}; the time counts only kernels of "
            "the kind in the title",
        ),
    )
