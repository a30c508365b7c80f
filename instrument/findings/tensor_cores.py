"""`tensor-cores`: matrix products and convolutions that run on the slow units of the device.

The check reads the names of the kernels of cuBLAS, cuDNN and CUTLASS. It looks for names of three
kinds of kernel. There is a finding for each kind that takes at least the given share of the time of
the steps:

- Kernels that multiply float64, 10 %.
- Kernels that multiply float32 without tensor cores, such as volta_sgemm, 10 %.
- Kernels that multiply matrices whose sizes are not aligned to 16 bytes, such as …_align1, 5 %.

For the first two kinds, the device must multiply at least twice as fast in a lower precision
(`instrument.analysis.peak_rates`). There is no finding if the simulation saves less than
1 % of the step. The simulation lets the kernels take half the time. This is a cautious guess,
because the peak rates differ by factors of 3 to 16.

The check cannot see whether the training still converges in a lower precision. It does not know the
precision of kernels with other names, such as the kernels that Triton generates. Kernels of AMD are
left out, because matrix cores of AMD multiply float32 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.analysis.breakdown import KERNEL
from instrument.analysis.coverage_rows import LAUNCHERS
from instrument.analysis.operator_keys import shape_text
from instrument.analysis.peak_rates import peak_rates
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.device_time import (
    LEAST_SAVING,
    device_share,
    has_device_work,
)
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Evidence, Finding, NotRecorded, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.links.groupby import groupby_rows
from instrument.trace.events import Device, Ints
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario


class _Kind(NamedTuple):
    """A kind of kernel that tensor cores could replace.

    Attributes:
        name: the pattern of the kernels' names.
        does: what the kernels do, for the title.
        precision: the precision in which they multiply; None for kernels of any precision.
        least_share: there is a finding if such kernels take at least this share of the step.
        change: the advice of the finding; "" if it depends on the device.
    """

    name: re.Pattern[str]
    does: str
    precision: str | None
    least_share: float
    change: str


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
        "Use float32 or less: model.float(), and no float64 from numpy (torch.from_numpy(array)"
        ".float()).",
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
        "",
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
        "Pad the sizes to a multiple of 8 (16-bit types), 4 (float32) or 16 (8-bit types); for "
        "attention, use torch.nn.functional.scaled_dot_product_attention, which pads by itself.",
    ),
)
_TF32 = (
    "Allow TF32: torch.set_float32_matmul_precision('high') and "
    "torch.backends.cudnn.allow_tf32 = True; or run the forward in torch.autocast('cuda', "
    "dtype=torch.bfloat16)."
)
_AUTOCAST = (
    "Run the forward in torch.autocast('cuda', dtype=torch.float16), with "
    "torch.amp.GradScaler('cuda') for the backward."
)
_FASTER = 0.5
_LEAST_FACTOR = 2


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield a finding for each kind of kernel that takes a large part of the step."""
    if not has_device_work(capture):
        return
    for kind in _KINDS:
        yield from _find_kind(capture, whatif, kind)


def _find_kind(capture: Views, whatif: Scenario, kind: _Kind) -> Iterator[Finding]:
    work, time = capture.work, capture.links.counted_steps
    kernels = work.event[work.kind == KERNEL]
    is_kind = capture.events.named(lambda name: kind.name.search(name) is not None)
    chosen = kernels[is_kind[kernels]]
    share = device_share(capture, time, chosen)
    if share < kind.least_share or not _has_faster_units(capture, chosen, kind):
        return
    saving = scaled(whatif, chosen, by=_FASTER)
    if not is_worth(saving, LEAST_SAVING):
        return
    path, source = common_place(capture, chosen)
    yield Finding(
        code="tensor-cores",
        title=f"For {percent(share)} of the {time.what}, kernels {kind.does}",
        change=kind.change or _change_of_float32(_device(capture, chosen)),
        verify=show_command(capture, "--kernels --efficiency"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=(*evidence(capture, chosen, most=4), *_shapes(capture, chosen)),
        coverage=LAUNCHERS,
    )


def _device(capture: Views, kernels: Ints) -> Device | None:
    """The device that ran the first of the given kernels."""
    process, _ = capture.events.threads[capture.events.thread[kernels[0]]]
    return capture.events.devices_of([process])[0]


def _has_faster_units(capture: Views, kernels: Ints, kind: _Kind) -> bool:
    """Whether a lower precision is at least twice as fast; True if `kind.precision` is None."""
    if kind.precision is None:
        return True
    device = _device(capture, kernels)
    given = capture.peak_flops or capture.about.config.peak_flops
    rates = peak_rates(device, given).flops_per_second
    if kind.precision not in rates or len(rates) < 2:
        name = "unknown" if device is None or device.name is None else device.name
        raise NotRecorded(
            f"the peak rates of the device {name} are not known",
            "load the capture with peak_flops={'float32': ..., 'float16': ...}",
        )
    return max(rates.values()) >= _LEAST_FACTOR * rates[kind.precision]


def _change_of_float32(device: Device | None) -> str:
    return _TF32 if "tf32" in peak_rates(device).flops_per_second else _AUTOCAST


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
            None,
            f"inputs {shape_text(events.texts[shapes])}; the time counts only kernels of the kind "
            "in the title",
        ),
    )


CHECK = Check("tensor-cores", find, needs_device_work=True)
