"""Collectives over the ranks: transfer, waiting and who came last, by hand and beside TraceLens and HTA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import annotation, call, kernel, span, step, write_rank
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


def test_transfer_waiting_and_the_last_rank_by_hand(tmp_path: Path) -> None:
    """Durations of 1200, 1100, 1000 µs; of 3900, 3000, 3600; of 1060, 1030, 1000. The broadcasts are left out.

    Rank 2 is last twice and the others wait 100 + 30 on average, rank 1 once, for which they wait 500.
    """
    write_ranks(tmp_path, numbered=False)
    (window,) = Run.load(tmp_path).windows
    assert window.clocks.column("offset_ns") == [0, 500_000, -2_000_000_000]
    (row,) = window.collectives
    assert (row.kind, row.process_group, row.ranks) == ("all_reduce", "1", "[0, 1, 2]")
    assert (row.group_size, row.recorded_ranks, row.calls) == (3, 3, 3)
    assert (row.duration_ns, row.transfer_ns) == (5_630_000, 5_000_000)
    assert (row.waiting_ns, row.waiting_share) == (630_000, 63 / 563)
    assert (row.skew_ns, row.max_skew_ns) == ((200 + 900 + 60) * 1000 // 3, 900_000)
    assert (row.last_rank, row.last_share, row.last_waiting_ns) == (1, 1 / 3, 500_000)
    assert row.bytes == 16_000_000
    assert row.algorithm_bytes_per_second == 3_200_000_000  # 16 MB in 5 ms
    assert row.bus_bytes_per_second == 3_200_000_000 * 4 // 3  # 2 (3 - 1) / 3
    (in_json,) = json.loads(as_json(window))["collectives"]
    assert in_json == row._asdict()
    text = as_text(window)
    assert "Collectives over the ranks, by process group and kind" in text
    assert "4.27 GB/s" in text


def test_torchs_numbers_match_what_the_order_does_not(tmp_path: Path) -> None:
    """Rank 1 lacks the first all-reduce: by their order, its second would count as the others' first."""
    write_ranks(tmp_path)
    (window,) = Run.load(tmp_path).windows
    assert window.clocks.column("matched") == [3, 2, 3]
    (row,) = window.collectives
    assert (row.recorded_ranks, row.calls, row.transfer_ns) == (3, 3, 5_000_000)
    assert row.duration_ns == (1100 + 3500 + 1030) * 1000  # of 1200 and 1000; of three; of three
    assert (row.last_rank, row.last_waiting_ns) == (1, 500_000)


@pytest.mark.parametrize(("ranks", "expected"), [((0, 2), [(2, 3, 5_400_000)]), ((1,), [])])
def test_where_ranks_are_missing(tmp_path: Path, ranks: tuple[int, ...], expected: list) -> None:
    """Without rank 1, the shortest of 3900 and 3600 is taken for the second transfer."""
    write_ranks(tmp_path, ranks)
    (window,) = Run.load(tmp_path).windows
    found = [(row.recorded_ranks, row.calls, row.transfer_ns) for row in window.collectives]
    assert found == [(n, calls, ns + 200_000) for n, calls, ns in expected]
    assert ("Collectives over the ranks" in as_text(window)) == bool(expected)


def test_coalesced_collectives_share_a_number_and_each_rank_has_its_own_size(tmp_path) -> None:
    """Two all-to-alls of number 9, of 1 and 3 MB on rank 0 and of 2 and 2 on rank 1: the larger size counts.

    They take 100 and 300 µs on rank 0, 200 and 250 on rank 1.
    """
    sizes = {0: ((1, 100), (3, 300)), 1: ((2, 200), (2, 250))}
    for rank, each in sizes.items():
        events = [
            kernel(
                GENERIC,
                1000 * at - took,
                took,
                Collective_name="all_to_allv",
                dtype="Float",
                In_msg_nelems=MB * size,
                Out_msg_nelems=MB,
                Group_size=2,
                Process_Group_Name="1",
                Seq=9,
            )
            for at, (size, took) in enumerate(each, 1)
        ]
        write_rank(tmp_path, rank, events, 2)
    (row,) = Run.load(tmp_path).windows[0].collectives
    assert (row.calls, row.transfer_ns, row.duration_ns) == (2, 350_000, (150 + 275) * 1000)
    assert (row.bytes, row.algorithm_bytes_per_second) == (5_000_000, 5_000_000 * 10**9 // 350_000)
    assert row.bus_bytes_per_second == row.algorithm_bytes_per_second // 2


def test_a_number_is_no_step(tmp_path: Path) -> None:
    """Rank 0 has torch's number 3, rank 1 none: its collective of step 3 is not taken for the same."""
    for rank, number in ((0, {"Seq": 3}), (1, {})):
        reduce = kernel(GENERIC, 50, 10, correlation=1, Collective_name="allreduce", **number)
        write_rank(tmp_path, rank, [step(3, 0, 100), call("launch", 5, 5, 1), reduce], 2)
    (window,) = Run.load(tmp_path).windows
    assert [[*summary.collectives.step] for summary in window.summaries] == [[3], [3]]
    assert len(window.collectives) == 0


def test_without_a_clock_durations_are_known_and_arrivals_are_not(tmp_path: Path) -> None:
    """The devices of two pairs have no collective in common, so their clocks are not compared; their CPUs have."""
    for rank, (group, took) in enumerate((("[0, 2]", 70), ("[1, 3]", 40))):
        barrier = annotation("gloo:barrier", 1000, took, tid=2)
        reduce = kernel(GENERIC, 2000, 10, Collective_name="allreduce", Process_Group_Ranks=group)
        write_rank(tmp_path, rank, [barrier, reduce])
    (window,) = Run.load(tmp_path).windows
    assert window.clocks.column("offset_ns") == [0, None]
    (row,) = window.collectives
    assert (row.kind, row.runs_on, row.ranks, row.bytes) == ("barrier", "CPU", None, None)
    assert (row.duration_ns, row.transfer_ns, row.waiting_ns) == (55_000, 40_000, 15_000)
    assert row.skew_ns is row.max_skew_ns is row.last_rank is row.last_share is None
    assert row.last_waiting_ns is row.bus_bytes_per_second is None


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
