"""What a notebook shows of a capture."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from builders import (
    annotation,
    call,
    capture,
    copy,
    kernel,
    kernels,
    launched,
    span,
    step,
    steps,
    synchronous_steps,
    write_capture,
)
from golden import Golden

from instrument.read.advise.verdict import first_lines
from instrument.read.capture import Capture
from instrument.read.show.outline import folded, leading, leading_ranges, outline
from instrument.read.show.remarks import _few_modules
from instrument.read.show.text import render
from instrument.read.show.verdict import first_parts
from instrument.read.views.coverage import range_advice
from instrument.read.views.device_use import device_use


def names(html: str) -> list[str]:
    """The first cell of each row of each table."""
    return re.findall(r"<tr><td[^>]*>([^<]*)</td>", html)


def test_a_capture_shows_its_ranges_as_a_tree_and_its_costliest_operators(tmp_path) -> None:
    shown = write_capture(tmp_path, steps() + kernels())._repr_html_()
    assert (
        f"<b>steps_3-4: steps 3–4, torch 2.13.0+cpu, no device</b><br>{tmp_path / 'steps_3-4'}</p>"
        in shown
    )
    assert names(shown)[:4] == ["forward", "  attention", "(no range)", "aten::mm"]
    assert "<p>Operators, 3 of 3, by self device; share = self CPU in step 4 / " in shown
    assert 'title="100,000 ns">100.0 µs</td>' in shown
    assert ', <code title="all events as columns">events</code>, ' in shown


def test_a_notebook_shows_the_verdict(tmp_path) -> None:
    found = write_capture(tmp_path, synchronous_steps(400))
    shown, first = unescape(found._repr_html_()), first_lines(found.diagnose())
    for lines in first:
        text = "".join(f"{line}\n" for line in lines)
        assert f">{text}</pre>" in shown
    assert shown.index("<pre") < shown.index("<b>steps_3-4:") < shown.index("<p>Ranges")


def test_without_a_device_the_hosts_own_time_decides(tmp_path) -> None:
    shown = write_capture(tmp_path, steps())._repr_html_()
    assert names(shown)[2:] == ["(no range)", "aten::mm", "aten::relu", "(in no operator)"]
    assert "<p>Not recorded: device times (no device), memory" in shown


def test_of_many_ranges_those_with_the_largest_shares_are_shown_first(tmp_path) -> None:
    events = [
        {**steps()[1], "name": f"range<{k}>", "ts": 1000 * k, "dur": 1 + k % 25} for k in range(50)
    ]
    shown = write_capture(tmp_path, events)._repr_html_()
    assert "<p>Ranges, 20 of 50, by share; share = self total (with backward) in " in shown
    expected = [f"range&lt;{at + k}&gt;" for k in range(24, 14, -1) for at in (0, 25)]
    assert names(shown)[:20] == expected


def test_the_advice_is_to_mark_what_is_not_marked_yet(tmp_path) -> None:
    def advice(folder: str, **facts: Any) -> str:
        events = [span("forward", 0, 50, "user_annotation"), span("aten::mm", 50, 50)]
        return range_advice(write_capture(tmp_path, events, folder, **facts))

    outside = "mark the code outside of the model with @profiled."
    assert advice("half") == "give the session the model (model=…), or mark code with @profiled."
    assert advice("modelled", module_types={"forward": "Net"}) == outside
    assert advice("uncalled", modules_not_seen=["Net"]) == outside
    on_others = advice("threads", threads_not_recorded=["server"], module_types={"a": "Net"})
    assert on_others == (
        "modules ran on the thread server, which is not recorded: record all threads "
        "(profiler.profile_all_threads=true, without profile_memory), or call "
        "session.step() on that thread."
    )
    assert "INSTRUMENT_DISABLE" in advice("off", annotations_disabled=True)


def test_long_names_of_modules_take_no_long_time() -> None:
    deep = ".".join("a" * 200_000)
    assert _few_modules([deep, f"{deep}.b", "a-b", "a.b", "a"]) == "a (with 3 inside), a-b"


def test_of_modules_that_were_not_called_few_are_named(tmp_path) -> None:
    unseen = ["a", *(f"a.{k}" for k in range(9)), "a.0.b", "b.c", *(f"d{k}.e" for k in range(5))]
    shown = render(write_capture(tmp_path, steps(), modules_not_seen=unseen))
    assert (
        "Modules not called in this window: a (with 10 inside), b.c, d0.e, d1.e and 3\nmore\n"
        in shown
    )


def test_a_small_range_with_a_large_share_comes_first(tmp_path) -> None:
    events = [annotation("net", 0, 1000)]
    for k in range(10):
        events += [
            annotation(f"block{k}", 100 * k, 90),
            annotation("head", 100 * k, 88 if k == 7 else 3),
        ]
    found = capture(tmp_path, events).ranges
    assert leading_ranges(found, [], "share", 1).column("name") == ["net", "(20 other ranges)"]
    assert leading_ranges(found, [], "share", 20).column("name")[:2] == ["net", "net/block7/head"]
    assert len(outline(found, [])) == 21


def test_siblings_that_differ_in_a_number_are_one_row(tmp_path) -> None:
    events, types = [annotation("net", 0, 1000)], {"net": "Net"}
    for k in range(5):
        names = {f"layers.{k}": "Odd" if k == 4 else "Block", f"layers.{k}.mlp": "MLP"}
        types |= names
        events += [annotation(name, 100 * k + at, 90 - at) for at, name in enumerate(names)]
    events += [annotation("head.0", 600, 10), annotation("head.1", 620, 10)]
    found = write_capture(tmp_path, events, module_types=types)
    shown = folded(found.ranges)
    assert shown.column("name") == [
        "net", "layers.*", "layers.*.mlp", "layers.4", "layers.4.mlp", "head.0", "head.1",
    ]  # fmt: skip
    assert shown.column("path")[:3] == ["net", "net/layers.*", "net/layers.*/layers.*.mlp"]
    assert shown.column("calls") == [1, 4, 4, 1, 1, 1, 1]
    for column in ("share", "self_total_ns"):
        assert sum(shown.column(column)) == pytest.approx(sum(found.ranges.column(column)))
    assert shown.column("median_ns")[1] is None
    assert "\n  layers.*: Block " in render(found)


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_the_shares_of_the_operators_that_are_shown_add_up_to_the_whole(tmp_path, rows) -> None:
    shown = write_capture(tmp_path, [*steps(), *kernels(), annotation("own", 900, 40)])
    table = leading(shown.operators, "self_cpu_ns", rows)
    for column in ("share", "device_share"):
        assert sum(filter(None, table.column(column))) == pytest.approx(1)
    others = {1: ["(2 other operators)"], 2: ["(1 other operator)"], 100: []}[rows]
    assert table.column("name")[min(rows, 3) :] == [*others, "(in no operator)"]


def test_deep_ranges_are_outlined(tmp_path) -> None:
    events = [annotation(f"r{k}", k, 5_000 - 2 * k) for k in range(2_000)]
    found = folded(capture(tmp_path, events).ranges)
    assert len(leading_ranges(found, [], "share", 15)) == 16


def test_what_cannot_be_shown_is_told(tmp_path) -> None:
    assert "<p>No ranges: " in write_capture(tmp_path, [], "empty")._repr_html_()
    damaged = write_capture(tmp_path, steps(), "a<b")
    damaged.trace_path.write_text("{")
    shown = Capture.load(damaged.folder)._repr_html_()
    assert "<b>a&lt;b</b><br>The trace file " in shown
    assert "is cut short" in shown
    assert "<table" not in shown


def test_completion_finds_every_view() -> None:
    views = re.findall(r"<code[^>]*>(\w+)(?:\(\))?</code>", Capture(None, None, {})._repr_html_())
    assert (
        {"events", "operators", "ranges", "stacks", "steps"}
        <= set(views)
        <= set(dir(Capture(None, None, {})))
    )


LAUNCH, WAIT = "cudaLaunchKernel", "cudaDeviceSynchronize"
TWO_KERNELS = [
    *(call(LAUNCH, at, 2, number) for at, number in ((-9, 1), (88, 2))),
    kernel("a", 0, 20, correlation=1),
    kernel("b", 90, 10, correlation=2),
]
# Each lasts 100 µs.
BOUND = {
    "the device works for 91": [
        call(LAUNCH, -9, 2, 1),
        kernel("a", 0, 90, correlation=1),
        kernel("b", 99, 1, correlation=1),
    ],
    "it waits for 70": TWO_KERNELS,
    "the CPU waits meanwhile": [*TWO_KERNELS, call(WAIT, -5, 60)],
    "the loader runs for 60": [
        *TWO_KERNELS,
        annotation("enumerate(DataLoader)#_Iter.__next__", 20, 60),
    ],
    "60 of communication": [kernel("a", 0, 40), kernel("ncclDevKernel_AllReduce", 20, 80)],
    "60 of copies": [kernel("a", 0, 40), copy(40, 60)],
    "a gap of 40 whose reason is not known": [kernel("a", 0, 40), kernel("b", 80, 20)],
    "work of no duration": [kernel("empty", 3, 0)],
    "no device": [span("aten::mm", 0, 5)],
}


def test_what_binds_a_run_with_a_device(tmp_path, golden: Golden) -> None:
    told = [
        "\n  ".join([f"{name}:", device_use(capture(tmp_path, events))])
        for name, events in BOUND.items()
    ]
    golden("bottlenecks.txt", "\n".join(told))


def test_the_line_on_the_device_is_about_the_steps_that_count(tmp_path) -> None:
    """The device is idle for most of the first step and of the time after it, never in the others."""
    events = [step(0, 0, 90_000), *launched("gemm", 10, 20, 100, 1)]
    for number in (1, 2):
        start = 90_000 + 1000 * (number - 1)
        events += [step(number, start, 1000), *launched("gemm", start, start + 6, 994, number + 1)]
    found = capture(tmp_path, events)
    assert "computes for 99 % of it" in " ".join(first_parts(found)[0])
