"""`instrument diff`: its options, its text, its JSON and Markdown, and what docs/compare.md shows of it."""

from __future__ import annotations

import json
import os
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from builders import Event, annotation, is_harmless, launched, span, step, write_capture, write_rank
from rich.console import Console

from instrument.analysis.section import Section
from instrument.cli.command import main
from instrument.compare import difference as report
from instrument.compare import guard
from instrument.compare.diff import diff
from instrument.compare.difference import Difference
from instrument.report.terminal import draw

PAGE = (Path(__file__).parent.parent / "docs" / "compare.md").read_text("utf-8")
TRACES = os.environ.get("INSTRUMENT_TRACES")
MINUS = "\N{MINUS SIGN}"


def steps(read_us: int, kernel_us: int, name: str = "read") -> list[Event]:
    """Four steps of 1000 µs plus reading, with a kernel that the model launches."""
    events = []
    for number in range(4):
        start = number * 2000
        events += [
            step(number, start, 1000 + read_us),
            annotation(name, start, read_us),
            span("aten::empty", start, read_us),
            annotation("model", start + read_us, 1000),
            *launched("gemm", start + read_us, start + read_us + 5, kernel_us, number + 1),
        ]
    return events


@pytest.fixture
def before(tmp_path: Path) -> Path:
    made = write_capture(tmp_path / "before", steps(400, 700)).folder
    assert made
    return made


@pytest.fixture
def after(tmp_path: Path) -> Path:
    made = write_capture(tmp_path / "after", steps(100, 800), "steps_3-4_new").folder
    assert made
    return made


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["diff", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_first_sentence_says_what_changed_most(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, before, after)
    assert " ".join(text.split("\n\n")[0].split()) == (
        f"steps_3-4 → steps_3-4_new: mean step 1.400 ms → 1.100 ms ({MINUS}0.300 ms, {MINUS}21.4 %), "
        f"mostly: other CPU in read {MINUS}0.300 ms"
    )
    assert (
        "Median step: 1.400 ms ± 0.000 ms (3 steps) → 1.100 ms ± 0.000 ms (3 steps). The medians"
        in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= 80


def test_captures_of_the_same_name_are_told_apart_by_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        write_capture(Path(name), steps(100, 700))
    assert said(capsys, "old", "new").startswith("old → new: mean step ")


def test_without_a_device_no_kernels_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_capture(tmp_path, [step(1, 0, 100), span("aten::mm", 0, 50)]).folder
    assert "Kernels" not in said(capsys, folder, folder)
    assert "Kernels: there is no device work." in said(capsys, folder, folder, "--by", "kernel")


def test_the_parts_that_are_shown_sum_to_the_step(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, before, after, "--rows", 2)
    table = text.partition("Parts of the mean step")[2].split("\n\n")[0]
    assert table.splitlines()[0] == ", 2 of 4"
    cells = [re.findall(r"([+−-]?[\d.]+) ms", line) for line in table.splitlines()[3:]]
    *rows, whole = [[float(cell.replace(MINUS, "-")) for cell in row] for row in cells]
    assert [round(sum(column), 3) for column in zip(*rows)] == whole
    assert "(2 smaller parts)" in table


@pytest.mark.parametrize(
    ("by", "title"),
    [
        ("range", "Ranges by time of the step; the same calls on both sides"),
        ("operator", "Operators by CPU time"),
        ("kernel", "Kernels by device time; the same calls on both sides"),
        ("shape", "Shapes: one side has no input shapes; profiler.record_shapes=true"),
    ],
)
def test_by_shows_one_table_below_the_parts(
    by: str, title: str, before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, before, after, "--by", by)
    _, _, _, table = text.split("\n\n")
    assert table.startswith(title)


def test_each_unlike_condition_is_a_warning(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_capture(tmp_path / "other", steps(100, 700), host="elsewhere")
    text = said(capsys, before, tmp_path / "other")
    assert "\n\nWarning: The machine differs: box before, elsewhere after.\n\n" in text


def test_a_comparison_that_would_mislead_needs_force(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_capture(tmp_path / "other", steps(100, 700), world_size=8)
    assert main(["diff", str(before), str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"instrument: {before} and {tmp_path}/other are too unlike to be compared: The world size "
        "differs: 1 before, 8 after. Use instrument diff --force (force=True) to compare them nevertheless.\n"
    )
    assert "Warning: The world size differs" in said(capsys, before, tmp_path / "other", "--force")


def test_a_mistake_is_answered_in_one_sentence(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(before), str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["diff", str(before)])


def test_the_ranks_of_a_run_have_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lasts in (("a", 100), ("b", 300)):
        for rank in range(2):
            write_rank(tmp_path / name, rank, steps(100 + rank * lasts, 700), world_size=2)
    text = said(capsys, tmp_path / "a", tmp_path / "b")
    table = text.partition("\nRanks\n")[2].split("\n\n")[0].splitlines()[2:]
    assert table == [
        "   0  1.100 ms  1.100 ms   0.000 ms  -",
        "   1  1.200 ms  1.400 ms  +0.200 ms  other CPU in read",
    ]


def test_json_has_the_keys_that_the_page_lists(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = ("--fail-on", "operators>1000")
    content = json.loads(said(capsys, before, after, "--json", *condition))
    assert [*content] == [*report.JSON_KEYS, "conditions"]
    assert content["conditions"][0].keys() == guard.JSON_KEYS.keys()
    assert content["version"] == 1
    (whole,) = content["wholes"]
    assert {"rank", "before_ns", "after_ns", "change_ns", "steps", "parts"} == whole.keys()
    for key in ("before_ns", "after_ns", "change_ns"):
        assert sum(part[key] for part in whole["parts"]) == whole[key]
    assert whole["steps"]["before"] == {"count": 3, "median_ns": 1_400_000, "deviation_ns": 0}
    assert {row["name"] for row in content["kernels"]} == {"gemm"}


def test_markdown_is_bounded_and_its_names_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "<img src=x>|[a](http://b) @someone `x` \x1b[2J"
    long = [f"{name} {number} " + "x" * 500 for number in range(60)]

    def hostile(lasts: int) -> list[Event]:
        events = [step(1, 0, 10_000)]
        for number, each in enumerate(long):
            events += [annotation(each, 100 * number, lasts), span(each, 100 * number, lasts)]
        return events

    sides = [
        write_capture(tmp_path / str(lasts), hostile(lasts), f"@me <b>{lasts}").folder
        for lasts in (20, 70)
    ]
    text = said(capsys, *sides, "--markdown", "--rows", -1)
    assert len(text.encode()) <= 6_001
    assert is_harmless(text)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in table)
    outside = re.sub(r"(`+) .*? \1", "", text)
    assert "<img" not in outside
    assert not re.search(r"@\w", outside)
    assert "smaller parts" in text


def test_on_a_terminal_the_same_tables_fit(before: Path, after: Path) -> None:
    made = report.parts(diff(before, after))
    text = draw(made, Console(file=StringIO(), width=80, force_terminal=False))
    assert max(map(len, text.splitlines())) <= 80
    assert f"{MINUS}0.300 ms" in text


def test_a_hostile_trace_is_shown_harmlessly(tmp_path: Path) -> None:
    sides = [
        write_capture(tmp_path / str(lasts), steps(lasts, 100, "\x1b]0;x\x07\nline")).folder
        for lasts in (100, 300)
    ]
    found = diff(*[each for each in sides if each])
    for part in report.parts(found):
        text = part if isinstance(part, str) else report_text(part)
        assert is_harmless(text)


def report_text(section: Section) -> str:
    from instrument.analysis.layout import plain

    return plain([section])


@pytest.mark.skipif(not TRACES, reason="INSTRUMENT_TRACES names no folder of real traces")
def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"`instrument diff BEFORE AFTER (--[^`]+)`", PAGE)
    assert command
    paths = [Path(TRACES or "", f"v100_resnet50_workers{n}.json.gz") for n in (0, 4)]
    shown = PAGE.partition("```text\n")[2].partition("```")[0]
    assert said(capsys, *paths, *command[1].split()) == shown


def test_a_difference_prints_itself_like_the_command(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = diff(before, after)
    assert f"{found}\n" == said(capsys, before, after)
    assert f"{found._repr_markdown_()}\n" == said(capsys, before, after, "--markdown")
    assert repr(found) == "<Difference: mean step 1.400 ms → 1.100 ms>"


def test_a_small_change_is_said_to_lie_within_the_spread(tmp_path: Path) -> None:
    def uneven(*lengths: int) -> Any:
        events = [step(0, 0, 10)]
        for number, lasts in enumerate(lengths, 1):
            events += [step(number, 1000 * number, lasts), span("aten::mm", 1000 * number, 5)]
        return write_capture(tmp_path / str(lengths), events)

    def spread(found: Difference) -> str:
        lines: Any = report.parts(found)[1]
        return " ".join(lines)

    base = uneven(100, 110, 120)
    assert "differ by at most the sum of both ± values" in " ".join(
        spread(diff(base, uneven(105, 115, 125))).split()
    )
    assert "differ by more than the sum of both ± values" in " ".join(
        spread(diff(base, uneven(300, 310, 320))).split()
    )
    fewer = " ".join(report.spread(diff(base, uneven(300, 310)).step).split())
    assert fewer.startswith(
        "Median step: 110.0 µs ± 10.0 µs (3 steps) → 305.0 µs (2 steps). The spread of the steps "
        "is not known, because a side has fewer than three steps"
    )
    fewest = report.spread(diff(uneven(10, 12), uneven(20, 22)).step)
    assert fewest.startswith("The spread of"), "the mean in the first sentence is the median too"
