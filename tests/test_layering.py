"""Who may import whom, and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import instrument

ROOT = Path(instrument.__file__).parent

FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent.name != "conf")


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
    assert "Contracts: 5 kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in ROOT.rglob("__init__.py")), ids=lambda p: p.name
)
def test_a_room_says_in_one_line_what_it_is(package: Path) -> None:
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert doc, package
    assert doc.splitlines()[0].endswith(".")


def test_no_file_has_a_name_that_says_nothing() -> None:
    for file in FILES:
        assert file.stem not in {
            "utils",
            "util",
            "core",
            "common",
            "base",
            "helpers",
            "managers",
            "misc",
        }, file


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import instrument",
            {"torch", "numpy", "pydantic", "hydra", "omegaconf", "loguru", "jinja2"},
        ),
        ("import hydra_plugins.instrument", {"torch", "numpy", "pydantic"}),
        ("import instrument.conf", {"torch", "numpy", "pydantic"}),
        (
            "from instrument import profiled",
            {"pydantic", "hydra", "omegaconf", "loguru", "msgspec", "torch._dynamo"},
        ),
        (
            "from instrument import Capture",
            {"torch", "pydantic", "hydra", "omegaconf", "loguru", "jinja2"},
        ),
        ("from instrument import Sink", {"torch", "hydra", "omegaconf"}),
        (
            "from instrument import Session",
            {f"instrument.{room}" for room in ("trace", "analysis", "runs", "report", "sinks")}
            | {"instrument.capture", "instrument.finish.window"},
        ),
        (
            "import instrument.sinks.table, instrument.sinks.tensorboard, instrument.sinks.stacks",
            {"torch"},
        ),
        ("import instrument.sinks.stacks, instrument.sinks.memory", {"jinja2", "markupsafe"}),
        ("from instrument import ProfilerConfig; ProfilerConfig(active=3)", {"torch"}),
        (
            "import instrument.report.ranks, instrument.runs.merge_traces, instrument.runs.run",
            {"torch"},
        ),
        (
            "import instrument.findings.diagnose, instrument.findings.diagnosis, "
            "instrument.whatif.scenario",
            {"torch", "pydantic", "jinja2"},
        ),
        (
            "import instrument.report.whatif, instrument.whatif.scenario, instrument.cli.whatif",
            {"torch", "pydantic", "hydra"},
        ),
        (
            "import instrument.compare.guard, instrument.cli.baseline",
            {"torch", "pydantic", "hydra"},
        ),
        (
            "import instrument.pytest_plugin",
            {"torch", "numpy", "msgspec", "pydantic", "hydra", "instrument.base.errors"},
        ),
        ("import instrument.fx, instrument.cli.graph", {"torch", "numpy"}),
        ("import instrument.finish.__main__", {"torch"}),
        (
            "import instrument.cli.command",
            {"torch", "numpy", "msgspec", "pydantic", "jinja2", "rich"},
        ),
    ],
)
def test_what_stays_unloaded(statement: str, absent: set[str]) -> None:
    code = (
        f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert absent.isdisjoint(loaded), absent & set(loaded)
