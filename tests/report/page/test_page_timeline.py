"""The timeline of the report page: which slices it holds, where they lie, and how it is used."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import real_traces
from browsing import frames
from builders import annotation, call, capture, frame, kernel, kernels, span, step, steps
from page_parts import page_of

from instrument.read.advise.diagnosis import Diagnosis
from instrument.read.advise.finding import Evidence, Finding
from instrument.read.show.page.timeline import KINDS, timeline

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Slice(NamedTuple):
    """A slice of a section, with its times in µs."""

    track: str
    row: int
    name: str
    kind: str
    start: float
    end: float
    own: float
    range: str | None


def slices(found: dict[str, Any]) -> list[Slice]:
    """The slices of a section, from its columns."""
    rows = [
        (track["name"], row)
        for track in found["tracks"]
        for row, size in enumerate(track["rows"])
        for _ in range(size)
    ]
    columns = (
        accumulate(found["start"]),
        *(found[k] for k in ("duration", "inner", "name", "range")),
    )
    return [
        Slice(
            *rows[at],
            found["names"][name],
            KINDS[found["kinds"][name]],
            start / 1e3,
            (start + length) / 1e3,
            (length - inner) / 1e3,
            found["ranges"][path] if path >= 0 else None,
        )
        for at, (start, length, inner, name, path) in enumerate(zip(*columns, strict=True))
    ]


def test_each_event_is_a_slice_in_the_row_of_its_depth(tmp_path: Path) -> None:
    found = timeline(capture(tmp_path, [*steps(), *kernels(), frame("train.py(3): main", 50, 900)]))
    assert found is not None
    made = slices(found)
    thread, stream = "thread 1 of process 1", "stream 7 of device 0"
    attention = "forward/attention"
    assert [each for each in made if each.track == thread and each.start < 1000] == [
        Slice(thread, 0, "ProfilerStep#3", "operator", 0, 1000, 350, None),
        Slice(thread, 1, "forward", "range", 100, 700, 200, "forward"),
        Slice(thread, 1, "aten::relu", "operator", 800, 850, 50, None),
        Slice(thread, 2, "attention", "range", 200, 600, 100, attention),
        Slice(thread, 3, "aten::mm", "operator", 250, 550, 290, attention),
        Slice(thread, 4, "cudaLaunchKernel", "call", 260, 270, 10, attention),
    ]
    assert [each for each in made if each.track == stream] == [
        Slice(stream, 0, "gemm", "device", 300, 370, 70, attention),
        Slice(stream, 0, "gemm", "device", 1300, 1330, 30, attention),
    ]
    assert Slice("Python on " + thread, 0, "train.py(3): main", "frame", 50, 950, 900, None) in made
    calls, works = (list(accumulate(found[key])) for key in ("launches", "launched"))
    assert [(made[one].name, made[other].name) for one, other in zip(calls, works)] == [
        ("cudaLaunchKernel", "gemm")
    ] * 2
    assert [made[one].start for one in calls] == [260, 1260]
    got = (found["steps"], found["first_step"])
    assert got == ([[3, 0, 1_000_000], [4, 1_000_000, 1_000_000]], 1)
    assert found["left_out"] == 0


def test_idle_time_has_its_cause(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = [
        step(1, 0, 1000),
        annotation(loader, 100, 300),
        call("cudaLaunchKernel", 500, 10, 1),
        kernel("gemm", 530, 70, correlation=1),
        kernel("unknown", 800, 200, correlation=99),
    ]
    found = timeline(capture(tmp_path, events))
    assert found is not None
    idle = [(each.name, each.start, each.end) for each in slices(found) if each.kind == "idle"]
    launch, gap, data, _, unknown = found["causes"]
    assert idle == [
        (launch, 0, 100),
        (data, 100, 400),
        (launch, 400, 510),
        (gap, 510, 530),
        (unknown, 600, 800),
    ]


def test_slices_that_overlap_in_part_are_kept_on_rows_of_their_own(tmp_path: Path) -> None:
    numbers = random.Random(7)
    spans = []
    for k in range(400):
        start = numbers.randrange(2000)
        spans.append((f"op{k}", start, numbers.choice([0, 1, 5, 40, 300])))
    found = timeline(capture(tmp_path, [span(*each) for each in spans]))
    assert found is not None
    made = slices(found)
    first = min(start for _, start, _ in spans)
    assert sorted((each.name, each.start, each.end) for each in made) == sorted(
        (name, start - first, start - first + length) for name, start, length in spans
    )
    for row in range(1 + max(each.row for each in made)):
        here = [each for each in made if each.row == row]
        assert here, "no row is empty"
        assert all(one.end <= other.start for one, other in pairwise(here))


def test_a_page_keeps_the_median_step_and_then_the_longest(tmp_path, monkeypatch) -> None:
    lengths = {1: 1000, 2: 3000, 3: 2000}
    events, begin = [], 0
    for number, length in lengths.items():
        events.append(step(number, begin, length))
        events += [span(f"{number}.{k}", begin + 10 * k * k, k + number) for k in range(1, 9)]
        begin += length
    monkeypatch.setattr("instrument.read.show.page.timeline.MOST_SLICES", 15)
    found = timeline(capture(tmp_path, events))
    assert found is not None
    assert found["steps"][found["first_step"]] == [3, 4_000_000, 2_000_000]
    made = slices(found)
    assert found["left_out"] == 27 - 15 == 27 - len(made)
    inside = [each for each in made if each.start >= 4000]
    outside = sorted(each.end - each.start for each in made if each.start < 4000)
    assert len(inside) == 9
    every = sorted([*(k + n for n in (1, 2) for k in range(1, 9)), 1000, 3000])
    assert outside == every[-6:]


def test_evidence_lies_on_a_track_of_its_own(tmp_path: Path) -> None:
    found_in = capture(tmp_path, steps())
    at = found_in.events.begin_ns + 1_250_000
    evidence = (
        Evidence("aten::mm", 2, 600_000, at, at + 300_000),
        Evidence("in no event", 2, 600_000),
    )
    finding = Finding("slow-product", "title", "change", "verify", evidence=evidence)
    found = timeline(found_in, Diagnosis((), (finding,), (), ()))
    assert found is not None
    assert [each for each in slices(found) if each.kind == "finding"] == [
        Slice("findings", 0, "slow-product", "finding", 1250, 1550, 300, None)
    ]


def test_the_timeline_opens_at_the_first_evidence_in_a_step(opened, tmp_path) -> None:
    found_in = capture(tmp_path, steps())
    begin = found_in.events.begin_ns

    def shown(*findings: Finding) -> dict[str, Any]:
        found = timeline(found_in, Diagnosis((), findings, (), ()))
        assert found is not None
        return found

    def finding(code: str, *starts: int | None) -> Finding:
        evidence = tuple(
            Evidence("aten::mm", 1, None, start, start and start + 500_000) for start in starts
        )
        return Finding(code, "title", "change", "verify", evidence=evidence)

    unknown, second = finding("unknown", None, begin - 5), finding("second", begin + 250_000)
    median = shown(unknown)
    assert (median["first_step"], median["first_code"]) == (1, None)
    found = shown(unknown, second, finding("third", begin + 1_250_000))
    assert (found["first_step"], found["first_code"]) == (0, "second")
    for content, text in (
        (found, "opens at step 3, because the evidence of the finding second is there."),
        (median, "opens at step 4, the median of all steps but the first."),
    ):
        tab = opened(page_of(tmp_path, timeline=content), "#timeline")
        assert tab.locator("#timeline").get_by_text(text).count() == 1
        assert tab.get_by_label("Step", exact=True).locator("option:checked").inner_text() == (
            text.split(",")[0].removeprefix("opens at ")
        )


def test_a_finding_is_never_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.read.show.page.timeline.MOST_SLICES", 1)
    found_in = capture(tmp_path, steps())
    at = found_in.events.begin_ns + 1_250_000
    finding = Finding(
        "code", "title", "change", "verify", evidence=(Evidence("a", 2, None, at, at + 1),)
    )
    found = timeline(found_in, Diagnosis((), (finding,), (), ()))
    assert found is not None
    assert [each.kind for each in slices(found)][:1] == ["finding"]
    assert len(slices(found)) == 2


def test_a_trace_without_slices_has_no_timeline(tmp_path: Path) -> None:
    assert timeline(capture(tmp_path, [])) is None
    odd = capture(tmp_path, [span("a", 0, 1, "odd")])
    assert timeline(odd) is None
    assert "<title>" in odd.report().html


@real_traces.needs_traces
@pytest.mark.parametrize(
    "name", real_traces.each(("v100_resnet50_workers0", "a100_megatron_tp8_rank0"))
)
def test_idle_time_of_a_real_trace_is_that_of_an_exact_sweep(name: str) -> None:
    found = timeline(real_traces.load(name))
    assert found is not None
    made = slices(found)
    work = [each for each in made if each.kind == "device"]
    first, last = min(each.start for each in work), max(each.end for each in work)
    idle_us = sum(
        max(min(each.end, last) - max(each.start, first), 0) for each in made if each.kind == "idle"
    )
    assert idle_us / 1e3 == pytest.approx(real_traces.KNOWN[name]["exact"]["idle_time"], abs=1e-3)
    assert len(work) == real_traces.KNOWN[name]["device_events"]


def canvas_of(tab: Page) -> Any:
    canvas = tab.locator("#timeline .scroller canvas")
    canvas.wait_for()
    tab.wait_for_function("document.querySelector('.scroller canvas').dataset.rectangles > 0")
    return canvas


def test_a_click_shows_a_slice_and_leads_to_its_launch(opened, tmp_path) -> None:
    found = timeline(capture(tmp_path, [*steps(), *kernels()]))
    tab = opened(page_of(tmp_path, timeline=found), "#timeline")
    canvas = canvas_of(tab)
    stream = tab.get_by_text("stream 7 of device 0").bounding_box()
    box = canvas.bounding_box()
    assert stream is not None
    # the view is the last step, of 1000 µs, with 2 % on each side
    tab.mouse.click(box["x"] + box["width"] * (315 + 20) / 1040, stream["y"] + 9)
    details = tab.locator("#timeline .details")
    assert details.locator("h3").inner_text() == "gemm"
    assert "30.00 µs" in details.inner_text()
    assert "forward/attention" in details.inner_text()
    details.get_by_role("button", name="cudaLaunchKernel").click()
    assert details.locator("h3").inner_text() == "cudaLaunchKernel"
    canvas.focus()
    for key, name in (("ArrowUp", "aten::mm"), ("ArrowUp", "attention"), ("ArrowUp", "forward")):
        tab.keyboard.press(f"Shift+{key}")
        assert details.locator("h3").inner_text() == name
    tab.keyboard.press("Escape")
    assert details.locator("h3").count() == 0


def test_keys_the_wheel_and_the_search_move_the_view(opened, tmp_path) -> None:
    tab = opened(page_of(tmp_path, timeline=timeline(capture(tmp_path, steps()))), "#timeline")
    canvas = canvas_of(tab)

    def picture() -> str:
        frames(tab)
        return str(tab.evaluate("document.querySelector('.scroller canvas').toDataURL()"))

    canvas.focus()
    home = picture()
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    seen = [home, picture()]
    for key in ("+", "-", "w", "s", "a", "d", "ArrowLeft", "ArrowRight"):
        tab.keyboard.press(key)
        seen.append(picture())
        assert seen[-1] != seen[-2], key
    assert seen[3] == seen[1]
    assert seen[7] == seen[5]
    tab.keyboard.press("0")
    assert picture() == home
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 40)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -200)
    tab.keyboard.up("Control")
    tab.mouse.move(box["x"] + 300, box["y"] + box["height"] + 200)
    assert picture() != home
    tab.get_by_placeholder("Search slices").fill("ATEN::")
    assert "4 found" in tab.locator("#timeline").inner_text()
    details, starts = tab.locator("#timeline .details dl"), []
    for _ in range(5):
        tab.keyboard.press("Enter")
        starts.append(details.locator("div", has_text="start").inner_text())
    assert len({*starts[:4]}) == 4
    assert starts[4] == starts[0]


def test_a_link_shows_evidence(opened: Callable[..., Page], tmp_path: Path) -> None:
    read = capture(tmp_path, steps())
    evidence = (Evidence("aten::mm", 2, 600_000, read.events.begin_ns + 1_250_000),)
    finding = Finding("slow-product", "title", "change", "verify", evidence=evidence)
    found = timeline(read, Diagnosis((), (finding,), (), ()))
    link = "#timeline?from=1250000&to=1550000"
    tab = opened(page_of(tmp_path, timeline=found), link)
    canvas_of(tab)
    details = tab.locator("#timeline .details")
    assert details.locator("h3").inner_text() == "aten::mm"
    assert "1.250 ms after the first event" in details.inner_text()


def test_a_frame_draws_no_more_rectangles_than_the_pixels_allow(opened, tmp_path) -> None:
    rows, each = 6, 6_000
    count = rows * each
    found = {
        "steps": [],
        "first_step": None,
        "first_code": None,
        "causes": [],
        "end_ns": each * 1000,
        "names": ["op"],
        "kinds": [KINDS.index("operator")],
        "ranges": [],
        "tracks": [{"name": "thread 1 of process 1", "open": True, "rows": [each] * rows}],
        "start": [
            0,
            *[1000] * (each - 1),
            *([-1000 * (each - 1), *[1000] * (each - 1)] * (rows - 1)),
        ],
        "duration": [900] * count,
        "inner": [0] * count,
        "name": [0] * count,
        "range": [-1] * count,
        "launched": [],
        "launches": [],
        "left_out": 0,
    }
    tab = opened(page_of(tmp_path, timeline=found), "#timeline")
    canvas = canvas_of(tab)
    canvas.focus()
    drawn = []
    for _ in range(12):
        tab.keyboard.press("+")
        frames(tab)
        drawn.append(int(canvas.get_attribute("data-rectangles")))
    pixels = canvas.bounding_box()["width"] * rows
    assert min(drawn) > 0
    assert pixels / 10 < max(drawn) <= 2 * pixels


@pytest.mark.parametrize(
    "events",
    [
        [span("alone", 5, 0)],
        [span("one", 0, 1)],
        [span("huge", 0, 9e12), span("tiny", 1, 0.001)],
        [span("ends early", 10, -5), span("other", 0, 20)],
        [span('</script><b>"&' + "x" * 2000, 0, 9), kernel("unlaunched", 4, 3)],
    ],
    ids=["one moment", "one slice", "huge", "negative", "hostile"],
)
def test_odd_traces_are_drawn(opened, tmp_path, events) -> None:
    found = timeline(capture(tmp_path, events))
    assert found is not None
    tab = opened(page_of(tmp_path, timeline=found), "#timeline", width=800, dark=True)
    canvas = canvas_of(tab)
    canvas.focus()
    for key in ("+", "-", "Shift+ArrowDown", "Shift+ArrowRight", "d"):
        tab.keyboard.press(key)
    frames(tab)
    assert tab.locator("#timeline .details h3").count() == 1
