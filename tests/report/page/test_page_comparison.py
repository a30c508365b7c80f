"""The section that compares a run with another one: its numbers, and its use in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import problems
from builders import (
    Event,
    annotation,
    capture,
    launched,
    span,
    step,
    synchronous_steps,
    write_capture,
    write_rank,
)
from page_parts import facts, parts, tables, words

from instrument import diff
from instrument.base.errors import CaptureError
from instrument.base.units import duration, durations_like
from instrument.cli.command import main
from instrument.read.capture import Capture
from instrument.read.compare.diff import as_dict
from instrument.read.compare.text import signed, summary
from instrument.read.show.page.page import page, payload

if TYPE_CHECKING:
    from playwright.sync_api import Page

TIMES = ("before_ns", "after_ns", "change_ns")


def training(read_us: int, product: str = "aten::mm", blocks: int = 14) -> list[Event]:
    """Four steps of a range `read`, and of blocks that each take 20 µs and one more than the last.

    A step takes `read_us`, the blocks, and 30 µs outside of all ranges.
    """
    events, at = [], 0
    for number in range(4):
        lasts = read_us + sum(20 + k for k in range(blocks)) + 30
        events += [
            step(number, at, lasts),
            annotation("read", at, read_us),
            span("aten::empty", at, read_us),
        ]
        start = at + read_us
        for k in range(blocks):
            shorter = 2 * k if product == "aten::bmm" else 0
            events += [
                annotation(f"block {k}", start, 20 + k - shorter),
                span(product, start, 20 + k - shorter, **{"Input Dims": [[k, 2], [2, 2]]}),
            ]
            start += 20 + k
        at += lasts
    return events


def comparison(after: Capture, before: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = payload([after], before=before, **options)["sections"]["comparison"]
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Capture, Capture]:
    """Before and after: `read` takes 200 µs more, and another product makes the blocks shorter."""
    folder = tmp_path_factory.mktemp("pair")
    was = write_capture(folder / "before", training(100))
    return was, write_capture(folder / "after", training(300, "aten::bmm"))


def test_the_parts_of_the_page_sum_to_the_change(pair: tuple[Capture, Capture]) -> None:
    before, after = pair
    found = comparison(after, before.folder)
    assert facts(found)["The step before"][0] == duration((100 + 14 * 20 + 91 + 30) * 1000)
    assert facts(found)["Change"] == ("+200.0 µs", "40 % slower")
    # 14 blocks of 20 µs to 33 µs, and 30 µs outside
    step = diff(before, after).step
    assert step.before_ns == (100 + 14 * 20 + 91 + 30) * 1000
    (choice,) = parts(found, "choice")
    by_range, by_kind = (
        [dict(zip(table["cells"], row)) for row in zip(*table["cells"].values())]
        for (table,) in (each["parts"] for each in choice["items"])
    )
    for rows in (by_range, by_kind):
        *changes, whole = rows
        assert whole["name"] == "the step"
        for name in TIMES:
            assert sum(row[name] for row in changes) == whole[name] == getattr(step, name)
    first, second, *_, others, _ = by_range
    assert (first["name"], first["change_ns"]) == ("read", 200_000)
    assert (others["name"], len(by_range)) == ("(others)", 12)
    # (no range) grew by the 182 µs by which the blocks are shorter; 8 blocks are shown
    assert second["change_ns"] == 2 * 91_000
    assert others["change_ns"] == -2000 * sum(range(6))


def test_the_page_shows_the_values_of_diff(pair: tuple[Capture, Capture]) -> None:
    before, after = pair
    values = json.loads(json.dumps(as_dict(diff(before, after))))
    found = json.loads(json.dumps(comparison(after, before)))
    shown = tables(found)
    captions = {
        "Changes: Ranges by time of the step": "ranges",
        "Changes: Operators by CPU time": "operators",
        "Changes: Input shapes by CPU time": "shapes",
        "Changes: counters": "counters",
    }
    assert [*shown] == ["By range and kind", "By kind", *captions]
    for caption, name in captions.items():
        cells = shown[caption]["cells"]
        rows = [dict(zip(cells, row)) for row in zip(*cells.values())]
        key = [each for each in ("range", "name", "input_shapes", "counter") if each in rows[0]]
        if name == "counters":
            for row in rows:
                row["range"] = None if row["range"] == "(whole step)" else row["range"]
        expected = {tuple(row[each] for each in key): row for row in values[name]}
        assert len(rows) == len(expected) > 2
        for row in rows:
            assert row.items() <= expected[tuple(row[each] for each in key)].items()
    changes = shown["Changes: Ranges by time of the step"]["cells"]["change_step_ns"]
    assert [*map(abs, changes)] == sorted(map(abs, changes), reverse=True)
    notes = [each.get("note") for each in parts(found, "folded")]
    assert notes[1] == "3; 1 added, 1 removed"
    texts = {each["name"]: each.get("texts") for each in shown["Changes: counters"]["columns"]}
    of = shown["Changes: counters"]["cells"]["counter"].index
    assert texts["after"][of("peak_bytes")] == "–"


def test_names_are_those_of_the_captures_or_of_the_given_path(tmp_path: Path) -> None:
    one = capture(tmp_path, training(100))
    two = write_capture(tmp_path / "other", training(100))
    assert comparison(two, one)["heading"] == f"Compared with {one.name}"
    assert comparison(two, one)["sentence"] == summary(diff(one, two))
    again = write_capture(tmp_path / "again", training(100))
    assert again.name == two.name
    found = comparison(again, two.folder)
    assert found["heading"] == f"Compared with {two.folder}"
    assert found["sentence"].startswith(
        f"{two.folder} → this run: mean step 501.0 µs → 501.0 µs (0.0 "
    )


def test_all_windows_and_ranks_are_compared(tmp_path: Path) -> None:
    sides = []
    for name, own in (("before", 300), ("after", 500)):
        ranks = [
            write_rank(tmp_path / name, rank, synchronous_steps(own + 100 * rank, device=True))
            for rank in (0, 1)
        ]
        sides.append([Capture.load(rank.folder) for rank in ranks])
    found = payload(sides[1], before=tmp_path / "before")["sections"]
    assert [*found][:3] == ["comparison", "verdict", "runs"]
    made = diff(tmp_path / "before", tmp_path / "after")
    assert len(made.wholes) == 3
    shown = found["comparison"]
    like = durations_like(max(made.step.before_ns, made.step.after_ns))
    assert facts(shown)["Change"][0] == signed(made.step.change_ns, like)
    cells = tables(shown)["Change of each rank"]["cells"]
    assert cells["change_ns"] == [whole.change_ns for whole in made.wholes[1:]]


def test_sides_that_are_too_unlike_leave_a_sentence(tmp_path, capsys) -> None:
    was = write_capture(tmp_path / "a", training(40), world_size=1)
    now = write_capture(tmp_path / "b", training(15), world_size=8)
    found = payload([now], before=was)
    shown = found["sections"]["comparison"]
    sentence = (
        f"Not compared: {was.name} and this run are too unlike to be compared: The world size "
        "differs: 1 before, 8 after."
    )
    assert (words(shown), shown["heading"]) == (sentence, f"Compared with {was.name}")
    assert "verdict" in found["sections"]
    assert "unlike" not in words(found["head"])
    arguments = ["report", str(now.folder), "--before", str(was.folder), "--json"]
    assert main(arguments) == 0
    assert "too unlike" in words(json.loads(capsys.readouterr().out)["sections"]["comparison"])


def test_a_side_that_is_not_there_is_an_error(pair, tmp_path, capsys) -> None:
    with pytest.raises(CaptureError, match="There is no capture at"):
        pair[1].report(before=tmp_path / "missing")
    assert main(["report", str(pair[1].folder), "--before", str(tmp_path / "missing")]) == 2
    assert "There is no capture at" in capsys.readouterr().err
    assert "comparison" not in payload([pair[1]])["sections"]


def test_the_command_writes_what_the_method_returns(pair, tmp_path) -> None:
    before, after = pair
    target = tmp_path / "page.html"
    arguments = ["report", str(after.folder), "--before", str(before.folder), "-o", str(target)]
    assert main(arguments) == 0
    assert target.read_text(encoding="utf-8") == after.report(before=before.folder).html


def test_a_redacted_page_names_no_file_and_no_host_of_the_other_run(tmp_path: Path) -> None:
    folder = tmp_path / "jane doe" / ("secret-project-" * 8)
    folder.mkdir(parents=True)
    host = "gpu-secret-" + "x" * 53  # 64 characters, the longest host name of Linux
    was = write_capture(folder, training(100), host=host)
    now = write_capture(tmp_path / "now", training(300), host="box")
    lone = folder / f"secret {'run' * 30}.json"
    lone.write_text(json.dumps({"traceEvents": training(100)}))
    unlike = write_capture(tmp_path / "unlike", training(100), world_size=8)
    detour = f"{folder.parent}/.//{folder.name}/{was.folder.name}"
    for before, after in (
        (was.folder, now),
        (was, now),
        (lone, now),
        (was.folder, unlike),
        (detour, now),
    ):
        plain, clean = (
            json.dumps(comparison(after, before, redact=redact)) for redact in (False, True)
        )
        for word in ("secret", "jane", "doe", "runrun", "xxx"):
            assert word not in clean, word
        assert "secret" in plain


@pytest.fixture(scope="module")
def tab(pair: tuple[Capture, Capture], opened_once: Callable[..., Page]) -> Page:
    """The page with the section, which the tests use one after another."""
    before, after = pair
    assert after.folder
    path = after.folder / "report.html"
    after.report(path, before=before.folder)
    return opened_once(path, "#comparison")


def test_the_section_says_what_changed(tab: Page, pair: tuple[Capture, Capture]) -> None:
    section = tab.locator("#comparison")
    assert section.locator("h2").inner_text() == f"Compared with {pair[0].folder}"
    facts = section.locator(".fact").all_inner_texts()
    assert facts[2].split("\n") == ["Change", "+200.0 µs", "40 % slower"]
    assert facts[3].split("\n") == ["Mostly", "+200.0 µs", "read · CPU operators"]
    bars = section.locator("table").first.locator("tbody tr")
    assert bars.count() == 12  # with the others and the step
    assert bars.first.inner_text().split("\t")[-1].strip() == "+200.0 µs"
    assert bars.last.inner_text().startswith("the step")
    # slower is right of the line, faster left of it
    for row, is_slower in ((0, True), (2, False)):
        bar = bars.nth(row).locator(".change-bar span").bounding_box()
        zero = bars.nth(row).locator(".change-bar i").bounding_box()
        assert bar is not None
        assert zero is not None
        assert (bar["x"] + bar["width"] / 2 > zero["x"]) == is_slower


def test_the_page_opens_with_what_changed(tab: Page, pair: tuple[Capture, Capture]) -> None:
    head = tab.locator("#head p").all_inner_texts()
    assert head[0].startswith(f"{pair[0].folder} → this run: mean step 501.0 µs → 701.0 µs")
    assert head[1].startswith("A step takes ")
    assert tab.locator("main section").first.get_attribute("id") == "comparison"


def test_a_narrow_page_shows_all_numbers(
    opened: Callable[..., Page], pair: tuple[Capture, Capture]
) -> None:
    assert pair[1].folder
    tab = opened(pair[1].folder / "report.html", "#comparison", width=400)
    tab.click("#open-all")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert tab.evaluate(f"{cut}.length") == 0
    row = tab.locator("#comparison tbody tr").first
    assert row.locator("td").last.get_attribute("data-column") == "change"
    for cell in row.locator("td").all():
        box = cell.bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= 400


def test_tables_sort_and_filter(tab: Page) -> None:
    tab.locator("#comparison-operators summary").click()
    operators = tab.locator("#comparison-operators")
    names = operators.locator("tbody td:first-child")
    assert names.all_inner_texts()[:2] == ["aten::mm", "aten::empty"]
    change = operators.locator("thead button", has_text="change")
    change.click()
    assert names.first.inner_text() == "aten::empty"  # the largest increase
    change.click()
    assert names.first.inner_text() == "aten::mm"
    ranges = tab.locator("#comparison-ranges")
    assert ranges.get_attribute("open") is not None
    ranges.get_by_role("searchbox").fill("block 13")
    assert ranges.locator("tbody td:first-child").all_inner_texts() == ["block 13"]
    cells = ranges.locator("tbody td").all_inner_texts()
    assert cells[1:4] == ["same", "33.00 µs", "7.000 µs"]
    assert ranges.get_by_role("status").inner_text() == "1 of 16 rows"


@pytest.mark.nightly  # axe takes two seconds for a page; the gate has it look at a whole one
def test_axe_finds_nothing_serious(opened, tab, pair, tmp_path) -> None:
    refused = tmp_path / "refused.html"
    on_device = [step(0, 0, 100), step(1, 100, 100), *launched("gemm", 110, 120, 30, 1)]
    refused.write_text(page(payload([capture(tmp_path, on_device)], before=pair[0])).html)
    unlike = opened(refused, "#comparison")
    for each in (tab, unlike):
        each.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert problems(each, "#comparison") == []
    assert "too unlike to be compared" in unlike.locator("#comparison .warning").inner_text()
