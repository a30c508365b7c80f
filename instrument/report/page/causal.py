"""The section on what each range, operator and kernel is worth: the step if it were faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

# How many ranges, operators and kernels are tried. In a window of more CPU and device events than
# `_MANY`, fewer are tried, because the time that each of them takes grows with the events.
_TRIED, _LEAST_TRIED, _MANY = 12, 2, 100_000


def section(scenario: Scenario) -> dict[str, Any] | None:
    """Return the causal profile; None if the capture has no ranges, operators or kernels.

    The keys:

    - `step_ns`: the simulated step without edits.
    - `faster`: by which shares the rows are made faster.
    - `rows`: for each range, operator or kernel, the largest saving first: `kind`, `name`, `cpu_ns`
      and `device_ns` (what it spends in a step), and `step_ns`: the simulated step for each entry
      of `faster`.
    - `notes`: sentences on how sure the simulation is.

    Cost: that of `instrument.whatif.causal_profile`, for 12 ranges, operators and kernels; for
    fewer of them in a window of more than 100,000 events.
    """
    events = sum(len(model.links.events) for model in scenario.window.models)
    table = scenario.profile(max(_LEAST_TRIED, _TRIED * _MANY // max(events, _MANY)))
    if not len(table):
        return None
    savings = [
        name for name in table.columns if name.startswith("saving_") and name.endswith("_ns")
    ]
    baseline_ns = scenario.baseline_ns
    return {
        "step_ns": baseline_ns,
        "faster": [int(name.split("_")[1]) / 100 for name in savings],
        "rows": [
            {
                "kind": row.kind,
                "name": row.name,
                "cpu_ns": row.cpu_ns,
                "device_ns": row.device_ns,
                "step_ns": [baseline_ns - getattr(row, name) for name in savings],
            }
            for row in table
        ],
        "notes": scenario.notes,
    }
