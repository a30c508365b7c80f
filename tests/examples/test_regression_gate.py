"""The example regression_gate: its tests pass again and again, and each fault flips its own counters only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import warm

EXAMPLE = Path(__file__).parents[2] / "examples" / "regression_gate"
PLUGINS = ("-p", "instrument.integrations.pytest_plugin", "-p", "no:cacheprovider")
# What to write for what, and the counters that rise. An allocation has a size, and a collective a kind.
FAULTS = {
    "item": (
        ("self.total_loss.add_(loss.detach())", "self.total_loss.add_(loss.detach()); loss.item()"),
        {"syncs"},
    ),
    "operator": (("features.relu_()", "features.relu_().relu_()"), {"operators"}),
    "allocation": (("features.relu_()", "features.relu()"), {"allocations", "allocated_bytes"}),
    "flops": (("used = WIDTH // 2", "used = WIDTH"), {"flops"}),
    "graph break": (
        ("    return centered", "    torch._dynamo.graph_break()\n    return centered"),
        {"graph_breaks"},
    ),
    "all_reduce": (
        ("    dist.all_reduce(flat)\n", "    dist.all_reduce(flat)\n    dist.all_reduce(flat)\n"),
        {"collectives", "collectives.all_reduce"},
    ),
}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to load all installed plugins takes a second
    }
    return warm.run(["-m", "pytest", *PLUGINS, "-q", *options], folder, environment)


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with a baseline made by this version of torch."""
    folder = tmp_path_factory.mktemp("example") / "regression_gate"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "perf"))
    done = run(folder, "--perf-update")
    assert done.returncode == 0, done.stdout
    return folder


def test_the_example_passes_again(accepted: Path) -> None:
    done = run(accepted, "--perf-report")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^ +collectives\.all_reduce +1, limit 1$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_flips_its_own_counters_only(name: str, accepted: Path, tmp_path: Path) -> None:
    (before, after), expected = FAULTS[name]
    folder = tmp_path / "regression_gate"
    shutil.copytree(accepted, folder)
    source = (folder / "train.py").read_text()
    assert source.count(before) == 1
    (folder / "train.py").write_text(source.replace(before, after))
    done = run(folder, "-k", "no_more_than_before")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    exceeded = re.findall(r"^fail: ([\w.]+)>", done.stdout, re.MULTILINE)
    assert set(exceeded) == expected, done.stdout
    if name != "graph break":  # torch.compile names its reasons in capture.json
        assert re.search(r"^ +train\.py:\d+ in \w+$", done.stdout, re.MULTILINE), done.stdout


def test_the_training_runs_and_its_captures_can_be_judged(accepted: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run([str(accepted / "train.py")], tmp_path, environment)
    assert done.returncode == 0, done.stdout
    assert len([*(tmp_path / "profile").glob("steps_*")]) == 3
