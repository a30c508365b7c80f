"""`instrument diff`: its options, its text, its JSON and Markdown, and what docs/compare.md shows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from builders import Event, annotation, is_harmless, launched, span, step, write_capture, write_rank
from commands import Command
from golden import Golden
from real_traces import needs_traces, path
from rich.console import Console

from instrument.read.compare import limits
from instrument.read.compare import text as report
from instrument.read.compare.diff import JSON_KEYS, Difference, diff
from instrument.read.show.terminal import draw
from instrument.read.views.layout import plain

PAGE = Path(__file__).parent.parent / "docs" / "compare.md"
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


COMMANDS = [
    "diff before after",
    "diff old/run new/run --rows 1",
    "diff before after --rows 2",
    *(f"diff before after --by {by} --rows 2" for by in ("range", "operator", "kernel", "shape")),
    "diff on_cpu on_cpu --by kernel",
    "diff before elsewhere --rows 1",
    "diff before larger",
    "diff before larger --force --rows 1",
    "diff a b",
    "diff before after --markdown --rows 2",
    "diff before nothing",
    "diff before",
]


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the captures named above, as the current one."""
    monkeypatch.chdir(tmp_path)
    write_capture(Path("before"), steps(400, 700))
    write_capture(Path("after"), steps(100, 800), "steps_3-4_new")
    for name in ("old", "new"):
        write_capture(Path(name), steps(100, 700), "run")
    write_capture(Path("on_cpu"), [step(1, 0, 100), span("aten::mm", 0, 50)])
    write_capture(Path("elsewhere"), steps(100, 700), host="elsewhere")
    write_capture(Path("larger"), steps(100, 700), world_size=8)
    for name, lasts in (("a", 100), ("b", 300)):
        for rank in range(2):
            write_rank(Path(name), rank, steps(100 + rank * lasts, 700), world_size=2)


@pytest.mark.usefixtures("sides")
def test_what_is_printed(transcript: Callable[[list[str]], str], golden: Golden) -> None:
    golden("diff.txt", transcript(COMMANDS))


@pytest.mark.usefixtures("sides")
def test_the_parts_that_are_shown_sum_to_the_step_in_80_columns(command: Command) -> None:
    text = command("diff", "before", "after", "--rows", 2).out
    assert max(map(len, text.splitlines())) <= 80
    table = text.partition("Parts of the mean step")[2].split("\n\n")[0]
    cells = [re.findall(r"([+−-]?[\d.]+) ms", line) for line in table.splitlines()[3:]]
    *rows, whole = [[float(cell.replace(MINUS, "-")) for cell in row] for row in cells]
    assert [round(sum(column), 3) for column in zip(*rows)] == whole


@pytest.mark.usefixtures("sides")
def test_json_has_the_keys_that_the_page_lists(command: Command) -> None:
    condition = ("--fail-on", "operators>1000")
    content = json.loads(command("diff", "before", "after", "--json", *condition).out)
    assert [*content] == ["version", *JSON_KEYS, "conditions"]
    assert content["conditions"][0].keys() == limits.JSON_KEYS.keys()
    assert content["version"] == 1
    (whole,) = content["wholes"]
    times = {"before_ns", "after_ns", "change_ns", "low_ns", "high_ns"}
    assert times | {"rank", "steps", "parts"} == whole.keys()
    for key in ("before_ns", "after_ns", "change_ns"):
        assert sum(part[key] for part in whole["parts"]) == whole[key]
    assert whole["steps"]["before"] == {"count": 3, "median_ns": 1_400_000, "deviation_ns": 0}
    assert {row["name"] for row in content["kernels"]} == {"gemm"}


def test_markdown_is_bounded_and_its_names_are_no_markup(tmp_path: Path, command: Command) -> None:
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
    text = command("diff", *sides, "--markdown", "--rows", -1).out
    assert len(text.encode()) <= 6_001
    assert is_harmless(text)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in table)
    outside = re.sub(r"(`+) .*? \1", "", text)
    assert "<img" not in outside
    assert not re.search(r"@\w", outside)
    assert "smaller parts" in text


@pytest.mark.usefixtures("sides")
def test_on_a_terminal_the_same_tables_fit() -> None:
    made = report.parts(diff("before", "after"))
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
        assert is_harmless(part if isinstance(part, str) else plain([part]))


@needs_traces
def test_the_page_shows_what_is_printed(command: Command) -> None:
    page = PAGE.read_text("utf-8")
    words = re.search(r"`instrument diff BEFORE AFTER (--[^`]+)`", page)
    assert words
    paths = [path(f"v100_resnet50_workers{n}") for n in (0, 4)]
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert command("diff", *paths, *words[1].split()).out == shown


@pytest.mark.usefixtures("sides")
def test_a_difference_prints_itself_like_the_command(command: Command) -> None:
    found = diff("before", "after")
    assert f"{found}\n" == command("diff", "before", "after").out
    assert f"{found._repr_markdown_()}\n" == command("diff", "before", "after", "--markdown").out
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


@pytest.mark.usefixtures("sides")
def test_of_several_paths_the_first_half_is_before(command: Command) -> None:
    content = json.loads(command("diff", "before", "old", "after", "new", "--json").out)
    assert content["given"] == ["before and 1 more", "after and 1 more"]
    assert len(content["before"]) == len(content["after"]) == 2
    words = ("diff", *["before"] * 3, *["after"] * 3, "--fail-on", "step>5%", "--rows", 1)
    printed = command(*words).out
    assert printed.startswith("pass: step>5% (before 1.400 ms, after 1.100 ms)")
    assert "give the same number of captures" in command("diff", *"abc", status=2).err
