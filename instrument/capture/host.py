"""The host's side of a trace as one nesting: operators, annotations and runtime calls."""

from __future__ import annotations

import numpy as np

from instrument.capture.events import ANNOTATION, OPERATOR, PYTHON, Events, is_runtime
from instrument.capture.launches import launching_operator
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


def host_forest(events: Events, *, python: bool = False) -> Forest:
    """The nesting of operators, annotations and runtime calls, with the Python frames where they are wanted.

    A runtime call belongs to the thread of the operator that it names, as for torch.
    """
    kinds = OPERATOR | ANNOTATION | (PYTHON if python else frozenset())
    runtime = events.among(is_runtime)
    chosen = (events.among(kinds) | runtime) & ~events.named(_HIDDEN.__contains__)
    calls = np.flatnonzero(runtime)
    operator = launching_operator(events, calls)
    thread = events.thread.copy()
    thread[calls[operator >= 0]] = events.thread[operator[operator >= 0]]
    return nest(events, chosen, thread)
