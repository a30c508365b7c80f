"""Operators and kernels that faster ones replace: attention, casts, layouts, precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from instrument.base.units import count, counted
from instrument.read.advise.check import INPUT_TYPES, RECORD_SHAPES, Check, NotRecorded, Problem
from instrument.read.advise.evidence import (
    cost_share,
    costs,
    device_kind,
    evidence,
    evidence_by_cost,
    in_steps,
    largest,
    share_of,
)
from instrument.read.advise.finding import Evidence
from instrument.read.advise.regions import backward_of
from instrument.read.facts.autograd import FORWARD, OPTIMIZER, is_backward, kinds_of_scopes
from instrument.read.facts.device_work import COPY, KERNEL
from instrument.read.facts.groupby import groupby_rows, isin
from instrument.read.facts.idle import is_loading
from instrument.read.facts.places import common_place, input_shapes
from instrument.read.facts.segments import waits_for_data
from instrument.read.trace.events import (
    OPERATOR,
    Events,
    Flags,
    Ints,
    called_operators,
    decoded,
    flags,
    split_overload,
)
from instrument.read.views.coverage_rows import LAUNCHERS
from instrument.read.views.operators import shape_text
from instrument.read.views.peak_rates import peak_rates
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit

_MOST_BETWEEN = 12
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
_FUSED = "scaled_dot_product"
_BACKWARD = "Backward"
_DRAWS = re.compile(r"bernoulli|(native|fused)_dropout|::rand|uniform_")


class _Kernel(NamedTuple):
    """What a fused kernel of torch 2.13 can compute (`sdp_utils*` in ATen/native/transformers).

    Attributes:
        types: torch's names of the types of the matrices.
        dropout: whether it can drop weights.
        least_keys: from how many keys on it is faster.
    """

    types: frozenset[str]
    dropout: bool
    least_keys: int


_ON_GPU = _Kernel(frozenset({"float", "c10::Half", "c10::BFloat16"}), dropout=True, least_keys=1)
# Measured on a CPU with AVX-512: bfloat16 takes twice as long as with separate operators, and 16 or
# 32 keys a tenth longer. With dropout, torch runs the same operators as without the kernel.
_KERNELS = {
    "cuda": _ON_GPU,
    "hip": _ON_GPU,
    "cpu": _Kernel(frozenset({"float", "double"}), dropout=False, least_keys=128),
}
_LEAST_LAYOUT, _LEAST_COPIES = 0.05, 0.1
# An operator is named if it makes copies of at least this share of their cost.
_MOSTLY = 0.5
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|^batched_transpose_\d", re.IGNORECASE)
_CASTS = frozenset({"aten::to", "aten::_to_copy"})
_COPIES = frozenset({"aten::contiguous", "aten::clone"})
_BETWEEN_DEVICES = re.compile(r"HtoD|DtoH|PtoP|Host", re.IGNORECASE)
_CHANNELS_LAST = (
    "Keep one layout: model = model.to(memory_format=torch.channels_last), and "
    "batch = batch.to(memory_format=torch.channels_last)."
)
_ON_ROCM = (
    " Set PYTORCH_MIOPEN_SUGGEST_NHWC=1 before the program starts; without it, torch gives MIOpen "
    "NCHW in any case."
)
_CAST_ONCE = (
    "Cast once instead of in each step: keep parameters and constants in the type in which "
    "they are used, such as model.to(torch.bfloat16), or cast the input of the model, not that of "
    "each layer."
)
_COPY_LESS = (
    "Remove .contiguous() if the next operator can read any layout, and .clone() if "
    "nothing writes to the copy in place; or store the tensor in the layout in which it is read."
)

# Names of torch's operators and of the backward nodes of these; not of a user's autograd function.
_TORCHS = re.compile(r"\w+::|.*Backward\d+$")
_OTHER_LAYOUT = (
    "{} copies its input because it cannot read this layout, such as that of .expand(), .t() or a "
    "slice: store the tensor once in a layout that it reads, or use an operator that reads any."
)


def attention_not_fused(capture: Views) -> Iterator[Problem]:
    """Find softmax between two batched matrix products, where torch has a faster fused kernel.

    The simulation removes the softmax and the other operators between, with their backward: a fused
    kernel never writes the matrix of scores to memory. On a CPU it may still compute as long.
    """
    tree, steps, kind = capture.links.call_tree, capture.links.counted_steps, device_kind(capture)
    if kind not in _KERNELS:
        return
    softmax, between = _attention(capture, _KERNELS[kind])
    on_cpu, unclear = kind == "cpu", None
    if not len(softmax):
        return
    events = tree.index[np.append(between, backward_of(capture, between)[0])]
    if on_cpu and not INPUT_TYPES.is_met(capture):
        unclear = NotRecorded(INPUT_TYPES.missing, RECORD_SHAPES)
    number = len(in_steps(capture, tree.index[softmax])) / steps.count
    yield Problem(
        "softmax and the other operators between the two matrix products of attention, with their "
        f"backward: {counted(round(number), 'softmax call')} a {steps.what}",
        events,
        cost_share(capture, events),
        edit=lambda whatif: whatif.scale_events(events, by=0, bounds=(1, 0) if on_cpu else None),
        place=common_place(capture, tree.index[softmax]),
        evidence=evidence_by_cost(capture, tree.index[between]),
        unclear=unclear,
    )


ATTENTION_NOT_FUSED = Check(
    "attention-not-fused",
    attention_not_fused,
    title="{share} of the {step} is {what}",
    change="Use torch.nn.functional.scaled_dot_product_attention(query, key, value, "
    "attn_mask=mask, is_causal=...), with tensors of 4 dimensions, instead of the two products and "
    "the softmax. nn.MultiheadAttention does so with need_weights=False.",
    verify="--ops",
    least_share=0.05,
    coverage=LAUNCHERS,
)


def layout_and_casts(capture: Views) -> Iterator[Problem]:
    """Find kernels that convert between NCHW and NHWC, casts, and copies by contiguous or clone.

    Healthy programs spend up to 6 % of the step in each kind. The check does not know which copies
    are needed, and does not see conversions inside other kernels.
    """
    if len(capture.work.event):
        work, steps = capture.work, capture.links.counted_steps
        is_layout = capture.events.named(lambda name: _LAYOUT.search(name) is not None)
        kernels = work.event[(work.kind == KERNEL) & is_layout[work.event]]
        number = counted(round(len(in_steps(capture, kernels)) / steps.count), "kernel")
        yield Problem(
            f"converts tensors between NCHW and NHWC: {number} a {steps.what}",
            kernels,
            variant="layout",
            change=_CHANNELS_LAST + _ON_ROCM * (device_kind(capture) == "hip"),
            verify="--kernels",
        )
    yield from _conversions(capture, _CASTS, "casts tensors", _CAST_ONCE)
    does = "copies tensors with contiguous() or clone()"
    yield from _conversions(capture, _COPIES, does, _COPY_LESS)


LAYOUT_AND_CASTS = Check(
    "layout-and-casts",
    layout_and_casts,
    title="{share} of the {step} {what}",
    verify="--ops",
    least_share=_LEAST_LAYOUT,
    lowest=_LEAST_LAYOUT,
    factor=0,
    coverage=LAUNCHERS,
)


def _attention(capture: Views, kernel: _Kernel) -> tuple[Ints, Ints]:
    """The softmax nodes of attention that a kernel computes, and all nodes between the products.

    All are siblings in the call tree. A product is or contains a batched matrix product. What is
    not recorded does not exclude an attention.
    """
    events, tree = capture.events, capture.links.call_tree
    softmax = events.named(_is_softmax)[tree.index]
    batched = events.named(lambda name: split_overload(name)[0] in _BATCHED)[tree.index]
    hidden = events.named(lambda name: _FUSED in name or _BACKWARD in name)[tree.index]
    shown = events.among(OPERATOR)[tree.index] & ~tree.at_or_inside(hidden)
    # aten::softmax calls aten::_softmax: only the outermost of the two counts.
    softmax = tree.outermost(softmax & shown)
    products = shown & (tree.with_descendants(batched.astype(np.int64)) > 0) & ~softmax
    draws = events.named(lambda name: _DRAWS.search(name) is not None)[tree.index]
    draws = tree.with_descendants(draws.astype(np.int64)) > 0
    batched_nodes = np.flatnonzero(batched)
    by_parent = np.flatnonzero(shown)[np.argsort(tree.parent[shown], kind="stable")]
    parents = tree.parent[by_parent]
    softmaxes, between = [], []
    for node in np.flatnonzero(softmax).tolist():
        first, last = np.searchsorted(parents, [tree.parent[node], tree.parent[node] + 1]).tolist()
        siblings = by_parent[first:last]
        at = int(np.searchsorted(siblings, node))
        earlier = siblings[max(at - _MOST_BETWEEN - 1, 0) : at]
        later = siblings[at + 1 : at + _MOST_BETWEEN + 2]
        before, after = earlier[products[earlier]][-1:], later[products[later]][:1]
        around = np.concatenate([before, after])
        if len(around) < 2 or (tree.thread[around] != tree.thread[node]).any():
            continue
        # Types are those of the innermost product: autocast casts the inputs of the outer one.
        inner = batched_nodes[np.searchsorted(batched_nodes, around[0])]
        begin, end = np.searchsorted(siblings, around).tolist()
        inside = siblings[begin + 1 : end]
        if (
            _fits(events, *tree.index[[around[0], node, around[1]]].tolist())
            and _computes(kernel, events, *tree.index[[inner, node]].tolist())
            and (kernel.dropout or not draws[inside].any())
        ):
            softmaxes.append(node)
            between.append(inside)
    if not softmaxes:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.array(softmaxes), np.unique(np.concatenate(between))


def _is_softmax(name: str) -> bool:
    lowered = name.lower()
    return "softmax" in lowered and "log" not in lowered


def _fits(events: Events, first: int, softmax: int, last: int) -> bool:
    """Whether softmax and second product read the first one's result; True without shapes."""
    factors, scores, others = (_matrices(events, each) for each in (first, softmax, last))
    if len(factors) < 2 or not scores or not others:
        return bool(events.shapes[softmax] < 0)
    rows, columns = scores[0][-2:]
    return (
        factors[-2][-2] == rows and factors[-1][-1] == columns and others[0][-2:] == [rows, columns]
    )


def _computes(kernel: _Kernel, events: Events, product: int, softmax: int) -> bool:
    """Whether a kernel computes such a product, and such a softmax faster."""
    code, scores = int(events.types[product]), _matrices(events, softmax)
    types = decoded(events.texts[code]) if code >= 0 else []
    is_type = not isinstance(types, list) or kernel.types.issuperset(
        each for each in types[:2] if isinstance(each, str)
    )
    return is_type and (not scores or scores[0][-1] >= kernel.least_keys)


def _matrices(events: Events, event: int) -> list[list[int]]:
    return [shape for shape in input_shapes(events, event) if shape is not None and len(shape) > 2]


def _conversions(
    capture: Views, names: frozenset[str], does: str, change: str
) -> Iterator[Problem]:
    steps, calls = capture.links.counted_steps, _copying(capture, names)
    share = cost_share(capture, calls)
    if share < _LEAST_COPIES:
        return
    place = common_place(capture, calls, costs(capture, calls))
    caller = _caller(capture, calls) if names == _COPIES else None
    if caller is not None:
        does, change = f"copies tensors inside {caller}", _OTHER_LAYOUT.format(caller)
    yield Problem(
        f"{does}: {counted(round(len(calls) / steps.count), 'call')} a {steps.what}",
        calls,
        share,
        place=place,
        evidence=evidence_by_cost(capture, calls),
        variant=does,
        change=change,
        verify="--ops --by range" if place[0] else "",
    )


def _copying(capture: Views, names: frozenset[str]) -> Ints:
    """The outermost calls of the operators in `names` that copy within one device, in the steps.

    Only those that the program can change: not the calls of the data loader or of an optimizer
    itself (but of the closure of its `step`), and not those that other operators make; but a copy
    inside an operator counts, as the operator cannot read the layout of its input, if it is not in
    the backward, nor the result, as `aten::masked_fill` makes one for `aten::masked_fill_`.
    """
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    operator = events.among(OPERATOR)[tree.index]
    plain = [split_overload(name)[0] for name in events.names]
    named, other, copies = (
        flags(of.__contains__, plain)[events.name[tree.index]]
        for of in (names, (_CASTS | _COPIES) - names, {"aten::copy_"})
    )
    stops = ((named | other) & operator) | is_loading(events)[tree.index]
    across = capture.work.event[capture.work.kind == COPY]
    across = across[events.named(lambda name: bool(_BETWEEN_DEVICES.search(name)))[across]]
    device, launcher = links.launched
    moves = np.bincount(launcher[isin(device, across) & (launcher >= 0)], minlength=len(tree))
    nodes = np.flatnonzero(
        named
        & operator
        & ~tree.inside(stops)
        & (tree.with_descendants(copies.astype(np.int64)) > 0)
        & (tree.with_descendants(moves) == 0)
        & (links.counted_steps.holds(tree.start_ns) >= 0)
    )
    parent = np.where(tree.parent[nodes] >= 0, tree.index[tree.parent[nodes]], -1)
    is_torchs = events.named(lambda name: _TORCHS.match(name) is not None)
    of_program = ~np.append(is_torchs & called_operators(events), False)[parent]
    scope = scopes.innermost[nodes]
    if names == _COPIES:
        known = {*plain}
        makes = events.named(lambda name: f"{split_overload(name)[0]}_" in known)
        excluded = np.append(makes | is_backward(events), False)[parent]
        of_program |= ~excluded & ~np.append(scopes.backward, False)[scope]
    kind = np.append(kinds_of_scopes(events, scopes), FORWARD)[scope]
    found: Ints = tree.index[nodes[of_program & ((kind != OPTIMIZER) | scopes.recording[nodes])]]
    return found


def _caller(capture: Views, calls: Ints) -> str | None:
    """The operator that itself makes most of the copies; None if the program makes them."""
    events, cost = capture.events, costs(capture, calls)
    plain = capture.facts.events("name", "parent")
    rows = plain[calls].select("parent", event=pl.Series(calls), total_ns=pl.Series(cost))
    rows = rows.drop_nulls("parent")
    is_called = called_operators(events) & ~is_backward(events)
    rows = rows.filter(pl.Series(is_called[rows["parent"].to_numpy()]))
    rows = rows.with_columns(name=plain["name"].gather(rows["parent"]))
    for name, _, _, spent_ns in largest(rows.drop("parent"), ["name"]).head(1).iter_rows():
        return name if spent_ns >= _MOSTLY * cost.sum() else None
    return None


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
_FLOAT64 = ("double", "c10::complex<double>")  # torch's words for it
_NEARLY_ALL, _LONGEST_DETAIL = 0.9, 200
# Measured on a CPU with AVX-512 but no float16, one thread: of the time in float64, convolutions
# need 11 to 23 % in float32, because oneDNN has none of float64, and other operators 16 to 80 %.
_CONVOLUTION, _OF_FLOAT64_CONVOLUTION, _OTHERS = re.compile("conv"), (0.22, 0.5, 0.1), 0.5
# Products of float16 run at 1 to 10 GFLOP/s there, those of float32 and bfloat16 at 70 to 200; so
# float32 needs 1 to 14 % of the time.
_SLOW_RATE, _LONG_PRODUCT_NS, _OF_FLOAT16 = 15.0, 20_000, (0.1, 0.3, 0.01)


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
        yield Problem("", operators, evidence=rows, edit=_in_float32(capture, operators))
    elif len(operators):
        yield Problem(
            ", the type of the model's parameters",
            operators,
            edit=_in_float32(capture, operators),
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
    assumes="in float32",
    on_device=False,
)


def float16(capture: Views) -> Iterator[Problem]:
    """Find products and convolutions of 16-bit types that a CPU computes slowly, by their FLOP/s.

    A CPU without instructions for such a type converts each number, or runs a fallback kernel such
    as `aten::_slow_conv2d_forward`.
    """
    events, links = capture.events, capture.links
    tree, steps, flops = links.call_tree, links.counted_steps, links.flops
    if flops is None:
        raise NotRecorded(INPUT_TYPES.missing, INPUT_TYPES.remedy)
    for kind, name in (("c10::Half", "float16"), ("c10::BFloat16", "bfloat16")):
        is_kind = np.array(
            [kind.encode() in text[: len(kind) + 4] for text in events.texts] + [False]
        )
        nodes = np.flatnonzero(
            is_kind[events.types[tree.index]]
            & (flops > 0)
            & (tree.total_ns >= _LONG_PRODUCT_NS)
            & (steps.holds(tree.start_ns) >= 0)
        )
        # The median, because other programs can make any call long.
        per_ns = float(np.median(flops[nodes] / tree.total_ns[nodes])) if len(nodes) else 0.0
        if per_ns < _SLOW_RATE:
            yield Problem(
                f"{name} at {count(per_ns * 1e9)}FLOP/s",
                tree.index[nodes],
                edit=lambda whatif, of=tree.index[nodes]: whatif.scale_events(  # type: ignore[misc]
                    of, by=_OF_FLOAT16[0], bounds=_OF_FLOAT16[1:]
                ),
                variant=name,
            )


FLOAT16 = Check(
    "float16",
    float16,
    title="{share} of the {step} multiplies {what}: this CPU has no fast kernel for it",
    change="Use float32 on this CPU: model.float(), and inputs in float32; or bfloat16 in "
    "torch.autocast('cpu', dtype=torch.bfloat16) if the CPU has instructions for it.",
    verify="--ops --by input_types  # float16 is 'c10::Half', bfloat16 'c10::BFloat16'",
    least_share=0.1,
    least_saving=0.03,
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


def _in_float32(capture: Views, operators: Ints) -> Edit:
    is_conv = capture.events.named(lambda name: bool(_CONVOLUTION.search(name)))[operators]
    by, *bounds = _OF_FLOAT64_CONVOLUTION
    return lambda whatif: whatif.scale_events(operators[~is_conv], by=_OTHERS).scale_events(
        operators[is_conv], by=by, bounds=(bounds[0], bounds[1])
    )


def _typed(capture: Views) -> Flags:
    """A mask of the nodes that are operators in float64, by their recorded types.

    One of the first two inputs is a tensor of float64. Python's numbers are float64 too, but have
    no dimensions; without shapes, only the first input counts.
    """
    events, tree = capture.events, capture.links.call_tree
    found = np.zeros(len(tree), np.bool_)
    nodes = np.flatnonzero((events.types >= 0)[tree.index] & events.among(OPERATOR)[tree.index])
    event = tree.index[nodes]
    keys, groups = groupby_rows(events.types[event], events.shapes[event])
    texts = [*events.texts, b"[]"]  # the last one for -1: not recorded
    found[nodes] = np.array([_is_float64(texts[k], texts[n]) for k, n in keys.T], np.bool_)[
        groups.of
    ]
    return found


def _is_float64(types: bytes, shapes: bytes) -> bool:
    kinds, dims = decoded(types), decoded(shapes)
    if not isinstance(kinds, list) or not isinstance(dims, list):
        return False
    for at, kind in enumerate(kinds[:2]):
        first = kind[0] if kind and isinstance(kind, list) else kind
        if first in _FLOAT64 and (dims[at] if at < len(dims) else at == 0):
            return True
    return False


def _not_loading(capture: Views) -> Flags:
    """A mask of the nodes that are operators, but not of a wait for data."""
    tree, loads = capture.links.call_tree, waits_for_data(capture)
    found: Flags = called_operators(capture.events)[tree.index]
    return found & ~tree.at_or_inside(np.isin(tree.index, loads))
