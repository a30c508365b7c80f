"""The host's side of a trace as one nesting, and what several views ask of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from instrument.capture.autograd import Marks, marks
from instrument.capture.events import ANNOTATION, OPERATOR, PYTHON, Events, Ints, is_runtime
from instrument.capture.flops import node_flops
from instrument.capture.launches import launching_nodes, threads_of_calls
from instrument.capture.nesting import Forest, nest

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


class Host:
    """The operators, annotations and runtime calls of a trace, nested by time; with `python` its Python frames too.

    Each part is made when it is first asked for, and kept for the other views that ask.
    """

    def __init__(self, events: Events, *, python: bool = False) -> None:
        self.events = events
        self._kinds = OPERATOR | ANNOTATION | (PYTHON if python else frozenset())

    @cached_property
    def forest(self) -> Forest:
        """The nesting; a runtime call lies in what is around it, see `instrument.capture.launches`."""
        events = self.events
        shown = ~events.named(_HIDDEN.__contains__)
        around = events.among(self._kinds) & shown
        return nest(events, around | (events.among(is_runtime) & shown), threads_of_calls(events, around))

    @cached_property
    def marks(self) -> Marks:
        """The ranges and the backward nodes, and the range to which each belongs."""
        return marks(self.events, self.forest)

    @cached_property
    def flops(self) -> Ints | None:
        """The operations that each node performs itself; see `instrument.capture.flops.node_flops`."""
        return node_flops(self.events, self.forest)

    @cached_property
    def launched(self) -> tuple[Ints, Ints]:
        """The device events and the node that launched each; see `instrument.capture.launches.launching_nodes`."""
        return launching_nodes(self.events, self.forest)

    def device_own_ns(self, *, annotations: bool = False) -> Ints | None:
        """For each node the time of the device events that it launched itself; None where the trace has none.

        A device event whose launch was not recorded counts nowhere. With `annotations` the device's copies of
        annotations count as device events, as they do for torch.
        """
        found = launching_nodes(self.events, self.forest, annotations=True) if annotations else self.launched
        device, node = found
        if not len(device):
            return None
        own = np.zeros(len(self.forest), np.int64)
        np.add.at(own, node[node >= 0], self.events.duration_ns[device[node >= 0]])
        return own
