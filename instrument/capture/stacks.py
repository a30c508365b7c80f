"""Python stacks: the frames around operators, and folded stacks for a flame graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from instrument.capture.events import PYTHON, Events, Ints
from instrument.capture.host import host_forest
from instrument.capture.launches import device_own_ns
from instrument.capture.nesting import Forest, nest, number_paths
from instrument.errors import CaptureError, ConfigError

# An object's address tells runs apart, not code: without it equal frames of different objects are one.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Stack(NamedTuple):
    """A call path from the outermost frame to the innermost, and the time spent in its last frame itself."""

    frames: tuple[str, ...]
    value_ns: int


def stacks(events: Events, metric: Literal["host", "device"] = "host") -> list[Stack]:
    """The call paths of a trace with the time that belongs to the last frame of each.

    Python frames hold annotations and operators, by time on each thread; threads are put together. `host` is host
    self time, `device` the time of the device events launched by the path's last frame. Paths without any time are
    left out, and with them those whose children overlap by more than the time of their own. Object addresses are
    cut from the names of built-in functions.

    Cost: about 1 µs an event.

    Raises:
        CaptureError: the trace holds no Python frames, or, for `device`, nothing that ran on a device.
        ConfigError: there is no such metric.
    """
    if metric not in ("host", "device"):
        raise ConfigError(f"Stacks have no metric {metric!r}; choose host or device.")
    if not events.among(PYTHON).any():
        raise CaptureError(
            "The trace was recorded without with_stack and holds no Python frames; record it with with_stack=true."
        )
    forest = host_forest(events, python=True)
    values = forest.own(forest.total_ns) if metric == "host" else device_own_ns(events, forest)
    if values is None:
        raise CaptureError("The trace holds no device activity, so it has no device stacks; choose host.")
    return _paths(events, forest, values)


def folded(found: Sequence[Stack]) -> str:
    """Stacks as text for `flamegraph.pl` and its like: a line "outer;inner 12" each, in whole microseconds.

    Semicolons in a frame become commas and white space underscores. What is below half a microsecond is left out.
    """
    lines = ((";".join(map(_safe, stack.frames)), (stack.value_ns + 500) // 1000) for stack in found)
    return "".join(f"{path} {value}\n" for path, value in lines if value > 0)


def _safe(frame: str) -> str:
    return "_".join(frame.replace(";", ",").split()) or "_"


def _paths(events: Events, forest: Forest, values: Ints) -> list[Stack]:
    """The time of all nodes with the same names from the root down, in the order of their first node."""
    names, code = _plain_names(events)
    path, parents, labels = number_paths(forest, code[events.name[forest.index]])
    totals = np.zeros(len(labels), np.int64)
    np.add.at(totals, path, values)
    frames: list[tuple[str, ...]] = []
    for parent, label in zip(parents.tolist(), labels.tolist()):
        frames.append((*frames[parent], names[label]) if parent >= 0 else (names[label],))
    _, first = np.unique(path, return_index=True)
    chosen = [k for k in np.argsort(first, kind="stable").tolist() if totals[k] > 0]
    return [Stack(frames[k], int(totals[k])) for k in chosen]


def _plain_names(events: Events) -> tuple[tuple[str, ...], Ints]:
    plain = [_ADDRESS.sub("", name) for name in events.names]
    index = {name: position for position, name in enumerate(dict.fromkeys(plain))}
    return tuple(index), np.array([index[name] for name in plain], np.int64)


def frames_around(events: Events, event: Ints, depth: int) -> tuple[Ints, list[str | None]]:
    """The innermost Python frames around each call, as an index into the distinct stacks.

    A stack is text: at most `depth` frames, the innermost first, joined by ";". It is None for a call outside any
    frame, and for memory outside any call (an `event` of -1).
    """
    python = events.among(PYTHON)
    if not python.any():
        return np.zeros(len(event), np.int64), [None]
    forest = nest(events, python)
    at = np.where(event >= 0, forest.around(events.thread[event], events.start_ns[event]), -1)
    nodes, code = np.unique(at, return_inverse=True)
    labels = [_stack_text(events, forest, node, depth) for node in nodes.tolist()]
    index = {label: position for position, label in enumerate(dict.fromkeys(labels))}
    return np.array([index[label] for label in labels], np.int64)[code], list(index)


def _stack_text(events: Events, forest: Forest, node: int, depth: int) -> str | None:
    frames: list[str] = []
    while node >= 0 and len(frames) < depth:
        frames.append(_ADDRESS.sub("", events.names[events.name[forest.index[node]]]))
        node = int(forest.parent[node])
    return ";".join(frames) or None
