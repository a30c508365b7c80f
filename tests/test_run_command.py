"""`instrument run`: scripts that nobody edited end as they do without it, and their steps, models and loaders are found."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent
from typing import Any

import pytest
import warm
from commands import Command

from instrument import Capture
from instrument.base.errors import ConfigError
from instrument.cli.run import Script, config_of, split
from instrument.record.unedited import Cycle

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
def mlp(inputs=8, outputs=8):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))
"""
FORKED = {"OMP_NUM_THREADS": "1"}


def write(folder: Path, code: str) -> Path:
    file = folder / "train.py"
    file.write_text(MODEL + dedent(code), encoding="utf-8")
    return file


def run(folder: Path, *words: object, **env: str) -> CompletedProcess[str]:
    """Run `python WORDS` in a folder, with captures in its folder `profile`."""
    return warm.run_apart([*map(str, words)], folder, {**os.environ, **FORKED, **env})


def recorded(folder: Path, code: str, *options: str) -> tuple[Capture, CompletedProcess[str]]:
    """The capture of a script that ends well."""
    script = write(folder, code)
    inline = "profiler.export=inline"
    done = run(folder, "-m", "instrument", "run", inline, *options, script)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "profile").glob("steps_*")
    return Capture.load(found), done


def ranges(capture: Capture) -> dict[str, int]:
    """How often each top range was called."""
    return {row.path: row.calls for row in capture.ranges if row.depth == 0 and row.calls}


@pytest.mark.parametrize(
    ("called", "ends"),
    [
        ("DDDD", "-DDD"),
        ("DGDGDG", "---G-G"),
        ("DDDGDDDG", "-DD-DDD-"),
        ("SASASA", "---A-A"),
        ("pqrpqrpqr", "-----r--r"),
        ("AAABBB", "-AA-BB"),
        ("DGDDD", "---DD"),
    ],
)
def test_a_step_ends_with_what_comes_before_the_first_that_is_called_again(
    called: str, ends: str
) -> None:
    cycle, objects = Cycle(), {name: object() for name in called}
    found = [name if cycle.ends_step(objects[name]) else "-" for name in called]
    assert "".join(found) == ends


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        ("train.py --epochs 3", "", "train.py --epochs 3"),
        ("trace train.py trace", "trace", "train.py trace"),
        ("profiler.active=3 -- trace -- x", "profiler.active=3", "trace -- x"),
        ("--step backward -m pkg.train -m x", "--step backward", "-m pkg.train -m x"),
        ("full --step forward profiler.wait=3 a.py profiler.wait=4",
         "full --step forward profiler.wait=3", "a.py profiler.wait=4"),
        ("summary profiler.active=3", "summary profiler.active=3", ""),
    ],
)  # fmt: skip
def test_the_words_before_the_script_are_the_commands_own(line: str, own: str, script: str) -> None:
    assert split(line.split()) == (own.split(), script.split())


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("summary", [], {"wait": 1, "skip_first": 0, "at_steps": None}),
        ("summary", ["profiler.wait=0"], {"wait": 0, "skip_first": 1}),
        ("summary", ["profiler.skip_first=2", "profiler.wait=0"], {"skip_first": 2}),
        ("trace", ["profiler.at_steps=[0,7]"], {"at_steps": [1, 7], "skip_first": 0}),
        ("trace", ["profiler.every_n_steps=10"], {"every_n_steps": 10, "skip_first": 0}),
        ("timings", [], {"at_steps": [], "skip_first": 0}),
    ],
)
def test_windows_begin_with_step_1_at_the_earliest(
    preset: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    config = config_of(preset, overrides)
    assert {name: getattr(config, name) for name in expected} == expected
    assert "file" in config.triggers
    assert "table" not in config.sinks


def test_what_cannot_run_is_refused_in_one_sentence(tmp_path: Path, command: Command) -> None:
    assert "needs a script" in command("run", status=2).err
    assert "There is no script" in command("run", tmp_path / "no.py", status=2).err
    (tmp_path / "a.py").touch()
    assert "two presets" in command("run", "trace", "full", tmp_path / "a.py", status=2).err
    assert "profiler.wiat" in command("run", "profiler.wiat=1", tmp_path / "a.py", status=2).err
    with pytest.raises(ConfigError, match="needs a script"):
        Script(["-m"])


TRAIN = """
def main():
    model, loss_fn = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        optimizer.zero_grad()
        loss = loss_fn(model(torch.randn(4, 8)), torch.zeros(4, 8))
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
"""


def test_a_script_ends_as_without_the_command_and_its_verdict_comes_last(tmp_path: Path) -> None:
    code = TRAIN + dedent(
        """
        import atexit, pickle, sys
        class Point: pass
        print(type(pickle.loads(pickle.dumps(Point()))), sys.argv, __file__, __name__)
        atexit.register(print, "at exit")
        main()
        raise OSError("the script's own")
        """
    )
    script = write(tmp_path, code)
    plain = run(tmp_path, script, "--epochs", "-m")
    options = ["profiler.export=inline", "--", script, "--epochs", "-m"]
    done = run(tmp_path, "-m", "instrument", "run", *options)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    trace = plain.stderr[plain.stderr.index(f'  File "{script}"') :]
    assert f"Traceback (most recent call last):\n{trace}" in done.stderr
    _, _, after = done.stderr.partition("OSError: the script's own\n")
    page = tmp_path / "profile" / "report.html"
    assert after.splitlines()[-1] == f"The report page is {page}."
    assert page.is_file()
    (capture,) = map(Capture.load, (tmp_path / "profile").glob("steps_*"))
    assert capture.steps.column("number") == [2, 3, 4]
    assert ranges(capture) == {
        "Optimizer.zero_grad#SGD.zero_grad": 3,
        "Sequential": 3,
        "loss_fn": 3,
        "Optimizer.step#SGD.step": 3,
    }
