"""The host's side of a trace as one nesting: operators, annotations and runtime calls."""

from __future__ import annotations

import re

import numpy as np

from instrument.capture.events import ANNOTATION, OPERATOR, PYTHON, STEP_PREFIX, Events, Flags, Ints, is_runtime
from instrument.capture.launches import launching_operator
from instrument.capture.nesting import Forest, nest, number_paths

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

_WITH_OVERLOAD = re.compile(r"(\w+::\w+)\.([A-Za-z_]\w*)")


def split_overload(name: str) -> tuple[str, str]:
    """An operator's name and its overload, "" for the default one; `aten::add.Tensor` is what torch writes of both.

    A range that is recorded as an operator and named like that cannot be told from one.
    """
    found = _WITH_OVERLOAD.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def is_step(name: str) -> bool:
    """Whether an event of this name is a step of the profiler."""
    return name.startswith(STEP_PREFIX) and name.removeprefix(STEP_PREFIX).isdecimal()


def range_events(events: Events) -> Flags:
    """A mask of the annotations that are ranges: all but the steps."""
    return events.among(ANNOTATION) & ~events.named(is_step)


def paths(events: Events, chosen: Flags) -> tuple[Forest, Ints, list[str]]:
    """The nesting of some events, each node's path of names from the outermost in, and the paths' texts, by "/"."""
    forest = nest(events, chosen)
    path, above, name = number_paths(forest, events.name[forest.index].astype(np.int64))
    texts: list[str] = []
    for parent, code in zip(above.tolist(), name.tolist()):
        texts.append(f"{texts[parent]}/{events.names[code]}" if parent >= 0 else events.names[code])
    return forest, path, texts


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
