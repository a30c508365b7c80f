"""How fast matrix products, convolutions and attention ran, and how fast they could run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.base.peak_flops import PRECISIONS
from instrument.base.units import percent
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.device_work import KERNEL, by_group
from instrument.read.facts.flops import UNKNOWN, needed_flops
from instrument.read.facts.groupby import computed, intern
from instrument.read.facts.idle import launching_step
from instrument.read.facts.launches import have_work, launches_kernel
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_bounds
from instrument.read.facts.traffic import moved_bytes, operand_types
from instrument.read.trace.events import Flags, Ints, is_runtime
from instrument.read.views.operators import shape_text
from instrument.read.views.peak_rates import PeakRates, peak_rates, roof
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
_SAYS = {"says_tf32": _TF32, "says_full": _FULL, "says_fewer": _FEWER}
# Instead of an index of a device, in the column `device` of `_calls`.
_SEVERAL, _NO_DEVICE = -2, -1
# The utilization is shown only if at least this share of the kernel time has known FLOPs. With a
# smaller share, the utilization would be far too low.
_LEAST_COVERED = 0.5
# A step with this share of the peak is near it: other operators and Python take the rest.
_NEAR = 0.4


def efficiency(capture: Views) -> Table:
    """Return one row for each combination of operator, shapes, types and device; see `EFFICIENCY`.

    The row with the most device time comes first. Operators that operators with known FLOPs call
    are not counted again. The table is empty if the trace has no input shapes.

    Limit: if the trace lacks a kernel that a call launched, the call's row has no device time.
    Cost: evaluates the formulas once for each distinct combination of operator and arguments.
    """
    calls, (rates, processes) = _calls(capture), _rates(capture)
    keys, moved = ["name", "shapes", "dtype", "precision", "device"], pl.col("moved_bytes")
    groups = calls.group_by(keys).agg(
        pl.sum("flops", "device_ns"),
        moved_bytes=pl.when(moved.null_count() == 0).then(moved.sum()),
        calls=pl.len().cast(pl.Int64),
    )
    rows = []
    for row in groups.sort(keys).to_dicts():
        device, flops, moved_bytes = row["device"], row["flops"], row["moved_bytes"]
        device_ns = None if device == _NO_DEVICE else row["device_ns"]
        peak, seconds = rates[device].flops(row["precision"]), (device_ns or 0) / 1e9
        bound_by, bound_ns = None, 0.0
        if seconds and moved_bytes is not None:
            bound_by, bound_ns = roof(flops, moved_bytes, peak, rates[device].bytes_per_second)
        row |= {
            "input_shapes": shape_text(capture.events.texts[row["shapes"]]),
            "device_number": processes[device] if device >= 0 else None,
            "device_ns": device_ns,
            "flops_per_second": round(flops / seconds) if seconds else None,
            "bytes_per_second": round(moved_bytes / seconds)
            if moved_bytes is not None and seconds
            else None,
            "intensity": flops / moved_bytes if moved_bytes else None,
            "peak_share": flops / seconds / peak if seconds and peak else None,
            "bound_by": bound_by,
            "bound_ns": round(bound_ns) if bound_by else None,
            "bound_share": bound_ns / device_ns if device_ns and bound_by else None,
        }
        rows.append(row)
    rows.sort(key=lambda row: (-(row["device_ns"] or 0), -row["flops"]))
    return Table.of_dicts(EFFICIENCY, rows)


def efficiency_steps(capture: Views) -> Table:
    """Return the model FLOPs utilization of each finished step; see `EFFICIENCY_STEPS`."""
    links, work, calls = capture.links, capture.work, _calls(capture)
    events, steps, has_device = links.events, links.steps, len(work.event) > 0
    if not len(calls):
        return Table.of_rows(EFFICIENCY_STEPS, [])
    node = calls["node"].to_numpy()
    calls = calls.with_columns(
        step=step_at(events, steps, links.call_tree.start_ns[node]),
        recomputed=_recomputed(links, node),
    )
    counted = calls.filter((pl.col("device") != _NO_DEVICE) | (not has_device))
    flops, by_precision = (
        pl.col("flops"),
        counted.group_by("step", "precision").agg(pl.sum("flops")),
    )
    of_step = {
        row["step"]: row
        for row in counted.group_by("step")
        .agg(flops.sum(), pl.col("device").unique().sort(), again=flops.filter("recomputed").sum())
        .join(by_precision.sort("flops").unique("step", keep="last"), on="step", suffix="_of_it")
        .to_dicts()
    }
    launched_in = launching_step(events, work, steps)
    found = by_group(work, launched_in, len(steps))
    busy_ns = (found["total_ns"] - found["idle_ns"]).tolist()
    covered, (rates, _) = _covered(capture, launched_in), _rates(capture)
    rows = []
    start_ns, end_ns = step_bounds(events, steps)
    durations = zip(links.step_numbers, (end_ns - start_ns).tolist())
    for at, (number, duration_ns) in enumerate(durations):
        row = of_step.get(at, {"device": []})
        peaks = [rates[device].flops(row["precision"]) for device in row["device"]]
        peak = None if not peaks or None in peaks else sum(filter(None, peaks))
        seconds = max(duration_ns, busy_ns[at] if has_device else 0) / 1e9
        share = covered.get(at)
        is_known = peak and seconds and (share is None or share >= _LEAST_COVERED)
        rows.append(
            {
                "number": number,
                "duration_ns": duration_ns,
                "busy_ns": busy_ns[at] if has_device else None,
                "flops": row.get("flops"),
                "recomputed_flops": row.get("again"),
                "precision": row.get("precision"),
                "peak_flops_per_second": None if peak is None else round(peak),
                "mfu": (row["flops"] - row["again"]) / seconds / peak if is_known else None,
                "flops_covered": share,
            }
        )
    return Table.of_dicts(EFFICIENCY_STEPS, rows)


def near_peak(capture: Views) -> str:
    """Return how fast the steps compute as a clause, if this is near the peak; else ""."""
    every, kept = [*capture.efficiency_steps], capture.links.counted_steps.kept
    rates = [row for row in every[kept] if row.mfu is not None]
    if not rates or (mean := sum(row.mfu for row in rates) / len(rates)) < _NEAR:
        return ""
    peak = rates[0].peak_flops_per_second
    device = "device" if len(capture.work.event) else "CPU"
    return f"a step computes at {percent(mean)} of the peak of this {device}, {peak:.2e} FLOP/s"


def _rates(capture: Views) -> tuple[list[PeakRates], list[Any]]:
    """The peak rates by the column `device` of `_calls`, and the numbers of the devices."""
    events, given = capture.events, capture.peak_flops
    if given is None:
        given = capture.about.config.peak_flops
    processes = intern(process for process, _ in events.threads)[1]
    # If the trace has no device, the given peaks are those of the CPU.
    without = peak_rates(None, None if len(capture.work.event) else given)
    known = [peak_rates(device, given) for device in events.devices_of(processes)]
    return [*known, PeakRates(), without], processes


def _calls(capture: Views) -> pl.DataFrame:
    """The calls of operators with known FLOPs, computed once.

    `flops` and `moved_bytes` are what a call needs at least. `device` is the index of a device in
    `_rates`; `_SEVERAL`, or `_NO_DEVICE` also if a kernel is missing. `node` is the call's node in
    the call tree, and `shapes` an index into `events.texts`.
    """
    return capture.once("calls with FLOPs", lambda: _flop_calls(capture))


def _flop_calls(capture: Views) -> pl.DataFrame:
    events, links, tree = capture.events, capture.links, capture.links.call_tree
    unknown, (rates, _) = np.full(len(tree), UNKNOWN), _rates(capture)
    flops = unknown if links.flops is None else needed_flops(events, tree, links.flops)
    node = np.flatnonzero(flops != UNKNOWN)
    index, texts = tree.index[node], [*events.texts, b"[]"]
    codes = {key: getattr(events, key)[index] for key in ("shapes", "types", "concrete")}
    name = capture.facts.events("name")["name"].gather(index)
    calls = pl.DataFrame({"name": name, "node": node, "flops": flops[node], **codes})

    def arguments(name: str, shapes: int, types: int, concrete: int) -> tuple[int | None, str]:
        values = texts[concrete] if concrete >= 0 else None
        moved = moved_bytes(name, texts[shapes], texts[types], values)
        return None if moved == UNKNOWN else moved, ", ".join(operand_types(name, texts[types]))

    def says(kernel: int) -> list[bool]:
        return [rule.search(events.names[kernel]) is not None for rule in _SAYS.values()]

    def precision(dtype: str, device: int, *said: bool) -> list[str | None]:
        return [_precision(dtype.split(", "), device, rates[device], *said)]

    device, launcher = links.launched
    kernels = pl.DataFrame(
        {
            "call": np.append(tree.nearest_of(node), -1)[launcher],
            "device": intern(process for process, _ in events.threads)[0][events.thread[device]],
            "device_ns": events.duration_ns[device],
            "kernel": events.name[device],
        }
    ).filter(pl.col("call") >= 0)
    is_one, says_anything = pl.col("device").n_unique() == 1, dict.fromkeys(_SAYS, pl.Boolean)
    by_call = (
        computed(kernels, says, ["kernel"], says_anything)
        .group_by("call")
        .agg(
            pl.when(is_one).then(pl.col("device").first()).otherwise(_SEVERAL).alias("device"),
            pl.sum("device_ns"),
            pl.col(*_SAYS).any(),
        )
    )
    calls = computed(
        calls, arguments, ["name", *codes], {"moved_bytes": pl.Int64, "dtype": pl.String}
    )
    calls = calls.with_row_index("call").cast({"call": pl.Int64})
    calls = calls.join(by_call, on="call", how="left", maintain_order="left").with_columns(
        pl.when(~pl.Series(_lacks_kernels(links, node))).then("device").fill_null(_NO_DEVICE),
        pl.col("device_ns").fill_null(0),
        pl.col(*_SAYS).fill_null(value=False),
    )
    return computed(calls, precision, ["dtype", "device", *_SAYS], {"precision": pl.String})


def _lacks_kernels(links: Links, node: Ints) -> Flags:
    """A mask of the calls that launched a kernel that the trace lacks."""
    events, around = links.events, np.append(links.call_tree.nearest_of(node), -1)
    launch = np.flatnonzero(events.among(is_runtime) & events.named(launches_kernel))
    lost = launch[~have_work(events, links.launches.device, launch)]
    call = around[links.call_tree.nodes_of(lost)]
    found: Flags = np.bincount(call[call >= 0], minlength=len(node)) > 0
    return found


def _precision(
    operands: list[str], device: int, rates: PeakRates, tf32: bool, full: bool, fewer: bool
) -> str | None:
    """The precision in which a device multiplies operands of these types; None if not known.

    torch's setting of TF32 is not in the trace, so the names of the call's kernels decide: whether
    any of them says that it computes in `tf32`, in `full` precision, or with `fewer` products.
    """
    kinds = {"float8" if name.startswith("float8") else name for name in operands}
    if len(kinds) != 1 or fewer:
        return None
    (kind,) = kinds
    if kind not in PRECISIONS:
        return None
    if kind != "float32" or device == _NO_DEVICE or (full and not tf32):
        return kind
    if tf32:
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


def _covered(capture: Views, step: Ints) -> dict[int, float | None]:
    """For each step, the share of the kernels' time that operators with known FLOPs launched."""
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    owner = np.append(tree.nearest_of(_calls(capture)["node"].to_numpy()), -1)[launcher]
    time_ns = capture.work.duration_ns
    kernels = pl.DataFrame({"step": step, "owner": owner, "time_ns": time_ns})
    by_step = kernels.filter((step >= 0) & (capture.work.kind == KERNEL)).group_by("step")
    known_ns = pl.col("time_ns").filter(pl.col("owner") >= 0).sum()
    found = by_step.agg(pl.sum("time_ns"), known_ns=known_ns).iter_rows()
    return {step: known / whole if whole else None for step, whole, known in found}
