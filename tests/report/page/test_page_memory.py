"""The memory of the report page: its charts, the peak, the steps, the snapshot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders import MEMORY, MIB, allocation, annotation, capture, span, step, steps, write_capture
from page_parts import facts, page_of, parts, tables, words

from instrument.read.show.page.memory import memory

if TYPE_CHECKING:
    from playwright.sync_api import Page


def levels(chart: dict[str, Any]) -> dict[str, list[int]]:
    """The MiB of each series at each time."""
    return {
        series["name"]: [level // MIB for level in accumulate(series["bytes"])]
        for series in chart["series"]
    }


def rows(table: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [*zip(*(table["cells"][column["name"]] for column in table["columns"]))]


def test_each_chart_stacks_up_to_the_memory_in_use(tmp_path: Path) -> None:
    found = memory(capture(tmp_path, [*steps(), *MEMORY]))
    assert found is not None
    by_range, by_operator = parts(found, "memory")
    (choice,) = parts(found, "choice")
    assert [item["title"] for item in choice["items"]] == ["by range", "by operator"]
    assert (by_range["device"], by_range["steps"]) == ("cuda:0", [[3, 0], [4, 1_000_000]])
    for chart in (by_range, by_operator):
        assert [*accumulate(chart["time"])] == [260_000, 650_000, 900_000, 1_300_000, 1_500_000]
        assert [sum(each) for each in zip(*levels(chart).values())] == [32, 38, 14, 24, 16]
        assert [*accumulate(chart["reserved"])] == [64 * MIB] * 5
    assert levels(by_range) == {
        "[before the window]": [8, 8, 8, 8, 0],
        "forward/attention": [24, 24, 0, 10, 10],
        "forward": [0, 6, 6, 6, 6],
    }
    assert [series["is_grey"] for series in by_range["series"]] == [True, False, False]
    assert rows(tables(found)["In use at the peak, by range"]) == [
        ("forward/attention", 24 * MIB, 1, 260_000),
        ("[before the window]", 8 * MIB, None, None),
        ("forward", 6 * MIB, 1, 650_000),
    ]
    got = rows(tables(found)["Steps on cuda:0"])
    assert got == [(3, 8 * MIB, 6 * MIB, 38 * MIB), (4, 14 * MIB, 2 * MIB, 24 * MIB)]
    assert facts(found)["In use at the peak"] == ("38.00 MiB", "after 650.0 µs")


def test_a_trace_without_memory_has_no_section(tmp_path: Path) -> None:
    assert memory(capture(tmp_path, steps())) is None


def opened_page(opened: Callable[..., Page], folder: Path, found: Any, **how: Any) -> Page:
    tab = opened(page_of(folder, memory=found), "#memory", **how)
    tab.locator("#memory canvas").wait_for()
    return tab


def test_the_page_shows_the_peak_and_reads_out_the_chart(opened, tmp_path) -> None:
    made = write_capture(tmp_path, [*steps(), *MEMORY])
    assert made.folder is not None
    (made.folder / "memory_snapshot.pickle").write_bytes(b"")
    tab = opened_page(opened, tmp_path, memory(made))
    shown = tab.locator("#memory")
    assert "In use at the peak\n38.00 MiB\nafter 650.0 µs" in shown.inner_text()
    assert "Reserved by the allocator\n64.00 MiB\nlargest value" in shown.inner_text()
    assert shown.get_by_role("link").get_attribute("href") == "memory_snapshot.pickle"
    peak = shown.locator("table", has_text="In use at the peak, by range")
    got = peak.locator("tbody tr").first.inner_text().split("\t")[:2]
    assert got == ["forward/attention", "24.00 MiB"]
    canvas = shown.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    read_out = shown.locator(".tooltip")
    canvas.hover(position={"x": box["width"] * (700 - 260) / (1500 - 260), "y": 100})
    near = ("38.00 MiB after 699.", "38.00 MiB after 700.")
    assert read_out.inner_text().startswith(near)
    assert "24.00 MiB forward/attention" in read_out.inner_text()
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -2000)
    tab.keyboard.up("Control")
    canvas.hover(position={"x": 1, "y": 100})
    assert read_out.inner_text().startswith(near), "the pointer's time keeps its place"
    shown.get_by_role("button", name="by operator").click()
    assert shown.locator("table", has_text="In use at the peak, by operator").count() == 1


def test_charts_without_names_say_what_to_record(opened, tmp_path) -> None:
    """Without addresses, the whole memory is one chart, as in traces of torch 1.9."""
    whole = memory(capture(tmp_path, [*steps(), allocation(260, MIB), allocation(650, MIB)]))
    assert whole is not None
    (chart,) = parts(whole, "memory")
    assert levels(chart) == {"[unknown]": [1, 2]}
    assert chart["series"][0]["is_grey"] is False
    shown = opened_page(opened, tmp_path, whole).locator("#memory")
    assert shown.get_by_text("The trace has no addresses of memory").count() == 1
    assert shown.locator("h4", has_text="In use at the peak").count() == 0


def test_charts_without_names_are_left_out(tmp_path: Path) -> None:
    outside = [step(1, 0, 1000), allocation(5, MIB, 1), span("aten::mm", 10, 100)]
    found = memory(capture(tmp_path, outside))
    assert found is not None
    assert len(parts(found, "memory")) == 1
    assert "profiler.with_stack=true" in words(found)
    inside = [*outside, annotation("forward", 200, 100), allocation(250, MIB, 2)]
    found = memory(capture(tmp_path, inside))
    assert found is not None
    assert len(parts(found, "memory")) == 1
    assert next(iter(tables(found))) == "In use at the peak, by range"
    assert "with_stack" not in words(found)


def test_one_event_is_drawn(opened: Callable[..., Page], tmp_path: Path) -> None:
    found = memory(capture(tmp_path, [allocation(5, 1, 1)]))
    tab = opened_page(opened, tmp_path, found, width=800, dark=True)
    tab.locator("#memory canvas").focus()
    for key in ("+", "-", "0", "d"):
        tab.keyboard.press(key)
    assert "1 B" in tab.locator("#memory").inner_text()
