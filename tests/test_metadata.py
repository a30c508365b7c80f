"""What a capture says of the run that it is of: the user's own keys, the command line, git."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from recording import window

from instrument import Session
from instrument.read.capture import Capture
from instrument.record import facts

pytestmark = pytest.mark.usefixtures("inline_export")

# Of the first, torch's own add_metadata_json makes what is no JSON; the second holds a key that the reader looks for.
NASTY = {
    'q"uo\\te\n\t é 日本': 'vi"t\\ \n\t é 日本 \u2028 \x00 😀',
    "nested": {
        "traceEvents": [{"ph": "X", "name": "fake", "cat": "cpu_op", "ts": 0, "dur": 1}],
        "a": [1.5, None, True],
    },
    "": "no key",
}


def top_level(capture: Capture) -> dict[str, Any]:
    """What the trace holds besides its events, read strictly."""
    with gzip.open(capture.trace_path) as file:
        trace = json.load(file)
    return {key: value for key, value in trace.items() if key != "traceEvents"}


def test_metadata_of_any_kind_comes_back_from_trace_and_capture(tmp_path: Path) -> None:
    capture = window(tmp_path, lambda: torch.ones(2) + 1, metadata=NASTY)
    assert capture.metadata["user_metadata"] == NASTY
    written = top_level(capture)
    assert {key: written[key] for key in NASTY} == NASTY
    assert "schemaVersion" in written
    assert "fake" not in capture.operators.column("name"), "only the trace's own events are read"
    assert "aten::add" in capture.operators.column("name")


def test_what_is_added_counts_from_the_window_that_is_open(tmp_path: Path) -> None:
    layers = [1, 2]
    session = Session(active=1, repeat=3, output_dir=tmp_path, metadata={"model": "vit"})
    session.add_metadata("before", 1)
    with session:
        for step in range(3):
            if step == 1:
                session.add_metadata("layers", layers)
                session.add_metadata("model", "resnet")
                layers.append(3)  # too late
            session.step()
    first, *rest = [capture.metadata["user_metadata"] for capture in session.captures]
    assert first == {"model": "vit", "before": 1}
    assert rest == [{"model": "resnet", "before": 1, "layers": [1, 2]}] * 2
    assert all(
        about.items() <= top_level(c).items() for about, c in zip([first, *rest], session.captures)
    )


def test_what_cannot_be_written_is_warned_of_and_ends_nothing(tmp_path: Path, log: Log) -> None:
    with Session(active=None, output_dir=tmp_path) as session:
        for _ in range(2):
            session.add_metadata("traceEvents", 1)
            session.add_metadata("weights", torch.ones(2))
        session.add_metadata("kept", 1)
    assert log.at("WARNING") == [
        "The session's metadata cannot hold 'traceEvents': torch writes that key; choose another name.",
        "The session's metadata 'weights' is of type Tensor, which JSON cannot hold; give it as text.",
    ]
    (capture,) = session.captures
    assert capture.metadata["user_metadata"] == {"kept": 1}
    assert "aten::is_nonzero" not in capture.operators.column("name"), (
        "telling of a tensor runs no operators"
    )


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text("steps = 1\n")
    for command in (
        "init -q",
        "add train.py",
        "-c user.name=me -c user.email=me@here commit -q -m first",
    ):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    yield tmp_path
    facts.git_state.cache_clear()


def test_gits_commit_and_whether_the_tree_is_dirty(repository: Path) -> None:
    commit = subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=repository, text=True
    ).strip()
    tag = "-c user.name=me -c user.email=me@here tag -a v1 -m first"
    # which `describe` would name instead
    subprocess.run(["git", *tag.split()], cwd=repository, check=True)
    (repository / "notes.txt").write_text("not tracked")
    assert facts.git_state(repository) == {"commit": commit, "dirty": False}
    (repository / "train.py").write_text("steps = 2\n")
    assert facts.git_state(repository) == {"commit": commit, "dirty": False}, (
        "asked once in a process"
    )
    facts.git_state.cache_clear()
    assert facts.git_state(repository) == {"commit": commit, "dirty": True}


@pytest.mark.parametrize("part", ["core", "filter"])
def test_no_program_is_run_that_a_repositorys_config_names(repository: Path, part: str) -> None:
    named = {
        "core": '[core]\n\tfsmonitor = "touch {made}; false"\n\thooksPath = {made}\n',
        "filter": '[filter "own"]\n\tclean = "touch {made}; cat"\n\tprocess = "touch {made}"\n',
    }
    (repository / ".gitattributes").write_text("* filter=own\n")
    with (repository / ".git" / "config").open("a") as config:
        config.write(named[part].format(made=repository / "made"))
    for file in repository.glob("*.*"):
        os.utime(file, (1, 1))  # so that git looks into it
    found = facts.git_state(repository)
    assert found["dirty"] is (None if part == "filter" else False)
    assert not (repository / "made").exists()


def test_revision_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_GIT_S", 0.0)
    assert facts.git_state(repository) is None
    monkeypatch.undo()
    facts.git_state.cache_clear()
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))
    assert facts.git_state(repository) is None
    monkeypatch.undo()
    facts.git_state.cache_clear()
    monkeypatch.setenv("PATH", str(repository))
    assert facts.git_state(repository) is None, "git is not installed"


def test_without_hydra_there_are_no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "steps=3"])
    about = facts.provenance()
    assert about["overrides"] is None
    assert about["command"] == ["train.py", "steps=3"]
