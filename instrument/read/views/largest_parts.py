"""What takes most of the steps' time: lines, and ranges or else operators, as sentences."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import polars as pl

from instrument.base.prose import shortened
from instrument.base.range_names import RECOMPUTED
from instrument.base.units import percent
from instrument.read.facts.idle import device_time
from instrument.read.facts.links import thread_of_steps
from instrument.read.trace.events import called_operators, is_compiled_code
from instrument.read.views.lines import HeavyLine, heaviest_lines
from instrument.read.views.views import Views

_LEAST, _LEAST_OPERATOR, _MORE = 0.05, 0.25, 1.5
_LONGEST_NAME, _SHOWN, _MOST_LINES, _MOST_NAMES = 44, 3, 5, 2
_NO_OPERATOR, _GENERATED = "no operator", "generated kernels"
_NO_RANGE, _WAITING = "no range", "waiting for data"
_OF_PASS = {"backward": "in the backward of ", "recompute": "in the recomputation of ", "data": ""}
_Part = tuple[str, str]  # a value of `_OF_PASS`, and the class or name of ranges


class Heaviest(NamedTuple):
    """What takes most of a step: a sentence, the share of the step, and rows of the next lines."""

    sentence: str = ""
    share: float = 0.0
    rows: tuple[str, ...] = ()


NOTHING = Heaviest()


def heaviest(capture: Views) -> Heaviest:
    """Return the line that takes most of a step, and what a change of it saves at most.

    Lines are known if they were sampled, and their shares are of the whole run. Without them, only
    the share of the largest part is known; `largest_parts` names it. With device work, there is no
    bound, because the device may be what is late.

    Raises:
        CaptureError: the file of the lines cannot be read, or is not one.
    """
    has_device_work = bool(capture.work.duration_ns.any())
    lines = heaviest_lines(capture)
    found = [each for each in lines if each.share >= _LEAST][:_MOST_LINES]
    if not found:
        parts = [] if has_device_work else _known_parts(capture)
        return Heaviest(share=parts[0][0]) if parts else NOTHING
    first, of = _heaviest_of(capture, lines), "it" if len(capture.links.steps) else "the recording"
    bound = f": at most {percent(first.share)} less if that cost nothing"
    return Heaviest(
        f"{_amount(first)} of {of} is {_place(first)}{'' if has_device_work else bound}.",
        first.share,
        tuple(f"{_amount(each):>10}  {_place(each)}" for each in found),
    )


def _heaviest_of(capture: Views, lines: list[HeavyLine]) -> HeavyLine:
    """The line with the largest share, or a function with a larger one, if no line has most of it.

    It is none that calls `backward` or an optimizer, because it is the loop, and no `forward`. It
    is shown with its heaviest line.
    """
    loops = {
        row.function.rpartition(".<locals>.")[2]
        for row in capture.lines.where("thread IS NULL AND library IS NOT NULL")
        if row.library.startswith(("Tensor.backward", "Optimizer."))
    }
    by_function = defaultdict[tuple[str, str], list[HeavyLine]](list)
    for each in lines:
        if each.function.rpartition(".")[2] != "forward" and each.function not in loops:
            by_function[each.line.rpartition(":")[0], each.function].append(each)
    of_it = max(by_function.values(), key=lambda found: sum(e.share for e in found), default=lines)
    share, (first, *_) = sum(each.share for each in of_it), of_it
    if of_it is lines or share <= lines[0].share or share < _MORE * first.share:
        return lines[0]
    half = sum(((each.high - each.low) / 2) ** 2 for each in of_it) ** 0.5
    file, _, line = first.line.rpartition(":")
    return first._replace(
        line=file, function=f"{first.function}, most at line {line}", share=share,
        low=max(share - half, 0.0), high=min(share + half, 1.0),
        is_backward_included=any(each.is_backward_included for each in of_it),
    )  # fmt: skip


def _amount(line: HeavyLine) -> str:
    """The share of a line, and half of its interval in percent."""
    half = max(line.high - line.share, line.share - line.low)
    return f"{percent(line.share)} ± {math.ceil(half * 100)}"


def _place(line: HeavyLine) -> str:
    function = "" if line.function == "<module>" else f" in {line.function}"
    where = f"{line.line}{shortened(function, _LONGEST_NAME)}"
    names = ", ".join(shortened(each, _LONGEST_NAME) for each in line.operators[:_MOST_NAMES])
    with_backward = ", with its backward" if line.is_backward_included else ""
    return f"{where}{f' ({names})' if names else ''}{with_backward}"


def largest_parts(capture: Views, *, in_ranges: bool = False) -> str:
    """Return a sentence with at most three parts, and their shares of the steps; see `_parts`.

    `in_ranges` leaves out the time in no range, of which lines say more.
    """
    basis = "ranges on the device" if capture.work.duration_ns.any() else "parts"
    found = _known_parts(capture)
    if in_ranges:
        found = [each for each in found if f" {_NO_RANGE}" not in each[1]]
    texts = [f"{percent(share)} {text}" for share, text in found]
    return f"The largest {basis}: {', '.join(texts)}." if texts else ""


def _known_parts(capture: Views) -> list[tuple[float, str]]:
    return capture.once("largest parts", lambda: _parts(capture))


def _parts(capture: Views) -> list[tuple[float, str]]:
    """The share and the text of at most three parts of the steps, the largest first.

    Time counts for the innermost range around it; ranges of submodules of one class are one part,
    and their backward is another. With device work, the time is that of the work that the ranges
    launch; else it is that of the steps' thread. Beside a part is the operator with the most time
    in it, if this is a quarter of the part's. If no range is among the parts, operators are.
    """
    whole_ns = device_time(capture)["total_ns"] or capture.links.counted_steps.total_ns
    has_device_work, types = bool(capture.work.duration_ns.any()), capture.about.module_types
    rows = _times(capture)
    all_ns = sum(ns for *_, ns in rows)
    if not all_ns or all_ns > whole_ns:  # several devices or streams work at the same time
        return []
    if not has_device_work:
        rows.append((None, _NO_RANGE, _NO_OPERATOR, whole_ns - all_ns))
    parts, ranges = defaultdict[_Part, Counter[str]](Counter), defaultdict[str, set[str]](set)
    for of_pass, name, operator, ns in rows:
        kind = types.get(name, name)
        parts[_OF_PASS.get(of_pass or "", "in "), kind][operator] += ns
        ranges[kind].add(name)
    shown = _largest(parts, whole_ns)
    if {kind for _, kind in shown} <= {_NO_RANGE, _WAITING}:
        if has_device_work:
            return []
        by_operator = defaultdict[_Part, Counter[str]](Counter)
        for (of, kind), spent in parts.items():
            for operator, ns in spent.items():
                by_operator[(of, kind) if kind == _WAITING else ("in ", operator)][""] += ns
        shown = _largest(by_operator, whole_ns)
    texts = []
    for (of, kind), spent in shown.items():
        names = ranges.get(kind, {kind})
        what = f"{len(names)} {kind} modules" if len(names) > 1 else min(names)
        text = f"{of}{shortened(what, _LONGEST_NAME)}"
        operator, ns = spent.most_common(1)[0]
        if operator and kind != _WAITING and ns >= _LEAST_OPERATOR * spent.total():
            text += f" ({percent(ns / whole_ns)} in {shortened(operator, _LONGEST_NAME)})"
        texts.append((spent.total() / whole_ns, text))
    return texts


def _largest(parts: dict[_Part, Counter[str]], whole_ns: int) -> dict[_Part, Counter[str]]:
    """The parts with the most time, at most three, each with a twentieth of the whole."""
    by_time = sorted(parts.items(), key=lambda each: -each[1].total())[:_SHOWN]
    return {part: spent for part, spent in by_time if spent.total() >= _LEAST * whole_ns}


def _times(capture: Views) -> list[tuple[str | None, str, str, int]]:
    """The time in the steps by pass, name of the innermost range, and outermost operator in it."""
    links, events, tree = capture.links, capture.events, capture.links.call_tree
    columns = capture.facts.events("pass", "counted_own_ns", "counted_own_device_ns")[tree.index]
    spent_ns = columns["counted_own_device_ns"]
    if not len(capture.work.event):
        spent_ns = columns["counted_own_ns"] * (tree.thread == thread_of_steps(links))
    is_called = called_operators(events)[tree.index]
    is_called[np.isin(tree.index, links.scopes.nodes.index)] = False
    call = tree.top_of_chain(is_called, np.arange(len(tree)))
    is_generated = tree.at_or_inside(is_compiled_code(events)[tree.index])
    operators = pl.Series([*events.names, _NO_OPERATOR, _GENERATED])
    operator = np.where(call >= 0, events.name[tree.index[call]], len(events.names) + is_generated)
    ranges = pl.Series([*(n.removesuffix(RECOMPUTED) for n in links.scopes.paths.names), _NO_RANGE])
    path = links.scopes.path_of_node[:-1]
    frame = pl.DataFrame(
        {
            "pass": columns["pass"],
            "range": ranges.gather(np.where(path >= 0, path, len(ranges) - 1)),
            "operator": operators.gather(operator),
            "ns": spent_ns,
        }
    )
    is_data = pl.col("pass").eq_missing("data")
    frame = frame.with_columns(range=pl.when(is_data).then(pl.lit(_WAITING)).otherwise("range"))
    rows = frame.filter(pl.col("ns") > 0).group_by("pass", "range", "operator", maintain_order=True)
    return rows.agg(pl.sum("ns")).rows()
