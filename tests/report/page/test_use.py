"""The page is used with mouse, keyboard and screen reader, in both themes, and is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import address, problems
from builders import (
    SINGLE_PROCESS,
    annotation,
    capture,
    in_steps,
    kernel,
    launched,
    made,
    node,
    step,
    synchronous_steps,
    write_rank,
)
from page_parts import parts, words

from instrument.base.units import duration
from instrument.read.advise.diagnosis import Diagnosis
from instrument.read.advise.finding import Saving
from instrument.read.capture import Capture
from instrument.read.show.page.page import Page as Report
from instrument.read.show.page.page import page, payload
from instrument.read.show.page.verdict import verdict

if TYPE_CHECKING:
    from playwright.sync_api import Page


def training(tmp_path: Path) -> Path:
    """The page of three steps with ranges, a loader, kernels and Python frames."""
    events = []
    for number in range(3):
        start = 10_000 * number
        events += [
            step(number, start, 9_900 + 100 * number),
            annotation(SINGLE_PROCESS, start, 4_000),
            annotation("forward", start + 4_100, 3_000),
        ]
        for k in range(8):
            at, unique = start + 4_150 + 300 * k, number * 100 + k
            events += [
                annotation(f"blocks.{k}", at, 250),
                made("aten::mm", at + 10, 200, unique),
                *launched(f"gemm {k}", at + 20, at + 60, 100 + 10 * k, unique + 1),
                node("MmBackward0", start + 7_200 + 200 * k, 150, unique),
            ]
    path = tmp_path / "report.html"
    capture(tmp_path, events).report(path)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def tab(opened_once: Callable[..., Page], written: Path) -> Page:
    """The page in a tab that the tests use one after another; those that unfold everything come last."""
    return opened_once(written)


def test_axe_finds_nothing_serious(opened: Callable[..., Page], written: Path) -> None:
    assert problems(printed(opened, written)) == []


@pytest.mark.nightly  # axe takes two seconds for a page
def test_axe_finds_nothing_serious_in_a_run(opened: Callable[..., Page], tmp_path: Path) -> None:
    ranks = [
        write_rank(tmp_path, rank, synchronous_steps(own, device=True))
        for rank, own in ((0, 300), (1, 320), (2, 700))
    ]
    run = tmp_path / "run.html"
    run.write_text(page(payload(ranks)).html, encoding="utf-8")
    assert problems(printed(opened, run), "#runs") == []


def printed(opened: Callable[..., Page], path: Path) -> Page:
    """A page with all its parts unfolded."""
    tab = opened(path)
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    return tab


def test_tables_sort_and_filter(tab: Page) -> None:
    address(tab, "#tables")
    kernels = tab.locator("#tables details", has=tab.locator("summary", has_text="Kernels"))
    kernels.locator("summary").click()
    names = kernels.locator("tbody tr td:first-child")
    assert names.first.inner_text() == "gemm 7"
    header = kernels.get_by_role("button", name="name", exact=True)
    header.focus()
    tab.keyboard.press("Enter")
    assert names.first.inner_text() == "gemm 0"
    assert kernels.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    tab.keyboard.press("Enter")
    assert names.first.inner_text() == "gemm 7"
    kernels.get_by_role("searchbox").fill("GEMM 3")
    assert names.all_inner_texts() == ["gemm 3"]
    assert kernels.get_by_role("status").inner_text() == "1 of 8 rows"
    kernels.get_by_role("searchbox").fill("")
    assert names.count() == 8


def test_the_tree_of_ranges_folds(tab: Page) -> None:
    address(tab, "#ranges")
    ranges = tab.locator("#ranges")
    rows = ranges.locator("tbody tr")
    assert rows.count() == 11  # the loader, forward with 8 blocks, no range
    toggle = ranges.get_by_role("button", name="Ranges inside forward")
    assert toggle.get_attribute("aria-expanded") == "true"
    toggle.focus()
    tab.keyboard.press("Space")
    assert rows.count() == 3
    ranges.get_by_role("searchbox").fill("blocks.5")
    assert [text.split("\n")[0].strip() for text in rows.all_inner_texts()] != []
    assert rows.count() == 2  # with the range around it
    ranges.get_by_role("button", name="By name").click()
    assert rows.count() == 11
    assert ranges.get_by_role("button", name="By name").get_attribute("aria-pressed") == "true"


def test_findings_unfold_to_evidence_in_the_timeline(tab: Page) -> None:
    cards = tab.locator("#verdict details.finding")
    is_open = [card.get_attribute("open") is not None for card in cards.all()]
    assert is_open == [True] + [False] * (len(is_open) - 1)  # the largest saving is unfolded
    card = tab.locator("#finding-loader-wait")
    for is_shown in (False, True):
        card.locator("summary").focus()
        tab.keyboard.press("Enter")
        assert ("num_workers" in card.inner_text()) == is_shown
    link = card.get_by_role("link").first
    assert link.get_attribute("href").startswith("#timeline?from=")
    link.click()
    assert tab.evaluate("location.hash").startswith("#timeline?from=")
    assert "enumerate(DataLoader)" in tab.locator("#timeline .details h3").inner_text()


def test_the_heading_has_the_verdict(tab: Page) -> None:
    address(tab, "#tables")
    first = tab.locator("#verdict .finding-title").first.text_content()
    sentence = tab.locator("#head #sentence").inner_text()
    assert sentence.startswith("A step takes ")
    assert first.partition(": ")[0] in sentence


def test_a_line_says_that_savings_do_not_add_up(written: Path) -> None:
    made = Capture.load(written.with_name("trace.json"))
    diagnosis = made.diagnose()
    loader = next(each for each in diagnosis.findings if each.code == "loader-wait")
    unknown = replace(loader, saving=None)
    for found, lines in (((loader, unknown), 0), ((loader, replace(loader, code="other")), 1)):
        shown = words(verdict(made, replace(diagnosis, findings=found)))
        assert shown.count("savings do not add up") == lines


def test_bounds_that_look_equal_are_not_shown(written: Path) -> None:
    made = Capture.load(written.with_name("trace.json"))
    loader = next(each for each in made.diagnose().findings if each.saving is not None)
    for high_ns, bounds in ((2_000_001, ""), (2_001_000, ", between 2.000 ms and 2.001 ms")):
        finding = replace(loader, saving=Saving(10**7, 2_000_000, 2_000_000, high_ns))
        (card,) = parts(verdict(made, Diagnosis((), (finding,), (), ())), "finding")
        assert card["terms"][0]["text"].startswith(
            f"2.000 ms of a step of 10.00 ms (20 %){bounds}:"
        )


def test_the_title_of_the_coverage_counts_what_was_not_recorded(opened, tab, tmp_path) -> None:
    assert tab.get_by_text("below 95 %").count() == 0
    events = [*in_steps(3, 100), kernel("gemm", 110, 60), *launched("gemm", 200, 210, 40, 7)]
    path = tmp_path / "lost.html"
    capture(tmp_path, events).report(path)
    title = opened(path).locator("#verdict summary", has_text="Coverage of the recording")
    assert title.inner_text().endswith("1 row below 95 %")


def test_what_if_shows_savings(tab: Page, written: Path) -> None:
    capture = Capture.load(written.with_name("trace.json"))
    address(tab, "#whatif")
    row = tab.locator("#whatif tbody tr", has_text="enumerate(DataLoader)").first
    cells = row.locator("td").all_inner_texts()
    loader = "enumerate(DataLoader)*"
    assert cells[-4:] == [
        duration(capture.whatif.baseline_ns - capture.whatif.scale(range=loader, by=by).step_ns)
        for by in (0.9, 0.75, 0.5, 0)
    ]


def test_links_stay_in_the_frame_of_a_notebook(opened: Callable[..., Page], written: Path) -> None:
    frame = written.with_name("notebook.html")
    shown = Report(written.read_text(encoding="utf-8"))._repr_html_()
    frame.write_text(f"<!doctype html><html data-ready><h1>notebook</h1>{shown}", encoding="utf-8")
    tab = opened(frame)
    inner = tab.frame_locator("iframe")
    inner.get_by_role("link", name="Tables").click()
    inner.locator("#tables summary", has_text="Kernels").click()
    assert inner.get_by_text("gemm 7").first.is_visible()
    assert inner.locator("h1").inner_text() == "trace"


def test_the_theme_is_that_of_the_system(tab: Page) -> None:

    def paper() -> str:
        found: str = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    light = paper()
    tab.emulate_media(color_scheme="dark")
    assert paper() != light
    assert tab.evaluate("themeColour('--ink')") == "rgb(230, 237, 243)"
    tab.emulate_media(color_scheme="light")
    assert paper() == light


def test_a_wide_table_scrolls_beside_its_first_column(tab: Page) -> None:
    tab.set_viewport_size({"width": 620, "height": 900})
    address(tab, "#whatif")
    area = tab.get_by_role("region", name="Causal profile")
    assert area.evaluate("area => area.scrollWidth - area.clientWidth") > 40
    # The second background is the shadow at the right edge. It does not scroll with the table.
    style = "area => getComputedStyle(area)"
    assert area.evaluate(f"{style}.backgroundAttachment") == "local, scroll"

    def left(column: int) -> float:
        cell = area.locator("tbody tr").first.locator("td").nth(column)
        found: float = cell.evaluate("cell => cell.getBoundingClientRect().left")
        return found

    name, bar = left(0), left(2)
    area.focus()
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    tab.wait_for_function("area => area.scrollLeft > 0", arg=area.element_handle())
    assert left(0) == name
    assert left(2) < bar


def test_a_long_range_keeps_the_numbers_in_a_narrow_window(opened, tmp_path) -> None:
    names = [f"{k} enumerate(DataLoader)#_SingleProcessDataLoaderIter" for k in range(12)]
    events = [annotation(name, 10 + 10 * k, 900 - 20 * k) for k, name in enumerate(names)]
    path = tmp_path / "report.html"
    capture(tmp_path, [step(0, 0, 1_000), *events]).report(path)
    tab = opened(path, width=500)
    for grouping in ("By path", "By name"):
        tab.locator("#ranges .tools button", has_text=grouping).click()
        row = tab.locator("#ranges tbody tr", has_text=names[11]).locator("td")
        assert row.nth(2).inner_text().endswith("µs")
        time = row.nth(2).bounding_box()
        assert time is not None
        assert time["x"] + time["width"] <= 500


def test_a_narrow_window_scrolls_only_downwards(tab: Page) -> None:
    tab.set_viewport_size({"width": 480, "height": 900})
    tab.click("#open-all")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 480


def test_the_mean_is_the_only_time_of_a_step(tab: Page) -> None:
    tab.set_viewport_size({"width": 1280, "height": 900})
    step = tab.locator("#verdict .fact", has_text="A step takes").inner_text().split("\n")
    # The steps but the first take 10,000 and 10,100 µs.
    got = step[1:]
    assert got == ["10.05 ms", "mean of 2 steps (steps 1–2); between 10.00 ms and 10.10 ms"]
    address(tab, "#whatif")
    tab.locator("#whatif tbody tr").first.wait_for()
    shown = tab.locator("#verdict").inner_text() + tab.locator("#whatif").inner_text()
    assert "instead of" not in shown
    assert "simulated step takes" not in shown


def test_everything_is_printed(tab: Page) -> None:
    tab.emulate_media(media="print")
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = false")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    assert not tab.locator("#contents").is_visible()
    for title in ("Verdict", "What if", "Ranges", "Tables"):
        assert tab.get_by_role("heading", name=title).is_visible()
    assert tab.locator("#tables").get_by_text("gemm 7").count() > 0
