"""The device's time by what it did."""

from __future__ import annotations

import numpy as np
import pytest
import real_traces
from builders import annotation, capture, copy, kernel, read, span, step, write_capture, write_trace
from hypothesis import given
from hypothesis import strategies as st
from real_traces import KNOWN, load, needs_traces

from instrument.base.errors import ConfigError
from instrument.read.capture import Capture
from instrument.read.facts.device_work import COMMUNICATION_NAMES, Work, by_group, device_work
from instrument.read.facts.intervals import sweep
from instrument.read.facts.links import Links

COLUMNS = "compute_ns exposed_communication_ns exposed_copy_ns idle_ns total_ns communication_ns copy_ns overlap_ns"
KNOWN_AS = {
    "compute_ns": "computation_time",
    "exposed_communication_ns": "exposed_comm_time",
    "exposed_copy_ns": "exposed_memcpy_time",
    "idle_ns": "idle_time",
    "total_ns": "total_time",
    "communication_ns": "total_comm_time",
    "copy_ns": "total_memcpy_time",
    "overlap_ns": "overlap",
}


@needs_traces
@pytest.mark.parametrize("name", real_traces.each(n for n in KNOWN if n != "mtia_rank0"))
def test_every_column_of_every_real_trace_to_the_nanosecond(name) -> None:
    known = KNOWN[name]["exact"]
    found = Capture.load(real_traces.path(name), communication=["*nccl*", "*rccl*"])
    row = found.breakdown[0]._asdict()
    if KNOWN[name]["device_events"]:
        assert row == {ours: round(known[theirs] * 1e6) for ours, theirs in KNOWN_AS.items()}
    else:
        assert set(row.values()) == {None}


@needs_traces
@pytest.mark.parametrize(
    ("name", "communication_ns", "overlap_ns", "exposed_ns"),
    real_traces.each(
        [
            ("h800_deepseek_train", 113_030_000, 108_872_000, 4_158_000),
            ("b200_eager", 2_141_501, 0, 2_141_501),
        ]
    ),
)
def test_communication_that_is_not_nccl(name, communication_ns, overlap_ns, exposed_ns) -> None:
    row = load(name).breakdown[0]
    found = (row.communication_ns, row.overlap_ns, row.exposed_communication_ns)
    assert found == (communication_ns, overlap_ns, exposed_ns)


@needs_traces
@pytest.mark.nightly
def test_mtia_is_what_hta_finds_once_rounded_as_it_rounds() -> None:
    """HTA leaves out the 137 requests without a stream, and shrinks every event to whole microseconds."""
    events = load("mtia_rank0").events
    work = device_work(Links(events))
    streamed = np.array([thread != (9, 801) for thread in events.threads])[
        events.thread[work.event]
    ]
    start, end = -(-work.start_ns // 1000) * 1000, work.end_ns // 1000 * 1000
    columns = (work.event, work.kind, start, np.maximum(end, start), work.call, work.operator)
    rounded = Work(*(column[streamed] for column in columns))
    found = {
        name: int(v[0]) // 1000
        for name, v in by_group(rounded, np.zeros(streamed.sum(), np.int64), 1).items()
    }
    known = KNOWN["mtia_rank0"]["hta_temporal_us"]
    assert found["idle_ns"] == known["idle_time(us)"]
    assert found["compute_ns"] == known["compute_time(us)"]
    got = found["exposed_copy_ns"] + found["exposed_communication_ns"]
    assert got == known["non_compute_time(us)"]
    assert found["total_ns"] == known["kernel_time(us)"]
    row = load("mtia_rank0").breakdown[
        0
    ]  # HTA's rounding loses 0.05 % of compute and 5 % of the short copies
    assert row.compute_ns == pytest.approx(7_305_596_000, rel=0.001)
    assert row.idle_ns == pytest.approx(5_648_827_000, rel=0.005)


MIXED = [
    kernel("gemm", 10, 20),
    kernel("ncclDevKernel_AllReduce", 25, 15, stream=9),
    copy(35, 15),
    span("Memset (Device)", 60, 5, cat="gpu_memset"),
    span("range", 0, 100, cat="gpu_user_annotation"),
    span("Stream Sync", 70, 30, cat="cuda_sync"),
    span("smsp__inst_executed.sum", 0, 90, cat="cuda_profiler_range"),
]


def test_overlaps_by_hand(tmp_path) -> None:
    """Compute 10–30 and 60–65; communication 25–40, of it 30–40 exposed; a copy 35–50, of it 40–50; idle 50–60."""
    (row,) = capture(tmp_path, MIXED).breakdown
    assert row._fields == tuple(COLUMNS.split())
    assert [value // 1000 for value in row] == [25, 10, 10, 10, 55, 15, 15, 5]


def test_a_trace_without_device_events_knows_nothing(tmp_path) -> None:
    assert set(capture(tmp_path, [span("aten::mm", 0, 5)]).breakdown[0]) == {None}


def test_the_rule_of_a_capture_is_that_of_its_views(tmp_path) -> None:
    path = write_trace(tmp_path, [step(0, 0, 20), kernel("my_exchange", 0, 7, correlation=1)])
    found = Capture.load(path, communication=["my_exch*"])
    assert found.breakdown[0].communication_ns == found.steps[0].clipped_communication_ns == 7000
    assert found.kernels[0].kind == "communication"
    assert found.streams[0].communication_ns == 7000
    with pytest.raises(
        ConfigError, match="communication is 'nccl', but it must be a list of globs"
    ):
        Capture.load(path, communication="nccl")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"communication holds 'n\|r', which looks like a regular"
    ):
        Capture.load(path, communication=["n|r"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", True),
        ("rcclGenericKernel", True),
        ("void deep_ep::internode_ll::dispatch<true, 2, 7168>(void*)", True),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(int4*)", True),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", True),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
            True,
        ),
        (
            "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)",
            True,
        ),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)", True),
        ("nvshmemi_proxy_quiet_entrypoint", True),
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)", False),
        ("void step::internode<3>()", False),
        ("void at::native::reduce_kernel<512, 1>()", False),
        ("void cutlass::device_kernel<flash::CollectiveMainloopBwd<2> >()", False),
        ("void at::native::amax_scatter_kernel()", False),
    ],
)
def test_which_kernels_are_communication(tmp_path, name, expected) -> None:
    row = capture(tmp_path, [kernel(name, 0, 7)]).breakdown[0]
    assert (row.communication_ns, row.compute_ns) == ((7000, 0) if expected else (0, 7000))


def test_a_caller_may_add_to_the_rule_or_replace_it(tmp_path) -> None:
    events = read(
        tmp_path, [kernel("my_exchange", 0, 7), kernel("multimem_x", 10, 5), kernel("nccl", 20, 3)]
    )

    def communication_ns(*globs: list[str]) -> int:
        work = device_work(Links(events), *globs)
        return by_group(work, np.zeros(len(work.event), np.int64), 1)["communication_ns"][0]

    assert communication_ns() == 8000
    assert communication_ns([*COMMUNICATION_NAMES, "my_exchange"]) == 15000
    assert communication_ns(["*nccl*", "*rccl*"]) == 3000


def test_what_the_recordings_config_adds_counts_when_it_is_read(tmp_path) -> None:
    made = [
        kernel("my_exchange<2>", 0, 7),
        kernel("Ring_Step", 10, 5),
        kernel("nccl", 20, 3),
        kernel("gemm", 30, 1),
    ]
    config = {"communication": ["my_exchange<?>", "ring*"]}
    folder = write_capture(tmp_path, made, config=config).folder
    assert Capture.load(folder).breakdown[0].communication_ns == 15000
    assert Capture.load(folder, communication=["*nccl*"]).breakdown[0].communication_ns == 3000
    assert write_capture(tmp_path, made, "older", config={}).breakdown[0].communication_ns == 3000


@pytest.mark.parametrize(
    ("globs", "why"),
    [
        (["ring*", "nccl|ring"], "holds 'nccl|ring', which looks like a regular expression"),
        (["a*"] * 21, "holds 21 globs, but at most 20 are allowed"),
        (
            ["".join(f"[\0-{chr(k)}]" for k in range(0x10000, 0x10FFFF, 99))],
            "of 52960 characters, but a glob has",
        ),
        (["*"], "holds '*', which selects no kernels in particular"),
    ],
)
def test_globs_that_no_recording_has_are_left_out_and_said(tmp_path, globs, why, log) -> None:
    made = [kernel("ring", 0, 7), kernel("nccl", 20, 3)]
    read = write_capture(tmp_path, made, config={"communication": globs})
    assert read.breakdown[0].communication_ns == 3000
    (sentence,) = log.at("WARNING")
    assert why in sentence
    assert (
        "with the default names of communication kernels, because config.communication" in sentence
    )
    assert read.kernels[0].kind == "kernel"
    assert len(log.at("WARNING")) == 1, "one sentence, not one for each view"


def test_devices_that_write_one_category_tell_copies_by_name(tmp_path) -> None:
    requests = [
        span("dma_request", 0, 5, cat="mtia_ccp_events", tid=1),
        span("fc", 3, 4, cat="mtia_ccp_events", tid=2),
    ]
    row = capture(tmp_path, requests).breakdown[0]
    assert (row.compute_ns, row.copy_ns, row.exposed_copy_ns) == (4000, 5000, 3000)


def test_mtias_copies_have_a_size_and_a_direction_and_its_waits_are_no_work(tmp_path) -> None:
    def on_mtia(name, start, duration, **args):
        return span(name, start, duration, cat="mtia_ccp_events", tid=801, **args)

    found = capture(
        tmp_path,
        [
            on_mtia("dma_request", 1, 8, direction="DEVICE_TO_HOST", size=163840, sqid=1),
            on_mtia("dma_request", 10, 4, direction="HOST_TO_DEVICE", size=1852),
            on_mtia("event_wait", 20, 1000, stream=112, wait_on_stream=104),
            on_mtia("event_record", 1020, 5, stream=112),
            annotation("after", 30, 10),
        ],
    )
    assert [(row.name, row.bytes, row.bytes_per_second) for row in found.copies] == [
        ("dma_request DEVICE_TO_HOST", 163840, 163840 * 10**9 // 8000),
        ("dma_request HOST_TO_DEVICE", 1852, 1852 * 10**9 // 4000),
    ]
    assert len(found.kernels) == 0
    (row,) = found.breakdown
    assert (row.compute_ns, row.copy_ns, row.total_ns, row.idle_ns) == (0, 12000, 13000, 1000)
    assert found.ranges[0].device_idle_ns == 10000


INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)),
    min_size=1,
    max_size=25,
)  # group, layer, start, length


@given(INTERVALS, st.integers(-5, 40), st.integers(0, 30))
def test_the_sweep_counts_each_nanosecond(given_intervals, window_start, window_length) -> None:
    table = np.array(given_intervals)
    group, layer, start, length = table.T
    ticks = np.zeros((3, 3, 60), bool)  # group, layer, nanosecond from -5 on
    for g, k, s, n in given_intervals:
        ticks[g, k, s + 5 : s + n + 5] = True
    rows = [layer == k for k in range(3)]
    spans = [(start[row], (start + length)[row]) for row in rows]
    timeline = sweep(spans, [group[row] for row in rows])
    first, second, third = timeline.active
    for where, expected in [
        (first, ticks[:, 0]),
        (second & ~first, ticks[:, 1] & ~ticks[:, 0]),
        (first | second | third, ticks.any(axis=1)),
    ]:
        assert timeline.total_ns(where, 3).tolist() == expected.sum(axis=1).tolist()
    together = sweep(spans)
    flat, either = ticks.any(axis=0), together.active[0] | together.active[1]
    window = slice(window_start + 5, window_start + window_length + 5)
    found = together.within(
        either, np.array([window_start]), np.array([window_start + window_length])
    )
    assert found.tolist() == [(flat[0] | flat[1])[window].sum()]
    busy = np.flatnonzero(np.diff(np.concatenate([[0], (flat[0] | flat[1]).astype(int), [0]]))) - 5
    starts, ends = together.merged(either)
    assert [*starts.tolist(), *ends.tolist()] == [*busy[::2].tolist(), *busy[1::2].tolist()]
