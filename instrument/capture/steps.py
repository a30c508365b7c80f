"""The profiler's steps."""

from __future__ import annotations

import numpy as np

from instrument.capture.events import ANNOTATION, OPERATOR, STEP_PREFIX, Events, Ints
from instrument.capture.table import Table


def is_step(name: str) -> bool:
    """Whether a range of this name is a step of the profiler."""
    return name.startswith(STEP_PREFIX) and name.removeprefix(STEP_PREFIX).isdecimal()


def finished_steps(events: Events) -> Ints:
    """The positions of the steps that ended inside the window, by start."""
    index = np.flatnonzero(events.among(ANNOTATION | OPERATOR) & events.named(is_step) & events.finished)
    return index[np.argsort(events.start_ns[index], kind="stable")]


def steps(events: Events) -> Table:
    """The steps that ended inside the window, by start: `number start_ns duration_ns`.

    `start_ns` is on the trace's own clock, to which `events.base_ns` adds up to Unix time.
    """
    index = finished_steps(events)
    return Table(
        {
            "number": [int(events.names[k].removeprefix(STEP_PREFIX)) for k in events.name[index].tolist()],
            "start_ns": events.start_ns[index].tolist(),
            "duration_ns": events.duration_ns[index].tolist(),
        }
    )
