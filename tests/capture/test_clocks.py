"""Clocks with a known skew, recovered from the ends of collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import REDUCES, annotation, kernel, span, synchronous_steps, write_rank

from instrument.runs.clock_skew import Clock
from instrument.runs.rank_summary import RankSummary
from instrument.runs.run import Ranks, Run
from instrument.trace.columns import BEYOND_NS


@pytest.mark.parametrize("device", [False, True])
def test_a_known_skew_is_found_within_the_jitter(tmp_path: Path, device: bool) -> None:
    """Eleven collectives end up to 3 µs off; the third rank's clock is 2 s behind and counts from another base."""
    random = np.random.default_rng(3)
    skews_us, jitters_us = {0: 0.0, 1: 5_000.25, 2: -2_000_000.0}, {}
    for rank, skew in skews_us.items():
        jitters_us[rank] = random.integers(-3_000, 3_001, 11) / 1000
        begin = skew + 10_000_000 - (1_000_000 if rank == 2 else 0)
        waits = [40 + 7 * rank + jitter for jitter in jitters_us[rank].tolist()]
        reduces = [
            span(
                REDUCES if device else "gloo:all_reduce", begin + 100 * k - 7 * rank, wait, category
            )
            for category in ["kernel" if device else "user_annotation"]
            for k, wait in enumerate(waits)
        ]
        events = [annotation("ProfilerStep#3", begin - 50, 2000), *reduces]
        write_rank(tmp_path, rank, events, 3, base_ns=10**18 + (10**9 if rank == 2 else 0))
    clocks = Run.load(tmp_path).windows[0].clocks
    assert clocks.column("rank") == [0, 1, 2]
    assert clocks.column("matched") == [11, 11, 11]
    for row in clocks:
        ahead = np.rint((skews_us[row.rank] + jitters_us[row.rank] - jitters_us[0]) * 1000)
        assert abs(row.offset_ns - skews_us[row.rank] * 1000) <= 6_000
        assert row.offset_ns == np.median(ahead)
        assert row.uncertainty_ns == np.median(np.abs(ahead - np.median(ahead)))


def test_the_last_128_collectives_are_compared(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [collective(1000 * k + 7 * rank, "[0, 1]") for k in range(140)]
        write_rank(tmp_path, rank, events, 2)
    clocks = Run.load(tmp_path).windows[0].clocks
    assert clocks.column("matched") == [128, 128]
    assert clocks.column("offset_ns") == [0, 7000]


def collective(at_us: float, ranks: str, name: str = REDUCES) -> dict:
    return kernel(name, at_us, 10, Process_Group_Ranks=ranks)


def test_ranks_without_a_common_group_are_reached_through_others(tmp_path: Path) -> None:
    """Tensor-parallel pairs [0, 1] and [2, 3], data-parallel [0, 2] and [1, 3]; the pairs' own collectives differ."""
    skew = {0: 0, 1: 70, 2: -30, 3: 500}
    pairs = {0: "[0, 1]", 1: "[0, 1]", 2: "[2, 3]", 3: "[2, 3]"}
    across = {0: "[0, 2]", 2: "[0, 2]"}
    for rank, later in skew.items():
        begins = 0 if rank < 2 else 444
        events = [collective(1000 + begins + later + 100 * k, pairs[rank]) for k in range(5)]
        events += [
            collective(3000 + later + 100 * k, across[rank]) for k in range(3) if rank in across
        ]
        write_rank(tmp_path, rank, events)
    write_rank(tmp_path, 4, [collective(0, "[4, 5]")], 5)
    clocks = Run.load(tmp_path).windows[0].clocks
    assert clocks.column("offset_ns") == [0, 70_000, -30_000, 500_000, None]
    assert clocks.column("matched") == [8, 5, 3, 5, 0]


def test_what_does_not_synchronise_and_a_single_match(tmp_path: Path) -> None:
    broadcast = "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)"
    for rank, later in ((0, 0), (1, 25)):
        events = [
            collective(100 + 7 * later, "[0, 1]", broadcast),
            collective(500 + later, "[0, 1]"),
        ]
        write_rank(tmp_path, rank, events, 2)
    rows = list(Run.load(tmp_path).windows[0].clocks)
    assert [(row.offset_ns, row.uncertainty_ns, row.matched) for row in rows] == [
        (0, 0, 1),
        (25_000, None, 1),
    ]


def test_a_collective_cut_off_at_the_edge_shifts_no_other(tmp_path: Path) -> None:
    """Counted within the step, the others keep their numbers when one rank saw one more before its first step."""
    for rank in (0, 1):
        events = synchronous_steps(100, later_us=1000)
        if rank:
            events.append({**events[-1], "ts": 100, "dur": 33})
        write_rank(tmp_path, rank, events, 2)
    assert Run.load(tmp_path).windows[0].clocks.column("offset_ns") == [0, 0]


def summary(rank: int, ends: dict[int, int], *, of: list[int] | None = None) -> RankSummary:
    """The summary of a rank whose collectives, by number, took 1 ns and ended at these times."""
    numbers, count = list(ends), max(of or [0]) + 1
    return RankSummary(
        name=f"r{rank}",
        rank=rank,
        world_size=3,
        collectives={
            "group": of or [0] * len(ends),
            "step": [1] * len(ends),
            "ordinal": numbers,
            "number": numbers,
            "start_ns": [end - 1 for end in ends.values()],
            "end_ns": [*ends.values()],
            "bytes": [1] * len(ends),
        },
        collective_groups={
            "name": ["a"] * count,
            "kind": ["all_reduce"] * count,
            "process_group": [str(k) for k in range(count)],
            "description": [None] * count,
            "ranks": [None] * count,
            "group_size": [2] * count,
            "runs_on": ["device"] * count,
        },
    )


def compared(*summaries: RankSummary) -> Ranks:
    return Ranks([(each.name, each) for each in summaries])


def test_an_unknown_uncertainty_is_that_of_all_ranks_behind_it() -> None:
    """Rank 1 shares one collective with rank 0; rank 2 reaches rank 0 through rank 1 alone; rank 3 does without."""
    clocks = compared(
        summary(0, {1: 100, 4: 400, 5: 500, 6: 600}),
        summary(1, {1: 107, 2: 207, 3: 307}),
        summary(2, {2: 209, 3: 309, 7: 709, 8: 809}),
        summary(3, {4: 403, 5: 503, 6: 605, 9: 903, 10: 1003}),
        summary(4, {7: 701, 8: 801}),
        summary(5, {9: 900, 10: 1000}),
    ).clocks
    assert [(row.offset_ns, row.uncertainty_ns) for row in clocks] == [
        (0, 0), (7, None), (9, None), (3, 0), (1, None), (0, 0)
    ]  # fmt: skip


EDGE = BEYOND_NS - 1


@pytest.mark.parametrize(
    ("ends", "offsets"),
    [
        (({1: -(2**63) + 1}, {1: 2**63 - 1}, {1: 0}), [0, None, None]),
        (({1: -EDGE}, {1: EDGE}, {1: -EDGE + 9}), [0, None, 9]),
        (({1: 0}, {1: EDGE, 2: -EDGE}, {2: EDGE}), [0, EDGE, None]),
    ],
)
def test_times_at_the_edge_of_64_bits_give_no_wrong_number(
    ends: tuple[dict[int, int], ...], offsets: list[int | None]
) -> None:
    found = compared(*(summary(rank, each) for rank, each in enumerate(ends)))
    assert found.clocks.column("offset_ns") == offsets
    for row in found.collectives:
        assert row.skew_ns is None or 0 <= row.skew_ns <= 10


@pytest.mark.parametrize(
    ("time", "corrected"), [(EDGE, 0), (0, -EDGE), (-EDGE, -BEYOND_NS), (-(2**63), -BEYOND_NS)]
)
def test_corrected_times_are_limited(time: int, corrected: int) -> None:
    assert Clock(EDGE, 0, 9).corrected_ns(np.array([time])).tolist() == [corrected]


def test_the_recorded_ranks_of_many_groups_are_those_of_a_plain_loop() -> None:
    random = np.random.default_rng(7)
    summaries, holders = [], dict[str, dict[int, set[int]]]()
    for rank in range(12):
        of = random.integers(0, 40, 25).tolist()
        numbers = random.permutation(30)[:25].tolist()
        for group, number in zip(of, numbers):
            holders.setdefault(str(group), {}).setdefault(number, set()).add(rank)
        summaries.append(summary(rank, {k: 100 * k + 1 for k in numbers}, of=of))
    expected = {
        group: len(set().union(*shared))
        for group, calls in holders.items()
        if (shared := [ranks for ranks in calls.values() if len(ranks) > 1])
    }
    found = compared(*summaries).collectives
    assert len(expected) > 20
    assert {row.process_group: row.recorded_ranks for row in found} == expected
