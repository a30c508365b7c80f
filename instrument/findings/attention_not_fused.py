"""`attention-not-fused`: attention is computed as a matrix product, a softmax and a matrix product.

The check looks for a softmax between two batched matrix products on the same thread, with at most
12 other operators on either side, outside `scaled_dot_product_attention`. Recorded shapes must fit.
The simulation removes the softmax and these operators: a fused kernel never writes the matrix of
scores to memory. It does not change the backward, where a fused kernel would save more. The check
cannot tell whether a fused kernel supports the program's mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.analysis.coverage_rows import LAUNCHERS
from instrument.analysis.places import common_place, input_shapes
from instrument.analysis.views import Views
from instrument.base.units import counted, percent
from instrument.findings.check import Check, Problem
from instrument.findings.evidence import cost_share, evidence_by_cost
from instrument.trace.events import OPERATOR, Events, Ints, split_overload

_MOST_BETWEEN = 12
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
_FUSED = "scaled_dot_product"
_BACKWARD = "Backward"


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all attention that is not fused."""
    tree, steps = capture.links.call_tree, capture.links.counted_steps
    softmax, between = _attention(capture)
    share = cost_share(capture, between) if len(softmax) else 0.0
    if share < CHECK.least_share:
        return
    count = int((steps.holds(tree.start_ns[softmax]) >= 0).sum()) / steps.count
    yield Problem(
        f"{percent(share)} of the {steps.what} is softmax and the other operators between the "
        f"two matrix products of attention: {counted(round(count), 'softmax call')} a "
        f"{steps.what}",
        tree.index[between],
        share,
        place=common_place(capture, tree.index[softmax]),
        evidence=evidence_by_cost(capture, between),
    )


CHECK = Check(
    "attention-not-fused",
    find,
    change="Use torch.nn.functional.scaled_dot_product_attention(query, key, value, "
    "attn_mask=mask, is_causal=...) instead of the two products and the softmax.",
    verify="--ops",
    least_share=0.05,
    least_saving=0.01,
    factor=0,
    coverage=LAUNCHERS,
)


def _attention(capture: Views) -> tuple[Ints, Ints]:
    """The softmax nodes of attention, and all nodes between the two products.

    All are siblings in the call tree. A product is or contains a batched matrix product.
    """
    events, tree = capture.events, capture.links.call_tree
    softmax = events.named(_is_softmax)[tree.index]
    batched = events.named(lambda name: split_overload(name)[0] in _BATCHED)[tree.index]
    hidden = events.named(lambda name: _FUSED in name or _BACKWARD in name)[tree.index]
    shown = events.among(OPERATOR)[tree.index] & ~tree.at_or_inside(hidden)
    # aten::softmax calls aten::_softmax: only the outermost of the two counts.
    softmax = tree.outermost(softmax & shown)
    products = shown & (tree.with_descendants(batched.astype(np.int64)) > 0) & ~softmax
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
        if _fits(events, *tree.index[[around[0], node, around[1]]].tolist()):
            softmaxes.append(node)
            begin, end = np.searchsorted(siblings, around).tolist()
            between.append(siblings[begin + 1 : end])
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


def _matrices(events: Events, event: int) -> list[list[int]]:
    return [shape for shape in input_shapes(events, event) if shape is not None and len(shape) > 2]
