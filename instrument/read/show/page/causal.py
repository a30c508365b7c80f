"""The section *What if*: how long a step takes if a range, operator or kernel is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instrument.base.units import duration
from instrument.read.show.page.parts import column, columns_of, listed, section, table, text

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

# The simulation tries at most `_TRIED` ranges, as many operators, and as many kernels. It tries
# fewer in windows of more than `_MANY` events, because each simulation takes longer there.
_TRIED, _LEAST_TRIED, _MANY = 12, 2, 100_000
_ABOUT = (
    "For each row, a simulation makes one range, operator or kernel faster. The columns on the "
    "right show how much shorter a step then is. A faster kernel does not always make the step "
    "shorter, because slower work may run at the same time."
)


def what_if(scenario: Scenario) -> dict[str, Any] | None:
    """Return the causal profile; None if the capture has no ranges, operators or kernels.

    Cost: as `simulate.causal_profile` for 12 ranges, 12 operators and 12 kernels. In a
    window of more than 100,000 events, fewer ranges, operators and kernels are simulated.
    """
    events = len(scenario.model.links.events)
    profile = scenario.profile(max(_LEAST_TRIED, _TRIED * _MANY // max(events, _MANY)))
    if not len(profile):
        return None
    savings = [
        name for name in profile.columns if name.startswith("saving_") and name.endswith("_ns")
    ]
    spent = [(row.cpu_ns or 0) + (row.device_ns or 0) for row in profile]
    won = [max(ns, 0) for ns in profile.column(savings[-1])]
    bars = {"largest saving": won, "time": [max(a - b, 0) for a, b in zip(spent, won)]}
    labels = [
        f"time {duration(ns)}, largest saving {duration(saved)}" for ns, saved in zip(spent, won)
    ]
    columns = [
        column("name", profile.column("name"), title="range, operator or kernel", kind="range",
               is_range=[kind == "range" for kind in profile.column("kind")]),
        *columns_of(profile.select(["kind"])),
        column("spent_ns", spent, title="time, and largest saving", kind="bar", texts=labels,
               parts=bars, doc="CPU and device time in one step; the dark part is the largest "
               "saving"),
        *(_saving(name, profile.column(name)) for name in savings),
    ]  # fmt: skip
    return section(
        "What if",
        text(_ABOUT, "soft"),
        table("Causal profile", columns, shown=15),
        listed(scenario.notes),
    )


def _saving(name: str, values: list[int]) -> dict[str, Any]:
    share = int(name.split("_")[1])
    less = "no time" if share == 100 else f"{share} % less time"
    doc = f"how much shorter a step is if this takes {share} % less time"
    return column(name, values, title=f"saves if it takes {less}", doc=doc)
