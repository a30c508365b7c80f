"""Simulate how long a step of a recorded window takes if a part of it is faster or removed.

docs/explanation/simulation.md says how. A moment is the start or the end of an event; an arc says
that one moment waits for another: the vertices and edges of the simulated graph.

- `model`: the moments and arcs of a window; `builder` finds them in a trace.
- `cpu_time`: the CPU time of each thread, with waits left out and edits applied.
- `program`: the moments in order, and the computation of when each moment happens.
- `selection`: the CPU time and the device work that an edit changes.
- `edits`: the possible changes: faster ranges, removed waits and others.
- `scenario`: a capture with edits, and the simulated step after these edits.
- `causal_profile`: how much shorter a step is if a range, an operator or a kernel is faster.
- `critical_path`: the work and waits that decide how long a step takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario, combined

__all__ = ["Scenario", "combined"]

__getattr__, __dir__ = lazy_names(__name__, {"Scenario": "scenario", "combined": "scenario"})
