"""The flame graphs of the report page: their frames, search, zoom and table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import capture, frame, kernels, span, steps
from page_parts import page_of

from instrument.read.show.page import flame
from instrument.read.show.page.flame import flame_graphs

if TYPE_CHECKING:
    from playwright.sync_api import Page

OWN = "/site-packages/instrument/record/step_loop.py(7): advance"


def graph(found: dict[str, Any] | None, name: str, value: str = "CPU time") -> dict[str, Any]:
    assert found is not None
    (wanted,) = (g for g in found["graphs"] if (g["name"], g["value"]) == (name, value))
    return dict(wanted)


def paths(of: dict[str, Any]) -> dict[tuple[str, ...], int]:
    """The own time of each path of a graph, in µs."""
    above: list[str] = []
    found = {}
    for depth, name, own in zip(of["depth"], of["name_of"], of["self"], strict=True):
        above[depth:] = [of["names"][name]]
        assert tuple(above) not in found
        found[tuple(above)] = own // 1000
    return found


def test_ranges_and_operators_are_merged_over_steps(tmp_path: Path) -> None:
    found = flame_graphs(capture(tmp_path, [*steps(), *kernels()]))
    cpu = graph(found, "Ranges and operators")
    root, inside = "ProfilerStep*", ("ProfilerStep*", "forward", "attention", "aten::mm")
    assert paths(cpu) == {
        (root,): 2 * (1000 - 600 - 50),
        (root, "aten::relu"): 2 * 50,
        (root, "forward"): 2 * 200,
        (root, "forward", "attention"): 2 * 100,
        inside: 2 * 290,
        (*inside, "cudaLaunchKernel"): 2 * 10,
    }
    got = {name for name, yes in zip(cpu["names"], cpu["is_range"]) if yes}
    assert got == {"forward", "attention"}
    device = paths(graph(found, "Ranges and operators", "device time"))
    assert device == {path: 100 if path == inside else 0 for path in device}
    assert inside in device
    assert found is not None
    assert {each["name"] for each in found["graphs"]} == {"Ranges and operators"}


def test_python_stacks_have_no_frames_of_the_profiler(tmp_path: Path) -> None:
    events = [
        frame("train.py(1): main", 0, 100),
        frame(OWN, 10, 20),
        frame("/lib/logging.py(3): log", 12, 5),
        span("aten::mm", 40, 50),
    ]
    found = paths(graph(flame_graphs(capture(tmp_path, events)), "Python stacks"))
    assert found == {
        ("train.py(1): main",): 30,
        ("train.py(1): main", "(recording)"): 20,
        ("train.py(1): main", "aten::mm"): 50,
    }


def test_the_time_of_frames_left_out_counts_for_their_callers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(flame, "MOST_FRAMES", 3)
    events = [span("outer", 0, 100)] + [span(f"op{k}", 10 * k, k) for k in range(1, 6)]
    found = graph(flame_graphs(capture(tmp_path, events)), "Ranges and operators")
    assert paths(found) == {("outer",): 100 - 5 - 4, ("outer", "op5"): 5, ("outer", "op4"): 4}
    assert found["left_out"] == 3


def test_nothing_with_a_time_has_no_graph(tmp_path: Path) -> None:
    assert flame_graphs(capture(tmp_path, [])) is None
    assert flame_graphs(capture(tmp_path, [span("moment", 5, 0)])) is None


@pytest.fixture(scope="module")
def tab(opened_once: Callable[..., Page], tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The graphs on a page, which the tests use one after another."""
    folder = tmp_path_factory.mktemp("flame")
    found = flame_graphs(capture(folder, [*steps(), *kernels()]))
    tab = opened_once(page_of(folder, flame=found), "#flame")
    tab.wait_for_function("document.querySelector('#flame canvas').dataset.rectangles > 0")
    return tab


def test_the_search_sums_each_moment_once(tab: Page) -> None:
    tab.get_by_placeholder("Search frames").fill("a")  # forward, and attention inside it
    found = tab.locator("#flame .tools [role=status]")
    assert found.inner_text().startswith("65 %")
    tab.get_by_placeholder("Search frames").fill("aten::")
    assert found.inner_text().startswith("35 %")
    tab.get_by_placeholder("Search frames").fill("nothing")
    assert found.inner_text().startswith("0 %")
    tab.get_by_placeholder("Search frames").fill("")


def test_frames_are_selected_and_zoomed_by_keys_and_clicks(tab: Page) -> None:
    canvas, status = tab.locator("#flame canvas"), tab.locator("#flame > p[role=status]")
    canvas.focus()
    for key, name in (
        ("ArrowDown", "ProfilerStep*: 2.000 ms, 100 %"),
        ("ArrowDown", "forward: 1.200 ms, 60 %"),
        ("ArrowRight", "aten::relu: 100.0 µs, 5.0 %"),
        ("ArrowLeft", "forward: 1.200 ms, 60 %"),
        ("Enter", "forward: 1.200 ms, 60 %"),
    ):
        tab.keyboard.press(key)
        assert status.inner_text().startswith(name), key
    box = canvas.bounding_box()
    assert box is not None
    # `forward` is as wide as the picture now, so attention, below it, ends at 2/3 of it
    canvas.click(position={"x": box["width"] * 0.65, "y": 3 * 18 + 9})
    assert status.inner_text().startswith("attention: 800.0 µs, 40 %")
    canvas.focus()
    tab.keyboard.press("Escape")
    assert status.inner_text().startswith("All CPU time: 2.000 ms")


def test_the_table_of_frames_counts_a_frame_inside_its_own_name_once(tab: Page) -> None:
    tab.get_by_text("Frames as a table").click()
    row = tab.locator("#flame tr", has_text="attention")
    assert row.inner_text().split("\t") == ["attention", "800.0 µs", "200.0 µs", "40 %"]


def test_the_other_graph_is_chosen(tab: Page) -> None:
    tab.get_by_label("Graph", exact=True).select_option("Ranges and operators, device time")
    status = tab.locator("#flame > p[role=status]")
    assert status.inner_text().startswith("All device time: 100.0 µs")


def test_frames_of_old_traces_are_part_of_the_python_stacks_alone(tmp_path: Path) -> None:
    found = flame_graphs(capture(tmp_path, [span("aten::mm", 0, 50, Call_stack="step;main")]))
    got = paths(graph(found, "Python stacks"))
    assert got == {("main",): 0, ("main", "step"): 0, ("main", "step", "aten::mm"): 50}
    assert paths(graph(found, "Ranges and operators")) == {("aten::mm",): 50}
