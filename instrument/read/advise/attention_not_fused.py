"""`attention-not-fused`: attention is computed as a matrix product, a softmax and a matrix product.

The check looks for a softmax between two batched matrix products on the same thread, with at most
12 other operators on either side, outside `scaled_dot_product_attention`. Recorded shapes must fit.
Attention counts only where torch has a fused kernel that is faster (`_KERNELS`). The simulation
removes the softmax and these operators: a fused kernel never writes the matrix of scores to memory.
On a CPU it may still compute as long, so the lower bound is 0. The backward stays as it is, where a
fused kernel would save more. The check cannot tell whether a fused kernel supports the program's
mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.base.units import counted, percent
from instrument.read.advise.check import INPUT_TYPES, RECORD_SHAPES, Check, NotRecorded, Problem
from instrument.read.advise.evidence import cost_share, device_kind, evidence_by_cost
from instrument.read.facts.places import common_place, input_shapes
from instrument.read.trace.events import OPERATOR, Events, Ints, decoded, split_overload
from instrument.read.views.coverage_rows import LAUNCHERS
from instrument.read.views.views import Views

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


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all attention that is not fused, but could be."""
    tree, steps, kind = capture.links.call_tree, capture.links.counted_steps, device_kind(capture)
    if kind not in _KERNELS:
        return
    softmax, between = _attention(capture, _KERNELS[kind])
    share = cost_share(capture, between) if len(softmax) else 0.0
    if share < CHECK.least_share:
        return
    on_cpu, events = kind == "cpu", tree.index[between]
    if on_cpu and not INPUT_TYPES.is_met(capture):
        raise NotRecorded(INPUT_TYPES.missing, RECORD_SHAPES)
    count = int((steps.holds(tree.start_ns[softmax]) >= 0).sum()) / steps.count
    yield Problem(
        f"{percent(share)} of the {steps.what} is softmax and the other operators between the "
        f"two matrix products of attention: {counted(round(count), 'softmax call')} a "
        f"{steps.what}",
        events,
        share,
        edit=lambda whatif: whatif.scale_events(events, by=0, bounds=(1, 0) if on_cpu else None),
        place=common_place(capture, tree.index[softmax]),
        evidence=evidence_by_cost(capture, between),
    )


CHECK = Check(
    "attention-not-fused",
    find,
    change="Use torch.nn.functional.scaled_dot_product_attention(query, key, value, "
    "attn_mask=mask, is_causal=...), with tensors of 4 dimensions, instead of the two products and "
    "the softmax. nn.MultiheadAttention does so with need_weights=False.",
    verify="--ops",
    least_share=0.05,
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
