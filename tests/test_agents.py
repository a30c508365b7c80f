"""What agents get: the skill file, the tasks of benchmarks/agents, and the MCP server."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Command

from instrument.base.errors import MissingPackage
from instrument.cli import mcp
from instrument.cli.command import COMMANDS

check = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/agents/check.py"))
)


def test_the_skill_names_commands_and_options_that_exist(
    command: Command, transcript: Callable[[Iterable[str]], str]
) -> None:
    skill = command("skill").out
    assert skill.startswith("---\nname: instrument\n")
    told = re.findall(r"^instrument (.*?)(?:  #.*)?$", skill, re.MULTILINE)
    assert len(told) > 8
    for line in told:
        name, *words = shlex.split(line)
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        text = transcript([f"{name} --help"])
        assert {each for each in options - {"--", "--its", "--own"} if each not in text} == set()
    assert {*re.findall(r"`([a-z]+) --", skill)} <= {*COMMANDS}


@pytest.mark.parametrize("task", check.tasks(), ids=lambda task: task["sample"])
def test_the_transcript_of_a_task_holds(task: dict[str, Any], tmp_path: Path) -> None:
    assert [*check.differences(task, str(tmp_path))] == []


def served(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Whether each call of a tool failed, and its text."""
    client = pytest.importorskip("mcp", reason="the extra torch-instrument[mcp] is not installed")

    async def answers() -> list[tuple[bool, str]]:
        async with client.Client(mcp.server(folder)) as connected:
            results = [await connected.call_tool(*each) for each in calls]
            return [(each.is_error, each.content[0].text) for each in results]

    return asyncio.run(answers())


def test_the_server_answers_with_the_commands_output(tmp_path: Path, command: Command) -> None:
    command("samples", "starved", str(tmp_path / "starved"))
    (failed, diagnosis), (_, table), (wrong_view, said) = served(
        tmp_path,
        ("diagnose", {"path": "starved"}),
        ("show", {"path": "starved", "view": "ops", "rows": 3}),
        ("show", {"path": "starved", "view": "opz"}),
    )
    assert not failed
    assert '"code": "loader-wait"' in diagnosis
    assert "Operators, 3 of" in table
    assert wrong_view
    assert "opz is no view" in said


@pytest.mark.parametrize("path", ["..", "/", "link", "a\0b", "https://example.org/trace.json"])
def test_the_server_reads_nothing_outside_its_folder(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    ((failed, said),) = served(folder, ("diagnose", {"path": path}))
    assert failed
    assert "give a path in this folder" in said


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("--output=/tmp/elsewhere", "is an option"),
        ("../outside.py", "is a file"),
        ("../script", "is a file"),
    ],
)
def test_a_change_is_no_option_and_no_script(change: str, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").touch()
    for name in ("outside.py", "script"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    call = {"script": "train.py", "changes": [change], "minutes": 0.1}
    ((failed, said),) = served(folder, ("try", call))
    assert failed
    assert why in said
    assert not (tmp_path / "ran").exists()


def test_an_edited_script_is_tried_with_another_output(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    calls = [("try", {"script": "train.py", "minutes": 0.1, "output": o}) for o in ("a", "a", "b")]
    served(tmp_path, calls[0])
    script.write_text("pass")
    (_, again), (_, anew) = served(tmp_path, *calls[1:])
    assert "train.py has changed since" in again
    assert "has ended before two steps" in anew
    ((_, said),) = served(tmp_path, ("try", {"script": "train.py", "output": "../b"}))
    assert "give a path in this folder" in said


def test_the_server_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(*sys.argv[1:])\nsys.exit(3)\n")
    ((failed, said),) = served(tmp_path, ("run", {"script": "train.py", "arguments": ["--a", "b"]}))
    assert not failed
    assert said.startswith("--a b")
    assert said.endswith("Exit status: 3")


def test_the_server_waits_for_no_process_that_a_script_leaves(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"with open({str(pid)!r}, 'w') as file: file.write(str(left.pid))\n"
        "print('done')\n"
    )
    ((_, said),) = served(tmp_path, ("run", {"script": "train.py"}))
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it is alive
    assert said.startswith("done")


def test_without_its_package_the_server_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(MissingPackage, match=r"pip install 'torch-instrument\[mcp\]'"):
        mcp.server(tmp_path)
