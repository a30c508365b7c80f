"""The section *What if*: how long a step takes if a range, operator or kernel is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

# The simulation tries at most `_TRIED` ranges, as many operators, and as many kernels. It tries
# fewer in windows of more than `_MANY` events, because each simulation takes longer there.
_TRIED, _LEAST_TRIED, _MANY = 12, 2, 100_000


def section(scenario: Scenario) -> dict[str, Any] | None:
    """Return the causal profile; None if the capture has no ranges, operators or kernels.

    The keys:

    - `step_ns`: the duration of the simulated step without changes.
    - `faster`: the simulated speedups. For example, 0.25 means that a part takes 25 % less time.
    - `rows`: an entry for each range, operator or kernel. The keys are `kind`, `name`, `cpu_ns` and
      `device_ns` (the times in one step), and `step_ns`: for each reduction in `faster`, the
      duration of the simulated step. The entry that saves most if its time is halved comes first.
    - `notes`: sentences on the accuracy of the simulation.

    Cost: as `instrument.whatif.causal_profile` for 12 ranges, 12 operators and 12 kernels. In a
    window of more than 100,000 events, fewer ranges, operators and kernels are simulated.
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
