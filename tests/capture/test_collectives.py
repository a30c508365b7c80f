"""Collectives of one rank: sizes, times and NCCL's bandwidths by hand, and on real traces beside TraceLens and HTA."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest
import real_traces
from builders import REDUCES, annotation, call, capture, kernel, span, step, write_capture
from golden import Golden, rows_as_lines
from real_traces import load, needs_traces
from rich.console import Console

from capture.plain_loops import raw
from instrument.read.capture import Capture
from instrument.read.facts.collective_records import collective_kind
from instrument.read.show.terminal import draw
from instrument.read.show.text import view_part
from instrument.read.views.layout import plain

GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"


def recorded(name: str | None, inputs: Any, outputs: Any, **more: Any) -> dict[str, Any]:
    """The arguments that Kineto writes on a collective's kernel and on torch's record of it."""
    found = {
        "Collective name": name,
        "dtype": "Float",
        "In msg nelems": inputs,
        "Out msg nelems": outputs,
        "Group size": 4,
        "Process Group Name": "1",
        "Process Group Description": "data",
        "Process Group Ranks": "[0, 1, 2, 3]",
    }
    return {key: value for key, value in (found | more).items() if value is not None}


M = 1_000_000
# Each takes 2 ms: torch's name of the collective, the elements of 4 bytes that go in and come out, the kind, and in MB
# and GB/s the size S, the algorithm bandwidth S / t, and the bus bandwidth with NCCL's factor for four ranks.
OF_EACH_KIND = [
    ("allreduce", 2 * M, 2 * M, "all_reduce", 8, 4, 6),  # x 2 (4 - 1) / 4
    ("allreduce_coalesced", 2 * M, 2 * M, "all_reduce", 8, 4, 6),
    ("_allgather_base", M // 2, 2 * M, "all_gather", 8, 4, 3),  # the larger side, x (4 - 1) / 4
    ("all_gather_into_tensor_coalesced", M // 2, 2 * M, "all_gather", 8, 4, 3),
    ("_reduce_scatter_base", 2 * M, M // 2, "reduce_scatter", 8, 4, 3),
    ("reduce_scatter_tensor_coalesced", 2 * M, M // 2, "reduce_scatter", 8, 4, 3),
    ("all_to_all", 2 * M, 2 * M, "all_to_all", 8, 4, 3),
    ("all_to_allv", M, 2 * M, "all_to_all", 8, 4, 3),  # this rank receives more than it sends
    ("broadcast", 2 * M, 2 * M, "broadcast", 8, 4, 4),
    ("_reduce_oop", 2 * M, 2 * M, "reduce", 8, 4, 4),
    ("gather", M // 2, 2 * M, "gather", 8, 4, 3),
    ("scatter", 2 * M, M // 2, "scatter", 8, 4, 3),
    ("send", 2 * M, 2 * M, "send_recv", 8, 4, 4),
    ("recv", 2 * M, 2 * M, "send_recv", 8, 4, 4),
    ("barrier", 0, 0, "barrier", None, None, None),
]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "kind", "size", "algorithm", "bus"), OF_EACH_KIND
)
def test_sizes_and_bandwidths(tmp_path, name, inputs, outputs, kind, size, algorithm, bus) -> None:
    found = capture(tmp_path, [kernel(GENERIC, 0, 2000, **recorded(name, inputs, outputs))])
    (row,) = found.collectives
    assert (row.kind, row.process_group, row.description) == (kind, "1", "data")
    assert (row.ranks, row.group_size, row.element_type) == ("[0, 1, 2, 3]", 4, "Float")
    assert (row.calls, row.duration_ns, row.runs_on) == (1, 2 * M, "device")
    expected = tuple(None if each is None else each * 10**9 for each in (algorithm, bus))
    assert row.bytes == (None if size is None else size * M)
    assert (row.algorithm_bytes_per_second, row.bus_bytes_per_second) == expected
    got = (row.largest_message_bytes, row.largest_message_bus_bytes_per_second)
    assert got == (row.bytes, expected[1])
    (single,) = found.collective_calls
    got = (single.kind, single.bytes, single.bus_bytes_per_second)
    assert got == (kind, row.bytes, expected[1])


@pytest.mark.parametrize(
    ("changed", "size", "bus"),
    [
        ({"Group size": 1}, 8 * M, 0),  # 2 (1 - 1) / 1: nothing crosses a link
        ({"Group size": 0}, 8 * M, None),
        ({"Group size": None}, 8 * M, None),
        ({"Group size": -3}, 8 * M, None),
        ({"dtype": "BFloat16"}, 4 * M, 3 * 10**9),
        ({"dtype": "Float8_e4m3fn"}, 2 * M, 15 * 10**8),
        ({"dtype": "Long"}, 16 * M, 12 * 10**9),
        ({"dtype": "Float6"}, None, None),
        ({"dtype": None}, None, None),
        ({"In msg nelems": -1}, None, None),
        ({"In msg nelems": None}, None, None),
        ({"In msg nelems": 2**63 - 1}, None, None),
        ({"In msg nelems": 10**30}, None, None),
        ({"Out msg nelems": "many"}, None, None),
        ({"In msg nelems": 0, "Out msg nelems": 0}, 0, 0),
    ],
)
def test_what_is_odd_or_missing_gives_no_wrong_number(tmp_path, changed, size, bus) -> None:
    events = [kernel(GENERIC, 0, 2000, **recorded("allreduce", 2 * M, 2 * M, **changed))]
    (row,) = capture(tmp_path, events).collectives
    assert (row.kind, row.bytes, row.bus_bytes_per_second) == ("all_reduce", size, bus)
    assert row.duration_ns == 2 * M


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (REDUCES, "all_reduce"),
        ("ncclKernel_Reduce_RING_LL_Sum_float(ncclWorkElem)", "reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(...)", "send_recv"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<int>(int*)", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<half, 8>(...)", "all_reduce"),
        ("nccl:all_gather_into_tensor_coalesced", "all_gather"),
        ("gloo:recvAnySource", "send_recv"),
        ("nccl:recv 1<-0", "send_recv"),
        ("wait", None),
        ("coalesced", None),
        (GENERIC, None),
        ("void deep_ep::internode::combine<8>()", None),
    ],
)
def test_the_kind_in_a_name(name, kind) -> None:
    assert collective_kind(name) == kind


# Four ways in which a kernel leads to torch's record of 100–130 on thread 1, and two to its annotation alone.
RECORD = span("record_param_comms", 100, 30, External_id=9, **recorded("_allgather_base", 2, 8))
LAUNCH = call("cudaLaunchKernel", 110, 5, 4)
RANGE = annotation("nccl:all_to_all", 105, 15)
COALESCED = recorded("allreduce", 50, 50)
SIZES = [(500, 1000, M), (2000, 2000, M), (4400, 100, 10_000), (5000, 700, None)]
OTHER_GROUP = {
    "Process Group Name": "2",
    "Process Group Ranks": "[0, 4]",
    "Group size": 2,
    "Process Group Description": "undefined",  # torch's word for none
}
CASES = {
    "by the external id: the record completes what the kernel lacks": [
        {**RECORD, "args": RECORD["args"] | {"Seq": 7}},
        kernel(GENERIC, 200, 10, External_id=9, **recorded("allreduce", 8, 8, dtype=None)),
    ],
    "by the launch inside the record": [RECORD, LAUNCH, kernel(GENERIC, 200, 10, correlation=4)],
    "the external id is the correlation, as in torch 2.1": [
        RECORD, LAUNCH, kernel(GENERIC, 200, 10, correlation=4, External_id=4),
    ],
    "an old record without a name: the annotation inside it says what it is": [
        *(span("record_param_comms", 100, 30, External_id=9), RANGE, LAUNCH),
        kernel(GENERIC, 200, 10, correlation=4),
    ],
    # NCCL has no kernel of its own for an all-to-all.
    "the annotation beats the kernel's name": [
        RANGE, LAUNCH, kernel("ncclDevKernel_SendRecv()", 200, 10, correlation=4),
    ],
    "the kernel's name alone": [LAUNCH, kernel(REDUCES, 200, 10, correlation=4)],
    "nothing says what it is": [kernel(GENERIC, 200, 10, correlation=4), RANGE],
    # Record 9 launches two kernels; 10 and 11 are coalesced: one kernel of theirs runs later, without a record. torch
    # records the wait for a collective as well, which is none.
    "one record is one collective, and coalesced ones have no time": [
        *(step(3, 0, 1000), RECORD),
        *(kernel(GENERIC, 200, 10, External_id=9), kernel(GENERIC, 230, 20, External_id=9)),
        *(span("record_param_comms", 300 + 10 * k, 5, External_id=10 + k, **COALESCED) for k in (0, 1)),
        span("record_param_comms", 320, 5, External_id=12, **recorded("wait", 0, 0)),
        kernel(REDUCES, 400, 40),
    ],
    # Compute runs 0–1000, a memset 3500–4500; messages of 4 MB in 1 and 2 ms, of 40 kB in 0.1 ms, one of unknown size.
    # Hidden are 500 of the first, 500 of the second, all of the third. The largest: 8 MB in 3 ms, x 1.5.
    "rates are over the calls whose size is known, and the largest alone": [
        *(kernel(GENERIC, at, ns, tid=9, **recorded("allreduce", n, n)) for at, ns, n in SIZES),
        *(kernel("gemm", 0, 1000), span("Memset (Device)", 3500, 1000, "gpu_memset")),
    ],
    "groups are kept apart, and element types are named": [
        kernel(GENERIC, 0, 50, **recorded("allreduce", 8, 8)),
        kernel(GENERIC, 100, 30, **recorded("allreduce", 8, 8, dtype="Half")),
        kernel(GENERIC, 200, 40, **recorded("allreduce", 8, 8, **OTHER_GROUP)),
    ],
    # gloo reduces 100–300 on its thread while an operator runs 150–250; NCCL's annotation is no collective.
    "gloo on the CPU beside NCCL on the device": [
        *(annotation("gloo:all_reduce", 100, 200, tid=2), span("aten::copy_", 110, 20, tid=2)),
        *(span("c10d::allreduce_", 100, 200), span("aten::mm", 150, 100, tid=3)),
        annotation("nccl:broadcast", 400, 5),
        kernel(GENERIC, 500, 10, **recorded("broadcast", 8, 8)),
    ],
}  # fmt: skip


def test_collectives_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        tables = {"collective": found.collectives, "call": found.collective_calls}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
    golden("collectives.txt", "\n".join(told))


def test_the_table_gives_rates_as_links_have_them(tmp_path) -> None:
    made = write_capture(
        tmp_path, [kernel(GENERIC, 0, 2000, **recorded("allreduce", 2 * M, 2 * M))]
    )
    text = render_view(made, "collectives")
    assert "bus bandwidth" in text
    assert "6.00 GB/s" in text
    assert "7.63 MiB" in text
    parts = [
        view_part(view, getattr(made, view), rows=5) for view in ("collectives", "collective_calls")
    ]
    assert draw(parts, Console(width=80)).count("6.00 GB/s") == 2
    assert render_view(capture(tmp_path, []), "collectives") == "Collectives: there are none."


def render_view(found: Capture, view: str) -> str:
    return plain([view_part(view, getattr(found, view), rows=15)])


@needs_traces
@pytest.mark.nightly
def test_a_slow_link_shows_in_the_bus_bandwidth() -> None:
    """On eight MI300X a 17.6 MB all-reduce takes 9.21 ms: 3.4 GB/s, where the link has tens of times as much.

    Five kernels were launched before the trace began: ROCm names them all alike, so their kind is not known.
    """
    found = load("mi300x_resnet_checkpoint_train")
    row = found.collectives.where(kind="all_reduce")[0]
    assert (row.calls, row.group_size, row.element_type) == (6, 8, "BFloat16")
    assert (row.largest_message_bytes, row.largest_message_calls) == (17_632_384, 3)
    assert row.largest_message_bus_bytes_per_second / 1e9 == pytest.approx(3.454, abs=5e-4)
    (slowest,) = found.collective_calls.where(duration_ns=9_208_906)
    assert slowest.bus_bytes_per_second / 1e9 == pytest.approx(3.351, abs=5e-4)
    assert [row.calls for row in found.collectives.where(kind=None)] == [5]
    assert sum(found.collectives.column("exposed_ns")) == 55_371_257  # MANIFEST's exact sweep
    assert "3.45 GB/s" in render_view(found, "collectives")


# Of each trace the elements that go in, and the mean algorithm and bus bandwidth that TraceLens prints for them.
TRACELENS = {
    "a100_nccl_2ranks_rank0": {
        2049000: (2.203357, 2.203357),
        7875584: (9.325775, 9.325775),
        6563840: (7.953828, 7.953828),
        6637568: (10.350353, 10.350353),
        2431040: (4.692718, 4.692718),
    },
    "b200_eager": {25136: (17.061704, 14.928991)},
    "mi300x_resnet_checkpoint_train": {
        8816192: (1.839513, 3.219148),
        2873320: (0.789587, 1.381776),
    },
}


@needs_traces
@pytest.mark.parametrize("name", real_traces.each(TRACELENS))
def test_bandwidths_are_those_of_tracelens(name) -> None:
    """TraceLens (`NcclAnalyser`, one rank) calls 2**30 bytes a GB, NCCL's tests and we 10**9.

    It averages the bandwidths of the calls of one size. Our sums divide all bytes by all time, so they give the
    harmonic mean. It leaves out broadcasts, and kernels without torch's record have no bandwidth in both.
    """
    calls = load(name).collective_calls
    found = defaultdict(list)
    for row in calls.where("kind in ('all_reduce', 'all_gather') and bytes is not null"):
        elements = row.bytes // {"BFloat16": 2, "Float": 4}[row.element_type]
        elements //= row.group_size if row.kind == "all_gather" else 1
        rates = (row.algorithm_bytes_per_second, row.bus_bytes_per_second)
        found[elements].append([rate / 2**30 for rate in rates])
    means = {n: tuple(sum(each) / len(each) for each in zip(*rows)) for n, rows in found.items()}
    assert means.keys() == TRACELENS[name].keys()
    for elements, expected in TRACELENS[name].items():
        assert means[elements] == pytest.approx(expected, abs=1e-6)


@needs_traces
@pytest.mark.parametrize(
    "name", real_traces.each([*TRACELENS, "v100_216k_events", "a100_megatron_tp8_rank0"])
)
def test_calls_and_times_are_what_a_loop_over_the_file_finds(name) -> None:
    expected: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for event in raw(real_traces.path(name)):
        text = event.get("name", "").lower()
        if event.get("cat") == "kernel" and ("nccl" in text or "multimem" in text):
            args = event["args"]
            group = args.get("Process Group Name"), args.get("Process Group Ranks")
            cell = expected[(*group, args.get("Group size"))]
            cell[0] += 1
            cell[1] += round(event["dur"] * 1000)
    found: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for row in load(name).collectives:
        cell = found[row.process_group, row.ranks, row.group_size]
        cell[0] += row.calls
        cell[1] += row.duration_ns
    assert found == expected


@needs_traces
@pytest.mark.nightly
def test_collectives_in_a_group_of_one_rank_have_a_size_and_no_time() -> None:
    """NCCL runs no kernel for them; torch's own waits for them are not counted."""
    rows = [
        (row.kind, row.ranks, row.group_size, row.calls, row.duration_ns, row.bus_bytes_per_second)
        for row in load("v100_ns_resolution").collectives
    ]
    assert rows == [
        ("all_reduce", "[0]", 1, 25, None, None),
        ("broadcast", "[0]", 1, 10, None, None),
    ]
    first = load("v100_ns_resolution").collective_calls[0]
    assert (first.bytes, first.element_type, first.step) == (2_049_000 * 4, "Float", 101)


def _overlapped(calls: Any, unit: int, categories: tuple[str, ...]) -> tuple[int, int]:
    """How long compute ran during calls, and how long these took, by a loop over the file; no two calls overlap.

    Start and end are rounded to the unit as HTA rounds them: the start up, the end down.
    """
    events = raw(real_traces.path("a100_nccl_2ranks_rank0"), parse_float=Decimal)

    def rounded(start: int, end: int) -> tuple[int, int]:
        return -(-start // unit), end // unit

    compute = sorted(
        rounded(round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in events
        if event.get("cat") in categories and "nccl" not in event["name"]
    )
    during = [rounded(row.start_ns, row.end_ns) for row in calls]
    total, until = 0, 0
    for start, end in compute:
        start, until = max(start, until), max(end, until)
        total += sum(max(0, min(until, ends) - max(start, begins)) for begins, ends in during)
    return total, sum(ends - begins for begins, ends in during)


@needs_traces
@pytest.mark.nightly
def test_overlap_with_compute_is_what_others_measure() -> None:
    """HTA: 14.31 % on `a100_nccl_2ranks_rank0`, where it drops the last step.

    HTA rounds starts up to µs and ends down, and a memset is no compute for it: so 0.5 % less is overlapped. The
    kernels of DeepEP are communication of no known kind: 113.03 ms, of which 4.16 ms are exposed.
    """
    calls = load("a100_nccl_2ranks_rank0").collective_calls.where("step in (4, 5)")
    total, exposed = sum(calls.column("duration_ns")), sum(calls.column("exposed_ns"))
    assert total - exposed == _overlapped(calls, 1, ("kernel", "gpu_memset"))[0]
    overlapped, whole = _overlapped(calls, 1000, ("kernel",))
    assert round(100 * overlapped / whole, 2) == 14.31
    # HTA's breakdown of kernels: 24204 µs for 10 all-reduces, 74 µs for 4 broadcasts
    reduces = calls.where(kind="all_reduce").column("duration_ns")
    assert (len(reduces), max(reduces) // 1000) == (10, 3306)
    assert sum(reduces) / 1000 == pytest.approx(24204, abs=10)
    (row,) = load("h800_deepseek_train").collectives
    assert (row.kind, row.calls) == (None, 32)
    assert row.duration_ns / 1e6 == pytest.approx(113.03, abs=5e-3)
    assert row.exposed_ns / 1e6 == pytest.approx(4.16, abs=5e-3)
