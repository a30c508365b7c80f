"""The calls that the operator table sums, and the properties by which calls can be grouped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.base.errors import CaptureError
from instrument.read.facts import loops
from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.links import Links
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Codes,
    Flags,
    Ints,
    decoded,
    is_step,
    split_overload,
)

# The kinds of rows. "wait" is a call in which the CPU waits for the device; "unlaunched" is device
# work whose launch is not in the trace.
KINDS = ("operator", "range", "step", "mark", "loader", "runtime", "wait", "memory", "unlaunched")
# Grouping by device needs a flag for each device and call. No machine has more devices.
_MOST_DEVICES = 64
Row = tuple[str, str]
Quantities = dict[str, Ints | None]
Grouping = tuple[Ints, list[Any]]


class Outside(NamedTuple):
    """Calls that are not nodes of the call tree, as parallel columns; see `Calls`.

    `event` is -1 for an allocation or free. `thread` is a position in `Events.threads`.
    """

    event: Ints
    thread: Codes
    start_ns: Ints


@dataclass(frozen=True)
class Calls:
    """The calls that the operator table sums, as parallel columns.

    A call is a node of the call tree, an allocation or free outside of all nodes, or device work
    whose launch is not in the trace.

    Attributes:
        tree: the call tree.
        outside: the calls that are not nodes.
        node: the number of the call: first the nodes, depth-first, then those of `outside`.
        after: the calls inside this call have the numbers from `node` + 1 to `after` - 1.
        row: for each call, the index of its name and kind in `rows`.
        rows: the distinct pairs of a name and a kind. Each kind is one of `KINDS`.
        quantities: the columns that the table sums; None for a quantity that was not recorded.
        counted: the times from which shares are computed; see `Links.counted_ns`.
    """

    tree: CallTree
    outside: Outside
    node: Ints
    after: Codes
    row: Ints
    rows: list[Row]
    quantities: Quantities
    counted: dict[str, Ints]

    @property
    def event(self) -> Ints:
        """The position of each call in `Events`; -1 for an allocation or free."""
        return self._column(self.tree.index, self.outside.event)

    @property
    def thread(self) -> Codes:
        """The position of each call's thread in `Events.threads`."""
        return self._column(self.tree.thread, self.outside.thread)

    @property
    def start_ns(self) -> Ints:
        """When each call began."""
        return self._column(self.tree.start_ns, self.outside.start_ns)

    def _column(self, of_nodes: NDArray[Any], of_outside: NDArray[Any]) -> NDArray[Any]:
        column = np.append(of_nodes, of_outside) if len(of_outside) else of_nodes
        return column[self.node]

    def outermost(self, groups: Groups) -> Flags:
        """A mask of the calls that are not inside another call of the same group."""
        if loops.compiled is None:
            return _outermost(groups.of, self.node, self.after)
        columns = map(np.ascontiguousarray, (groups.of, self.node, self.after))
        return np.frombuffer(loops.compiled.outermost(*columns, groups.count), np.bool_)


def _outermost(group: Ints, node: Ints, after: Codes) -> Flags:
    beyond = int(after.max(initial=0)) + 1
    # numpy sorts integers of 16 bits or fewer by radix, which is faster. The sort is stable, so in
    # each group an outer call stays before the calls inside it.
    narrow = group.astype(np.min_scalar_type(int(group.max(initial=0))))
    order = np.argsort(narrow, kind="stable")
    first, until = (group * beyond + node)[order], (group * beyond + after)[order]
    reached = np.maximum.accumulate(np.append(0, until))[:-1]
    outer = np.zeros(len(group), np.bool_)
    outer[order] = first >= reached
    return outer


def by_input_shapes(links: Links, calls: Calls, _: int) -> Grouping:
    """Input shapes as torch prints them; None for all calls if the trace holds no input shapes."""
    return _by_inputs(links, calls, links.events.shapes, shape_text)


def by_input_types(links: Links, calls: Calls, _: int) -> Grouping:
    """Input types as torch names them; None for all calls if the trace holds no input types."""
    return _by_inputs(links, calls, links.events.types, _type_text)


def _by_inputs(links: Links, calls: Calls, column: Codes, text: Callable[[bytes], str]) -> Grouping:
    if not (column >= 0).any():
        return _unknown(calls)
    used, groups = groupby(_of_event(column, calls) + 1)
    texts = links.events.texts
    codes, labels = intern(text(texts[k - 1]) if k else "[]" for k in used.tolist())
    return codes[groups.of], labels


def by_stack(links: Links, calls: Calls, depth: int) -> Grouping:
    """The innermost Python frames around each call."""
    from instrument.read.views.stacks import frames_around

    return frames_around(links.events, calls.event, depth)


def by_overload(links: Links, calls: Calls, _: int) -> Grouping:
    """The operator's overload, "" for the default overload; None if the trace names no overload."""
    events = links.events
    if not any(split_overload(name)[1] for name in events.names):
        return _unknown(calls)
    operators = np.unique(events.name[events.among(OPERATOR)])
    overloads = [""] * (len(events.names) + 1)  # the last entry is for memory outside of calls
    for code in operators.tolist():
        overloads[code] = split_overload(events.names[code])[1]
    if not any(overloads):
        return _unknown(calls)
    codes, labels = intern(overloads)
    return codes[_of_event(events.name, calls)], labels


def by_thread(links: Links, calls: Calls, _: int) -> Grouping:
    """The thread as "process/thread"; a runtime call has the thread of the operator around it."""
    return calls.thread.astype(np.int64), [
        f"{process}/{thread}" for process, thread in links.events.threads
    ]


def by_step(links: Links, calls: Calls, _: int) -> Grouping:
    """The number of the step, on any thread, during which the call began; None for none."""
    events = links.events
    steps = np.flatnonzero(events.among(ANNOTATION | OPERATOR) & events.named(is_step))
    if not steps.size:
        return _unknown(calls)
    steps = steps[np.argsort(events.start_ns[steps], kind="stable")]
    codes, labels = intern([*(step_number(events, k) for k in steps.tolist()), None])
    return codes[step_at(events, steps, calls.start_ns)], labels


def by_device(links: Links, calls: Calls, _: int) -> Grouping:
    """The devices that ran work of the call, as text such as "0" or "0,1"; None for no device.

    Raises:
        CaptureError: the trace has too many devices.
    """
    events, tree, (device, node) = links.events, calls.tree, links.launched
    of_thread = [str(process) for process, _ in events.threads]
    on = np.array(of_thread)[events.thread[device]]
    names = np.unique(on[node >= 0]).tolist()
    if len(names) > _MOST_DEVICES:
        raise CaptureError(
            f"The trace holds work of {len(names)} devices, but operators can be grouped by at "
            f"most {_MOST_DEVICES}: group them by another property."
        )
    used = np.zeros(len(tree), np.int64)  # a bit for each device
    for bit, name in enumerate(names):
        own = np.bincount(node[(node >= 0) & (on == name)], minlength=len(tree))
        used |= (tree.with_descendants(own) > 0).astype(np.int64) << bit
    masks, groups = groupby(used)
    texts = [
        ",".join(name for bit, name in enumerate(names) if mask >> bit & 1) or None
        for mask in masks[::-1].tolist()
    ]
    codes = _of_node(len(texts) - 1 - groups.of, calls, len(texts))
    event = calls.event
    unlaunched = np.flatnonzero((calls.node >= len(tree)) & (event >= 0))
    codes[unlaunched] = len(texts) + 1 + events.thread[event[unlaunched]]
    same, labels = intern([*texts, None, *of_thread])
    return same[codes], labels


def by_range(links: Links, calls: Calls, _: int) -> Grouping:
    """The path of the range around the call, or around its forward operator; None for none."""
    scopes = links.scopes
    is_itself = np.append(scopes.nodes.index, -1)[scopes.innermost] == links.call_tree.index
    above = np.append(
        np.where(scopes.backward, np.arange(len(scopes.nodes)), scopes.nodes.parent), -1
    )
    path = np.append(scopes.attributed, -1)[
        np.where(is_itself, above[scopes.innermost], scopes.innermost)
    ]
    texts: list[str | None] = [*scopes.paths.texts, None]
    return _of_node(np.where(path >= 0, path, len(texts) - 1), calls, len(texts) - 1), texts


GROUPINGS: dict[str, Callable[[Links, Calls, int], Grouping]] = {
    "input_shapes": by_input_shapes,
    "input_types": by_input_types,
    "stack": by_stack,
    "overload": by_overload,
    "thread": by_thread,
    "step": by_step,
    "device": by_device,
    "range": by_range,
}


def _of_event(column: Any, calls: Calls) -> Ints:
    found: Ints = np.append(column, -1)[calls.event]
    return found


def _of_node(column: Ints, calls: Calls, missing: int) -> Ints:
    found: Ints = np.append(column, missing)[np.minimum(calls.node, len(column))]
    return found


def _unknown(calls: Calls) -> Grouping:
    return np.zeros(len(calls.node), np.int64), [None]


def shape_text(text: bytes) -> str:
    """Shapes as torch prints them. For a list of tensors, torch prints []."""
    shapes = decoded(text)
    if not isinstance(shapes, list):
        return str(shapes)
    lists = (
        isinstance(shape, list) and any(isinstance(n, list) for n in shape) for shape in shapes
    )
    return str([[] if is_list else shape for shape, is_list in zip(shapes, lists)])


def _type_text(text: bytes) -> str:
    """Types without quotation marks, such as "[double, Scalar]"."""
    return str(decoded(text)).replace("'", "")
