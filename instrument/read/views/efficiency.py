"""How fast matrix products, convolutions and attention ran, and how fast they could run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.base.peak_flops import PRECISIONS
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.device_work import KERNEL, Work, by_group
from instrument.read.facts.flops import UNKNOWN, needed_flops
from instrument.read.facts.groupby import Groups, distinct, groupby, groupby_rows, intern
from instrument.read.facts.idle import launching_step
from instrument.read.facts.launches import have_work, launches_kernel
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.facts.traffic import moved_bytes, operand_types
from instrument.read.trace.events import (
    Events,
    Flags,
    Ints,
    is_runtime,
    split_overload,
)
from instrument.read.views.operators import shape_text
from instrument.read.views.peak_rates import PeakFlops, PeakRates, peak_rates, roof
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

EFFICIENCY: Schema = schema(
    name="the operator",
    input_shapes='the shapes of the inputs, such as "[[8, 3], [3, 4]]"',
    dtype="the types of the tensors that the operator multiplies",
    precision="the precision in which the device multiplies: the precision of `dtype`, or tf32 if "
    "the kernel's name says so; None if it is not known. The precision decides the peak",
    calls="how many times the operator was called",
    device_ns="device time of the work that the calls launched; None if the calls launched no "
    "work, or if the trace lacks a part of this work",
    flops_per_second="`flops` divided by `device_ns`",
    bound_by="what limits the operator: compute if `flops` at the peak FLOP/s take at least as "
    "long as `moved_bytes` at the peak bandwidth, else bandwidth; None if a peak is not known",
    bound_share="`bound_ns` divided by `device_ns`: how close the operator comes to the peak that "
    "limits it (above 1 if the data was in a cache)",
    bytes_per_second="`moved_bytes` divided by `device_ns`",
    intensity="`flops` divided by `moved_bytes`",
    flops="floating-point operations of the calls, without operations that a causal mask makes "
    "unnecessary; the column `flops` of `operators` counts these operations too",
    moved_bytes="the bytes that the calls must move at least: all inputs and outputs, each once; "
    "None if they are not known",
    peak_share="`flops_per_second` as a fraction of the device's peak; None if the peak is not "
    "known",
    bound_ns="the shortest possible device time: the time for `flops` at the peak FLOP/s, or the "
    "time for `moved_bytes` at the peak bandwidth, whichever is longer",
    device_number="the device that ran the work of the calls, as the trace numbers it; None if "
    "`device_ns` is None, or if several devices ran the work",
)
EFFICIENCY_STEPS: Schema = schema(
    number="the step's number, counted from 0",
    duration_ns="the duration of the step on the CPU",
    busy_ns="the time in which at least one device was busy with work that the step launched, "
    "also after the end of the step on the CPU; None if the trace has no device events",
    flops="floating-point operations of the operators in `efficiency` that the step called; if the "
    "trace has device events, only calls that launched work count",
    recomputed_flops="the part of `flops` that activation checkpointing computed again",
    precision="the precision in which most of `flops` were computed; None if it is not known",
    peak_flops_per_second="the peak FLOP/s in the precision of the column `precision`, summed over "
    "the devices that ran the operators; None if it is not known",
    mfu="model FLOPs utilization: `flops` without `recomputed_flops`, divided by "
    "`peak_flops_per_second` and by the longer one of `duration_ns` and `busy_ns`; a lower bound "
    "if `flops_covered` is below 1; None if `flops_covered` is below 0.5",
    flops_covered="the time of kernels from operators with known FLOPs, as a share of the time of "
    "all kernels of the step; communication does not count",
)

# The names of kernels that multiply float32 operands as TF32, and of kernels that multiply them in
# full precision. The kernels are those of cuBLAS, cuDNN, CUTLASS and of AMD's Tensile.
_TF32 = re.compile(r"tf32|tensorop_s1688(gemm|fprop|dgrad|wgrad)|Cijk_\w{4}_\w{4}_S_MX_B_", re.I)
_FULL = re.compile(
    r"(?<![a-z0-9])sgemm|scudnn|_simt_|gemv|gemmSN|gemmk1|dot_kernel|convolve_sgemm"
    r"|[dw]grad\w{0,300}_engine<float|Cijk_\w{4}_\w{4}_S_?B_",
    re.I,
)
# Kernels that compute a convolution with fewer multiplications than the FLOP formula counts. They
# use Winograd's algorithm (Sp3Asm is MIOpen's) or Fourier transforms with complex matrices.
_FEWER = re.compile(r"winograd|fft|sp3asm|cgemm", re.I)
_SAYS_TF32, _SAYS_FULL, _SAYS_FEWER = 1, 2, 4
_SEVERAL, _NO_DEVICE = -2, -1
# The utilization is shown only if at least this share of the kernel time has known FLOPs. With a
# smaller share, the utilization would be far too low.
_LEAST_COVERED = 0.5


@dataclass(frozen=True, slots=True)
class FlopCalls:
    """The calls of operators with known FLOPs, as parallel columns.

    Attributes:
        node: the node of the call in the call tree.
        flops, moved_bytes: the operations and bytes that the call needs at least; `UNKNOWN` bytes.
        dtype, precision: indices into `dtypes` and `precisions`.
        device: an index into `processes`; `_SEVERAL`, or `_NO_DEVICE` also if a kernel is missing.
        device_ns: the device time of the work that the call launched.
        owner: for each device event, the index of the call that launched it; -1 for none of them.
        dtypes: the distinct combinations of operand types, as text.
        precisions: the distinct precisions; None stands for an unknown precision.
        processes: the distinct process numbers, which are those of the devices.
        rates: the peak rates for each value of `device`.
    """

    node: Ints
    flops: Ints
    moved_bytes: Ints
    dtype: Ints
    precision: Ints
    device: Ints
    device_ns: Ints
    owner: Ints
    dtypes: list[str]
    precisions: list[str | None]
    processes: list[Any]
    rates: dict[int, PeakRates]


def efficiency(capture: Views) -> Table:
    """Return one row for each combination of operator, shapes, types and device; see `EFFICIENCY`.

    The row with the most device time comes first. Operators that operators with known FLOPs call
    are not counted again. The table is empty if the trace has no input shapes.

    Limit: if the trace lacks a kernel that a call launched, the call's row has no device time.
    """
    links, calls = capture.links, flop_calls(capture)
    if calls is None:
        return Table.of_rows(EFFICIENCY, [])
    events = links.events
    index = links.call_tree.index[calls.node]
    name, names = intern(split_overload(each)[0] for each in events.names)
    operator, shapes = name[events.name[index]], events.shapes[index]
    keys, groups = groupby_rows(operator, shapes, calls.dtype, calls.precision, calls.device)
    least_bytes = groups.sum(np.maximum(calls.moved_bytes, 0))
    totals = zip(
        groups.size.tolist(),
        groups.sum(calls.flops).tolist(),
        groups.cells(least_bytes, groups.number(calls.moved_bytes == UNKNOWN) == 0),
        groups.sum(calls.device_ns).tolist(),
    )
    rows = []
    for (code, text, dtype, kind, device), (count, flops, moved, device_ns) in zip(
        keys.T.tolist(), totals
    ):
        precision, rates = calls.precisions[kind], calls.rates[device]
        has_device = device != _NO_DEVICE
        peak = rates.flops(precision)
        seconds = device_ns / 1e9 if has_device and device_ns else None
        bound_by, bound_ns = None, 0.0
        if seconds and moved is not None:
            bound_by, bound_ns = roof(flops, moved, peak, rates.bytes_per_second)
        rows.append(
            {
                "name": names[code],
                "input_shapes": shape_text(events.texts[text]),
                "dtype": calls.dtypes[dtype],
                "precision": precision,
                "device_number": calls.processes[device] if device >= 0 else None,
                "calls": count,
                "flops": flops,
                "moved_bytes": moved,
                "device_ns": device_ns if has_device else None,
                "flops_per_second": round(flops / seconds) if seconds else None,
                "bytes_per_second": None
                if moved is None or not seconds
                else round(moved / seconds),
                "intensity": flops / moved if moved else None,
                "peak_share": flops / seconds / peak if seconds and peak else None,
                "bound_by": bound_by,
                "bound_ns": round(bound_ns) if bound_by else None,
                "bound_share": bound_ns / device_ns if bound_by else None,
            }
        )
    rows.sort(key=lambda row: (-(row["device_ns"] or 0), -row["flops"]))
    return Table.of_dicts(EFFICIENCY, rows)


def efficiency_steps(capture: Views) -> Table:
    """Return the model FLOPs utilization of each finished step; see `EFFICIENCY_STEPS`."""
    links, work, calls = capture.links, capture.work, flop_calls(capture)
    if calls is None:
        return Table.of_rows(EFFICIENCY_STEPS, [])
    events, steps = links.events, links.steps
    count, has_device = len(steps), len(work.event) > 0
    step = step_at(events, steps, links.call_tree.start_ns[calls.node])
    chosen = np.flatnonzero((step >= 0) & ((calls.device != _NO_DEVICE) | (not has_device)))
    groups, flops = Groups(step[chosen], count), calls.flops[chosen]
    recomputed = groups.sum(flops, _recomputed(links, calls.node[chosen]))
    kinds = len(calls.precisions)
    by_precision = Groups(step[chosen] * kinds + calls.precision[chosen], count * kinds)
    most = by_precision.sum(flops).reshape(count, kinds).argmax(axis=1)
    launched_in = launching_step(events, work, steps)
    found = by_group(work, launched_in, count)
    busy = (found["total_ns"] - found["idle_ns"]).tolist() if has_device else [None] * count
    covered = _covered(work, launched_in, calls.owner, count)
    devices = [distinct(calls.device[chosen[row]]).tolist() for row in groups.rows()]
    rows = []
    for at, (total, again, duration) in enumerate(
        zip(groups.sum(flops).tolist(), recomputed.tolist(), events.duration_ns[steps].tolist())
    ):
        is_known = bool(groups.size[at])
        precision = calls.precisions[most[at]] if is_known else None
        peaks = [calls.rates[device].flops(precision) for device in devices[at]]
        peak = None if not peaks or None in peaks else sum(filter(None, peaks))
        seconds = max(duration, busy[at] or 0) / 1e9
        share = covered[at]
        is_covered = share is None or share >= _LEAST_COVERED
        rate = (total - again) / seconds if seconds and is_covered else None
        rows.append(
            {
                "number": step_number(events, int(steps[at])),
                "duration_ns": duration,
                "busy_ns": busy[at],
                "flops": total if is_known else None,
                "recomputed_flops": again if is_known else None,
                "precision": precision,
                "peak_flops_per_second": None if peak is None else round(peak),
                "mfu": rate / peak if peak and rate is not None else None,
                "flops_covered": share,
            }
        )
    return Table.of_dicts(EFFICIENCY_STEPS, rows)


def flop_calls(capture: Views) -> FlopCalls | None:
    """Return the calls with known FLOPs; None if there are none.

    Cost: evaluates the formulas once for each distinct combination of operator and arguments.
    """
    given = capture.peak_flops
    if given is None:
        given = capture.about.config.peak_flops
    return capture.once("FLOP calls", lambda: _flop_calls(capture.links, given))


def _flop_calls(links: Links, given: PeakFlops | None) -> FlopCalls | None:
    events, call_tree = links.events, links.call_tree
    if links.flops is None:
        return None
    flops = needed_flops(events, call_tree, links.flops)
    node = np.flatnonzero(flops != UNKNOWN)
    if not len(node):
        return None
    moved, dtype, operands = _types(events, call_tree.index[node])
    around = np.append(call_tree.nearest_of(node), -1)
    owner = around[links.launched[1]]
    on, launched = np.flatnonzero(owner >= 0), Groups(owner[owner >= 0], len(node))
    events_on = links.launches.device[on]
    process, processes = intern(process for process, _ in events.threads)
    process_on = process[events.thread[events_on]]
    first, last = launched.min(process_on), -launched.min(-process_on)
    device = np.where(first == last, first, _SEVERAL)
    device[(launched.size == 0) | _lacks_kernels(links, around, len(node))] = _NO_DEVICE
    rates = {k: peak_rates(each, given) for k, each in enumerate(events.devices_of(processes))}
    # If the trace has no device, the given peaks are those of the CPU.
    rates |= {_SEVERAL: PeakRates(), _NO_DEVICE: peak_rates(None, None if len(owner) else given)}
    names, by_name = groupby(events.name[events_on])
    said = np.array([_said(events.names[k]) for k in names.tolist()], np.int64)
    says = np.zeros(len(node), np.int64)
    np.bitwise_or.at(says, launched.of, said[by_name.of])
    keys, groups = groupby_rows(dtype, says, device)
    precision, precisions = intern(
        _precision(operands[kind], said, on_device, rates[on_device])
        for kind, said, on_device in keys.T.tolist()
    )
    return FlopCalls(
        node=node,
        flops=flops[node],
        moved_bytes=moved,
        dtype=dtype,
        precision=precision[groups.of],
        device=device,
        device_ns=launched.sum(events.duration_ns[events_on]),
        owner=owner,
        dtypes=[", ".join(each) for each in operands],
        precisions=precisions,
        processes=processes,
        rates=rates,
    )


def _types(events: Events, index: Ints) -> tuple[Ints, Ints, list[tuple[str, ...]]]:
    """For each call, its moved bytes and the index of its operand types; and these types."""
    columns = (events.name, events.shapes, events.concrete, events.types)
    keys, groups = groupby_rows(*(column[index] for column in columns))
    moved, operands = [], []
    for name, shapes, concrete, types in keys.T.tolist():
        given = events.texts[types] if types >= 0 else b"[]"
        arguments = events.texts[concrete] if concrete >= 0 else None
        moved.append(moved_bytes(events.names[name], events.texts[shapes], given, arguments))
        operands.append(tuple(operand_types(events.names[name], given)))
    dtype, found = intern(operands)
    return np.array(moved, np.int64)[groups.of], dtype[groups.of], found


def _lacks_kernels(links: Links, around: Ints, count: int) -> Flags:
    """A mask of the calls that launched a kernel that the trace lacks."""
    events = links.events
    launch = np.flatnonzero(events.among(is_runtime) & events.named(launches_kernel))
    lost = launch[~have_work(events, links.launches.device, launch)]
    call = around[links.call_tree.nodes_of(lost)]
    found: Flags = np.bincount(call[call >= 0], minlength=count) > 0
    return found


def _said(kernel: str) -> int:
    """What the name of a kernel says about how it multiplies: a sum of `_SAYS_…` flags."""
    rules = ((_TF32, _SAYS_TF32), (_FULL, _SAYS_FULL), (_FEWER, _SAYS_FEWER))
    return sum(flag for rule, flag in rules if rule.search(kernel))


def _precision(operands: tuple[str, ...], said: int, device: int, rates: PeakRates) -> str | None:
    """The precision in which a device multiplies operands of these types; None if not known.

    torch's setting of TF32 is not in the trace, so the names of the call's kernels (`said`) decide.
    """
    kinds = {"float8" if name.startswith("float8") else name for name in operands}
    if len(kinds) != 1 or said & _SAYS_FEWER:
        return None
    (kind,) = kinds
    if kind not in PRECISIONS:
        return None
    if kind != "float32" or device == _NO_DEVICE or said == _SAYS_FULL:
        return kind
    if said & _SAYS_TF32:
        return "tf32"
    has_only_full = "float32" in rates.flops_per_second and "tf32" not in rates.flops_per_second
    return kind if has_only_full else None


def _recomputed(links: Links, node: Ints) -> Flags:
    """A mask of the calls that activation checkpointing repeats in the backward.

    Such a call lies in a backward node, and there in an operator that ran in grad mode, which is
    usually off in the backward.
    """
    events, call_tree = links.events, links.call_tree
    backward = call_tree.nearest(is_backward(events)[call_tree.index])[node]
    recording = call_tree.nearest(events.records_gradients[call_tree.index])[node]
    inside: Flags = (backward >= 0) & (recording > backward)
    return inside


def _covered(work: Work, step: Ints, owner: Ints, steps: int) -> list[float | None]:
    computes = (work.kind == KERNEL) & (step >= 0)
    groups = Groups(step, steps)
    duration = work.duration_ns
    whole = groups.sum(duration, computes).tolist()
    known = groups.sum(duration, computes & (owner >= 0)).tolist()
    return [part / total if total else None for part, total in zip(known, whole)]
