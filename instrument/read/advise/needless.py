"""Needless work that only the values of tensors show: repeated, copied, padded, or not used.

A detail window observes the values; see `instrument.record.observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from instrument.base.prose import shortened
from instrument.base.units import percent
from instrument.read.advise.check import Check, Need, Problem
from instrument.read.advise.evidence import in_steps, share_of
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.detail import of_window
from instrument.read.facts.graph_nodes import makers
from instrument.read.facts.groupby import isin
from instrument.read.facts.intervals import Intervals, interval_at, merged
from instrument.read.facts.links import thread_of_steps
from instrument.read.facts.places import common_place, input_shapes
from instrument.read.trace.capture_json import Observed, Padding, Repair
from instrument.read.trace.events import Events, Ints, called_operators
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

OBSERVED = Need(
    lambda capture: _observed(capture) is not None,
    "the values of tensors were not observed",
    "record with profiler.detail=2, without torch.compile",
)
_LONGEST_NAME = 40
_LEAST_PADDING, _MOST_INDEXED = 0.3, 0.2
# Of shorter operators, most of the time does not depend on the size of the inputs.
_LEAST_SCALED_NS = 20_000
_FUSED, _PRODUCTS = "scaled_dot_product", ("aten::bmm", "aten::baddbmm", "aten::matmul")
_DENSE = "aten::embedding_dense_backward"
# What calls of a kind do, and what to write instead.
_Kind: TypeAlias = tuple[str, str]
_REPEATED = {
    "each step": (
        "computes the same as in the step before",
        "Compute it once, before the loop, and keep the result: what it reads is the same in each "
        "step. A mask or table of several sizes: functools.cache by the size.",
    ),
    "twice": (
        "computes again what the same step has already computed from the same inputs",
        "Keep the first result and use it again.",
    ),
}
_COPIES = {
    "grows": (
        "copies again what it copied before, to append to it or to change a part of it",
        "Append to a list and join it once when it is needed, or make a tensor of the full size "
        "once and write each new part into it: buffer[n : n + len(new)] = new, or index_copy_ "
        "instead of index_copy.",
    ),
    "parameters": (
        "copies the parameters of a model",
        "Copy them only in the steps that need the copy, such as those with a better result. To "
        "average them, update one copy in place: torch._foreach_lerp_(copies, parameters, weight).",
    ),
}
_UNUSED = {
    "unused": (
        "orders all of a tensor, of which a small part is used",
        "Make only that part: torch.randint(n, (k,)) instead of torch.randperm(n)[:k], where "
        "repetitions do no harm; torch.topk(x, k), min or max instead of a sort.",
    ),
}


def _observed(capture: Views) -> Observed | None:
    about = capture.about.detail
    return None if about is None or capture.detail is None else about.observed


def _of_window(
    capture: Views, detail: Views, events: Ints, values: NDArray[Any]
) -> tuple[Ints, NDArray[np.float64]]:
    """The operators of the window like some of the detail window, with the mean of their values."""
    given = pl.DataFrame({"event": events, "value": values})
    found = of_window(capture.links, detail.links, given, pl.mean("value"))
    return found["event"].to_numpy(), found["value"].to_numpy()


def _repairs(capture: Views, kinds: dict[str, _Kind]) -> Iterator[Problem]:
    """Find the calls that the detail window observed to do needless work of some kinds."""
    observed, detail = _observed(capture) or Observed(), capture.detail
    for repair in observed.repairs:
        if repair.kind in kinds and detail is not None:
            calls, kept = _calls(capture, detail, repair)
            if len(calls):
                yield _repair(capture, kinds[repair.kind], repair, calls, kept)


def _calls(capture: Views, detail: Views, repair: Repair) -> tuple[Ints, float]:
    """The outermost operators in the calls, and which share of their time a repair keeps."""
    spans = sorted((each.start_unix_ns, each.end_unix_ns, each.kept) for each in repair.spans)
    start_ns, end_ns = (np.array(each, np.int64) for each in [*zip(*spans)][:2])
    began_ns = detail.facts.events("start_unix_ns")["start_unix_ns"].fill_null(-1).to_numpy()
    span = interval_at((start_ns, end_ns), began_ns)
    inside = np.flatnonzero(span >= 0)
    kept = np.array([kept for *_, kept in spans])[span[inside]]
    calls, kept = _of_window(capture, detail, inside, kept)
    tree = capture.links.call_tree
    chosen = np.zeros(len(tree), np.bool_)
    chosen[tree.nodes_of(calls[kept < 1])] = True
    outer = tree.index[tree.outermost(chosen)]
    weight_ns = np.maximum(capture.events.duration_ns[outer], 1)
    kept = kept[np.searchsorted(calls, outer)]
    return outer, float(np.average(kept, weights=weight_ns)) if len(outer) else 1.0


def _repair(capture: Views, kind: _Kind, repair: Repair, calls: Ints, kept: float) -> Problem:
    (does, change), events, steps = kind, capture.events, capture.links.counted_steps
    every = np.concatenate([calls, _backward(capture, calls)])
    start_ns, end_ns = gaps = _gaps(capture, calls)
    thread = thread_of_steps(capture.links)

    def edit(whatif: Scenario) -> Scenario:
        whatif = whatif.scale_events(every, by=kept)
        return whatif.scale_spans(thread, gaps, by=kept) if len(start_ns) else whatif

    names = [shortened(each, _LONGEST_NAME) for each in repair.functions[:3]]
    return Problem(
        f"{does}: {', '.join(names)}",
        every,
        steps.covered(
            np.append(events.start_ns[every], start_ns), np.append(events.end_ns[every], end_ns)
        ),
        edit=edit,
        place=(common_place(capture, calls)[0], repair.source),
        change=change,
        variant=repair.kind,
    )


def _gaps(capture: Views, calls: Ints) -> Intervals:
    """The times between two outermost operators of a step that follow each other and are calls."""
    tree, thread = capture.links.call_tree, thread_of_steps(capture.links)
    operators = tree.outermost(called_operators(capture.events)[tree.index])
    nodes = np.flatnonzero(operators & (tree.thread == thread))
    nodes = nodes[np.argsort(tree.start_ns[nodes], kind="stable")]
    is_call = isin(tree.index[nodes], calls)
    step = capture.links.counted_steps.holds(tree.start_ns[nodes])
    both = is_call[1:] & is_call[:-1] & (step[1:] == step[:-1])
    start_ns, end_ns = tree.end_ns[nodes[:-1]], tree.start_ns[nodes[1:]]
    both &= end_ns > start_ns
    return merged(start_ns[both], end_ns[both])


def _backward(capture: Views, calls: Ints) -> Ints:
    """The backward nodes of what some operators, and those inside them, made."""
    events, tree = capture.events, capture.links.call_tree
    made = makers(capture.links)
    inside = tree.nearest_of(tree.nodes_of(calls), tree.nodes_of(made)) >= 0
    ran = is_backward(events)[tree.index]
    ran &= isin(events.sequence[tree.index], np.unique(events.sequence[made[inside]]))
    found: Ints = tree.index[tree.outermost(ran)]
    return found


def padding(capture: Views) -> Iterator[Problem]:
    """Find rows that are mostly padding, and the operators whose time depends on their length.

    The time of most of them follows the length of the rows, that of attention its square. Rows that
    are all shorter than their padding are cut; else rows of similar length are put together.
    """
    observed = _observed(capture) or Observed()
    if not observed.padding:
        return
    # of those that agree, a mask tells more than equal numbers
    every, detail = observed.padding, capture.detail
    first = max(every, key=lambda each: (each.valid / each.rows / each.length, each.what))
    rows = [each for each in every if each.what == first.what]
    cells = sum(each.rows * each.length for each in rows)
    valid = sum(each.valid for each in rows) / cells
    cut = sum(each.to_longest for each in rows) / cells
    if detail is None or valid > 1 - _LEAST_PADDING:
        return
    is_cut = 1 - cut > (1 - valid) / 2
    kept = cut if is_cut else valid
    calls, power = _scaled(capture, detail, rows)

    def edit(whatif: Scenario) -> Scenario:
        for of in np.unique(power).tolist():
            bounds = (max(cut, kept) ** of, valid**of)
            whatif = whatif.scale_events(calls[power == of], by=kept**of, bounds=bounds)
        return whatif

    yield Problem(
        f"{percent(1 - valid)} of the numbers in the batches are padding ({first.what})",
        calls,
        share_of(capture, calls),
        edit=edit,
        place=(common_place(capture, calls)[0], first.source),
        change=f"{_CUT} {_GROUP}" if is_cut else _GROUP,
    )


def _scaled(capture: Views, detail: Views, rows: list[Padding]) -> tuple[Ints, Ints]:
    """The outermost operators whose time follows a power of the length of rows, and the power."""
    events, tree = detail.events, detail.links.call_tree
    node = np.flatnonzero((events.shapes >= 0)[tree.index])
    event, known = tree.index[node], dict[tuple[int, int], int]()
    power = np.zeros(len(tree), np.int64)
    for at, key in enumerate(zip(events.name[event].tolist(), events.shapes[event].tolist())):
        if key not in known:
            known[key] = _power(events, int(event[at]), rows)
        power[node[at]] = known[key]
    outer = tree.outermost(power > 0)
    calls, found = _of_window(capture, detail, tree.index[outer], power[outer])
    kind = capture.facts.events("pass")["pass"].gather(calls)
    chosen = ~kind.eq_missing("optimizer").to_numpy() & (found == found.round())
    chosen &= capture.events.duration_ns[calls] > _LEAST_SCALED_NS
    return calls[chosen], found[chosen].astype(np.int64)


def _power(events: Events, event: int, rows: list[Padding]) -> int:
    shapes = [shape for shape in input_shapes(events, event) if shape]
    name = events.names[events.name[event]]
    for count, length in {(each.rows, each.length) for each in rows}:
        long = [shape for shape in shapes if length in shape]
        is_product = _FUSED in name or name in _PRODUCTS
        if any(shape.count(length) > 1 for shape in long) or (is_product and len(long) > 1):
            return 2
        if any(count * length in shape for shape in shapes) or any(
            each % count == 0
            for shape in long
            for each in shape[:2]
            if each != length or count == length
        ):
            return 1
    return 0


_CUT = "Pad each batch only to its own longest row, not to a fixed length."
_GROUP = (
    "Put rows of similar length into the same batch (a sampler that sorts by length), or join the "
    "rows without padding: nested tensors, pack_padded_sequence, or attention over joined rows."
)


def dense_gradients(capture: Views) -> Iterator[Problem]:
    """Find tables of embeddings of which a step indexes few rows, but has gradients for all."""
    observed, events = _observed(capture) or Observed(), capture.events
    tables = [e for e in observed.embeddings if e.indexed <= _MOST_INDEXED * e.rows]
    dense = in_steps(capture, np.flatnonzero(events.named(_DENSE.__eq__)))
    if not tables or not len(dense):
        return
    largest = max(tables, key=lambda each: each.numbers)
    unused = sum(each.numbers * (1 - each.indexed / each.rows) for each in tables)
    numbers = max(sum((capture.about.parameter_types or {}).values()), unused, 1)
    share, kept = largest.indexed / largest.rows, 1 - unused / numbers
    rows = capture.facts.events("id", "kind", "pass")
    rows = rows.filter(kind="operator", **{"pass": "optimizer"})
    update = in_steps(capture, rows["id"].to_numpy())
    yield Problem(
        f"{percent(share)} of the {largest.rows:,} rows of an embedding",
        np.concatenate([dense, update]),
        edit=lambda whatif: whatif.scale_events(dense, by=share).scale_events(
            update, by=kept, bounds=(1, kept)
        ),
        place=(common_place(capture, dense)[0], largest.source),
    )


def repeated_work(capture: Views) -> Iterator[Problem]:
    """Find calls that compute the same as in the step before, or twice in a step."""
    return _repairs(capture, _REPEATED)


def needless_copies(capture: Views) -> Iterator[Problem]:
    """Find copies of what was copied before, and of parameters."""
    return _repairs(capture, _COPIES)


def unused_results(capture: Views) -> Iterator[Problem]:
    """Find orders of which a part is used."""
    return _repairs(capture, _UNUSED)


def _check(find: Callable[[Views], Iterator[Problem]], **texts: str) -> Check:
    return Check(
        find.__name__.replace("_", "-"),
        find,
        verify="Record again: this finding must be gone.",
        least_share=0.03,
        least_saving=0.02,
        needs=(OBSERVED,),
        coverage=(CPU_IN_STEPS,),
        **({"title": "{share} of the {step} {what}"} | texts),  # type: ignore[arg-type]
    )


REPEATED_WORK, NEEDLESS_COPIES = _check(repeated_work), _check(needless_copies)
UNUSED_RESULTS = _check(unused_results)
PADDING = _check(
    padding,
    title="{what}; {share} of the {step} works on all of them",
    assumes="if the time follows the length of the rows, and that of attention its square",
)
DENSE_GRADIENTS = _check(
    dense_gradients,
    title="A step indexes {what}, but has gradients and updates of all: {share} of the {step}",
    change="nn.Embedding(..., sparse=True), with torch.optim.SparseAdam or SGD for this table in "
    "an optimizer of its own; or a smaller table.",
    assumes="if the update of the table takes the share of the optimizer that its size has",
)
