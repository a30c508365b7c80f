"""Which work each wait waits for: by hand for each kind, and against HTA 0.5.0's critical path."""

from __future__ import annotations

import numpy as np
import pytest
import real_traces
from builders import (
    Event,
    annotation,
    call,
    capture,
    copy,
    kernel,
    launched,
    made,
    node,
    span,
    synchronisation,
)
from golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from real_traces import load, needs_traces

from capture.plain_loops import raw
from instrument.read.capture import Capture
from instrument.read.facts.synchronisation import KINDS, STREAM_WAIT

RECORD, STREAM_SYNC, DEVICE_SYNC = (
    "cudaEventRecord",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)
EVENT_SYNC, WAIT_EVENT = "cudaEventSynchronize", "cudaStreamWaitEvent"
PAGEABLE, PINNED = "Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)"


def edges(found: Capture) -> list[tuple[str, str, str, bool, float]]:
    """Kind, earlier, later, whether the trace states it, and the µs waited."""
    links = found.links.synchronisations
    names = [found.events.names[code] for code in found.events.name]
    columns = (links.wait, links.earlier, links.later, links.recorded, links.waited_ns)
    return [
        (KINDS[links.kind[wait]], names[earlier], names[later], recorded, waited / 1000)
        for wait, earlier, later, recorded, waited in zip(*(each.tolist() for each in columns))
    ]


# On stream 7 from 10 to 30, on stream 9 from 30 to 60.
A, B = launched("a", 0, 10, 20, 1), launched("b", 6, 30, 30, 2, tid=9)
AFTER_A = call(STREAM_SYNC, 12, 20, 3)
AFTER_BOTH = [call(DEVICE_SYNC, 12, 53, 3), call(DEVICE_SYNC, 70, 2, 4)]
STATED = [
    synchronisation("Context Sync", 13, 51, tid=-1, correlation=3),
    synchronisation("Context Sync", 71, 1, tid=-1, correlation=4),
]
# a is launched before the event on stream 7, b7 (30 to 60) after it; c runs on stream 9 from 31.
B7, EVENT = launched("b7", 8, 30, 30, 5), call(RECORD, 6, 1, 2)
C, OF_C = launched("c", 16, 31, 9, 6, tid=9), call(WAIT_EVENT, 14, 1, 3)
BEFORE_C = launched("before c", 1, 12, 13, 7, tid=9)
OF_EVENT = {"wait_on_stream": 7, "wait_on_cuda_event_id": 1, "correlation": 3}
AT_EVENT = {**OF_EVENT, "wait_on_cuda_event_record_corr_id": 2}
STATED_C = synchronisation("Stream Wait Event", 14, 1, tid=9, **AT_EVENT)
AFTER_EVENT = call(EVENT_SYNC, 14, 19, 3)


def hip(events: list[Event]) -> list[Event]:
    return [{**event, "name": event["name"].replace("cuda", "hip")} for event in events]


CASES = {
    "a stream that the trace states": [*A, *B, AFTER_A, synchronisation("Stream Sync", 13, 18, correlation=3)],
    "work that ended after the call, as far as the clocks may differ":
        [*A, call(STREAM_SYNC, 12, 8, 3), synchronisation("Stream Sync", 13, 6, correlation=3)],
    "work that ended a nanosecond later than that":
        [*A, call(STREAM_SYNC, 12, 7.999, 3), synchronisation("Stream Sync", 13, 6, correlation=3)],
    "a copy that the trace states to wait for its stream": [
            *[*A, call("cudaMemcpyAsync", 12, 38, 3), {**copy(40, 8, correlation=3), "name": PAGEABLE}],
            synchronisation("Stream Sync", 45, 4, correlation=3),
        ],
    "its row in traces since 2026":
        [*A, *B, AFTER_A, synchronisation("Stream Sync", 13, 18, tid=1_000_007, correlation=3)],
    "the trace has no call": [*A, *B, synchronisation("Stream Sync", 13, 18, correlation=3)],
    "the stream whose work ended just before": [*A, *B, AFTER_A],
    "not the stream of its thread, as its work ended long before":
        [*A, *launched("long", 2, 30, 170, 4, tid=9), *launched("own", 8, 30, 10, 5), call(STREAM_SYNC, 15, 190, 3)],
    "not a stream that still ran, though some of its work had just ended": [
            *[*launched("first", 2, 10, 20, 4, tid=9), *launched("second", 3, 30, 30, 5, tid=9)],
            *[*launched("own", 8, 10, 2, 6), call(STREAM_SYNC, 15, 17, 3)],
        ],
    "what ran last, whichever call began first":
        [*launched("ran first", 8, 10, 5, 1), *launched("ran last", 6, 15, 15, 2), AFTER_A],
    "the stream on which its thread launched, if nothing ended during the call": [*B, *A, call(STREAM_SYNC, 80, 2, 3)],
    "nothing, if its thread launched nothing": [*A, *B, call(STREAM_SYNC, 80, 2, 3, tid=5)],
    "work that ended after the call is not what it waited for": [*B, call(STREAM_SYNC, 12, 20, 3)],
    "a device that the trace states": [*A, *B, *AFTER_BOTH, *STATED],
    "the only device": [*A, *B, *AFTER_BOTH],
    "the only device, on which other work ended later":
        [*A, *launched("late", 6, 30, 60, 2), call(DEVICE_SYNC, 12, 20, 3)],
    "one of two devices that the trace states": [*A, *launched("b", 6, 30, 30, 2, pid=1), *AFTER_BOTH, *STATED],
    "one of two devices, whose work ended just before": [*A, *launched("b", 6, 30, 30, 2, pid=1), *AFTER_BOTH],
    "work from before the recording":
        [kernel("before", 10, 20), *launched("a", 40, 50, 5, 1), call(DEVICE_SYNC, 5, 28, 3)],
    "an event that the trace states":
        [EVENT, *A, *B7, AFTER_EVENT, synchronisation("Event Sync", 15, 17, tid=-1, **AT_EVENT)],
    "an event whose record is not stated: b7 ended later, so nothing is known":
        [*A, *B7, AFTER_EVENT, synchronisation("Event Sync", 15, 17, tid=-1, **OF_EVENT)],
    "an event that was recorded again later":
        [*A, AFTER_EVENT, call(RECORD, 40, 1, 2), synchronisation("Event Sync", 15, 17, tid=-1, **AT_EVENT)],
    "an event on a stream that Kineto does not know":
        [*A, AFTER_EVENT, synchronisation("Event Sync", 15, 17, tid=-1, correlation=3, wait_on_stream=-1)],
    "the work that ended just before": [*A, EVENT, *B7, AFTER_EVENT],
    "its call is not in the trace: it may be a query":
        [*A, EVENT, *B7, synchronisation("Event Sync", 15, 17, tid=-1, **AT_EVENT)],
    "nothing ended during the call": [*A, EVENT, call(EVENT_SYNC, 40, 2, 3)],
    "a query does not wait":
        [*A, EVENT, call("cudaEventQuery", 35, 2, 3), synchronisation("Event Sync", 35, 1, tid=-1, **AT_EVENT)],
    "a copy to pageable memory":
        [call("cudaMemcpyAsync", 20, 30, 1), kernel("k", 0, 40), {**copy(40, 8, correlation=1), "name": PAGEABLE}],
    "not a copy to pinned memory, even if it was fast":
        [call("cudaMemcpyAsync", 20, 30, 1), {**copy(40, 8, correlation=1), "name": PINNED}],
    "a call that blocks": [call("hipMemcpyWithStream", 20, 30, 1), {**copy(40, 8, correlation=1), "name": PINNED}],
    "not a copy that ended after its call":
        [call("cudaMemcpyAsync", 20, 20, 1), {**copy(30, 18, correlation=1), "name": PAGEABLE}],
    "a stream that the trace states to wait": [*A, EVENT, *B7, OF_C, STATED_C, *C],
    "it was free only after its own work": [*A, *BEFORE_C, EVENT, *B7, OF_C, STATED_C, *C],
    "its own work is the first of the file": [*BEFORE_C, *A, EVENT, *B7, OF_C, STATED_C, *C],
    "its event's record is not stated: b7 ended later":
        [*A, *B7, OF_C, synchronisation("Stream Wait Event", 14, 1, tid=9, **OF_EVENT), *C],
    "its event's record is not stated, and a was last":
        [*A, OF_C, synchronisation("Stream Wait Event", 14, 1, tid=9, **OF_EVENT), *C],
    "a stream waits for itself": [
            *[*A, EVENT, OF_C, synchronisation("Stream Wait Event", 14, 1, tid=7, **AT_EVENT)],
            *launched("c", 16, 31, 9, 6),
        ],
    "the work that ended just before c": [*A, EVENT, *B7, OF_C, *C],
    "work that was launched after the event ended even later":
        [*A, EVENT, *launched("late", 8, 30, 0.5, 8, tid=8), OF_C, *C],
    "c was launched as a ended": [*A, *BEFORE_C, EVENT, OF_C, *launched("c", 30, 40, 9, 6, tid=9)],
    "c was launched a nanosecond before a ended": [*A, *BEFORE_C, EVENT, OF_C, *launched("c", 29.999, 40, 9, 6, tid=9)],
    "without calls that record": [*A, OF_C, *C],
    "its own work ended later": [*A, *launched("before c", 1, 12, 19, 7, tid=9), EVENT, OF_C, *C],
    "other work was launched in between":
        [*A, EVENT, call(WAIT_EVENT, 7, 1, 3), *launched("between", 8, 9, 1, 8, tid=9), *C],
    "another thread waited": [*A, EVENT, call(WAIT_EVENT, 14, 1, 3, tid=5), *C],
    "a ended long before c": [*A, EVENT, OF_C, *launched("c", 16, 61, 9, 6, tid=9)],
    "c was launched after the end of a": [*A, EVENT, OF_C, *launched("c", 31, 40, 9, 6, tid=9)],
    "a was launched after the event": [call(RECORD, 0, 1, 2), *launched("a", 2, 10, 20, 1), OF_C, *C],
    "another wait is stated, so that Kineto left this one out":
        [*A, EVENT, OF_C, *C, call(WAIT_EVENT, 90, 1, 8), synchronisation("Stream Wait Event", 90, 1, correlation=8)],
    "the first kernel of a graph": [*A, EVENT, OF_C, *C, kernel("second", 42, 3, tid=9, correlation=6)],
    "on another device": [*launched("a", 0, 10, 20, 1, pid=1), EVENT, OF_C, *C],
}  # fmt: skip


def test_what_a_wait_waits_for_by_hand(tmp_path, golden: Golden) -> None:
    """The work before, what waits for it, whether the trace states it, and the µs waited; checked by hand."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        expected, calls = edges(found), found.links.synchronisations.call.tolist()
        assert len(calls) == len({*calls}), "each call is one wait"
        assert sorted(edges(capture(tmp_path, events[::-1]))) == sorted(expected)
        on_rocm = edges(capture(tmp_path, hip(events)))
        assert [each[:2] + each[3:] for each in on_rocm] == [
            each[:2] + each[3:] for each in expected
        ]
        told.append("\n".join([f"{name}:", *map(str, expected)]))
    golden("synchronisations.txt", "\n".join(told))


def item(start: float, first: int) -> list[Event]:
    """`aten::item` for 30 µs: a copy of 2 µs after 10, whose call lasts 14, and a wait of 5."""
    return [
        span("aten::item", start, 30),
        span("aten::_local_scalar_dense", start + 1, 28),
        call("cudaMemcpyAsync", start + 2, 14, first),
        {**copy(start + 10, 2, correlation=first, tid=7), "name": PAGEABLE},
        call(STREAM_SYNC, start + 20, 5, first + 1),
    ]


# item waits for 2 → 12 and not at all after that, twice in `loss`, once outside; in the backward of `loss`, stream 9
# waits for stream 7 from 310, when its work was launched, until 330, and an unknown wait of 3 takes place.
PLACES = [
    annotation("step", 0, 400, tid=1),
    annotation("loss", 90, 110),
    made("aten::mul", 91, 2, 1),
    *item(100, 10),
    *item(140, 20),
    *item(220, 30),
    node("MulBackward0", 300, 60, 1),
    call(WAIT_EVENT, 304, 1, 41, tid=2),
    *({**event, "tid": 2} if event["cat"] == "cuda_runtime" else event for event in launched("c", 310, 331, 9, 42, tid=9)),
    *launched("a", 295, 305, 25, 40),
    call(EVENT_SYNC, 350, 3, 43, tid=2),
]  # fmt: skip


def test_the_places_that_wait_by_hand(tmp_path) -> None:
    rows = [tuple(row) for row in capture(tmp_path, PLACES).synchronisations]
    engine = "autograd::engine::evaluate_function: MulBackward0"
    assert rows == [
        ("cudaMemcpyAsync", "aten::item", "step/loss", 2, 28_000, 20_000, None, 0, 7, None, PAGEABLE, 2, 0),
        (WAIT_EVENT, engine, "step/loss", 1, 1_000, None, 20_000, 0, 7, 9, "a", 1, 0),
        ("cudaMemcpyAsync", "aten::item", "step", 1, 14_000, 10_000, None, 0, 7, None, PAGEABLE, 1, 0),
        (STREAM_SYNC, "aten::item", "step/loss", 2, 10_000, 0, None, 0, 7, None, PAGEABLE, 2, 0),
        (STREAM_SYNC, "aten::item", "step", 1, 5_000, 0, None, 0, 7, None, PAGEABLE, 1, 0),
        (EVENT_SYNC, engine, "step/loss", 1, 3_000, None, None, None, None, None, None, 0, 0),
    ]  # fmt: skip


def test_a_call_counts_for_the_work_that_ended_last(tmp_path) -> None:
    """And work that two waits delay counts once, for the one that ended last: 14 of 14 µs."""
    row = capture(tmp_path, [*A, *B, *AFTER_BOTH, *STATED]).synchronisations[0]
    assert (row.stream, row.kernel, row.cpu_wait_ns) == (9, "b", 48_000)
    assert (row.calls, row.recorded_calls) == (2, 2)
    twice = [
        *A,
        *launched("d", 2, 10, 15, 8, tid=11),
        EVENT,
        OF_C,
        STATED_C,
        call(WAIT_EVENT, 15, 1, 9),
        synchronisation("Stream Wait Event", 15, 1, tid=9, wait_on_stream=11, correlation=9),
        *C,
    ]
    found = capture(tmp_path / "twice", twice).synchronisations
    assert [(row.stream, row.stream_wait_ns) for row in found] == [(7, 14_000), (11, 0)]


def test_a_place_names_the_work_that_it_waited_for_longest(tmp_path) -> None:
    events = [
        A[1],
        A[0],
        call(STREAM_SYNC, 12, 20, 3),
        span("first", 0, 300),
        span("second", 0, 250),
    ]
    for k, start in enumerate((100, 200), 10):
        events += [
            *launched("often", start, start + 6, 2, k),
            call(STREAM_SYNC, start + 5, 9, k + 10),
        ]
    (row,) = capture(tmp_path, events).synchronisations
    assert (row.calls, row.kernel, row.cpu_wait_ns) == (3, "a", 18_000 + 2 * 3_000)
    assert (row.operator, row.range) == ("first", None)


def test_calls_that_do_not_wait(tmp_path) -> None:
    """A copy from pageable memory goes on after its call has returned."""
    late = [call("cudaMemcpyAsync", 40, 10, 8), {**copy(45, 18, correlation=8), "name": PAGEABLE}]
    found = capture(tmp_path, [*A, EVENT, *late])
    assert len(found.synchronisations) == len(found.links.synchronisations.wait) == 0


SYNCS = st.builds(
    lambda kind, start, length, tid, args: synchronisation(kind, start, length, tid=tid, **args),
    st.sampled_from(["Stream Sync", "Context Sync", "Event Sync", "Stream Wait Event", "else"]),
    st.integers(0, 60),
    st.integers(0, 40),
    st.sampled_from([7, 9, -1, 1_000_007, 10**12, "stream 7"]),
    st.fixed_dictionaries(
        {},
        optional={
            "correlation": st.sampled_from([-1, 0, 1, 2, 3, 4, 2**62, 10**30]),
            "wait_on_stream": st.sampled_from([-1, 7, 9, 2**63, "x", None]),
            "wait_on_cuda_event_record_corr_id": st.sampled_from([-1, 0, 1, 3, 2**62, 10**30]),
        },
    ),
)
CALLS = st.builds(
    call,
    st.sampled_from([RECORD, STREAM_SYNC, DEVICE_SYNC, EVENT_SYNC, WAIT_EVENT, "cudaLaunchKernel", "cudaMemcpy"]),
    st.integers(0, 60),
    st.integers(0, 40),
    st.sampled_from([0, 1, 2, 3, 4, 5]),
    tid=st.sampled_from([1, 2]),
)  # fmt: skip
WORK = st.builds(
    lambda name, start, length, correlation, tid: kernel(name, start, length, correlation=correlation, tid=tid),
    st.sampled_from(["a", PAGEABLE]),
    st.integers(-5, 90),
    st.integers(0, 30),
    st.sampled_from([0, 1, 2, 3, 4, 5]),
    st.sampled_from([7, 9]),
)  # fmt: skip


@given(st.lists(st.one_of(SYNCS, CALLS, WORK), max_size=14))
def test_any_trace_gives_edges_that_point_forward(tmp_path, made: list[Event]) -> None:
    found = capture(tmp_path, made)
    events, links = found.events, found.links.synchronisations
    assert np.isin(links.earlier, found.work.event).all()
    starts = np.where(
        links.kind[links.wait] == STREAM_WAIT,
        events.start_ns[links.later],
        events.end_ns[links.later],
    )
    late = events.end_ns[links.earlier] - starts
    assert (late[~links.recorded] <= 0).all()
    assert (late <= 10_000).all()
    assert (links.waited_ns >= 0).all()
    table = found.synchronisations
    assert sum(table.column("calls")) == len(links.call)
    assert all(row.known_calls >= row.recorded_calls for row in table)
    assert all((row.cpu_wait_ns or 0) <= row.cpu_ns for row in table)
    assert all((row.blocked_ns or 0) == 0 for row in found.queue)


# The correlations of the synchronising edges in HTA's critical path: earlier, later.
HTA_STREAMS = {
    (k, k + 1) for k in (14, 25, 40, 51, 62, 73, 84, 95, 106, 117, 132, 143, 158, 169, 184, 195)
}
HTA_DEVICE = {
    *((218, 225), (5190, 5503), (5498, 5503), (5190, 5511), (5498, 5511)),
    *((5606, 5894), (5889, 5894), (5606, 5909), (5889, 5909)),
}
# HTA repeats these: nothing ran on stream 20 since the synchronisation before.
REPEATED = {(5190, 5511), (5606, 5909)}
# HTA has these in another recording of the same program, whose calls of cudaEventRecord are in the trace.
HTA_WAITS = {(5144, 5181), (5178, 5188), (5190, 5213), (5560, 5597), (5594, 5604), (5606, 5629)}  # fmt: skip


def correlated(found: Capture, kinds: set[str]) -> set[tuple[int, int]]:
    events, links = found.events, found.links.synchronisations
    chosen = np.isin(links.kind[links.wait], [KINDS.index(kind) for kind in kinds])
    sides = (events.correlation[side[chosen]].tolist() for side in (links.earlier, links.later))
    return set(zip(*sides))


@needs_traces
def test_the_edges_are_those_of_hta(tmp_path) -> None:
    """Also without the cuda_sync events, but then only one of six streams that wait is sure."""
    found = load("hta_simple_add")
    on_cpu = {"stream", "device"}
    assert correlated(found, on_cpu) == HTA_STREAMS | HTA_DEVICE - REPEATED
    assert correlated(found, {"stream wait"}) == HTA_WAITS
    assert found.links.synchronisations.recorded.sum() == 16 + 7
    events = raw(real_traces.path("hta_simple_add"))
    bare = capture(tmp_path, [event for event in events if event.get("cat") != "cuda_sync"])
    assert correlated(bare, on_cpu) == HTA_STREAMS | HTA_DEVICE - REPEATED
    assert correlated(bare, {"stream wait"}) == {(5606, 5629)}
    assert not bare.links.synchronisations.recorded.any()


@needs_traces
@pytest.mark.parametrize(
    ("name", "count"),
    real_traces.each(
        (f"a100_megatron_tp8_rank{rank}", count)
        for rank, count in enumerate([157, 168, 165, 167, 168, 168, 162, 168])
    ),
)
def test_streams_that_wait_for_collectives_and_for_their_input(name: str, count: int) -> None:
    """Each of 84 all-reduces waits for its input, and the stream of the computation for each all-reduce: 168 at most."""
    found = load(name)
    events, links = found.events, found.links.synchronisations
    of_stream = links.kind[links.wait] == STREAM_WAIT
    pairs = list(zip(links.earlier[of_stream].tolist(), links.later[of_stream].tolist()))
    assert len(pairs) == len(set(pairs)) == count
    assert all(
        ("nccl" in events.names[events.name[one]]) != ("nccl" in events.names[events.name[other]])
        for one, other in pairs
    )


@needs_traces
@pytest.mark.nightly
def test_what_real_calls_waited_for() -> None:
    """A copy of 1 µs that waits 126 ms for the model; 14 ms of work from before the recording."""
    first = load("h100_timesformer_inference").synchronisations[0]
    assert (first.name, first.operator, first.kernel) == ("cudaMemcpyAsync", "aten::to", PAGEABLE)
    assert first.cpu_ns - first.cpu_wait_ns == pytest.approx(19_500, abs=100)
    first = load("h100_qwen_0.5b_inference").synchronisations[0]
    assert (first.name, first.calls, first.known_calls) == (DEVICE_SYNC, 2, 2)
    assert first.cpu_wait_ns == pytest.approx(first.cpu_ns, abs=20_000)
    loader = load("v100_resnet50_workers0").synchronisations.where(name=STREAM_SYNC)[0]
    assert (loader.operator, loader.calls, loader.stream) == ("aten::to", 12, "stream 7")


@pytest.mark.parametrize("name", ["zeEventHostSynchronize", "urQueueFinish", "cuCtxSynchronize"])
def test_what_counts_as_a_wait_counts_everywhere(tmp_path, name: str) -> None:
    events = [span("aten::item", 10, 50), call(name, 20, 30, correlation=1)]
    found = capture(tmp_path, events)
    assert found.synchronisations.column("name") == [name]
    assert found.sql("select name from events where kind = 'wait'").column("name") == [name]
