"""Tables on a terminal: fitted to its width, harmless, and plain text wherever there is no terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
import warm
from builders import annotation, kernels, span, steps, write_capture
from golden import Golden
from rich.cells import cell_len
from rich.console import Console

from instrument.cli import show
from instrument.read.capture import Capture
from instrument.read.show.terminal import draw
from instrument.read.show.text import capture_parts, render, view_part
from instrument.read.views.coverage import COVERAGE
from instrument.read.views.section import Section
from instrument.read.views.table import Table

CONTROL = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = (
    "[red]x[/red]",
    "[link=https://evil]y[/link]",
    ":smile:",
    "a\x1b]0;owned\x07b",
    "[/]",
    "中文内核" * 20,
)


def drawn(
    parts: list[str | Section], width: int, encoding: str = "utf-8", **options: object
) -> str:
    class File(StringIO):
        pass

    File.encoding = encoding  # type: ignore[misc]
    console = Console(
        file=File(),
        force_terminal=True,
        color_system="standard",
        width=width,
        _environ={},
        **options,
    )
    return draw(parts, console)


def words(text: str) -> str:
    return CONTROL.sub("", text)


def tables(text: str) -> list[list[str]]:
    """The lines of each table: its header, its rule and its rows."""
    blocks = [block.splitlines() for block in words(text).split("\n\n")]
    found = []
    for block in blocks:
        rule = next(
            (at for at, line in enumerate(block) if re.fullmatch(r"[─ -]*[─-]{3}[─ -]*", line)),
            None,
        )
        if rule is not None:
            found.append(block[rule - 1 :])
    return found


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    deep = [
        annotation("/".join("abcdefgh"[: depth + 1]), 100 + depth, 80 - 2 * depth)
        for depth in range(8)
    ]
    return write_capture(
        tmp_path, [*steps(), *kernels(), *deep, span("aten::" + "long" * 40, 500, 9)]
    )


@pytest.mark.parametrize("width", [30, 80, 140, 250])
@pytest.mark.parametrize("columns", [None, ["all"], ["calls", "cpu_ns", "share", "self_cpu_ns"]])
def test_lines_fit_the_terminal(capture: Capture, width: int, columns: list[str] | None) -> None:
    parts = capture_parts(capture, columns=columns, rows=-1)
    if columns != ["calls", "cpu_ns", "share", "self_cpu_ns"]:
        parts += [
            view_part(view, getattr(capture, view), rows=5, columns=columns)
            for view in ("kernels", "steps")
        ]
    text = drawn(parts, width)
    found = tables(text)
    assert len(found) >= 2
    assert all(cell_len(line) <= width for lines in found for line in lines)


@pytest.mark.parametrize("width", [40, 50, 60, 250])
def test_sentences_below_rows_are_wrapped_and_whole(width: int) -> None:
    reasons = ["half of the work is missing because its launches came " + "much " * 12 + "earlier."]
    coverage = Table.of_rows(COVERAGE, [("device time with a launch", 0.5, 1, 2, reasons[0])])
    part = view_part("coverage", coverage, rows=-1)
    assert isinstance(part, Section)
    text = words(drawn([part], width))
    assert all(cell_len(line) <= min(width, 78) for line in text.splitlines() if line[:4] == "    ")
    in_one_line = " ".join(text.split())
    assert all(" ".join(reason.split()) in in_one_line for reason in reasons)
    names = Table({"name": ["mm"]})
    frames = Section(names, ["name"], below=[["a/long/path/" * 30]])
    assert words(drawn([frames], width)).count("…") == 1


def test_what_is_drawn(capture: Capture, golden: Golden) -> None:
    """A column without room is named below; one that was asked for has a table of its own, with the names again."""
    shares = Table({"name": ["hot", "warm", "cold"], "share": [0.6, 0.05, 0.01]})
    depths = [0, 1, 2, 2, 1, 2, 0, 1]
    names = [*(f"{'  ' * depth}n{k}" for k, depth in enumerate(depths)), "rest"]
    tree = Section(Table({"name": names, "depth": [*depths, None]}), ["name"], is_tree=True)
    long = Table({"name": ["void " + "x" * 200 + "<float, 3>"], "calls": [1]})
    empty = Section(Table({"name": [], "calls": []}), ["name", "calls"], "Nothing")
    ranges = capture_parts(capture, operators=False)[1:2]
    operators = capture_parts(capture, sort="cpu_ns", ranges=False)[1:2]
    all_columns = capture_parts(capture, columns=["all"], operators=False)[1:2]
    drawings = {
        "ranges, 250 columns": drawn(ranges, 250),
        "ranges, 80 columns of ASCII": drawn(ranges, 80, encoding="ascii"),
        "operators by CPU time, 60 columns": drawn(operators, 60),
        "all columns of the ranges, 80 columns": drawn(all_columns, 80),
        "shares of a cost": drawn([Section(shares, ["name", "share"], of_cost=True)], 40),
        "shares": drawn([Section(shares, ["name", "share"])], 40),
        "a tree": drawn([tree], 80),
        "a long name": drawn([Section(long, ["name", "calls"])], 50),
        "a table of nothing": drawn([empty], 20),
    }
    shown = "\n".join(f"---- {name}\n{text}" for name, text in drawings.items())
    golden("drawn.txt", shown.replace(str(capture.folder), "FOLDER").replace("\x1b", "ESC"))


def test_the_name_of_a_deep_row_is_seen() -> None:
    table = Table({"name": ["  " * k + "n" for k in range(500)], "depth": range(500)})
    lines = words(drawn([Section(table, ["name"], is_tree=True)], 40)).splitlines()[2:]
    assert len(lines) == 500
    assert all(cell_len(line) <= 40 and line.endswith("n") for line in lines)


def test_hostile_names_stand_as_they_are(tmp_path: Path) -> None:
    table = Table({"name": [*HOSTILE], "calls": [1] * len(HOSTILE), "share": [0.5] * len(HOSTILE)})
    below = [[name] for name in HOSTILE]
    text = drawn([*HOSTILE, Section(table, table.columns, title=HOSTILE[0], below=below)], 80)
    plain_text = words(text)
    assert "\x1b" not in plain_text
    assert "\x07" not in plain_text
    for name in (*HOSTILE[:3], r"a\x1b]0;owned\x07b", "[/]"):
        assert plain_text.count(name) >= 3, name
    assert "8;" not in "".join(re.findall(r"\x1b[^m]*", text)), "no link"
    capture = write_capture(
        tmp_path, [*steps(), *(span(name, 600 + k, 1) for k, name in enumerate(HOSTILE))]
    )
    shown = words(drawn([*capture_parts(capture, rows=-1)], 80))
    assert all(name in shown for name in HOSTILE[:3])


def test_a_terminal_of_five_columns() -> None:
    table = Table({"number": [1, 2], "duration_ns": [10**9, None]})
    text = drawn([Section(table, ["number", "duration_ns"])], 5)
    assert all(cell_len(line) <= 5 for lines in tables(text) for line in lines)


def on_a_terminal(*arguments: str, width: int, **environment: str) -> str:
    """What a command writes to a terminal of that width."""
    inside, outside = pty.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    env = warm.environment({**env, "TERM": "xterm", **environment})
    command = ["-m", "instrument", *arguments]
    with ThreadPoolExecutor(1) as thread, os.fdopen(inside, "rb", buffering=0) as terminal:
        status = thread.submit(warm.run_into, command, Path.cwd(), env, outside)
        status.add_done_callback(lambda _: os.close(outside))
        content = b""
        with suppress(OSError):  # so Linux says that the other end is closed
            while more := terminal.read(65536):
                content += more
        assert status.result() == 0
    return content.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_and_its_width_and_others_plain_text(capture: Capture) -> None:
    folder = str(capture.folder)
    text = on_a_terminal("show", folder, width=80)
    assert "\x1b[1m" in text
    assert all(cell_len(line) <= 80 for lines in tables(text) for line in lines)
    assert "left out" in text
    wide = on_a_terminal("show", folder, "--ranges", width=200)
    assert "\x1b[36m" in wide, "a bar"
    assert "\x1b[36m" not in on_a_terminal("show", folder, "--ranges", width=200, NO_COLOR="1")
    assert on_a_terminal("show", folder, width=80, TERM="dumb") == render(capture) + "\n"
    assert on_a_terminal("show", folder, "--json", width=80).startswith("{")
    forced = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    piped = warm.run_apart(["-m", "instrument", "show", folder], Path.cwd(), forced)
    assert piped.stdout == render(capture) + "\n"


def test_every_view_can_be_drawn(capture: Capture) -> None:
    views = [f"--{option}" for option in show.OPTIONS]
    text = on_a_terminal("show", str(capture.folder), *views, "--columns", "all", width=60)
    assert all(cell_len(line) <= 60 for lines in tables(text) for line in lines)
    assert "Kernels" in text
