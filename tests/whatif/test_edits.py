"""Every edit and every kind of wait on traces written by hand, with answers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import (
    REDUCES,
    SINGLE_PROCESS,
    Event,
    annotation,
    call,
    capture,
    copy,
    kernel,
    launched,
    span,
    step,
    write_capture,
)

from instrument.base.errors import CaptureError, ConfigError
from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.simulate.model import CROSS, HANDOVER, KINDS, QUEUE
from instrument.read.simulate.scenario import Scenario
from whatif import oracle
from whatif.oracle import Launch, Op, Program, Sync, Work

EVIL = "evil\x1b[31m\nname"


def whatif(folder: Path, events: list[Event]) -> Scenario:
    return capture(folder, events).whatif


def steps_us(found: Scenario) -> list[float]:
    return [each / 1000 for each in found.steps]


def positions_of_steps(found: Scenario) -> np.ndarray:
    return found.model.links.steps


def replays(found: Scenario) -> bool:
    """Whether the unedited costs give the recorded times, to the nanosecond."""
    model = found.model
    times = model.program.run(model.weights(model.measured))
    return np.array_equal(times, model.moments.time_ns)


def arcs(found: Scenario, kind: int) -> int:
    return int(np.count_nonzero(found.model.arcs.kind == kind))


def repeated(
    length_us: float, body: Callable[[int, float], list[Event]], steps: int = 4
) -> list[Event]:
    """Steps of one length; `body` gets the step's number and start."""
    found = []
    for k in range(steps):
        found += [step(k, k * length_us, length_us), *body(k, k * length_us)]
    return found


# ---- the CPU


def on_cpu(_: int, at: float) -> list[Event]:
    """A range of 400 µs with operators of 100 and 200 µs."""
    return [
        annotation("forward", at + 50, 400),
        span("aten::mm", at + 60, 100),
        span("aten::add.Tensor", at + 200, 200),
    ]


@pytest.mark.parametrize(
    ("edit", "step_us"),
    [
        ({"range": "forward"}, 800),
        ({"range": "for*"}, 800),
        ({"operator": "aten::mm"}, 950),
        ({"operator": "aten::add"}, 900),
        ({"operator": "aten::add.Tensor"}, 900),
        ({"operator": "aten::*"}, 850),
    ],
)
def test_half_of_some_cpu_time(tmp_path, edit, step_us) -> None:
    found = whatif(tmp_path, repeated(1000, on_cpu))
    assert steps_us(found.scale(**edit, by=0.5)) == [step_us] * 4
    without = found.remove(**edit)
    assert without.saving_ns == found.scale(**edit, by=0).saving_ns == (1000 - step_us) * 2000
    assert without.low_ns == without.high_ns == without.saving_ns
    assert found.scale(**edit, by=2).saving_ns == -(1000 - step_us) * 2000


def test_half_of_the_cpu_time_in_spans_of_a_thread(tmp_path) -> None:
    """From 100 to 300 µs of the second step lie 60 µs of one operator, 100 of another, and 40 between."""
    found = whatif(tmp_path, repeated(1000, on_cpu))
    thread = int(found.model.links.events.thread[positions_of_steps(found)[0]])
    spans = np.array([1_100_000]), np.array([1_300_000])
    assert steps_us(found.scale_spans(thread, spans, by=0.5)) == [1000, 900, 1000, 1000]
    assert steps_us(found.scale_spans(thread, spans, by=0)) == [1000, 800, 1000, 1000]
    with pytest.raises(ConfigError):
        found.scale_spans(thread, spans, by=-1)


def test_coroutines_whose_ranges_overlap(tmp_path) -> None:
    """`one` from 100 to 500, `two` from 300 to 700 on one thread; together they have 600 µs."""
    body = lambda _, at: [annotation("one", at + 100, 400), annotation("two", at + 300, 400)]  # noqa: E731
    found = whatif(tmp_path, repeated(1000, body))
    assert replays(found)
    for name in ("one", "two"):
        assert 0 < found.scale(range=name, by=0.5).saving_ns <= 200_000
    assert found.scale(range="*", by=0.5).saving_ns == 300_000


# ---- the loader


@pytest.mark.parametrize(
    ("load_us", "rest_us", "count", "step_us", "modest_us"),
    [
        (400, 600, 1, 600, 600),
        (900, 100, 1, 900, 900),
        (900, 100, 3, 300, 600),
        (900, 100, 20, 100, 100),
    ],
)
def test_more_workers(tmp_path, load_us, rest_us, count, step_us, modest_us) -> None:
    """A step takes what the training takes, or what one of several workers needs for its batch."""
    body = lambda _, at: [annotation(SINGLE_PROCESS, at, load_us)]  # noqa: E731
    found = whatif(tmp_path, repeated(1000, body))
    assert (load_us + rest_us, found.baseline_ns) == (1000, 1_000_000)
    edited = found.workers(count)
    assert edited.step_ns == step_us * 1000
    assert edited.low_ns == (1000 - modest_us) * 1000
    assert edited.high_ns == (1000 - step_us) * 1000


def test_the_bounds_of_workers_that_share_cpus(tmp_path) -> None:
    body = lambda _, at: [annotation(SINGLE_PROCESS, at, 600)]  # noqa: E731
    edited = whatif(tmp_path, repeated(1000, body)).workers(1.2, bounds=(0.75, 3))
    assert (edited.low_ns, edited.saving_ns, edited.high_ns) == (200_000, 500_000, 600_000)


def steps_with_waits(*waits_us: int, works_us: int = 480) -> list[Event]:
    """Each step waits for a batch of a worker process, and then works."""
    events, at = [], 0
    for number, waits in enumerate(waits_us):
        events += [
            step(number, at, waits + works_us),
            annotation(oracle.WORKERS, at, waits),
            span("aten::mm", at + waits, works_us),
        ]
        at += waits + works_us
    return events


def test_workers_that_limit_the_program_stay_as_slow(tmp_path) -> None:
    """Steps 1 to 3 wait 500 µs for the only worker; with faster operators, they wait longer."""
    found = whatif(tmp_path, steps_with_waits(20, 1000, 520, 520, works_us=480))
    assert len(found.model.batches[1]) == 4
    faster = found.scale(operator="aten::mm", by=0.5)
    assert steps_us(faster) == [260, 1480, 1000, 1000]
    # The worker is two batches ahead, so that slow steps hide it.
    assert steps_us(found.scale(operator="aten::mm", by=4))[2:] == [1940, 1940]
    assert steps_us(found.remove(range=oracle.WORKERS)) == [480] * 4
    with pytest.raises(CaptureError, match="No data loader of this capture loads its batches"):
        found.workers(4)


@pytest.mark.parametrize("workers", [None, 1, 2, 4])
def test_workers_that_are_ahead_let_steps_become_shorter(tmp_path, workers) -> None:
    """Calls that take over a batch take up to 8 of 48 ms, some of them several times as long as others."""
    events = steps_with_waits(1000, 7000, 1500, 8000, 6500, 1000, 7500, 900, 1200, works_us=40_000)
    found = with_loader(tmp_path, events, workers)
    share = found.scale(operator="aten::mm", by=0.5).saving_ns / found.baseline_ns
    assert 0.4 < share < 0.5


@pytest.mark.parametrize("workers", [None, 2])
def test_two_slow_workers_deliver_two_batches_at_a_time(tmp_path, workers) -> None:
    """Each round of 1000 µs has two batches, so that only every second step waits."""
    events = steps_with_waits(*[600, 20] * 6, works_us=190)
    found = with_loader(tmp_path, events, workers)
    assert found.scale(operator="aten::mm", by=0.5).saving_ns < 0.05 * found.baseline_ns


def test_one_batch_that_is_late_is_ordered_earlier_by_faster_steps(tmp_path) -> None:
    """It was ordered when batch 4 of 1 ms was taken, at 4020 µs, and ready after 2.9 ms."""
    waits = [20, 20, 20, 20, 20, 20, 920, 20, 20, 20, 20]
    found = with_loader(tmp_path, steps_with_waits(*waits, works_us=980), 1)
    after = found.scale(operator="aten::mm", by=0.5)
    assert steps_us(after)[1:6] == [510] * 5
    # Batch 4 is now taken at 2060 µs, so that batch 6, asked for at 3060 µs, is ready at 4960 µs.
    assert steps_us(after)[6] == 1900 + 490


def with_loader(folder: Path, events: list[Event], workers: int | None) -> Scenario:
    loaders = [{"phase": "train", "workers": workers, "prefetch_factor": 2}] if workers else []
    return write_capture(folder, events, environment={"loaders": loaders}).whatif


def test_a_note_says_that_batches_of_workers_come_when_they_came(tmp_path) -> None:
    """Only if a step waits for one with the edits; the first step does not count."""
    name = oracle.WORKERS

    def steps_that_wait(*waiting: int) -> list[Event]:
        def body(k: int, at: float) -> list[Event]:
            waits = 520 if k in waiting else 20
            return [annotation(name, at, waits), span("aten::mm", at + waits, 1000 - waits)]

        return repeated(1000, body)

    def has_note(found: Scenario) -> bool:
        return any("a worker needs as long for a batch" in note for note in found.notes)

    found = whatif(tmp_path, steps_that_wait(1, 3))
    assert has_note(found)
    assert has_note(found.scale(operator="aten::mm", by=0.5))
    assert not has_note(found.scale(operator="aten::mm", by=3)), "a slow step waits for no batch"
    assert not has_note(found.remove(range=name))
    assert not has_note(whatif(tmp_path, steps_that_wait(0)))
    assert not has_note(whatif(tmp_path, steps_that_wait()))
    # One batch that was ordered before the window, by the first step: how long it took is not known.
    got = [has_note(whatif(tmp_path, steps_that_wait(k))) for k in (1, 2, 3)]
    assert got == [False, True, True]


# ---- the device


def polling(until_us: float) -> Callable[[int, float], list[Event]]:
    """In a range, the CPU does nothing from its launch on until a time; the device works for 5 ms."""

    def body(k: int, at: float) -> list[Event]:
        return [
            *launched("gemm", at, at + 10, 4000, 3 * k + 1),
            annotation("dispatch", at + 100, until_us),
            *launched("notify", at + 110, at + 4010, 1000, 3 * k + 2),
            span("aten::empty", at + until_us, 10),
            *launched(
                "scatter", at + until_us + 20, max(at + until_us + 30, at + 5020), 500, 3 * k + 3
            ),
        ]

    return body


@pytest.mark.parametrize("until_us", [4980, 5010, 5030])
def test_a_thread_that_polls_until_a_kernel_ends_does_no_work(tmp_path, until_us) -> None:
    found = whatif(tmp_path, repeated(8000, polling(until_us)))
    assert replays(found)
    cpu_ns = {row.name: row.cpu_ns for row in found.profile() if row.kind == "range"}
    assert cpu_ns["dispatch"] < 300_000
    on_path = {row.name: row.step_ns for row in found.critical_path if row.kind == "CPU"}
    assert on_path.get("dispatch", 0) < 300_000
    assert found.scale(kernel="gemm", by=0.5).saving_ns == 2_000_000


@pytest.mark.parametrize("until_us", [2500, 4800, 5300, 7000])
def test_a_thread_that_works_beside_a_kernel_does_not_poll(tmp_path, until_us) -> None:
    found = whatif(tmp_path, repeated(8000, polling(until_us)))
    cpu_ns = {row.name: row.cpu_ns for row in found.profile() if row.kind == "range"}
    assert cpu_ns["dispatch"] > (until_us - 300) * 1000


def test_a_full_queue_makes_launches_free(tmp_path) -> None:
    """2600 kernels of 100 µs, launched in 4 µs each: only the device counts, however fast the CPU is."""
    body = (Launch("gemm", 100_000),) * 1300
    program = Program({1: tuple(oracle.step(k, *body) for k in range(2))})
    recorded = oracle.run(program)
    found = whatif(tmp_path, recorded.events)
    assert arcs(found, QUEUE) > 200
    for kind, ours, by in (
        ("call", "operator", 0.5),
        ("kernel", "kernel", 0.5),
        ("call", "operator", 2.0),
    ):
        name = "cudaLaunchKernel" if kind == "call" else "gemm"
        right = oracle.run(oracle.scaled(program, kind, name, by), recorded).steps
        assert found.scale(**{ours: name}, by=by).steps == right
    assert found.scale(operator="cudaLaunchKernel", by=0.5).saving_ns == 0


def behind_a_copy(k: int, at: float) -> list[Event]:
    """A blocking copy from 20 to 320 in a call until 330, then a kernel of 100 and a wait for it."""
    first = 10 * k + 1
    return [
        call("cudaMemcpyAsync", at + 10, 320, first),
        {**copy(at + 20, 300, tid=7, correlation=first), "name": oracle.PAGEABLE},
        *launched("gemm", at + 400, at + 410, 100, first + 1),
        span("aten::item", at + 415, 205),
        call("cudaStreamSynchronize", at + 420, 110, first + 2),
    ]


def test_copies_that_overlap_and_calls_that_wait(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, behind_a_copy))
    assert replays(found)
    # The call returns 10 µs after the copy, and takes as long without it.
    assert found.overlap().saving_ns == 310_000
    # Where the call still waits, only the copy's own time is won.
    assert found.overlap().low_ns == 300_000 + 10_000
    assert found.scale(kernel="Memcpy*", by=0.5).saving_ns == 150_000
    # All of the 110 µs goes, or all but the call's own time: 20 µs after the kernel has ended.
    assert found.remove(operator="cudaStreamSynchronize").saving_ns == 110_000
    assert found.asynchronous(sync="aten::item").saving_ns == 90_000
    # An operator goes with the wait in it.
    assert found.remove(operator="aten::item").saving_ns == 205_000
    # Its CPU time alone: what it does before the wait is no loss, as the kernel runs meanwhile.
    assert found.scale(operator="aten::item", by=0).saving_ns == 90_000


def test_edits_by_position_leave_other_events(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, behind_a_copy))
    events = found.model.links.events
    copies = np.flatnonzero(events.named(lambda name: name == oracle.PAGEABLE))
    assert found.overlap(positions=copies).saving_ns == found.overlap().saving_ns
    assert found.overlap(positions=copies[:0]).saving_ns == 0
    kernels = np.flatnonzero(events.named(lambda name: name == "gemm"))
    assert found.scale_events(kernels, 0.5).saving_ns == 50_000
    assert found.scale_events(kernels, 0.5, device=False).saving_ns == 0


def test_a_range_as_a_graph(tmp_path) -> None:
    """A range of 300 µs with three launches costs one launch of a graph, which takes 10 µs."""

    def body(k: int, at: float) -> list[Event]:
        launches = [
            launched("relu", at + 120 + 80 * n, at + 130 + 80 * n, 20, 10 * k + n + 1)
            for n in range(3)
        ]
        return [annotation("block", at + 100, 300), *(each for pair in launches for each in pair)]

    found = whatif(tmp_path, repeated(1000, body))
    assert found.graph_launch(range="block").saving_ns == 290_000
    empty = whatif(tmp_path, repeated(1000, on_cpu))
    with pytest.raises(CaptureError, match="forward launches no device work"):
        empty.graph_launch(range="forward")


def test_the_rows_of_a_graph_follow_each_other(tmp_path) -> None:
    """One call launches three kernels of 100 µs, 2 µs apart, and the step waits for them."""

    def body(k: int, at: float) -> list[Event]:
        rows = [kernel(f"k{n}", at + 20 + 102 * n, 100, correlation=2 * k + 1) for n in range(3)]
        return [call("cudaGraphLaunch", at + 10, 8, 2 * k + 1), *rows]

    events = repeated(1000, body)
    events += [call("cudaDeviceSynchronize", k * 1000 + 30, 300, 1000 + k) for k in range(4)]
    found = whatif(tmp_path, events)
    assert replays(found)
    assert found.scale(kernel="k1", by=0.5).saving_ns == 50_000
    assert found.scale(kernel="k?", by=0.5).saving_ns == 150_000


def test_work_without_a_launch_comes_when_it_came(tmp_path) -> None:
    """Nothing is known of its cause: a faster CPU does not move it."""
    events = [*repeated(1000, on_cpu), kernel("from before", 3900, 50)]
    found = whatif(tmp_path, events)
    assert replays(found)
    faster = found.scale_events(positions_of_steps(found), by=0.5)
    assert steps_us(faster) == [500] * 4
    times = found.model.program.run(found.model.weights(faster.variants[0].costs))
    assert times[found.model.moments.end_of].tolist() == [3_950_000]


def across(_: int, at: float) -> list[Event]:
    """On stream 9 a kernel waits for one of 200 µs on stream 7; its start shows it: 2 µs after."""
    first = int(at) + 1
    return [
        *launched("slow", at + 10, at + 20, 200, first),
        call("cudaEventRecord", at + 16, 1, first + 1),
        call("cudaStreamWaitEvent", at + 18, 1, first + 2),
        *launched("after", at + 20, at + 222, 100, first + 3, tid=9),
        call("cudaDeviceSynchronize", at + 30, 300, first + 4),
    ]


def test_work_that_waits_for_another_stream(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, across))
    assert replays(found)
    assert arcs(found, CROSS) == 4, KINDS[CROSS]
    assert found.scale(kernel="slow", by=0.5).saving_ns == 100_000
    assert found.scale(kernel="*", by=0.5).saving_ns == 150_000


def test_a_wait_that_comes_to_bind_when_another_one_is_gone(tmp_path) -> None:
    """The second synchronisation waits for stream 9 too, once the first one no longer does."""
    body = (
        Launch("long", 400_000, 9),
        Op("first", (Work(1600), Sync())),
        Launch("short", 100_000, 7),
        Op("second", (Work(1600), Sync())),
        Work(80_000),
    )
    program = Program({1: tuple(oracle.step(k, *body) for k in range(4))})
    recorded = oracle.run(program)
    found = whatif(tmp_path, recorded.events).remove(operator="first")
    assert found.steps == oracle.run(oracle.removed(program, "operator", "first"), recorded).steps


# ---- other ranks


def with_a_collective(k: int, at: float) -> list[Event]:
    """A kernel of 600 µs, then an all-reduce of 200 µs; the step waits for both."""
    first = 10 * k + 1
    return [
        *launched("gemm", at + 10, at + 20, 600, first),
        *launched(REDUCES, at + 20, at + 620, 200, first + 1),
        call("cudaDeviceSynchronize", at + 30, 800, first + 2),
    ]


def test_one_rank_gives_both_bounds(tmp_path) -> None:
    """The others are faster too, or come as late as they came."""
    found = whatif(tmp_path, repeated(1000, with_a_collective))
    faster = found.scale(kernel="gemm", by=0.5)
    assert (faster.low_ns, faster.saving_ns, faster.high_ns) == (0, 300_000, 300_000)
    assert any("Other ranks are not in this capture" in note for note in faster.notes)
    wider = found.bandwidth(2)
    assert (wider.low_ns, wider.saving_ns, wider.high_ns) == (0, 100_000, 100_000)


def test_bandwidth_of_chosen_collectives(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, with_a_collective))
    communication = found.model.work
    sent = communication.event[communication.kind == COMMUNICATION]
    assert found.bandwidth(2, positions=sent).saving_ns == found.bandwidth(2).saving_ns > 0
    assert found.bandwidth(2, positions=sent[:0]).saving_ns == 0


def late_after_the_first(k: int, at: float) -> list[Event]:
    """All-reduces of 200 and, in the steps that count, 500 µs move as much: 300 µs are a wait."""
    lasts = 200 if k == 0 else 500
    reduce = launched(REDUCES, at + 10, at + 20, lasts, 2 * k + 1)
    return [*reduce, call("cudaDeviceSynchronize", at + 30, lasts, 100 + k)]


def test_without_late_ranks_a_collective_takes_its_transfer_time(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, late_after_the_first)).no_late_ranks()
    assert (found.low_ns, found.saving_ns) == (0, 300_000)
    with pytest.raises(CaptureError, match="no communication"):
        whatif(tmp_path, repeated(1000, on_cpu)).no_late_ranks()


def test_bandwidth_leaves_the_wait_for_other_ranks(tmp_path) -> None:
    found = whatif(tmp_path, repeated(1000, late_after_the_first))
    assert found.bandwidth(4).saving_ns == 150_000
    with pytest.raises(CaptureError, match="no communication"):
        whatif(tmp_path, repeated(1000, on_cpu)).bandwidth(2)


# ---- traces that hold little, or too much


def test_without_steps_the_window_is_one_step(tmp_path) -> None:
    found = whatif(tmp_path, on_cpu(0, 100))
    assert steps_us(found) == [400]
    assert any("no whole step" in note for note in found.notes)
    assert steps_us(found.scale(range="forward", by=0.5)) == [200]


@pytest.mark.parametrize("events", [[], [kernel("gemm", 0, 10)]], ids=["empty", "device alone"])
def test_without_cpu_events_there_is_one_clear_sentence(tmp_path, events) -> None:
    with pytest.raises(CaptureError, match="no CPU events, so no step can be simulated: record"):
        whatif(tmp_path, events)


def test_a_trace_that_is_too_long(tmp_path) -> None:
    a_hundred_days = span("aten::mm", 0, 100 * 86_400 * 10**6)
    others = [span("aten::mm", 0, 10, tid=number) for number in range(2, 1100)]
    with pytest.raises(CaptureError, match="too long to simulate: record a shorter window"):
        whatif(tmp_path, [a_hundred_days, *others])


def test_events_without_duration_at_one_time(tmp_path) -> None:
    at_once = [
        *(span("aten::mm", 500, 0) for _ in range(3)),
        *(call("cudaLaunchKernel", 500, 0, k) for k in range(1, 4)),
        *(kernel("gemm", 500, 0, correlation=k) for k in range(1, 4)),
        call("cudaDeviceSynchronize", 500, 0, 9),
    ]
    found = whatif(tmp_path, [step(0, 0, 500), *at_once, step(1, 500, 500)])
    assert replays(found)
    assert steps_us(found.scale(kernel="*", by=0.5)) == [500, 500]
    assert steps_us(found.scale_events(positions_of_steps(found), by=0.5)) == [250, 250]


def test_a_thread_that_runs_beside_hands_nothing_over(tmp_path) -> None:
    """It works the whole time, so the main thread cannot have waited for it."""
    events = [*repeated(1000, on_cpu), span("background", 0, 5000, tid=9)]
    found = whatif(tmp_path, events)
    assert arcs(found, HANDOVER) == 0
    assert found.scale(operator="background", by=0.5).saving_ns == 0


# ---- what the caller gets wrong


@pytest.mark.parametrize("kind", ["range", "operator", "kernel"])
@pytest.mark.parametrize("edit", ["scale", "remove"])
def test_a_glob_that_matches_nothing(tmp_path, kind, edit) -> None:
    found = whatif(tmp_path, repeated(1000, behind_a_copy) + on_cpu(9, 5000))
    more = {"by": 0.5} if edit == "scale" else {}
    with pytest.raises(ConfigError) as raised:
        getattr(found, edit)(**{kind: "no\x1bsuch"}, **more)
    text = str(raised.value)
    assert text.startswith("No ")
    assert "the capture has " in text
    assert text.isprintable()


def test_names_are_data(tmp_path) -> None:
    events = [
        *(annotation(EVIL, 1000 * k + 10, 400) for k in range(3)),
        *(step(k, 1000 * k, 1000) for k in range(3)),
        span(EVIL, 50, 100),
    ]
    found = whatif(tmp_path, events)
    for kind in ("range", "operator"):
        with pytest.raises(ConfigError) as raised:
            found.scale(**{kind: "evil"}, by=0.5)
        assert "evil" in str(raised.value)
        assert str(raised.value).isprintable()
    # A name in full is no glob.
    assert found.scale(range=EVIL, by=0.5).saving_ns == 200_000
    starred = whatif(
        tmp_path, [step(0, 0, 100), annotation("[a*", 0, 50), annotation("other", 60, 20)]
    )
    assert steps_us(starred.scale(range="[a*", by=0)) == [50]
    assert repr(found.scale(range=EVIL, by=0.5)).isprintable()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.scale(by=0.5), "0 of range, operator, layer, kernel"),
        (lambda w: w.scale(range="a", kernel="b", by=0.5), "2 of range, operator, layer, kernel"),
        (lambda w: w.remove(), "0 of range, operator, layer, kernel"),
        (lambda w: w.scale(range="forward", by=-1), "by is -1; give a number of at least 0"),
        (lambda w: w.scale(range="forward", by=float("nan")), "by is nan"),
        (lambda w: w.scale(range="forward", by=float("inf")), "by is inf"),
        (lambda w: w.workers(0), "workers is 0; give a positive number"),
        (lambda w: w.bandwidth(0), "bandwidth is 0"),
        (lambda w: w.asynchronous(), "No synchronising call matches '\\*'"),
        (lambda w: w.overlap(), "No copy matches 'Memcpy\\*': the capture has none"),
        (lambda w: w.graph_launch(range="x"), "No range matches 'x': the capture has forward"),
    ],
)
def test_a_wrong_argument_gives_one_clear_sentence(tmp_path, edit, message) -> None:
    with pytest.raises(ConfigError, match=message):
        edit(whatif(tmp_path, repeated(1000, on_cpu)))


def test_a_path_from_the_root_on_is_only_this_range(tmp_path) -> None:
    """`rows` is the name of two ranges, and `/rows` the path of one."""
    events = [
        event
        for k in range(3)
        for event in (
            step(k, 1000 * k, 1000),
            annotation("rows", 1000 * k + 10, 200),
            annotation("val", 1000 * k + 300, 500),
            annotation("rows", 1000 * k + 400, 300),
        )
    ]
    found = whatif(tmp_path, events)
    assert found.remove(range="rows").saving_ns == 500_000
    assert found.remove(range="/rows").saving_ns == 200_000
    assert found.remove(range="/val/rows").saving_ns == 300_000
