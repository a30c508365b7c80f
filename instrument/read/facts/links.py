"""`Links`: the call tree of a trace, and other relations that several tables need."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from instrument.read.facts.autograd import Scopes, find_scopes
from instrument.read.facts.call_tree import CallTree, nest
from instrument.read.facts.detail import numbered_operators
from instrument.read.facts.flops import node_flops
from instrument.read.facts.groupby import Groups
from instrument.read.facts.launches import Launches, launches, named_operators, threads_of_calls
from instrument.read.facts.step_index import (
    CountedSteps,
    counted_steps,
    finished_steps,
    spans_of_steps,
    step_numbers,
)
from instrument.read.facts.synchronisation import Synchronisations, synchronisations
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Events,
    Flags,
    Ints,
    is_runtime,
)

# Utility operators that torch leaves out of its tables.
_HIDDEN = frozenset(
    {
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
    }
)


class Links:
    """The relations between the events of one trace, each computed at its first use."""

    def __init__(
        self, events: Events, *, python: bool = False, first_step: int | None = None
    ) -> None:
        """Keep the events.

        With `python`, Python frames become nodes of the call tree too. `first_step` is the number
        of the first step, if these are some steps of a trace; then all of them count.
        """
        self.events, self._first_step = events, first_step
        self._kinds = OPERATOR | ANNOTATION | (PYTHON if python else frozenset())

    @cached_property
    def call_tree(self) -> CallTree:
        """The operators, annotations and runtime calls, nested by time."""
        events = self.events
        shown = ~events.named(_HIDDEN.__contains__)
        others = events.among(self._kinds) & shown
        calls = events.among(is_runtime) & shown
        return nest(events, others | calls, threads_of_calls(events, others, self.named_operators))

    @cached_property
    def frames(self) -> CallTree:
        """The Python frames alone, nested by time; empty if no event is a Python frame."""
        return nest(self.events, self.events.among(PYTHON))

    @cached_property
    def scopes(self) -> Scopes:
        """The scopes (ranges and backward nodes), and the range that each scope belongs to."""
        return find_scopes(self.events, self.call_tree)

    @cached_property
    def events_that_are_ranges(self) -> Flags:
        """A mask of the events that are ranges."""
        found = np.zeros(len(self.events), np.bool_)
        found[self.scopes.ranges.index] = True
        return found

    @cached_property
    def flops(self) -> Ints | None:
        """The FLOPs of each node of the call tree; see `instrument.read.facts.flops.node_flops`."""
        return node_flops(self.events, self.call_tree)

    @cached_property
    def steps(self) -> Ints:
        """The positions of the finished steps, sorted by start."""
        return finished_steps(self.events, least=2 if self._first_step is None else 1)

    @cached_property
    def step_numbers(self) -> list[int]:
        """The numbers of the finished steps; see `step_index.step_numbers`."""
        return step_numbers(self.events, self.steps, self._first_step or 0)

    @cached_property
    def counted_steps(self) -> CountedSteps:
        """The steps that count; see `CountedSteps`."""
        every = self.finished_steps
        return counted_steps(every) if self._first_step is None else every

    @cached_property
    def finished_steps(self) -> CountedSteps:
        """The spans of all finished steps, or of the recording if no step finished."""
        return spans_of_steps(self.events, self.steps)

    @cached_property
    def launches(self) -> Launches:
        """The device events and the CPU events that launched them."""
        return launches(self.events, self.named_operators)

    @cached_property
    def named_operators(self) -> Ints:
        """See `instrument.read.facts.launches.named_operators`."""
        return named_operators(self.events)

    @cached_property
    def numbered_operators(self) -> pl.DataFrame:
        """See `instrument.read.facts.detail.numbered_operators`."""
        return numbered_operators(self)

    @cached_property
    def launched(self) -> tuple[Ints, Ints]:
        """The device events, and the node that launched each of them; -1 if it is unknown."""
        found = self.launches
        return found.device, self._launching_nodes(found.call, found.operator)

    def nodes_of_calls(self, calls: Ints) -> Ints:
        """The node of the operator, annotation or frame of each runtime call; -1 for none."""
        return self._launching_nodes(calls, self.named_operators[calls])

    def _launching_nodes(self, call: Ints, operator: Ints) -> Ints:
        """For each call, the nearest ancestor that is no call, else the node of `operator`."""
        if not len(call):
            return call  # many traces of CPUs have no calls
        around = self._not_calls[self.call_tree.nodes_of(call)]
        return np.where(around >= 0, around, self.call_tree.nodes_of(operator))

    @cached_property
    def _not_calls(self) -> Ints:
        is_call = self.events.among(is_runtime)[self.call_tree.index]
        return np.append(self.call_tree.nearest(~is_call), -1)

    @cached_property
    def synchronisations(self) -> Synchronisations:
        """The calls that wait for device work, and the work that each of them waits for."""
        return synchronisations(self.events, self.launches)

    @cached_property
    def spent_ns(self) -> Ints:
        """The duration of each node, without the time in which a later sibling overlaps it."""
        tree = self.call_tree
        end_ns = tree.ends_before_overlap
        return tree.total_ns if end_ns is tree.end_ns else end_ns - tree.start_ns

    @cached_property
    def own_ns(self) -> Ints:
        """For each node, the part of `spent_ns` that is outside of its direct children."""
        return self.call_tree.own(self.spent_ns)

    @cached_property
    def device_own_ns(self) -> Ints | None:
        """For each node, the time of the device events that the node itself launched.

        None if the trace has no device event.
        """
        device, node = self.launched
        if not len(device):
            return None
        return Groups(node, len(self.call_tree)).sum(self.events.duration_ns[device], node >= 0)


def thread_of_steps(links: Links) -> int:
    """The thread on which most steps run; without steps, the thread with the most CPU events."""
    thread = links.events.thread[links.steps]
    if not len(thread):
        thread = links.call_tree.thread
    return int(np.bincount(thread).argmax()) if len(thread) else -1
