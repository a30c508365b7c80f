"""Precision: kernels without tensor cores, float64 on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from instrument.read.advise.check import INPUT_TYPES, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, largest, share_of
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import KERNEL
from instrument.read.facts.segments import waits_for_data
from instrument.read.trace.events import OPERATOR, Flags, Ints, called_operators, decoded
from instrument.read.views.coverage_rows import LAUNCHERS
from instrument.read.views.operators import shape_text
from instrument.read.views.peak_rates import peak_rates
from instrument.read.views.views import Views


class _Kind(NamedTuple):
    """A kind of kernel that tensor cores could replace.

    Attributes:
        does: what the kernels do, for the title.
        name: the pattern of the kernels' names, of cuBLAS, cuDNN and CUTLASS. Kernels of AMD are
            left out, because matrix cores of AMD multiply float32 too.
        precision: the precision in which they multiply; "" for kernels of any precision.
        least_share: there is a finding if such kernels take at least this share of the step.
        advice: what to change to multiply in other precisions, the least change first.
    """

    does: str
    name: str
    precision: str
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
_KINDS = (
    _Kind(
        "multiply float64",
        r"(?<![a-z0-9])dgemm|d884gemm|d1688gemm|_f64f64_|convolve_dgemm"
        r"|[dw]grad\w{0,300}_engine<double|(?<![a-z])dcudnn",
        "float64",
        0.1,
        _OF_FLOAT64,
    ),
    _Kind(
        "multiply float32 without tensor cores",
        r"(?<![a-z0-9])sgemm|scudnn|_simt_sgemm|convolve_sgemm|[dw]grad\w{0,300}_engine<float"
        r"|gemm_f32f32_f32f32|(fprop|[dw]grad)\w{0,300}_f32f32_f32f32",
        "float32",
        0.1,
        _OF_FLOAT32,
    ),
    _Kind(
        "multiply matrices whose sizes are not aligned to 16 bytes",
        r"(tensorop|16816gemm|1688gemm|884gemm)\w{0,300}align1(?!\d)"
        r"|tensorop_(b?f16|h)\w{0,300}align[24](?!\d)",
        "",
        0.05,
        {
            "": "Pad the sizes to a multiple of 8 (16-bit types), 4 (float32) or 16 (8-bit "
            "types); for attention, use torch.nn.functional.scaled_dot_product_attention, which "
            "pads by itself."
        },
    ),
)
_LEAST_FACTOR = 1.9  # an advised precision is twice as fast, but vendors round the rates
# Measured on a CPU (torch 2.13): in float32, these take 84 to 130 % of the time, others 17 to 81 %.
_AS_LONG = re.compile(
    r"::_?(arg)?(sort|topk|unique|nonzero|searchsorted|bucketize|index|scatter|gather|dropout"
    r"|bernoulli)"
)
# A float64 tensor, or a list that begins with one, as first input; `double` is torch's word for it.
_FLOAT64 = re.compile(rb'[\[\s]*"double"')
_NEARLY_ALL, _LONGEST_DETAIL = 0.9, 200


def tensor_cores(capture: Views) -> Iterator[Problem]:
    """Find each kind of kernel that takes a large part of the step on slow units of the device.

    Half of the time is a cautious guess: the peak rates differ by factors of 2 to 16.
    """
    kernels = capture.work.event[capture.work.kind == KERNEL]
    for kind in _KINDS:
        name = re.compile(kind.name, re.IGNORECASE)
        chosen = kernels[capture.events.named(lambda each: bool(name.search(each)))[kernels]]  # noqa: B023
        share = share_of(capture, chosen)
        if len(chosen) and share >= kind.least_share and (change := _change(capture, chosen, kind)):
            yield Problem(
                kind.does,
                chosen,
                share,
                evidence=(*evidence(capture, chosen, most=4), *_shapes(capture, chosen)),
                variant=kind.does,
                change=change,
            )


TENSOR_CORES = Check(
    "tensor-cores",
    tensor_cores,
    title="For {share} of the {step}, kernels {what}",
    verify="--kernels --efficiency",
    least_share=min(kind.least_share for kind in _KINDS),
    lowest=min(kind.least_share for kind in _KINDS),
    factor=0.5,
    on_device=True,
    coverage=LAUNCHERS,
)


def float64(capture: Views) -> Iterator[Problem]:
    """Find operators on the CPU whose first input is a float64 tensor.

    Without recorded types, all operators count, except those that load data, if nearly all
    parameters of the session's models are float64: their layers refuse inputs of another type.
    """
    has_types, numbers = INPUT_TYPES.is_met(capture), capture.about.parameter_types
    are_float64 = numbers.get("float64", 0) > _NEARLY_ALL * sum(numbers.values())
    if not has_types and not are_float64:
        raise NotRecorded(INPUT_TYPES.missing, INPUT_TYPES.remedy)
    events, tree = capture.events, capture.links.call_tree
    chosen = tree.outermost(_typed(capture) if has_types else _not_loading(capture))
    chosen &= capture.links.counted_steps.holds(tree.start_ns) >= 0
    chosen &= ~events.named(lambda name: _AS_LONG.search(name) is not None)[tree.index]
    operators = tree.index[chosen]
    if has_types and len(operators):
        longest = operators[np.argmax(events.duration_ns[operators])]
        types = f"inputs of the longest: {decoded(events.texts[events.types[longest]])}"
        rows = evidence(capture, operators, detail=types[:_LONGEST_DETAIL])
        yield Problem("", operators, evidence=rows)
    elif len(operators):
        yield Problem(
            ", the type of the model's parameters",
            operators,
            verify="Record again: this finding must be gone; profiler.record_shapes=true shows the "
            "types.",
        )


FLOAT64 = Check(
    "float64",
    float64,
    title="{share} of the {step} computes in float64{what}",
    change="Use float32: model.float(), and torch.from_numpy(array).float() for data from numpy.",
    verify="--ops --by input_types  # float64 is 'double', and float32 is 'float'",
    least_share=0.1,
    least_saving=0.03,
    factor=0.5,
    assumes="in float32",
    on_device=False,
)


def _change(capture: Views, kernels: Ints, kind: _Kind) -> str | None:
    """The first advice to a precision that is at least twice as fast on this device, if any is.

    Raises:
        NotRecorded: the rates of the device are not known.
    """
    if not kind.precision:
        return kind.advice[kind.precision]
    process, _ = capture.events.threads[capture.events.thread[kernels[0]]]
    (device,) = capture.events.devices_of([process])
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
    """Make a row for the operator and input shapes that take the most time in the given kernels."""
    events, tree = capture.events, capture.links.call_tree
    device, launcher = capture.links.launched
    nearest = tree.nearest(events.shapes[tree.index] >= 0, launcher)
    chosen = np.isin(device, kernels) & (nearest >= 0)
    call = tree.index[nearest[chosen]]
    rows = capture.facts.events("name", "shapes")[call].with_columns(
        event=pl.Series(call), total_ns=pl.Series(events.duration_ns[device[chosen]])
    )
    for name, shapes, _, _, total_ns in largest(rows, ["name", "shapes"]).head(1).iter_rows():
        calls = rows.filter(name=name, shapes=shapes)["event"].n_unique()
        detail = (
            f"inputs {shape_text(shapes.encode())}; the time counts only kernels of the kind in "
            "the title"
        )
        return (Evidence(name, calls, total_ns, detail=detail),)
    return ()  # no shapes were recorded


def _typed(capture: Views) -> Flags:
    """A mask of the nodes that are operators in float64, by their recorded types."""
    events, tree = capture.events, capture.links.call_tree
    is_float64 = np.array([bool(_FLOAT64.match(text)) for text in events.texts] + [False])
    found: Flags = (is_float64[events.types] & events.among(OPERATOR))[tree.index]
    return found


def _not_loading(capture: Views) -> Flags:
    """A mask of the nodes that are operators, but not of a wait for data."""
    tree, loads = capture.links.call_tree, waits_for_data(capture)
    found: Flags = called_operators(capture.events)[tree.index]
    return found & ~tree.at_or_inside(np.isin(tree.index, loads))
