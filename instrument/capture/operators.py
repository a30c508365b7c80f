"""The operator table: what torch's `key_averages()` tells, from the trace file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from instrument.capture import memory
from instrument.capture.events import ANNOTATION, STEP_PREFIX, Events, Flags, Ints
from instrument.capture.flops import UNKNOWN, node_flops
from instrument.capture.host import host_forest
from instrument.capture.launches import device_own_ns
from instrument.capture.nesting import Forest
from instrument.capture.rules import HONEST, TORCH, Rules
from instrument.capture.stacks import frames_around
from instrument.capture.table import Table
from instrument.errors import ConfigError

Quantities = dict[str, Ints | None]

MEMORY_ROW = "[memory]"


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls behind the table's rows: parallel columns, those of no recorded kind None.

    `event` is a call's position among the events, -1 for memory that no call covers; `name` an index into `names`.
    """

    event: Ints
    start_ns: Ints
    name: Ints
    is_annotation: Flags
    names: tuple[str, ...]
    quantities: Quantities


class OperatorTable(Table):
    """One row for each operator, annotation and runtime call by name, in the order of their first calls.

    Times are nanoseconds. `host_ns` and `device_ns` count a call inside a call of the same name twice, as torch
    does; the `self_` columns count nothing twice. Byte columns are allocated less freed. A cell that the trace
    cannot tell is None: device columns without device events, bytes without memory events.

    The row "[memory]" holds the allocations and frees that lie in no call.
    """

    def __init__(self, events: Events, calls: Calls) -> None:
        super().__init__(_rows(calls, np.zeros(len(calls.name), np.int64), {}))
        self._events = events
        self._calls = calls

    def by(self, what: Literal["input_shapes", "stack"], *, depth: int = 5) -> Table:
        """The table with a row for each name and input shapes, or each name and Python stack.

        The new column follows `name`. `input_shapes` is text such as "[[8, 3], []]", where a list of tensors is
        written as [], as torch does. `stack` is the `depth` innermost Python frames around the call, the innermost
        first, joined by ";". The column is None where the trace holds no shapes, or no Python frames.

        Raises:
            ConfigError: there is no such grouping.
        """
        if what == "input_shapes":
            codes, labels = _shape_labels(self._events, self._calls.event)
        elif what == "stack":
            codes, labels = frames_around(self._events, self._calls.event, depth)
        else:
            raise ConfigError(f"Operators cannot be grouped by {what!r}; choose input_shapes or stack.")
        return Table(_rows(self._calls, codes, {what: labels}))


def operators(events: Events, rules: Literal["honest", "torch"] = "honest") -> OperatorTable:
    """The operator table of a trace; its columns and their units are those of `OperatorTable`.

    With `rules="torch"` counts, totals, self times and memory equal `key_averages()` of the same recording.

    Cost: about 0.5 µs an event.
    """
    return OperatorTable(events, _calls(events, TORCH if rules == "torch" else HONEST))


def _calls(events: Events, rules: Rules) -> Calls:
    forest = host_forest(events, python=rules.python_rows)
    names, name = _display_names(events, forest)
    kept, top = _folded(forest, name)
    quantities: Quantities = {
        "host_ns": forest.total_ns[kept],
        "self_host_ns": _at_top(forest.own(forest.total_ns), top)[kept],
        **_device_times(events, forest, kept, top, rules),
        **_bytes(events, forest, kept, top, rules),
        "flops": _flops(events, forest, kept, top),
    }
    calls = Calls(
        event=forest.index[kept],
        start_ns=forest.start_ns[kept],
        name=name[kept],
        is_annotation=events.among(ANNOTATION)[forest.index[kept]],
        names=names,
        quantities=quantities,
    )
    return _with_uncovered_memory(calls, events, forest, rules)


def _display_names(events: Events, forest: Forest) -> tuple[tuple[str, ...], Ints]:
    """The names of the rows and each node's among them; all steps of the profiler share one."""
    shown = [f"{STEP_PREFIX[:-1]}*" if name.startswith(STEP_PREFIX) else name for name in events.names]
    index = {name: position for position, name in enumerate(dict.fromkeys([*shown, MEMORY_ROW]))}
    codes = np.array([index[name] for name in shown], np.int64)
    return tuple(index), codes[events.name[forest.index]]


def _folded(forest: Forest, name: Ints) -> tuple[Flags, Ints]:
    """Which nodes stay when an only child of its parent's name is folded into it, and where each node ends up.

    Folding one pair changes nothing for another, as a parent takes over its child's children: so all pairs can be
    told from the nesting as it is.
    """
    inner = forest.parent >= 0
    children = np.bincount(forest.parent[inner], minlength=len(forest))
    folds = inner & (name == name[forest.parent]) & (children[forest.parent] == 1)
    return ~folds, forest.nearest(~folds)


def _at_top(own: Ints, top: Ints) -> Ints:
    """What each node has itself, with that of the nodes folded into it."""
    total = np.zeros(len(own), np.int64)
    np.add.at(total, top, own)
    return total


def _device_times(events: Events, forest: Forest, kept: Flags, top: Ints, rules: Rules) -> Quantities:
    own = device_own_ns(events, forest, annotations=rules.annotations_as_kernels)
    if own is None:
        return {"device_ns": None, "self_device_ns": None}
    lifted = _at_top(own, top)
    if rules.folding_loses_kernels:
        lifted[top] = own  # the innermost of a chain comes last
    lifted[~kept] = 0
    return {"device_ns": forest.with_descendants(lifted)[kept], "self_device_ns": lifted[kept]}


def _bytes(events: Events, forest: Forest, kept: Flags, top: Ints, rules: Rules) -> Quantities:
    found: Quantities = {}
    for where, size in memory.sizes(events.memory, rules).items():
        total = None if size is None else memory.within(forest, events.memory, size, rules)
        found[f"{where}_bytes"] = None if total is None else total[kept]
        found[f"self_{where}_bytes"] = None if total is None else _at_top(forest.own(total), top)[kept]
    return found


def _flops(events: Events, forest: Forest, kept: Flags, top: Ints) -> Ints | None:
    """Each call's own operations with those folded into it, -1 where they are not known."""
    own = node_flops(events, forest)
    if own is None:
        return None
    known = _at_top((own != UNKNOWN).astype(np.int64), top) > 0
    return np.where(known, _at_top(np.maximum(own, 0), top), UNKNOWN)[kept]


def _with_uncovered_memory(calls: Calls, events: Events, forest: Forest, rules: Rules) -> Calls:
    """The calls, and one more named "[memory]" for each allocation or free that lies in no call."""
    bare = memory.uncovered(forest, events.memory, rules)
    sizes = memory.sizes(events.memory, rules)
    more: Quantities = {}
    for name, values in calls.quantities.items():
        size = sizes.get(name.removeprefix("self_").removesuffix("_bytes"))
        nothing = UNKNOWN if name == "flops" else 0
        added = np.full(len(bare), nothing) if size is None else size[bare]
        more[name] = None if values is None else np.concatenate([values, added])
    return Calls(
        event=np.concatenate([calls.event, np.full(len(bare), -1)]),
        start_ns=np.concatenate([calls.start_ns, events.memory.time_ns[bare]]),
        name=np.concatenate([calls.name, np.full(len(bare), calls.names.index(MEMORY_ROW))]),
        is_annotation=np.concatenate([calls.is_annotation, np.zeros(len(bare), np.bool_)]),
        names=calls.names,
        quantities=more,
    )


def _shape_labels(events: Events, event: Ints) -> tuple[Ints, list[str | None]]:
    """Each call's input shapes as an index into the distinct ones; all None where the trace holds no shapes."""
    if not (events.shapes >= 0).any():
        return np.zeros(len(event), np.int64), [None]
    texts = [_shape_text(events.texts[code]) if code >= 0 else "[]" for code in range(-1, len(events.texts))]
    index = {text: position for position, text in enumerate(dict.fromkeys(texts))}
    codes = np.array([index[text] for text in texts], np.int64)
    return codes[np.where(event >= 0, events.shapes[event], -1) + 1], list(index)


def _shape_text(text: bytes) -> str:
    """Shapes as torch prints them: a list of tensors has none of its own."""
    shapes = msgspec.json.decode(text)
    return str([[] if any(isinstance(n, list) for n in shape) else shape for shape in shapes])


def _rows(calls: Calls, codes: Ints, labels: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Calls summed by name, kind and one more code, in the order of the first call of each."""
    width = max((len(values) for values in labels.values()), default=1)
    key = (calls.name * 2 + calls.is_annotation) * width + codes
    distinct, group = np.unique(key, return_inverse=True)
    first = np.full(len(distinct), np.iinfo(np.int64).max)
    np.minimum.at(first, group, calls.start_ns)
    order = np.argsort(first, kind="stable")
    chosen = distinct[order]
    columns: dict[str, list[Any]] = {"name": [calls.names[k] for k in chosen // (2 * width)]}
    for name, values in labels.items():
        columns[name] = [values[k] for k in chosen % width]
    columns["calls"] = np.bincount(group, minlength=len(distinct))[order].tolist()
    for name, quantity in calls.quantities.items():
        columns[name] = _sums(quantity, group, order, skip=UNKNOWN if name == "flops" else None)
    return columns


def _sums(quantity: Ints | None, group: Ints, order: Ints, skip: int | None) -> list[int | None]:
    """The sum of each group; None for a quantity that was not recorded, and for a group where all is skipped."""
    if quantity is None:
        return [None] * len(order)
    counts = np.ones(len(group), np.bool_) if skip is None else quantity != skip
    totals = np.zeros(len(order), np.int64)
    np.add.at(totals, group[counts], quantity[counts])  # not bincount: its sums are floats
    known = np.bincount(group[counts], minlength=len(order)) > 0
    return [int(total) if is_known else None for total, is_known in zip(totals[order], known[order])]
