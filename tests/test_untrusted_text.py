"""Names from anybody's trace and capture: exact as data, harmless wherever a person reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import (
    REDUCES,
    allocation,
    annotation,
    call,
    frame,
    is_harmless,
    kernel,
    span,
    step,
    write_capture,
)
from commands import Command

from instrument.cli.command import main
from instrument.read.capture import Capture
from instrument.read.ranks.rank_summary import write
from instrument.read.views.stacks import Stack, folded

# Retitles the window, clears the screen, writes red by one C1 character, forges a line, turns the text round.
EVIL = "e\x1b]0;owned\x07\x1b[2J\x9b31m\nforged  9\r\x85\u2028\u202edetrever</script><b>"
SHOWN = r"e\x1b]0;owned\x07\x1b[2J\x9b31m\nforged  9\r\x85\u2028\u202edetrever</script><b>"


def evil_events(own_us: int = 500) -> list[dict[str, Any]]:
    events = []
    for number, start in ((3, 0), (4, 1000)):
        launch = {"correlation": number, "External_id": number}
        events += [
            step(number, start, 1000),
            annotation(EVIL, start, own_us),
            frame(EVIL, start, 1000, Python_id=number, Python_parent_id=None),
            span(EVIL, start + 10, 100, External_id=number, Input_Dims=[[8, 3]]),
            call(f"cudaLaunch{EVIL}", start + 20, 10, **launch),
            kernel(f"{EVIL}gemm", start + 30, own_us - 100, **launch),
            kernel(
                f"{REDUCES}{EVIL}", start + own_us, 900 - own_us, correlation=number, grid=[1, 1, 1]
            ),
            allocation(start + 40, 64, number, 64),
        ]
    compiled = span(f"Torch-Compiled Region: {EVIL}", 1950, 5)
    return [*events, compiled, kernel("k", 1960, 5, tid=EVIL)]


EVIL_METADATA: dict[str, Any] = {
    "name": EVIL,
    "versions": {"torch": EVIL, EVIL: "1"},
    "devices": [EVIL],
    "window": {
        "first_step": 3, "last_step": 4, "steps": 2, "truncated": True, "reason": EVIL,
        "phase": EVIL,
    },
    "compiled_ranges": [{"range": EVIL, "region": EVIL}],
    "modules_not_seen": [EVIL],
    "threads_not_recorded": [EVIL],
}  # fmt: skip


def evil_capture(output: Path) -> Capture:
    folder = write_capture(output, evil_events(), "c0").folder
    about = json.loads((folder / "capture.json").read_text())
    (folder / "capture.json").write_text(json.dumps(about | EVIL_METADATA))
    capture = Capture.load(folder)
    write(capture, folder)
    return capture


def test_names_are_exact_as_data_and_harmless_as_text(tmp_path: Path, command: Command) -> None:
    """What commands print of such names is looked at in `test_forged_lines.py`."""
    capture = evil_capture(tmp_path)
    assert SHOWN[:40] in command("show", capture.folder).out
    assert is_harmless(
        repr(capture.ranges) + repr(capture) + str(capture.operators) + capture._repr_html_()
    )
    assert capture.ranges[0].name == EVIL
    assert capture.operators.column("name")[1] == EVIL
    ranges = json.loads(command("ranks", capture.folder, "--json").out)["ranges"]
    assert ranges[0]["path"] == EVIL


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / EVIL.replace("/", "")
    for content in (None, b"", b"{", b"[3]", b"\x1f\x8b" + EVIL.encode()):
        trace = folder / "trace.json"
        if content is not None:
            folder.mkdir(exist_ok=True)
            trace.write_bytes(content)
        assert main(["show", str(trace)]) == 2
        err = capsys.readouterr().err
        assert is_harmless(err)
        assert err.count("\n") == 1


def test_pipe_in_place_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_capture(tmp_path, []).folder
    for name in ("capture.json", "trace.json.gz"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert main(["show", str(folder)]) == 2
        out, err = capsys.readouterr()
        assert (out, err[:12]) == ("", "instrument: ")
        (folder / name).unlink()
        (folder / name).write_text("{}")


@pytest.mark.parametrize("command", ["show", "ranks", "export"])
@pytest.mark.parametrize(
    "path", ["a" * 300, "\x1b[2J", "\u202e/\x9b", "a\x00b", "/dev/null/x", "\ud800"]
)
def test_impossible_path(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, path]) == 2
    err = capsys.readouterr().err
    assert err.startswith("instrument: ")
    assert is_harmless(err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["show", "t.json"],
        ["show", "t.json.gz"],
        ["ranks", "t.json"],
        ["export", "t.json", "--sink", "table"],
        ["show", "timings_rank0.jsonl"],
    ],
    ids=" ".join,
)
def test_a_pipe_that_nobody_writes_into_is_not_waited_for(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(command[1])
    assert main(command) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_a_file_of_stacks_has_no_control_characters() -> None:
    (text,) = folded([Stack((EVIL, "inner"), 5_000)])
    assert text == SHOWN_IN_STACKS + ";inner 5\n"
    assert text.rstrip("\n").isprintable()


SHOWN_IN_STACKS = r"e\x1b]0,owned\x07\x1b[2J\x9b31m_forged_9_\u202edetrever</script><b>"
