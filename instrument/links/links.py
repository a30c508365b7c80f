"""The CPU's side of a trace as one nesting, and what several views ask of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from instrument.links.autograd import Scopes, scopes
from instrument.links.call_tree import CallTree, nest
from instrument.links.flops import node_flops
from instrument.links.launches import Launches, launches, launching_nodes, threads_of_calls
from instrument.links.step_index import finished_steps, step_at, stepped_ns
from instrument.trace.events import ANNOTATION, OPERATOR, PYTHON, Events, Ints, is_runtime

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
    """The operators, annotations and runtime calls of a trace, nested by time; with `python` its Python frames too.

    Each part is made when it is first asked for, and kept for the other views that ask.
    """

    def __init__(self, events: Events, *, python: bool = False) -> None:
        self.events = events
        self._kinds = OPERATOR | ANNOTATION | (PYTHON if python else frozenset())

    @cached_property
    def call_tree(self) -> CallTree:
        """The nesting; a runtime call lies in what is around it, see `instrument.links.launches`."""
        events = self.events
        shown = ~events.named(_HIDDEN.__contains__)
        around = events.among(self._kinds) & shown
        return nest(
            events, around | (events.among(is_runtime) & shown), threads_of_calls(events, around)
        )

    @cached_property
    def scopes(self) -> Scopes:
        """The ranges and the backward nodes, and the range to which each belongs."""
        return scopes(self.events, self.call_tree)

    @cached_property
    def flops(self) -> Ints | None:
        """The operations that each node performs itself; see `instrument.links.flops.node_flops`."""
        return node_flops(self.events, self.call_tree)

    @cached_property
    def steps(self) -> Ints:
        """The positions of the finished steps, by start."""
        return finished_steps(self.events)

    @cached_property
    def launches(self) -> Launches:
        """The device events and what launched them; see `instrument.links.launches.launches`."""
        return launches(self.events)

    @cached_property
    def launched(self) -> tuple[Ints, Ints]:
        """The device events and the node that launched each; see `instrument.links.launches.launching_nodes`."""
        return self.launches.device, launching_nodes(self.events, self.call_tree, self.launches)

    @cached_property
    def spent_ns(self) -> Ints:
        """The time of each node, its overlap with a later one of the same thread counted there alone."""
        return self._until_ns - self.call_tree.start_ns

    @cached_property
    def counted_ns(self) -> Ints:
        """How much of that lies in finished steps, which shares are of; all of it where there are none."""
        if not len(self.steps):
            return self.spent_ns
        return stepped_ns(self.events, self.steps, self.call_tree.start_ns, self._until_ns)

    @cached_property
    def _until_ns(self) -> Ints:
        return self.call_tree.last_begun()

    @cached_property
    def counted_device_ns(self) -> Ints:
        """The time of each device event that was launched in a finished step, 0 of others; see `counted_ns`.

        Of one whose launch is not in the trace it counts when it began.
        """
        events, (device, node) = self.events, self.launched
        if not len(self.steps):
            return events.duration_ns[device]
        launch = np.where(self.launches.call >= 0, self.launches.call, self.launches.operator)
        time = events.start_ns[np.where(node >= 0, launch, device)]
        return np.where(step_at(events, self.steps, time) >= 0, events.duration_ns[device], 0)

    @cached_property
    def counted_device_own_ns(self) -> Ints | None:
        """For each node the time of the device events that it launched itself in finished steps; see `counted_ns`."""
        return self._own_of_device(self.counted_device_ns)

    @cached_property
    def device_own_ns(self) -> Ints | None:
        """For each node the time of the device events that it launched itself; None where the trace has none.

        A device event whose launch was not recorded counts nowhere.
        """
        return self._own_of_device(self.events.duration_ns[self.launches.device])

    def _own_of_device(self, duration_ns: Ints) -> Ints | None:
        device, node = self.launched
        if not len(device):
            return None
        own = np.zeros(len(self.call_tree), np.int64)
        np.add.at(own, node[node >= 0], duration_ns[node >= 0])
        return own
