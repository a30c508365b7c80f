"""The README, block by block, in one empty folder: its files are written, its commands and scripts run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from collected import errors_in
from installed import need

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
# Tested elsewhere: the package is built and installed in test_package.py.
NOT_RUN = ("pip install ",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for _, body in BLOCKS:
        named = re.match(r"# ([\w/]+\.(?:py|yaml))\n", body)
        if named:
            (folder / named[1]).parent.mkdir(exist_ok=True)
            (folder / named[1]).write_text(body, encoding="utf-8")
    return folder


def run(command: list[str] | str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    assert not errors_in(done.stdout), done.stdout
    return done.stdout


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_runs(number: int, folder: Path) -> None:
    language, body = BLOCKS[number]
    for trainer in re.findall(r"^from (lightning)\.", body, flags=re.MULTILINE):
        need(trainer)
    if language == "python" and not body.startswith("# "):
        assert "name" in run([sys.executable, "-c", body], folder) or "number" in body or "steps" in body
    elif language == "bash":
        for line in body.splitlines():
            if not line.startswith(NOT_RUN):
                run(line, folder)
    else:
        # the query is run on eight real ranks by tests/sinks/test_parquet_sink.py
        assert language in ("python", "yaml", "text", "sql"), "a block that nothing runs"


def test_the_table_shown_is_the_one_printed(folder: Path) -> None:
    """The columns that the README shows are those of today."""
    printed = run("python train.py", folder)
    shown = next(body for language, body in BLOCKS if language == "text")
    headings = [line.split() for line in shown.splitlines() if line.startswith("name ")]
    assert len(headings) == 2
    assert [line.split() for line in printed.splitlines() if line.startswith("name ")] == headings
    for name in ("attention_block", "loss_fn", "forward", "backward", "optimizer", "data"):
        assert re.search(rf"^ *{name} +\d+ +[\d.]+ [mµn]?s", printed, flags=re.MULTILINE), name


def test_what_is_said_to_be_disabled_is(folder: Path) -> None:
    assert "Ranges" not in run("python train.py profiler=disabled", folder)
    assert "Ranges" not in run("python train.py '~profiler.sinks.table'", folder)


@pytest.mark.skipif("INSTRUMENT_TRACES" not in os.environ, reason="INSTRUMENT_TRACES names no folder of real traces")
def test_what_is_shown_of_a_device_is_printed(folder: Path) -> None:
    command = re.search(r"`instrument show TRACE (--breakdown [^`]+)`", TEXT)
    assert command
    trace = Path(os.environ["INSTRUMENT_TRACES"]) / "a100_nccl_2ranks_rank0.json.gz"
    printed = run(f"instrument show {trace} {command[1]}", folder)
    shown = next(body for language, body in BLOCKS if language == "text" and body.startswith("Breakdown"))
    assert shown == printed.partition("\n\n")[2]
