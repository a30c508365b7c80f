"""Reading where torch, Hydra and OmegaConf are not installed: all commands, with the packages that README names.

The commands run in a Python that finds nothing but the checkout and links to these packages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from test_watch_command import train

import instrument
from instrument.cli.command import COMMANDS
from instrument.cli.samples import FOLDER

ROOT = Path(instrument.__file__).parents[1]
# What each command that reads is asked here; a new command needs a row here or in RECORDING.
READING = {
    "show": ["show starved", "show starved --steps --json", "show python-bound --ops --by range"],
    "sql": ['sql "select kind, count(*) from events group by kind" starved'],
    "ls": ["ls .", "ls . --csv"],
    "report": ["report after --before before -o page.html"],
    "open": ["open starved --finding none"],
    "diagnose": ["diagnose starved", "diagnose two-ranks --json"],
    "check": ["check starved"],
    "whatif": ["whatif starved"],
    "diff": ["diff before after"],
    "verify": ["verify ."],
    "baseline": ["baseline after -o perf.json"],
    "export": [
        "export starved",
        "export starved --sink table --to written",
        "export starved --sink report --to written",
        "export starved --sink parquet --to written",
        "export starved --sink stacks --to written",
        "export starved --sink table rows=3",
    ],
    "ranks": ["ranks two-ranks"],
    "trigger": ["trigger starved"],
    "watch": ["watch timed --once"],
    "ab": ["ab --a true --b true"],
    "mcp": ["mcp ."],
    "skill": ["skill"],
    "samples": ["samples", "samples compiled copied"],
}
RECORDING = {
    "run": "run starved/train.py",
    "try": "try starved/train.py",
    "graph": "graph model:build",
}
# Errors of commands that find nothing of their kind in a sample: they have looked for it.
REFUSED = {
    "open starved --finding none": "has no finding 'none'",
    "ab --a true --b true": "The run has recorded no window with two steps",
    "export starved --sink table rows=3": "needs the package omegaconf: pip install omegaconf.",
    "mcp .": "instrument mcp needs the package mcp",
    "verify .": "proof.json cannot be read",
    "trigger starved": "No run in or below starved has the trigger 'file'",
}
RUN = """
import io, json, shlex, sys
from contextlib import redirect_stderr, redirect_stdout
from instrument.cli.command import main

class Terminal(io.StringIO):
    def isatty(self):
        return True

answers = {}
for line in sys.argv[1:]:
    with redirect_stdout(Terminal()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(shlex.split(line))
    answers[line] = status, out.getvalue(), err.getvalue()
print(json.dumps([answers, [*sys.modules]]))
"""


class Answer(NamedTuple):
    status: int
    out: str
    err: str


def short_list() -> list[str]:
    """The packages that README names for reading without torch."""
    text = (ROOT / "README.md").read_text("utf-8")
    (names,) = re.findall(r"^pip install ([a-z0-9 ]+)\npip install --no-deps \.$", text, re.M)
    return names.split()


def closure(names: list[str]) -> set[str]:
    """The packages and all that they require."""
    found: set[str] = set()
    left = [*names]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            needed = [Requirement(each) for each in distribution(name).requires or ()]
            left += [
                each.name
                for each in needed
                if not each.marker or each.marker.evaluate({"extra": ""})
            ]
    return found


def modules(name: str) -> set[Path]:
    """The files and folders of a package in the folder that it is installed in."""
    own = distribution(name)
    tops = {Path(str(each)).parts[0] for each in own.files or ()} - {"..", "__pycache__"}
    return {Path(str(own.locate_file(each))) for each in tops}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples and the timings of a run."""
    folder = tmp_path_factory.mktemp("read")
    for each in FOLDER.iterdir():
        shutil.copytree(each, folder / each.name)
    train(folder / "timed", range(5))
    return folder


@pytest.fixture(scope="module")
def asked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Answer], Any]:
    """What each command answers, by its line, and the names of the modules that were loaded."""
    links = tmp_path_factory.mktemp("packages")
    for path in {path for name in closure(short_list()) for path in modules(name)}:
        (links / path.name).symlink_to(path)
    lines = [line for of in READING.values() for line in of] + [*RECORDING.values()]
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN, *lines],
        cwd=folder,
        env={"PYTHONPATH": f"{links}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout)
    return {line: Answer(*each) for line, each in answers.items()}, loaded


def test_each_command_is_asked() -> None:
    assert {*READING} | {*RECORDING} == {*COMMANDS}


@pytest.mark.parametrize("line", [line for of in READING.values() for line in of])
def test_a_command_reads(line: str, asked: Any) -> None:
    answer = asked[0][line]
    if line in REFUSED:
        assert REFUSED[line] in answer.err
    else:
        assert (answer.status, answer.err) == (0, "")
        assert answer.out


@pytest.mark.parametrize("line", RECORDING.values(), ids=RECORDING)
def test_a_command_that_records_says_what_to_install(line: str, asked: Any) -> None:
    answer = asked[0][line]
    command = line.partition(" ")[0]
    assert answer == Answer(
        2,
        "",
        f"instrument: instrument {command} needs torch, which is not installed: "
        "pip install torch-instrument installs all that recording needs.\n",
    )


def test_the_short_list_names_no_package_that_nothing_loads(asked: Any) -> None:
    loaded = {name.partition(".")[0] for name in asked[1]}
    assert not loaded & {"torch", "hydra", "omegaconf"}
    for name in short_list():
        assert loaded & {path.name for path in modules(name)}, name
