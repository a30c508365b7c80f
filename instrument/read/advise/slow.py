"""Slow implementations of what torch has a fast one for, on a CPU and on devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import counted
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import device_kind
from instrument.read.advise.regions import LONGEST_GAP_NS, backward_of, bodies, region
from instrument.read.facts.groupby import group_rows, isin
from instrument.read.facts.places import common_place, input_shapes
from instrument.read.trace.events import Flags, Ints, split_overload
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

_OPTIMIZER = re.compile(rf"{OPTIMIZER_STEP}(\w+)\.step")
# Options of torch's optimizers (2.13): `fused` updates all parameters in one kernel on CPUs and
# devices, `foreach` calls each operator once for all of them.
_OPTIONS = {
    **dict.fromkeys(("Adam", "AdamW", "SGD", "Adagrad"), "fused"),
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"), "foreach"
    ),
}
# Measured on a CPU, one thread, 8 to 80 parameters of 32 to 2 million numbers. With k operators for
# a parameter (AdamW 10, Adagrad 6, SGD with momentum 3), the fused kernel needs 1/k to 3/k of the
# time of the loop. foreach needs 0.51 to 0.74 of it for small parameters, more for large ones, and
# always more for ASGD; fused needs a third of the time of foreach.
_FUSED, _FOREACH, _FUSED_OF_FOREACH = (2.0, 3.0, 1.0), (0.6, 1.0, 0.5), (0.35, 0.7, 0.2)
_LEAST_PARAMETERS, _LEAST_OPERATORS = 8, 2.5


def optimizer_not_fused(capture: Views) -> Iterator[Problem]:
    """Find optimizers that call several operators for each parameter, or foreach where fused is.

    The number of parameters is how often the typical operator of the optimizer runs in a step.
    """
    events, links, on_cpu = capture.events, capture.links, device_kind(capture) == "cpu"
    tree, steps = links.call_tree, links.counted_steps
    operators, ranges = bodies(capture)
    names = [each and each[1] for each in map(_OPTIMIZER.fullmatch, events.names)]
    is_step = np.append(
        np.array([*map(bool, names)], np.bool_)[events.name[tree.index]] & ranges, False
    )
    # Within the closure of a step, gradients are recorded.
    calls = np.flatnonzero(operators & is_step[tree.parent] & ~links.scopes.recording)
    of = group_rows(events.name[tree.index[tree.parent[calls]]])
    for nodes in (calls[rows] for rows in of.rows()):
        name = names[events.name[tree.index[tree.parent[nodes[0]]]]] or ""
        kinds, counts = np.unique(events.name[tree.index[nodes]], return_counts=True)
        called, is_tiny = [events.names[kind] for kind in kinds], True
        parameters, option = np.median(counts) / steps.count, _OPTIONS.get(name)
        if any("_fused_" in each for each in called):
            continue
        each = len(nodes) / steps.count / parameters
        is_foreach = any("_foreach_" in each for each in called)
        what = f"{name}, which calls {counted(round(len(nodes) / steps.count), 'operator')}"
        if is_foreach:
            left = _FUSED_OF_FOREACH
            if option != "fused" or not on_cpu:
                continue
        elif parameters < _LEAST_PARAMETERS or each < _LEAST_OPERATORS:
            continue
        else:
            what += f", {each:,.0f} for each of {parameters:,.0f} parameters"
            is_tiny = bool(np.median(tree.total_ns[nodes]) <= LONGEST_GAP_NS)
            left = (_FUSED[0] / each, min(_FUSED[1] / each, 1), _FUSED[2] / each)
        if option == "foreach" and on_cpu:
            left = _FOREACH
            if not is_tiny or name == "ASGD":
                continue
        if option is None:
            left = (left[0], 1.0, left[2])
        around = region(capture, nodes, tree.parent[nodes], np.zeros(0, np.int64))
        yield Problem(
            what,
            tree.index[nodes],
            steps.share(around.elapsed_ns),
            edit=around.scaled(capture, left[0], left[1:]),
            place=common_place(capture, tree.index[nodes]),
            change=f"torch.optim.{name}(params, ..., {option}=True) updates all parameters at once."
            if option
            else f"Use an optimizer of torch with fused=True instead of {name}, or "
            "torch._foreach_* operators in its step.",
        )


OPTIMIZER_NOT_FUSED = Check(
    "optimizer-not-fused",
    optimizer_not_fused,
    title="{share} of the {step} goes to {what}",
    verify="--ops --by range",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)


Shapes = list[list[int] | None]


class _Pieces(NamedTuple):
    """Operators that follow each other in one range, which one operator replaces.

    Attributes:
        names: patterns of the names, in order; up to `_APART` other operators may be between two.
        what, change: what they compute, and what to write instead.
        left: the part of the time that is left, and its bounds, measured on a CPU with one thread.
        fits: whether the shapes of the inputs of the first operator fit, for which the trace must
            have shapes; None if any do.
        between: which other operators may be between.
    """

    names: tuple[str, ...]
    what: str
    change: str
    left: tuple[float, float, float]
    fits: Callable[[Shapes], bool] | None = None
    between: str = ".*"


def _is_pairwise(shapes: Shapes) -> bool:
    """Whether two tensors are broadcast to one that is much larger than both."""
    if len(shapes) < 2 or not shapes[0] or not shapes[1]:
        return False
    out = prod(_broadcast(shapes))
    return out >= _LEAST_PAIRS and out >= _LEAST_GROWTH * (prod(shapes[0]) + prod(shapes[1]))


_APART, _LEAST_PAIRS, _LEAST_GROWTH = 4, 2**18, 8
_PIECES = (
    _Pieces(
        (
            "isnan|isinf|isfinite|eq|ne|l[te]|g[te]|logical_(and|or|not)",
            "all|any",
            "item|is_nonzero|_local_scalar_dense",
        ),
        "checks the values of tensors, such as isnan(x).any(), and waits for each result",
        "Check the loss alone, once in many steps, and the tensors only if it is not finite. "
        "torch.distributions check with validate_args=True, which is the default.",
        (0.0, 0.3, 0.0),
    ),
    _Pieces(
        ("(log_)?softmax", "one_hot", "mul", "sum|mean"),
        "multiplies the logarithm of a softmax by a table of classes, and sums",
        "torch.nn.functional.cross_entropy(logits, classes): no table of one-hot rows is made.",
        (0.3, 0.5, 0.2),
        bool,
        between="log|add|clamp|clamp_min|clip|to|neg",
    ),
    _Pieces(
        ("softmax", "log"),
        "computes the logarithm of a softmax in two operators",
        "torch.nn.functional.log_softmax, or cross_entropy with the logits: one operator, which is "
        "also exact for small probabilities.",
        (0.5, 0.75, 0.25),
        between="add|clamp|clamp_min|clip",
    ),
    _Pieces(
        ("mean", "var|std", "div|mul"),
        "normalises tensors by separate operators: mean, variance, division",
        "torch.nn.functional.layer_norm, group_norm or batch_norm, by the dimensions of the mean.",
        (0.1, 0.3, 0.01),
        bool,
        between="sub|add|sqrt|rsqrt|clamp",
    ),
    _Pieces(
        ("sub|rsub", "sum|mean|norm|linalg_vector_norm"),
        "broadcasts two tensors to the differences of all pairs, and reduces these",
        "torch.cdist(a, b), or the sums of squares of a and of b minus 2 * a @ b.T: the tensor of "
        "all differences is never made.",
        (0.05, 0.2, 0.003),
        _is_pairwise,
        between="pow|square|abs|mul|neg|div|sqrt",
    ),
    _Pieces(
        ("mul", "sum"),
        "broadcasts two tensors to the products of all pairs, and sums these",
        "Use a matrix product, such as a @ b.T: the tensor of all products is never made.",
        (0.05, 0.2, 0.003),
        _is_pairwise,
        between="(?!)",
    ),
)


def in_pieces(capture: Views) -> Iterator[Problem]:
    """Find what several operators compute one after the other, and one operator computes at once.

    Each of them must read a tensor of the shape that the first one makes, as far as shapes are
    recorded. Their backward and the gaps between them count too.
    """
    tree, steps = capture.links.call_tree, capture.links.counted_steps
    nodes = np.flatnonzero(bodies(capture)[0])
    nodes = nodes[np.lexsort((tree.start_ns[nodes], tree.parent[nodes], tree.thread[nodes]))]
    known = np.zeros(0, np.int64)
    for pieces in _PIECES:
        rows = _found(capture, nodes, pieces)
        rows = rows[~isin(rows[:, 0], known)]
        if not len(rows):
            continue
        known = np.append(known, rows[:, 0])
        inside = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in rows[:, [0, -1]]]))
        around = region(
            capture,
            nodes[inside],
            np.searchsorted(rows[:, 0], inside, "right"),
            backward_of(capture, np.sort(nodes[inside]))[0],
        )
        left, most, least = pieces.left
        index = tree.index[around.calls]
        yield Problem(
            f"{pieces.what}: {counted(round(len(rows) / steps.count), 'time')} a {steps.what}",
            index,
            steps.share(around.elapsed_ns),
            edit=around.scaled(capture, left, (most, least)),
            place=common_place(capture, index),
            variant=pieces.what,
            change=pieces.change,
        )


IN_PIECES = Check(
    "in-pieces",
    in_pieces,
    title="{share} of the {step} {what}",
    verify="--ops",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)


def _found(capture: Views, nodes: Ints, pieces: _Pieces) -> Ints:
    """The places in `nodes` of the operators of each occurrence; occurrences do not overlap."""
    events, tree = capture.events, capture.links.call_tree
    event, plain = tree.index[nodes], [_plain(name) for name in events.names]
    first, *others = [
        np.array([re.fullmatch(pattern, name) is not None for name in plain], np.bool_)[
            events.name[event]
        ]
        for pattern in pieces.names
    ]
    between = np.array([re.fullmatch(pieces.between, name) is not None for name in plain], np.bool_)
    barred = np.append(0, np.cumsum(~between[events.name[event]]))
    has_shapes = bool((events.shapes[event] >= 0).any())
    found, until = [], -1
    for row in np.flatnonzero(first & (_soon(others[0]) > 0)).tolist():
        shapes = input_shapes(events, int(event[row])) if has_shapes else []
        if row <= until or (pieces.fits is not None and not pieces.fits(shapes)):
            continue
        out, places = _broadcast(shapes), [row]
        for mask in others:
            after = places[-1] + 1
            for place in range(after, min(after + _APART + 1, len(nodes))):
                if tree.parent[nodes[place]] != tree.parent[nodes[row]]:
                    break
                read = input_shapes(events, int(event[place]))[:1] if has_shapes else []
                read = [] if plain[events.name[event[place]]] == "one_hot" else read  # of classes
                if mask[place] and barred[place] == barred[after] and read in ([], [[]], [out]):
                    places.append(place)
                    break
        if len(places) == len(pieces.names):
            found.append(places)
            until = places[-1]
    return np.array(found, np.int64).reshape(-1, len(pieces.names))


def _soon(mask: Flags) -> Ints:
    """How many of the `_APART` + 1 rows after each row are in the mask."""
    sums = np.append(np.cumsum(mask), [np.count_nonzero(mask)] * (_APART + 1))
    found: Ints = sums[_APART + 1 :] - sums[: len(mask)]
    return found


def _plain(name: str) -> str:
    return split_overload(name)[0].removeprefix("aten::").rstrip("_").lstrip("_")


def _broadcast(shapes: Shapes) -> list[int]:
    """The shape of an operator's result, if it is that of its broadcast inputs."""
    known = [each for each in shapes[:2] if each]
    width = max((len(each) for each in known), default=0)
    padded = [[1] * (width - len(each)) + each for each in known]
    return [max(sizes) for sizes in zip(*padded)]
