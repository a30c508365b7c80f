"""Clocks with a known skew, recovered from the ends of collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import REDUCES, annotation, kernel, span, synchronous_steps, write_rank

from instrument.read.ranks.clock_skew import Clocks
from instrument.read.ranks.rank_summary import CollectiveGroups, Collectives, RankSummary
from instrument.read.ranks.run import Ranks, Run
from instrument.read.show.ranks import as_text
from instrument.read.trace.columns import BEYOND_NS


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


def test_128_collectives_are_compared(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [collective(1000 * k + 7 * rank, "[0, 1]") for k in range(140)]
        write_rank(tmp_path, rank, events, 2)
    clocks = Run.load(tmp_path).windows[0].clocks
    assert clocks.column("matched") == [128, 128]
    assert clocks.column("offset_ns") == [0, 7000]


SECOND = 10**9


def ticking(
    drifts_ppm: list[float],
    *,
    over_s: float = 60,
    count: int = 400,
    late_ns: int = 0,
    outliers: float = 0,
    seed: int = 1,
) -> tuple[Ranks, list[int]]:
    """Ranks with these drifts, whose collectives end up to 20 µs off; some ends are up to 5 ms late.

    The last rank starts all collectives `late_ns` after the others. Also returned is how far each
    clock is ahead at time 0.
    """
    random = np.random.default_rng(seed)
    true_ns = np.sort(random.uniform(0, over_s * SECOND, count))
    offsets, summaries = [0, 7_000_000, -3_000_000, 123_456][: len(drifts_ppm)], []
    for rank, (ppm, offset) in enumerate(zip(drifts_ppm, offsets)):
        jitter_ns = random.uniform(0, 20_000, count)
        jitter_ns += random.uniform(0, 5e6, count) * (random.random(count) < outliers)
        starts_ns = true_ns - 10_000_000 + late_ns * (rank == len(drifts_ppm) - 1)
        start, end = (
            np.rint(each * (1 + ppm / 1e6) + offset).astype(int).tolist()
            for each in (starts_ns, true_ns + jitter_ns)
        )
        summaries.append(summary(rank, dict(enumerate(end)), starts=start))
    return compared(*summaries), offsets


@pytest.mark.parametrize("outliers", [0, 0.15])
@pytest.mark.parametrize(("over_s", "count"), [(60, 400), (60, 40), (5, 512)])
def test_a_known_drift_is_found_within_the_stated_uncertainty(over_s, count, outliers) -> None:
    drifts = [0.0, 50.0, -50.0, 1.0 if over_s == 60 and not outliers else 30.0]
    window, offsets = ticking(
        drifts, over_s=over_s, count=count, outliers=outliers, late_ns=4_000_000
    )
    for row, ppm, offset in zip(window.clocks, drifts, offsets):
        assert (row.drift_ppm or 0) == pytest.approx(
            ppm, abs=2 * row.uncertainty_ns / over_s / 1000
        )
        assert row.uncertainty_ns < 50_000
        for true_ns in (0, over_s * SECOND // 2, over_s * SECOND):
            shown = np.array([round(true_ns * (1 + ppm / 1e6) + offset)])
            (found,) = window.measured_clocks.corrected_ns(np.array([row.rank]), shown).tolist()
            # the reference's own jitter moves all clocks by its mean
            assert abs(found - true_ns) <= row.uncertainty_ns + 10_000
    (row,) = window.collectives
    assert (row.last_rank, row.last_share) == (3, 1)
    assert row.skew_ns == pytest.approx(4_000_000, abs=60_000)
    assert "'s clock " in as_text(window), "the largest drift is said"


def test_a_drift_is_found_through_another_rank() -> None:
    """Rank 2 has collectives in common with rank 1 only; its drift is that of both clocks."""
    ends = np.arange(60) * SECOND
    shown = [np.rint(ends * (1 + ppm / 1e6)).astype(int).tolist() for ppm in (0, 50, -20)]
    both = {k: shown[1][k] for k in range(60)}
    window = compared(
        summary(0, {k: shown[0][k] for k in range(30)}),
        summary(1, both),
        summary(2, {k: shown[2][k] for k in range(30, 60)}),
    )
    got = window.clocks.column("drift_ppm")
    assert got == [None, pytest.approx(50, abs=0.01), pytest.approx(-20, abs=0.01)]
    assert window.clocks.column("matched") == [30, 30, 30]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("over_s", "count"), [(60, 400), (60, 30), (0.01, 400), (60, 12)])
def test_without_a_drift_the_offset_is_the_median_difference(seed, over_s, count) -> None:
    window, _ = ticking([0, 0, 0], over_s=over_s, count=count, outliers=0.1, seed=seed)
    found, ends = window.clocks, window.matched.end_ns.reshape(3, count)
    for row in found:
        last = (ends[row.rank] - ends[0])[-128:]
        assert abs(row.offset_ns - np.median(last)) <= max(row.uncertainty_ns, 0)
        if row.drift_ppm is None:
            continue
        assert abs(row.drift_ppm) * over_s * 1000 <= 4 * row.uncertainty_ns, "not over the jitter"
    assert found.column("drift_ppm").count(None) >= 2


SECONDS = np.linspace(0, 1, 60)


@pytest.mark.parametrize(
    ("at_s", "ppm"),
    [
        (
            [*(0.06 * SECONDS), 3],
            None,
        ),  # all but one close together: the end of the line is unknown
        ([0, *(3 + 0.1 * SECONDS)], None),
        ([*(0.2 * SECONDS), *(5 + 0.01 * SECONDS[::12])], None),
        ([*(0.03 * SECONDS), *(0.3 + 0.03 * SECONDS), *(0.6 + 0.03 * SECONDS)], 80),
        (np.linspace(0, 60, 24), None),
        (np.linspace(0, 60, 24), 5),
    ],
)
def test_of_many_clocks_none_is_said_to_drift_without_doing_so(at_s, ppm) -> None:
    """400 ranks whose collectives end 3 µs off, of which the last drifts or none does."""
    random, at_ns = np.random.default_rng(5), np.array(at_s) * SECOND
    summaries = []
    for rank in range(400):
        gained = (ppm or 0) / 1e6 * at_ns * (rank == 399)
        ends = np.rint(at_ns + gained + random.normal(0, 3000, len(at_ns))).astype(int).tolist()
        summaries.append(summary(rank, dict(enumerate(ends))))
    *others, last = compared(*summaries).clocks.column("drift_ppm")
    assert others == [None] * 399
    assert last == (None if ppm is None else pytest.approx(ppm, rel=0.2))


def test_no_clock_gains_more_than_ntp_slews_it_by() -> None:
    window, _ = ticking([0, 2_000, 50], over_s=60)
    assert window.clocks.column("drift_ppm") == [None, None, pytest.approx(50, abs=1)]
    assert window.clocks[1].uncertainty_ns > 10_000_000


def test_corrected_times_keep_their_order() -> None:
    clocks = ticking([0, 50, -50, 499])[0].measured_clocks
    random = np.random.default_rng(4)
    for rank in range(4):
        begin = int(random.integers(0, 60 * SECOND))
        times = begin + np.arange(200_000)
        corrected = clocks.corrected_ns(np.full(len(times), rank), times)
        assert set(np.diff(corrected).tolist()) <= {0, 1, 2}
        assert len(set(np.diff(corrected[:: 2**17]).tolist())) == 1


def test_a_rank_behind_too_many_others_has_no_clock() -> None:
    window = compared(*(summary(k, {k: 100, k + 1: 200 + k}) for k in range(20)))
    known = [offset is not None for offset in window.clocks.column("offset_ns")]
    assert known == [True] * 17 + [False] * 3


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


def test_a_summary_keeps_early_collectives_for_the_drift(tmp_path: Path) -> None:
    """Of 1500 in three steps: 128 after the first step, whose beginnings differ, and the last 384."""
    for rank in (0, 1):
        events = [annotation(f"ProfilerStep#{n}", 50_000 * n, 50_000) for n in range(3)]
        at_us = [100 * k * (1 + 20e-6 * rank) + 10 for k in range(1500)]
        events += [span("gloo:all_reduce", round(each, 3), 5, "user_annotation") for each in at_us]
        write_rank(tmp_path, rank, events, 2)
    (window,) = Run.load(tmp_path).windows
    for each in window.summaries:
        ordinals = [*zip(each.collectives.step, each.collectives.ordinal)]
        assert ordinals[:128] == [(1, k) for k in range(128)]
        assert ordinals[128:] == [(2, k) for k in range(116, 500)]
    assert window.clocks.column("drift_ppm") == [None, pytest.approx(20, abs=0.1)]


def test_what_does_not_synchronise_and_a_single_match(tmp_path: Path) -> None:
    broadcast = "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)"
    for rank, later in ((0, 0), (1, 25)):
        events = [
            collective(100 + 7 * later, "[0, 1]", broadcast),
            collective(500 + later, "[0, 1]"),
        ]
        write_rank(tmp_path, rank, events, 2)
    rows = list(Run.load(tmp_path).windows[0].clocks)
    got = [(row.offset_ns, row.uncertainty_ns, row.matched) for row in rows]
    assert got == [(0, 0, 1), (25_000, None, 1)]


def test_a_collective_cut_off_at_the_edge_shifts_no_other(tmp_path: Path) -> None:
    """Counted within the step, the others keep their numbers when one rank saw one more before its first step."""
    for rank in (0, 1):
        events = synchronous_steps(100, later_us=1000)
        if rank:
            events.append({**events[-1], "ts": 100, "dur": 33})
        write_rank(tmp_path, rank, events, 2)
    assert Run.load(tmp_path).windows[0].clocks.column("offset_ns") == [0, 0]


def summary(
    rank: int, ends: dict[int, int], *, of: list[int] | None = None, starts: list[int] | None = None
) -> RankSummary:
    """The summary of a rank whose collectives, by number, took 1 ns and ended at these times."""
    numbers, count = list(ends), max(of or [0]) + 1
    return RankSummary(
        name=f"r{rank}",
        rank=rank,
        world_size=3,
        collectives=Collectives(
            group=of or [0] * len(ends),
            number=numbers,
            start_ns=starts or [end - 1 for end in ends.values()],
            end_ns=[*ends.values()],
        ),
        collective_groups=CollectiveGroups(
            name=["a"] * count,
            kind=["all_reduce"] * count,
            process_group=[str(k) for k in range(count)],
            runs_on=["device"] * count,
        ),
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
def test_times_at_the_edge_of_64_bits_give_no_wrong_number(ends, offsets) -> None:
    found = compared(*(summary(rank, each) for rank, each in enumerate(ends)))
    assert found.clocks.column("offset_ns") == offsets
    for row in found.collectives:
        assert row.skew_ns is None or 0 <= row.skew_ns <= 10


@pytest.mark.parametrize(
    ("time", "corrected"), [(EDGE, 0), (0, -EDGE), (-EDGE, -BEYOND_NS), (-(2**63), -BEYOND_NS)]
)
def test_corrected_times_are_limited(time: int, corrected: int) -> None:
    clock = Clocks(*(np.array([value]) for value in (True, EDGE, 0.0, 0, 0, 9)))
    assert clock.corrected_ns(np.array([0]), np.array([time])).tolist() == [corrected]


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
