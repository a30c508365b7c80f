"""Compares the transcripts of five tasks for agents with what the commands print: `python benchmarks/agents/check.py`.

No model runs: each task names the commands of a right solution, where the answer is in their JSON, and what stands
there. Prints a line for each task, with the tokens that its answers cost; ends with 1 if one of them has changed.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks.toml"
CHARACTERS = 4  # to a token


def tasks() -> list[dict[str, Any]]:
    with TASKS.open("rb") as file:
        found: list[dict[str, Any]] = tomllib.load(file)["tasks"]
    return found


@cache
def printed(folder: str, *words: str) -> str:
    command = [sys.executable, "-m", "instrument", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def at(content: Any, look: str) -> str:
    """The value at a path such as `findings.0.code`."""
    for key in look.split("."):
        content = content[int(key) if isinstance(content, list) else key]
    return content if isinstance(content, str) else json.dumps(content)


def differences(task: dict[str, Any], folder: str) -> Iterator[str]:
    """What the commands print in a folder, where it is not the answer."""
    samples = {key: task[key] for key in ("sample", "other") if key in task}
    for name in samples.values():
        printed(folder, "samples", name)
    for step in task["steps"]:
        words = shlex.split(step["command"].format(**samples))
        text, look = printed(folder, *words), step.get("look")
        found = at(json.loads(text), look) if look else text
        if re.fullmatch(step["expect"], found, re.DOTALL) is None:
            yield f"{step['command']}: {look or 'the text'} is {found}, not {step['expect']}"


def cost(task: dict[str, Any], folder: str) -> int:
    """The tokens of the answers of a task."""
    samples = {key: task[key] for key in ("sample", "other") if key in task}
    commands = {step["command"].format(**samples) for step in task["steps"]}
    return sum(len(printed(folder, *shlex.split(each))) for each in commands) // CHARACTERS


def main() -> int:
    wrong = 0
    for task in tasks():
        with tempfile.TemporaryDirectory() as folder:
            differ = [*differences(task, folder)]
            print(
                f"{'wrong' if differ else 'right'}  {cost(task, folder):6,} tokens  {task['question']}"
            )
        print("".join(f"       {each}\n" for each in differ), end="")
        wrong += bool(differ)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
