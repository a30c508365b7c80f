"""`stragglers`: ranks that the others wait for in collectives, and the range that makes them slow.

It compares the ranks of one window by the time of their steps without waiting in communication: see
`instrument.runs.rank_comparison.stragglers` for the rule (above the median of the ranks by three
robust standard deviations and by a tenth). A finding also needs other ranks that wait for the
straggler in each step: at least 3 % of their step more than the straggler waits itself.
With several stragglers, part of the waiting is for the others.

The times of the ranks come from their summaries, so no step is simulated. `Scenario.balance` does
that for captures whose traces are at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from instrument.findings.finding import Evidence, Finding, RanksCheck
from instrument.findings.places import percent
from instrument.units import duration

if TYPE_CHECKING:
    from instrument.runs.run import Ranks

_LEAST_SHARE = 0.03
# A range is named if it explains at least this part of the time that the rank needs more.
_OF_EXCESS = 0.25


def find(ranks: Ranks) -> Iterator[Finding]:
    """Yield a finding for each rank that the others wait for, the slowest first."""
    table = ranks.ranks
    step_ns = {row.rank: row.step_ns for row in table}
    for row in ranks.stragglers:
        step = step_ns.get(row.rank)
        waited_ns = (row.others_exposed_communication_ns or 0) - row.exposed_communication_ns
        if not step or waited_ns < _LEAST_SHARE * step:
            continue
        slow = row.range_excess_ns is not None and row.range_excess_ns >= _OF_EXCESS * (
            row.own_ns - row.median_own_ns
        )
        idle = row.idle_ns is not None and row.idle_ns - (row.others_idle_ns or 0) > waited_ns / 2
        host = f" on {row.host}" if row.host else ""
        yield Finding(
            code="stragglers",
            title=f"Rank {row.rank}{host} is late: its own work takes {percent(row.excess)} longer "
            f"than the median, and the other ranks wait up to {duration(waited_ns)} of each step "
            f"({percent(waited_ns / step)}) for it",
            change=_change(row, slow, idle),
            verify="instrument ranks FOLDER",
            range=row.range if slow else None,
            evidence=tuple(
                Evidence(
                    f"rank {other.rank}",
                    other.steps,
                    other.own_ns,
                    None,
                    f"own work per step, {duration(other.exposed_communication_ns)} waiting in "
                    "communication",
                )
                for other in _shown(table, row.rank)
            ),
        )


def _change(row: Any, slow: bool, idle: bool) -> str:
    """What to look at, from what the rank does longer than the others."""
    where = (
        f"Its range {row.range} takes {duration(row.range_excess_ns)} longer per step. "
        if slow
        else ""
    )
    if idle:
        return (
            f"{where}Its device is idle while the CPU is late: give the rank CPU cores of its own "
            "(torchrun with numactl, OMP_NUM_THREADS), and take work off it that the others do not "
            "do, such as logging."
        )
    return (
        f"{where}Give all ranks equally much work (lengths of sequences, sizes of batches, layers "
        "of a stage), and compare the clock and temperature of its device with nvidia-smi."
    )


def _shown(table: Any, rank: int | None) -> list[Any]:
    """The straggler, then the rank with the shortest own work, for comparison."""
    known = table.where(own_ns=lambda ns: ns >= 0, exposed_communication_ns=lambda ns: ns >= 0)
    own = [row for row in known if row.rank == rank]
    return own + [row for row in known.sort("own_ns", descending=False).head(1) if row not in own]


CHECK = RanksCheck("stragglers", "No rank makes the others wait.", find)
