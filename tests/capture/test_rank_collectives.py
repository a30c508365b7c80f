"""Collectives over the ranks: transfer, waiting and who came last, by hand and beside TraceLens and HTA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import annotation, call, kernel, span, step, write_rank
from golden import Golden, rows_as_lines
from real_traces import FOLDER, needs_traces

from instrument.read.ranks.run import Run
from instrument.read.show.ranks import as_json, as_text

GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
MB = 250_000  # elements of 4 bytes
# Three all-reduces: torch's number, the size in MB, when each of three ranks arrives, and when all are done.
REDUCED = [
    (5, 4, (0, 100, 200), 1200),
    (6, 8, (5000, 5900, 5300), 8900),
    (7, 4, (10_000, 10_030, 10_060), 11_060),
]
AHEAD_US = (0, 500, -2_000_000)  # of each rank's clock


def reduces(rank: int, later_us: float, numbered: bool = True) -> list[Any]:
    """The all-reduces of one rank as its clock has them: kernels with their sizes, and the records with their numbers."""
    events = []
    for number, size, arrivals, end in REDUCED:
        known = {
            "Collective name": "allreduce",
            "dtype": "Float",
            "In msg nelems": size * MB,
            "Out msg nelems": size * MB,
            "Group size": 3,
            "Process Group Name": "1",
            "Process Group Ranks": "[0, 1, 2]",
        }
        start = arrivals[rank]
        name, at = "record_param_comms", start + later_us - 50
        events += [
            span(name, at, 10, External_id=number, **known | ({"Seq": number} if numbered else {})),
            kernel(GENERIC, start + later_us, end - start, External_id=number, **known),
        ]
    return events


def write_ranks(folder: Path, ranks: tuple[int, ...] = (0, 1, 2), numbered: bool = True) -> None:
    """Rank 2 counts its times from another base; rank 1's window begins after the first all-reduce."""
    for rank in ranks:
        base_us = 1_000_000 if rank == 2 else 0
        events = reduces(rank, 3_000_000 + AHEAD_US[rank] - base_us, numbered)
        broadcast = kernel("ncclDevKernel_Broadcast_RING_LL()", 100 + rank, 5 * rank + 5)
        window = events[2:] if rank == 1 and numbered else events
        write_rank(folder, rank, [broadcast, *window], 3, base_ns=10**18 + base_us * 1000)


def coalesced(folder: Path) -> None:
    """Two all-to-alls of number 9, of 1 and 3 MB on rank 0 and of 2 and 2 on rank 1: the larger size counts.

    They take 100 and 300 µs on rank 0, 200 and 250 on rank 1.
    """
    known = {"Collective_name": "all_to_allv", "dtype": "Float", "Group_size": 2, "Seq": 9}
    known |= {"Out_msg_nelems": MB, "Process_Group_Name": "1"}
    for rank, each in enumerate((((1, 100), (3, 300)), ((2, 200), (2, 250)))):
        events = [
            kernel(GENERIC, 1000 * at - took, took, In_msg_nelems=MB * size, **known)
            for at, (size, took) in enumerate(each, 1)
        ]
        write_rank(folder, rank, events, 2)


def without_a_number(folder: Path) -> None:
    """Rank 0 has torch's number 3, rank 1 none: its collective of step 3 is not taken for the same."""
    for rank, number in ((0, {"Seq": 3}), (1, {})):
        reduce = kernel(GENERIC, 50, 10, correlation=1, Collective_name="allreduce", **number)
        write_rank(folder, rank, [step(3, 0, 100), call("launch", 5, 5, 1), reduce], 2)
    summaries = Run.load(folder).windows[0].summaries
    assert [[*each.collectives.step] for each in summaries] == [[3], [3]]


def without_a_clock(folder: Path) -> None:
    """The devices of two pairs have no collective in common, so their clocks are not compared; their CPUs have."""
    for rank, (group, took) in enumerate((("[0, 2]", 70), ("[1, 3]", 40))):
        barrier = annotation("gloo:barrier", 1000, took, tid=2)
        reduce = kernel(GENERIC, 2000, 10, Collective_name="allreduce", Process_Group_Ranks=group)
        write_rank(folder, rank, [barrier, reduce])


CASES: dict[str, Callable[[Path], None]] = {
    # Durations of 1200, 1100, 1000 µs; of 3900, 3000, 3600; of 1060, 1030, 1000. The broadcasts are left out. Rank 2 is
    # last twice and the others wait 100 + 30 on average, rank 1 once, for which they wait 500. 16 MB in 5 ms.
    "by their order": lambda folder: write_ranks(folder, numbered=False),
    # Rank 1 lacks the first: by their order, its second would count as the others' first.
    "by torch's numbers": write_ranks,
    # The shortest of 3900 and 3600 is taken for the second transfer.
    "without rank 1": lambda folder: write_ranks(folder, (0, 2)),
    "one rank": lambda folder: write_ranks(folder, (1,)),
    "coalesced ones share a number, and each rank has its own size": coalesced,
    "a number is no step": without_a_number,
    "without a clock durations are known and arrivals are not": without_a_clock,
}


def test_collectives_over_ranks_by_hand(tmp_path: Path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for number, (name, write) in enumerate(CASES.items()):
        write(tmp_path / str(number))
        (window,) = Run.load(tmp_path / str(number)).windows
        tables = {"collective": window.collectives, "clock": window.clocks}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
        assert json.loads(as_json(window))["collectives"] == window.collectives.to_dicts()
        assert ("Collectives over the ranks" in as_text(window)) == bool(len(window.collectives))
    golden("rank_collectives.txt", "\n".join(told))


@needs_traces
def test_waiting_on_a_real_job_is_what_tracelens_and_hta_find(tmp_path: Path) -> None:
    """Eight ranks of a tensor-parallel step, whose old traces name no group.

    TraceLens, over the 84 all-reduces: 50.099 ms of shortest times; a mean skew of 5317.95 µs and 4374.241 µs of mean
    waiting per call, which it measures to the last start and we to the shortest time; rank 0 last 32 times. It
    compares times as they are, we by the clocks as measured, which are up to 11 µs apart. HTA: 3340.091 ms of
    communication on all ranks together.
    """
    for path in FOLDER.glob("a100_megatron_tp8_rank*.json.gz"):
        shutil.copy(path, tmp_path)
    (row,) = Run.load(tmp_path).windows[0].collectives
    got = (row.kind, row.ranks, row.bytes, row.bus_bytes_per_second)
    assert got == ("all_reduce", None, None, None)
    assert (row.recorded_ranks, row.calls, row.transfer_ns) == (8, 84, 50_099_000)
    assert row.duration_ns == pytest.approx(3_340_091_000 / 8, abs=84)
    assert row.waiting_ns / 84 == pytest.approx(4_374_241, rel=1e-4)
    assert row.skew_ns == pytest.approx(5_317_952, abs=11_000)
    assert (row.last_rank, round(row.last_share * 84)) == (0, 32)
