"""`stragglers`: ranks that the others wait for in collectives, and the range that makes them slow.

If none of the ranks is slow in all steps, they may still wait for each other, because another one
is slow in each step. Then the waits are those of `Ranks.collectives`, and the saving is not known.

The ranks of one window are compared by their own work: the time of their steps without waits in
communication. A straggler's own work exceeds the median by 10 % and by three standard deviations
(`runs.rank_comparison.stragglers`). Counted is how much longer the others wait in communication
than the straggler. The saving comes from a joint simulation in which all ranks have the same amount
of work; it needs the traces of all ranks, at most 32.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from statistics import median_low
from typing import TYPE_CHECKING, Any

from instrument.base.errors import CaptureError, TraceError
from instrument.base.units import duration, few, percent
from instrument.read.advise.check import RanksCheck, is_worth, saving_of
from instrument.read.advise.finding import Evidence, Finding

if TYPE_CHECKING:
    from instrument.read.ranks.run import Ranks
    from instrument.read.simulate.scenario import Scenario

_LEAST_SHARE, _LEAST_SAVING = 0.03, 0.01
# A range is named if it explains at least this part of the rank's additional time.
_OF_EXCESS = 0.25
_MOST_SIMULATED, _MOST_ROWS = 32, 5
# Without a slow rank, at least this part of the time in collectives must be waiting.
_MOSTLY = 0.5


def find(ranks: Ranks) -> Iterator[Finding]:
    """Yield one finding if ranks wait for others for at least 3 % of the step."""
    table = ranks.ranks
    step_ns = {row.rank: row.step_ns for row in table}
    late = [row for row in ranks.stragglers if _waited_ns(row) >= _LEAST_SHARE * step_ns[row.rank]]
    balanced = _balanced(ranks) if late else None
    if not late or not is_worth(balanced, _LEAST_SAVING):
        yield from _in_turn(ranks)
        return
    worst, waited_ns = late[0], max(map(_waited_ns, late))
    excess = ""
    if worst.excess is not None:  # None: the median rank has no own work
        more = percent(worst.excess)
        excess = f"the own work of rank {worst.rank} takes {more} longer than the median, and "
    share = waited_ns / step_ns[worst.rank]
    numbers = few(row.rank for row in late)
    who = f"Ranks {numbers} are" if len(late) > 1 else f"Rank {numbers} is"
    yield Finding(
        code="stragglers",
        title=f"{who} late: {excess}the other ranks wait up to {duration(waited_ns)} of "
        f"each step ({percent(share)})",
        change=_change(worst),
        verify=_command(ranks),
        share=share,
        saving=saving_of(balanced),
        range=worst.range if _is_in_range(worst) else None,
        evidence=tuple(_row(row) for row in _shown(table, [row.rank for row in late])),
    )


def _in_turn(ranks: Ranks) -> Iterator[Finding]:
    """Yield one finding if the time in collectives is mostly waiting, for whichever rank."""
    table, of_ranks = ranks.collectives, ranks.ranks.where("exposed_share != 0")
    whole_ns = sum(table.column("duration_ns"))
    waiting = sum(table.column("waiting_ns")) / whole_ns if whole_ns else 0.0
    share = waiting * median_low([*of_ranks.column("exposed_share")] or [0.0])
    if waiting < _MOSTLY or share < _LEAST_SHARE:
        return
    yield Finding(
        code="stragglers",
        variant="in turn",
        title=f"The ranks wait for each other for {percent(share)} of the step: {percent(waiting)} "
        "of the time in collectives is waiting for the rank that comes last",
        change="Give all ranks equally much work in each step: put samples of like length into the "
        "same batches of all ranks, or limit the tokens of a batch instead of its samples.",
        verify=_command(ranks),
        share=share,
        evidence=tuple(map(_waits, table.head(_MOST_ROWS))),
    )


def _waits(row: Any) -> Evidence:
    last = (
        ""
        if row.last_rank is None
        else (f", rank {row.last_rank} is the last in {percent(row.last_share)} of the calls")
    )
    return Evidence(row.kind, row.calls, row.waiting_ns, detail=f"waiting, mean of the ranks{last}")


def _waited_ns(row: Any) -> int:
    others_ns: int = row.others_exposed_communication_ns or 0
    return others_ns - int(row.exposed_communication_ns)


def _is_in_range(row: Any) -> bool:
    excess_ns = row.own_ns - row.median_own_ns
    return row.range is not None and row.range_excess_ns >= _OF_EXCESS * excess_ns


def _balanced(ranks: Ranks) -> Scenario | None:
    """Simulate equal work on all ranks; None if this costs too much or is not possible."""
    from instrument.read.simulate.scenario import joint_scenario

    if len(ranks.paths) > _MOST_SIMULATED:
        return None
    try:
        joint = joint_scenario(ranks)
    except (CaptureError, TraceError):  # without traces, or collectives on the device
        return None
    return joint.balance()


def _change(row: Any) -> str:
    host = f" on {row.host}" if row.host else ""
    where = (
        f"Look at the range {row.range}: rank {row.rank}{host} spends "
        f"{duration(row.range_excess_ns)} more in it per step than the median rank. "
        if _is_in_range(row)
        else ""
    )
    if row.idle_ns is not None and row.idle_ns - (row.others_idle_ns or 0) > _waited_ns(row) / 2:
        return (
            f"{where}The device of rank {row.rank}{host} is idle because its CPU is late. Give the "
            "rank CPU cores of its own (numactl, OMP_NUM_THREADS). Remove work that only this rank "
            "does, such as logging."
        )
    of_rank = f"rank {row.rank}{host}"
    compared = (
        "load of the CPUs" if row.idle_ns is None else "clock rate and temperature of the device"
    )
    return (
        f"{where}Give all ranks equally much work (lengths of sequences, sizes of batches, layers "
        f"of a stage), and compare the {compared} of {of_rank} with those of the others."
    )


def _command(ranks: Ranks) -> str:
    folders = dict.fromkeys(
        path.rpartition("/")[0] if isinstance(path, str) else str(path.parent)
        for path in ranks.paths
    )
    return f"instrument ranks {shlex.join(folders)} --window {shlex.quote(ranks.name)}"


def _shown(table: Any, late: list[int | None]) -> list[Any]:
    """The stragglers, then the rank with the least work of its own, for comparison."""
    known = table.where("own_ns >= 0 and exposed_communication_ns >= 0")
    by_work = [*known.sort("own_ns", descending=True)]
    slow = [row for row in by_work if row.rank in late][: _MOST_ROWS - 1]
    return [*slow, by_work[-1]]


def _row(row: Any) -> Evidence:
    waiting = f"own work per step, and {duration(row.exposed_communication_ns)} waiting"
    return Evidence(f"rank {row.rank}", row.steps, row.own_ns, detail=waiting)


CHECK = RanksCheck("stragglers", find)
