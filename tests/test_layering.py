"""Who may import whom, and what stays unloaded."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import instrument

ROOT = Path(instrument.__file__).parent

FILES = sorted(
    p for p in ROOT.rglob("*.py") if p.parent.name != "conf" and "samples" not in p.parts
)


def test_the_contracts_of_who_may_import_whom_are_kept() -> None:
    """Those in pyproject.toml; `lint-imports` prints the same."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(lint), "--no-cache", "--config", str(ROOT.parent / "pyproject.toml")],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 7 kept, 0 broken." in done.stdout


def test_a_room_says_in_one_line_what_it_is() -> None:
    for package in ROOT.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(package.read_text()))
        assert doc, package
        assert doc.splitlines()[0].endswith("."), package


def test_no_file_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "util", "core", "common", "base", "helpers", "managers", "misc"}
    assert [file for file in FILES if file.stem in nothing] == []


# Which packages and modules an import does not load.
ABSENT: dict[str, set[str]] = {
    "import instrument": {
        "torch", "numpy", "polars", "pydantic", "hydra", "omegaconf", "loguru", "jinja2",
    },
    "import hydra_plugins.instrument": {"torch", "numpy", "pydantic"},
    "import instrument.conf": {"torch", "numpy", "pydantic"},
    "from instrument import profiled": {
        "pydantic", "hydra", "omegaconf", "loguru", "msgspec", "torch._dynamo",
    },
    "from instrument import Capture": {
        "torch", "pydantic", "hydra", "omegaconf", "loguru", "jinja2",
    },
    "from instrument import Sink": {"torch", "hydra", "omegaconf"},
    "from instrument import Session": {
        f"instrument.{room}"
        for room in ("read.trace", "read.views", "read.ranks", "read.show", "export")
    }
    | {"instrument.read.capture"},
    "import instrument.export.sinks; instrument.export.sinks.TableSink(); instrument.export.sinks.Report(); "
    "instrument.export.sinks.Stacks(); instrument.export.sinks.Memory()": {
        "torch",
        "polars",
        "jinja2",
    },
    "from instrument import ProfilerConfig; ProfilerConfig(active=3)": {"torch"},
    "import instrument.read.show.ranks, instrument.read.ranks.merge_traces, instrument.read.ranks.run": {
        "torch"
    },
    "import instrument.read.advise.diagnose, instrument.read.advise.diagnosis, "
    "instrument.read.simulate.scenario": {"torch", "pydantic", "jinja2"},
    "import instrument.read.show.whatif, instrument.read.simulate.scenario, instrument.cli.whatif": {
        "torch",
        "pydantic",
        "hydra",
    },
    "import instrument.read.compare.limits, instrument.cli.baseline": {
        "torch",
        "pydantic",
        "hydra",
    },
    "import instrument.integrations.pytest_plugin": {
        "torch", "numpy", "msgspec", "pydantic", "hydra", "instrument.base.errors",
    },
    "import instrument.graph, instrument.cli.graph": {"torch", "numpy"},
    "import instrument.export.__main__": {"torch"},
    "import instrument.cli.command": {
        "torch", "numpy", "polars", "msgspec", "pydantic", "jinja2", "rich",
    },
}  # fmt: skip
# These load torch, which this process does once.
WITH_TORCH = {"from instrument import profiled", "from instrument import Session"}
PROBE = """
import json, os, sys

for number, (statement, with_torch) in enumerate(json.loads(sys.argv[1])):
    if with_torch:
        import torch
    if not os.fork():
        exec(statement)
        print(json.dumps([number, [*sys.modules]]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that each statement loads, in a process that has loaded nothing else."""
    statements = sorted(ABSENT, key=lambda each: each in WITH_TORCH)
    asked = json.dumps([(each, each in WITH_TORCH) for each in statements])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = dict(map(json.loads, done.stdout.splitlines()))
    return {statements[number]: set(modules) for number, modules in answers.items()}


@pytest.mark.parametrize("statement", ABSENT)
def test_what_stays_unloaded(statement: str, loaded: dict[str, set[str]]) -> None:
    assert ABSENT[statement] & loaded[statement] == set()
