"""Steps and stages of inference engines and pipelines: what their ranges say, worked out by hand."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
from builders import Event, annotation, call, capture, copy, kernel, span, step
from findings.by_hand import check
from golden import Golden
from real_traces import load, needs_traces, path

from instrument.read.facts.grammars import parse
from instrument.read.show.remarks import facts
from instrument.read.views.device_use import device_use
from instrument.read.views.phases import stages_in_words, step_times

# Each name is one that the source of the program writes, or that a trace of it holds: of steps, and of parts of them.
NAMES = [
    "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)",
    "execute_context_1(888_788544)_generation_0(0)",
    "execute_context_0(0)_generation_64(64)",
    "execute_context_0(0)_generation_64(192)",
    "execute_context_0(0)_generation_2(9000)",
    "execute_context_2(6144)_generation_3(3)",
    "execute_new_2_cached_0",
    "execute_new_0_cached_4",
    "step[EXTEND bs=2 toks=14721]",
    "step[EXTEND bs=2 toks=12 c_sqsq=80 c_sqsk=120 c_sk=20]",
    "step[DECODE bs=64]",
    "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]",
    "step[MIXED bs=2]",
    "step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 c_sqsk=40 g_sq=1 g_sk=12 g_sqsq=1 g_sqsk=12]",
    "step[TARGET_VERIFY bs=23]",
    "step[DRAFT_LOOP raw_bs=3 bs=4 topk=1]",
    "step[IDLE bs=0]",
    "[Executor] _forward_step 7: 0 ctx reqs, 0 ctx tokens, 32 gen reqs",
    "[Executor] _forward_step 7: 2 ctx reqs, 1 gen reqs",
    "_forward_step: 2 ctx reqs, 0 gen reqs",
    "prefill[bs=2 tok=14721 ctx=[7803, 6918]]",
    "decode[bs=117/128 tok=117 d=117]",
    "decode[bs=128 tok=384 p=2 d=126 sqsq=132612 sqsk=1114112 sk=258048 tbo=1]",
    "decode[bs=32 tok=128 d=32 spec=3]",
    "eager_decode[bs=3 tok=3 ctx=5]",
]  # fmt: skip
PARTS = [
    "gpu_model_runner: draft", "draft_extend", "draft[1/3 bs=4]", "PP:0F3", "PP:1I2", "PP:1W2", "Backward 12", "mlp(W)",
]  # fmt: skip
OTHERS = [
    "gpu_model_runner: forward", "PP:1SEND_F2", "PP:0UNSHARD", "dummy_decode[bs=1]", "step[1]",
    "step[TRAIN 3]", "decode[x]", "Forward", "mlp(F2)", "execute_context_1(2)_generation_3",
    "execute_context_" + "9" * 9999 + "(1)_generation_0(0)", "",
]  # fmt: skip


def test_what_the_name_of_a_step_or_of_a_part_says(golden: Golden) -> None:
    """Of steps the program and the stage, and how many requests, prefill tokens, decode tokens and captured requests."""
    told = []
    for name in (*NAMES, *PARTS):
        found = parse(name)
        assert found is not None
        assert found.is_step == (name in NAMES)
        label, counts = (found[2], found[4:]) if found.is_step else (found[:3], "")
        told.append(f"{name}\n  {label}{counts}")
    golden("names_of_steps.txt", "\n".join(told))
    assert [name for name in OTHERS if parse(name)] == []


def replay(at: float, correlation: int, nodes: int = 2) -> list[Event]:
    """A launch of 5 µs; 10 µs after its start, the nodes of 20 µs each."""
    ids = {"correlation": correlation, "graph_id": 3}
    return [
        call("cudaGraphLaunch", at, 5, correlation),
        *(kernel("gemm", at + 10 + 20 * k, 20, graph_node_id=9 + k, **ids) for k in range(nodes)),
    ]


def eager(at: float, correlation: int, lasts: float) -> list[Event]:
    return [
        span("aten::mm", at, 8),
        call("cudaLaunchKernel", at + 2, 5, correlation),
        kernel("attention", at + 10, lasts, correlation=correlation),
    ]


ENGINE = [
    # not counted, as the first one
    annotation("execute_context_1(100)_generation_0(0)", 0, 50),
    *eager(10, 1, 30),
    # The device works at 110–310; the range ends before it.
    annotation("execute_context_2(300)_generation_4(4)", 100, 60),
    *eager(100, 2, 200),
    # Launched while the step before runs, so it begins at 310. Work at 320–360.
    annotation("execute_context_0(0)_generation_6(6)", 300, 30),
    *replay(310, 3),
    # Work at 390–430 and 440–450.
    annotation("execute_context_0(0)_generation_5(5)", 380, 60),
    *replay(380, 4),
    *eager(430, 5, 10),
]


def test_steps_of_an_engine_and_their_stages(tmp_path: Path) -> None:
    found = capture(tmp_path, ENGINE)
    assert found.links.step_numbers == [0, 1, 2, 3]
    rows = {row.stage: row for row in found.phases}
    assert [*rows] == ["mixed", "decode"]
    mixed, decode = rows["mixed"], rows["decode"]
    assert (mixed.steps, mixed.requests) == (1, 6)
    assert (mixed.prefill_tokens, mixed.decode_tokens) == (300, 4)
    assert (mixed.step_ns, mixed.step_ns_per_token) == (210_000, 210_000 // 304)
    assert (mixed.device_ns, mixed.kernels, mixed.graph_share) == (200_000, 1, 0)
    # 310–380 and 380–450. Nothing runs at 310–320, whose launch returns at 315, at 360–390, whose
    # launch returns at 385, and at 430–440, whose launch returns at 437.
    assert (decode.steps, decode.requests) == (2, 6)  # 5.5
    assert (decode.prefill_tokens, decode.decode_tokens) == (0, 6)
    assert (decode.step_ns, decode.step_ns_per_token) == (70_000, 140_000 // 11)
    assert decode.idle_share == pytest.approx(50 / 140)
    assert decode.launch_wait_share == pytest.approx((5 + 25 + 7) / 140)
    assert decode.graph_share == pytest.approx(80 / 90)
    assert decode.padding_share is None
    assert decode.steps_share == pytest.approx(140 / 350)
    assert decode.device_share == pytest.approx(90 / 290)


def test_the_ranges_of_steps_have_the_name_of_their_stage(tmp_path: Path) -> None:
    found = capture(tmp_path, ENGINE)
    got = {row.path: row.calls for row in found.ranges}
    assert got == {"vLLM prefill": 1, "vLLM mixed": 1, "vLLM decode": 2}
    assert found.rows("stage", "step", "kind").filter(kind="kernel").rows() == [
        ("prefill", 0, "kernel"),
        ("mixed", 1, "kernel"),
        *[("decode", 2, "kernel")] * 2,
        *[("decode", 3, "kernel")] * 3,
    ]


def test_what_runs_between_two_steps_is_of_the_first(tmp_path: Path) -> None:
    """Such as sampling. But if the engine has no requests for long, nothing is of the step."""
    events = [
        event
        for k in range(6)
        for event in (annotation("step[DECODE bs=2]", 100 * k, 40), *eager(100 * k + 60, k + 1, 20))
    ]
    late = [annotation("step[DECODE bs=2]", 2000, 40), *eager(1000, 9, 20)]
    found = capture(tmp_path, [*events, *late])
    rows = found.rows("kind", "step").filter(kind="kernel")
    # The sixth ends at 540, because the next one begins 14 usual steps later.
    assert rows["step"].to_list() == [0, 1, 2, 3, 4, None, None]
    assert found.steps.column("duration_ns") == [*[100_000] * 5, 40_000, 40_000]
    assert sum(found.steps.column("total_ns")) == 5 * 20_000


def test_some_steps_of_an_engine_keep_their_numbers(tmp_path: Path) -> None:
    found = capture(tmp_path, ENGINE).during(steps=(2, 9))
    assert found.links.step_numbers == [2, 3]
    # The work of step 1 still runs for 10 µs, without its launch.
    rows = [(row.stage, row.steps, row.device_ns) for row in found.phases]
    assert rows == [("decode", 2, 90_000), (None, None, 10_000)]
    assert found.during(steps=3).links.step_numbers == [3]


def test_steps_of_the_profiler_come_first(tmp_path: Path) -> None:
    """The engine's steps inside them keep their stages."""
    found = capture(tmp_path, [*ENGINE, step(7, 0, 95), step(8, 95, 400)])
    assert found.links.step_numbers == [7, 8]
    assert [(row.stage, row.steps) for row in found.phases] == [("mixed", 1), ("decode", 2)]


def test_one_step_is_a_recording(tmp_path: Path) -> None:
    """The device could still be busy with the step before; so its time begins with its own work."""
    events = [event for event in ENGINE if 100 <= event["ts"] < 311]
    found = capture(tmp_path, [*events[:4], kernel("gemm", 90, 20)])
    assert not len(found.links.steps)
    (row,) = [row for row in found.phases if row.stage]
    assert (row.stage, row.steps, row.step_ns) == ("mixed", 1, 200_000)


def test_work_to_make_drafts_is_draft(tmp_path: Path) -> None:
    events = [
        annotation("step[DECODE bs=2]", 0, 40),
        *eager(0, 1, 10),
        annotation("draft", 100, 40),
        annotation("step[DECODE bs=2]", 100, 30),
        *eager(105, 2, 20),
    ]
    found = capture(tmp_path, events)
    rows = found.rows("kind", "stage").filter(kind="kernel")
    assert rows["stage"].to_list() == ["decode", "draft"]
    assert step_times(found)["stage"].to_list() == ["draft"]  # the first does not count


def test_steps_without_a_device_have_no_times_of_one(tmp_path: Path) -> None:
    names = ["step[EXTEND bs=1 toks=9]", "step[DECODE bs=1]", "step[DECODE bs=2]"]
    events = [annotation(name, 100 * k, 60) for k, name in enumerate(names)]
    (row,) = capture(tmp_path, events).phases
    assert (row.stage, row.steps, row.step_ns, row.requests) == ("decode", 2, 80_000, 2)
    assert row.idle_share is row.launch_wait_share is row.device_ns is row.graph_share is None


def test_steps_are_those_of_one_thread(tmp_path: Path) -> None:
    """As in a file with the traces of two ranks."""
    others = [{**event, "tid": 5} for event in ENGINE[:3] if event["cat"] == "user_annotation"]
    found = capture(tmp_path, [*ENGINE, *({**each, "ts": each["ts"] + 20} for each in others)])
    assert found.links.step_numbers == [0, 1, 2, 3]


def test_a_range_called_draft_is_no_stage_without_an_engine(tmp_path: Path) -> None:
    found = capture(tmp_path, [annotation("draft", 0, 40), *eager(0, 1, 10)])
    assert found.rows("stage")["stage"].is_null().all()
    assert len(found.phases) == 0


def test_padding_is_the_part_of_the_graphs_batches_without_a_request(tmp_path: Path) -> None:
    names = ["decode[bs=9 tok=9 d=9]", "decode[bs=6/8 tok=6 d=6]", "decode[bs=3/4 tok=3 d=3]"]
    events = [
        event
        for number, name in enumerate(names)
        for event in (annotation(name, 100 * number, 50), *replay(100 * number, number + 1))
    ]
    (row,) = capture(tmp_path, events).phases
    assert (row.stage, row.steps) == ("decode", 2)
    assert row.padding_share == pytest.approx(1 - (6 + 3) / (8 + 4))


def pipeline() -> list[Event]:
    """A forward and its backward in a pipeline; the backward runs on a thread of the engine."""
    return [
        step(3, 0, 200),
        annotation("PP:0F1", 10, 50),
        span("aten::mm", 15, 20, Sequence_number=5),
        call("cudaLaunchKernel", 20, 5, 1),
        kernel("forward", 30, 10, correlation=1),
        annotation("PP:0B1", 100, 60),
        span(
            "autograd::engine::evaluate_function: MmBackward0", 110, 30, tid=2, Sequence_number=5,
            Fwd_thread_id=1,
        ),
        call("cudaLaunchKernel", 120, 5, 2, tid=2),
        kernel("backward", 130, 30, correlation=2),
    ]  # fmt: skip


def test_backward_of_a_pipeline_has_the_stage_of_the_range_at_its_time(tmp_path: Path) -> None:
    found = capture(tmp_path, pipeline())
    rows = found.rows("name", "stage", "path", "kind").filter(kind="kernel")
    assert rows["stage"].to_list() == ["forward", "backward"]
    assert rows["path"].to_list() == ["PP:0F", "PP:0F"]
    got = [(row.stage, row.device_ns, row.steps) for row in found.phases]
    assert got == [("backward", 30_000, None), ("forward", 10_000, None)]


def replays(count: int, per_step: int, *, copies: bool = True) -> list[Event]:
    """Steps of 100 µs, each a copy of the tokens, and a sequence of graphs of different kernels."""
    events, number = [], 0
    for k in range(count):
        for graph in range(per_step):
            number += 1
            at = 100 * k + 20 * graph
            events += [
                call("cudaGraphLaunch", at, 2, number),
                kernel(f"layer{graph}", at + 5, 10, correlation=number, graph_node_id=1),
            ]
        if copies:
            events += [call("cudaMemcpyAsync", 100 * k + 90, 2, 1000 + k)]
            events += [copy(100 * k + 93, 3, correlation=1000 + k)]
    return events


def test_replays_of_graphs_show_steps_without_annotations(tmp_path: Path) -> None:
    (row,) = capture(tmp_path, replays(5, 3)).phases
    # The fifth has no end.
    assert (row.stage, row.steps, row.step_ns) == (None, 4, 100_000)
    assert row.idle_share == pytest.approx(1 - 33 / 100)
    assert row.graph_share == pytest.approx(150 / 165)
    assert row.decode_tokens is row.step_ns_per_token is None


@pytest.mark.parametrize(
    "events",
    [
        replays(2, 3),  # too few
        replays(5, 3, copies=False),  # may be layers
        [*replays(5, 3), *(event | {"ts": 1000} for event in replays(1, 1))],  # not repeated
        [step(1, 0, 900), *replays(5, 3)],  # a program with steps
    ],
)
def test_other_replays_show_no_steps(tmp_path: Path, events: list[Event]) -> None:
    assert len(capture(tmp_path, events).phases) == 0


def test_the_verdict_says_what_the_engine_did(tmp_path: Path) -> None:
    use = device_use(capture(tmp_path, ENGINE))
    # 70 + 70 of 210 + 140 µs; 200 + 90 of 350 busy.
    assert use.startswith(
        "The time of vLLM's steps is 60 % mixed (1 step of 210.0 µs: 6 requests, 300 prefill tokens, "
        "4 decode tokens), 40 % decode (2 steps of 70.00 µs: 6 requests, 6 decode tokens). The device "
        "computes for 83 % of it and is idle for 17 %"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "step[DECODE bs=1]",
            "SGLang's steps is 100 % decode (1 step of 10.00 µs: 1 request, 1 decode token)",
        ),
        ("step[IDLE bs=0]", "SGLang's steps is 100 % of no stage (1 step of 10.00 µs)"),
    ],
)
def test_what_is_not_known_of_a_step_is_not_said(tmp_path: Path, name: str, said: str) -> None:
    found = capture(tmp_path, [annotation(name, 0, 15), *eager(0, 1, 10)])
    assert stages_in_words(found) == f"The time of {said}."


def test_advice_fits_the_engine(tmp_path: Path) -> None:
    """Steps of SGLang with 30 short gaps each: never torch.compile."""
    events: list[Event] = []
    for k in range(40):
        events.append(annotation("step[DECODE bs=2]", 400 * k, 380))
        for j in range(10):
            events += eager(400 * k + 40 * j, 100 * k + j + 1, 12)
    (found,) = check(capture(tmp_path, events), "launch-bound")
    assert found.change == (
        "Launch less often: let the engine replay CUDA graphs, for more sizes of batches, or let "
        "more tokens into a step; docs/engines.md names the options."
    )


def test_a_long_first_step_of_an_engine_is_no_finding(tmp_path: Path) -> None:
    """It has more tokens. (Of a program with steps, it is a finding.)"""
    lasts = [50_000, *[1000] * 6]
    events = [annotation("step[DECODE bs=2]", sum(lasts[:k]), each) for k, each in enumerate(lasts)]
    assert check(capture(tmp_path, events), "first-step") == []
    steps = [{**event, "name": f"ProfilerStep#{k}"} for k, event in enumerate(events)]
    assert check(capture(tmp_path, steps), "first-step")


def raw(name: str) -> list[dict[str, Any]]:
    with gzip.open(path(name)) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


@needs_traces
def test_one_mixed_step_of_vllm() -> None:
    events = raw("mi300x_vllm_graph")
    work = [each for each in events if each["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    first = min(each["ts"] for each in work)
    last = max(each["ts"] + each["dur"] for each in work)
    graphs = {each["args"]["correlation"] for each in events if "GraphLaunch" in each["name"]}
    replayed = sum(each["dur"] for each in work if each["args"]["correlation"] in graphs)
    (row,) = load("mi300x_vllm_graph").phases
    assert (row.stage, row.steps, row.requests) == ("mixed", 1, 46)
    assert (row.prefill_tokens, row.decode_tokens) == (8155, 37)
    assert row.kernels == len(work)
    assert row.device_ns == pytest.approx(1000 * sum(each["dur"] for each in work), abs=1000)
    assert row.step_ns == pytest.approx(1000 * (last - first), abs=2)
    assert row.graph_share == pytest.approx(replayed / sum(each["dur"] for each in work))


@needs_traces
def test_forward_and_backward_of_dualpipe() -> None:
    """The stage of a kernel is that of the range in which its launch lies, on whatever thread."""
    events = raw("h800_deepseek_train")
    ranges = sorted(
        (each["ts"], each["ts"] + each["dur"], each["name"][-2])
        for each in events
        if each["cat"] == "user_annotation" and each["name"][-3:-1] in ("(F", "(B", "(W")
    )
    launched = {
        each["args"]["correlation"]: each["ts"]
        for each in events
        if each["cat"] in ("cuda_runtime", "cuda_driver")
    }
    expected: dict[str, float] = {}
    for each in events:
        if each["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            at = launched[each["args"]["correlation"]]
            begin, end, stage = ranges[bisect_right(ranges, (at, float("inf"))) - 1]
            assert begin <= at <= end
            expected[stage] = expected.get(stage, 0) + each["dur"] * 1000
    found = {row.stage: row.device_ns for row in load("h800_deepseek_train").phases}
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    assert found == pytest.approx({names[key]: ns for key, ns in expected.items()})


@needs_traces
def test_replays_show_the_steps_of_vllm_without_its_annotations(tmp_path: Path) -> None:
    """The recorded step, four times with 200 ms between their starts; a step has 25 replays of 3 graphs."""
    kept = ("kernel", "gpu_memcpy", "cuda_runtime")
    events = [
        event
        | {
            "ts": event["ts"] + 200_000 * k,
            "args": event["args"] | {"correlation": event["args"]["correlation"] + 1_000_000 * k},
        }
        for event in raw("mi300x_vllm_graph")
        if event["cat"] in kept
        for k in range(4)
    ]
    (row,) = capture(tmp_path, events).phases
    assert (row.stage, row.steps) == (None, 3)
    assert row.step_ns == pytest.approx(200_000_000, abs=1000)
    one = load("mi300x_vllm_graph").phases[0]
    assert row.graph_share == pytest.approx(one.graph_share)
    assert (row.kernels, row.device_ns) == (4 * one.kernels, pytest.approx(4 * one.device_ns))


@needs_traces
def test_the_first_sentences_on_vllm() -> None:
    """As a performance engineer reads the traces: the device is the limit of one, launches are of the other."""
    graphs, eager = (device_use(load(name)) for name in ("mi300x_vllm_graph", "b200_eager"))
    assert graphs.startswith(
        "The time of vLLM's steps is 100 % mixed (1 step of 156.5 ms: 46 requests, 8,155 prefill "
        "tokens, 37 decode tokens). From its first to its last work, 156.5 ms, the device computes for "
        "99.7 % and is idle for 0.2 %: the device is the limit. The kernels with the most time: 91 % "
        "matrix products"
    )
    assert eager.startswith(
        "The time of vLLM's steps is 100 % prefill (1 step of 84.77 ms: 1 request"
    )
    assert [facts(load(name)) for name in ("mi300x_vllm_graph", "b200_eager")] == [
        ["1 step of vLLM"]
    ] * 2
    assert load("mi300x_vllm_graph").diagnose().step_ns == 156_466_417
    (found,) = check(load("b200_eager"), "launch-bound")
    assert "CUDA graphs" in found.change
    assert "torch.compile" not in found.change
