"""Folded stacks from Python frames and operators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import real_traces
import torch
from builders import allocation, annotation, call, capture, frame, kernel, span, step
from golden import Golden
from torch import nn

from instrument import Session, profiled
from instrument.base.errors import CaptureError, ConfigError
from instrument.read.views.stacks import DEEPER, Stack, folded

EVENTS = [
    frame("train.py(1): main", 0, 100),
    frame("train.py(5): step", 10, 60),
    span("aten::linear", 20, 30, External_id=1),
    span("aten::mm", 25, 20, External_id=2),
    frame("<built-in method add of type object at 0x7f01>", 60, 5),
    frame("<built-in method add of type object at 0x7f02>", 66, 2),
    span("autograd::mm", 5, 40, tid=2, External_id=3),
    call("cudaLaunchKernel", 30, 2, External_id=2, correlation=50),
    kernel("gemm", 200, 7, External_id=2, correlation=50),
    kernel("copy", 210, 3, External_id=3, correlation=51),
]


def test_paths_are_cut_where_they_would_be_much_larger_than_the_trace(tmp_path) -> None:
    nested = [frame(f"a.py({k}): f", k, 3000 - 2 * k) for k in range(1200)]
    stacks = capture(tmp_path, nested).stacks()
    lengths = {len(each.frames) for each in stacks}
    assert lengths == set(range(1, max(lengths) + 1))
    assert 32 < max(lengths) < 128
    assert {each.frames[-1] for each in stacks if len(each.frames) == max(lengths)} == {DEEPER}
    assert sum(each.value_ns for each in stacks) == 3_000_000


def test_folded_text_is_one_safe_path_and_whole_microseconds_a_line() -> None:
    stacks = [
        Stack(("train.py(1): main", "a;b  c"), 12_400),
        Stack(("half",), 500),
        Stack(("less",), 499),
        Stack(("line\nbreak", " "), 2000),
    ]
    assert "".join(folded(stacks)) == "train.py(1):_main;a,b_c 12\nhalf 1\nline_break;_ 2\n"
    assert not [*folded([])]


def test_the_stacks_of_a_real_recording_hold_every_operators_self_time(recordings) -> None:
    recording = recordings("convolutions", with_stack=True)
    stacks = recording.capture.stacks()
    found: dict[str, int] = {}
    for stack in stacks:
        found[stack.frames[-1]] = found.get(stack.frames[-1], 0) + stack.value_ns
    operators = {
        name: row[2] for name, row in recording.by_name.items() if name.startswith("aten::")
    }
    assert len(operators) > 30
    assert {name: found[name] for name in operators} == operators
    deep = [s.frames for s in stacks if s.frames[-1] == "aten::addmm"]
    assert deep
    assert all(any("linear.py" in name for name in frames) for frames in deep)
    lines = "".join(folded(stacks)).splitlines()
    assert len(lines) > 50
    assert all(re.fullmatch(r"[^\s;]+(;[^\s;]+)* [1-9]\d*", line) for line in lines)


RANGED = [
    frame("main", 0, 100),
    annotation("forward", 10, 40),
    annotation("block", 20, 20),
    span("aten::mm", 22, 10, External_id=1),
    annotation("block", 60, 10),
    span("aten::add", 61, 5, tid=2),
    kernel("gemm", 200, 7, External_id=1, correlation=50),
]


def test_a_range_that_is_not_there(tmp_path) -> None:
    with pytest.raises(
        CaptureError, match=r"^The trace holds no range 'forwrd'; did you mean 'forward'\?$"
    ):
        capture(tmp_path, RANGED).stacks(range="forwrd")


TOLD = [  # as torch before 1.12 wrote it: no frames, but a text with each operator
    annotation("forward", 0, 50),
    span("aten::zeros", 10, 10, External_id=1, Call_stack="f.py(9): inner at 0x7f;;f.py(3): main;"),
    span("aten::empty", 12, 4, External_id=2),
    span("aten::add", 30, 5, Call_stack="f.py(3): main"),
    span("AddBackward", 60, 5, tid=2),
    kernel("fill", 100, 3, External_id=1, correlation=9),
]


WITHIN = "site-packages/instrument/annotate/module_calls.py(125): ranged"
OURS = [
    frame("train.py(1): main", 0, 300),
    *(step(n, 100 * n, 90) for n in (0, 1, 2)),
    *(frame(WITHIN, 100 * n + 10, 50) for n in (0, 1)),
    *(annotation("block", 100 * n + 12, 40) for n in (0, 1)),
    frame("<profiled>(3): ranged", 210, 30),
    frame("train.py(9): forward", 212, 20),
    frame("instrument/record/windows.py(236): _end", 290, 8),
    frame("threading.py(590): set", 291, 5),
    frame("/home/me/instrument_tuning/annotate/wrapper.py(3): ranged", 298, 1),
    frame("instrument/annotate/wrapper.py(3): outermost", 400, 10),
    span("aten::add", 402, 4),
]
# A kernel of no launch is a path of its own.
STRAY = [
    *(frame("main", 0, 50), span("aten::mm", 5, 10, External_id=1)),
    *(kernel("mm", 20, 7, External_id=1), kernel("stray", 30, 9)),
]
# The events, the options, and what all stacks have together, in µs: the outermost slices, or the device's work.
CASES = {
    "frames and operators": (EVENTS, {}, 100 + 40),
    "frames and operators, on the device": (EVENTS, {"metric": "device"}, 7 + 3),
    "a range by its path": (RANGED, {"range": "forward/block"}, 20),
    "a range by its name": (RANGED, {"range": "block"}, 20 + 10),
    "a range on the device": (RANGED, {"metric": "device", "range": "block"}, 7),
    "frames told with the operators": (TOLD, {}, 50 + 5),
    "frames told with the operators, on the device": (TOLD, {"metric": "device"}, 3),
    "our own frames": (OURS, {}, 300 + 10),
    "device work without a launch": (STRAY, {"metric": "device"}, 7 + 9),
}


def test_stacks_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand: our own frames are told apart, and steps are one."""
    told = []
    for name, (events, options, whole_us) in CASES.items():
        stacks = capture(tmp_path, events).stacks(**options)
        assert sum(stack.value_ns for stack in stacks) == 1000 * whole_us
        lines = [f"{stack.value_ns} {' > '.join(stack.frames)}" for stack in stacks]
        told.append("\n".join([f"---- {name}", *lines]))
    golden("stacks.txt", "\n".join(told))
    assert capture(tmp_path, OURS).operators_by("stack").where(name="block").column("stack") == [
        "train.py(1): main"
    ]


def test_operators_by_the_frames_told_with_them(tmp_path) -> None:
    whole = capture(tmp_path, TOLD)
    by_stack = {r.name: r.stack for r in whole.operators_by("stack")}
    assert by_stack["aten::zeros"] == "f.py(9): inner;f.py(3): main"
    assert by_stack["AddBackward"] is None
    innermost = {r.name: r.stack for r in whole.operators_by("stack", depth=1)}
    assert innermost["aten::zeros"] == "f.py(9): inner"


def test_where_frames_are_events_the_texts_are_not_kept(tmp_path) -> None:
    events = capture(tmp_path, [frame("main", 0, 90), *TOLD]).events
    assert not (events.call_stack >= 0).any()
    assert not any(b"inner" in text for text in events.texts)


def test_an_unknown_metric_gets_one_sentence(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"^Stacks have no metric 'wall'; choose cpu or device\.$"
    ):
        capture(tmp_path, EVENTS).stacks("wall")


def test_memory_without_any_call_has_no_stack(tmp_path: Path) -> None:
    (row,) = capture(tmp_path, [allocation(3, 64)]).operators_by("stack")
    assert (row.name, row.stack) == ("[memory]", None)


def test_a_recording_holds_no_frame_of_ours_around_the_users_code(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    @profiled("block")
    def block(x):
        return model(x)

    with Session(
        active=2, with_stack=True, output_dir=tmp_path, model=model, sinks={}, export="inline"
    ) as session:
        for x in session.steps([torch.ones(2, 4)] * 3):
            block(x)
    stacks = session.captures[0].stacks()
    (added,) = {stack.frames[-4:] for stack in stacks if stack.frames[-1] == "aten::addmm"}
    assert added[-1:] == ("aten::addmm",)
    for stack in stacks:
        assert not any("instrument/" in name for name in stack.frames), stack
    paths = {name for stack in stacks for name in stack.frames}
    assert {"ProfilerStep*", "block", "0", "(recording)"} <= paths


@pytest.mark.parametrize(
    "outermost",
    [
        ["bin/instrument(8): <module>"],
        ["<frozen runpy>(88): _run_code", "x/instrument/__main__.py(5): <module>"],
    ],
)
def test_the_frames_around_a_script_are_not_those_of_recording(tmp_path, outermost) -> None:
    """Those of `instrument run`, of what started it, and of its functions around torch's."""
    around = [
        *outermost,
        *(
            f"/lib/instrument/cli/{each}"
            for each in ("command.py(70): main", "run.py(94): <lambda>")
        ),
        "/lib/instrument/record/script.py(89): _run",
        "<built-in method exec of module object at 0x7f>",
    ]
    events = [frame(name, at, 100 - 2 * at) for at, name in enumerate(around)]
    events += [
        frame("train.py(9): <module>", 20, 50),
        frame("instrument/own.py(3): step", 21, 40),  # a package of the script's
        frame("/lib/instrument/record/unedited.py(180): noticed", 22, 20),
        span("aten::mm", 23, 10),
        frame("/lib/instrument/record/unedited.py(190): _notice", 45, 5),
    ]
    assert {each.frames: each.value_ns // 1000 for each in capture(tmp_path, events).stacks()} == {
        ("train.py(9): <module>",): 10,
        ("train.py(9): <module>", "instrument/own.py(3): step"): 25,
        ("train.py(9): <module>", "instrument/own.py(3): step", "aten::mm"): 10,
        ("train.py(9): <module>", "instrument/own.py(3): step", "(recording)"): 5,
    }


@real_traces.needs_traces
@pytest.mark.parametrize(
    "name", real_traces.each(["v100_resnet50_workers4", "v100_resnet50_workers0"])
)
def test_a_real_trace_of_torch_1_9_tells_its_frames_with_its_operators(name) -> None:
    whole = real_traces.load(name)
    stacks = whole.stacks()
    table = whole.operators
    found: dict[str, int] = {}
    for stack in stacks:
        found[stack.frames[-1]] = found.get(stack.frames[-1], 0) + stack.value_ns
    own = {row.name: row.self_cpu_ns for row in table if row.name.startswith("aten::")}
    assert len(own) > 30
    assert {n: found.get(n, 0) for n in own} == own
    assert any(stack.frames[0] == "resnet50_profiler_api.py(54): <module>" for stack in stacks)
    on_device = sum(stack.value_ns for stack in whole.stacks("device"))
    assert on_device == sum(row.self_device_ns for row in table) > 0
