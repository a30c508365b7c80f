"""`instrument run`: scripts that nobody edited end as they do without it, and their steps, models and loaders are found."""

from __future__ import annotations

import gc
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from array import array
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import warm
from builders import in_steps, span, write_capture
from commands import Command
from installed import need

import instrument
from instrument import Capture, ProfilerConfig, Session
from instrument.base.errors import ConfigError
from instrument.cli.run import _join_threads, _verdict, config_of, split
from instrument.read.advise.diagnose import Diagnosing
from instrument.read.advise.finding import Finding
from instrument.record.config.schedule import planned
from instrument.record.long_steps import EXPORTING, MOST_KEPT, long_steps, no_times, unlike_window
from instrument.record.script import prepared
from instrument.record.unedited import Cycle, Watch, with_later_window

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
        ("xMyMzMwM", "-----M-M"),
        ("DGDDD", "---DD"),
    ],
)
def test_cycle_ends_step(called: str, ends: str) -> None:
    cycle, objects = Cycle(), {name: type(name, (), {})() for name in called}
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
        ("summary", [], {"wait": 1, "skip_first": 1, "at_steps": None}),
        ("summary", ["profiler.wait=0"], {"wait": 0, "skip_first": 2}),
        ("summary", ["profiler.skip_first=2", "profiler.wait=0"], {"skip_first": 2}),
        ("trace", ["profiler.at_steps=[0,7]"], {"at_steps": [2, 7]}),
        ("trace", ["profiler.every_n_steps=10"], {"every_n_steps": 10, "skip_first": 0}),
        ("timings", [], {"at_steps": [], "skip_first": 0}),
    ],
)
def test_first_window_is_late(preset: str, overrides: list[str], expected: dict[str, Any]) -> None:
    config = config_of(preset, overrides)
    assert {name: getattr(config, name) for name in expected} == expected
    assert "file" in config.triggers
    assert "table" not in config.sinks
    assert not config.notes


def test_what_cannot_run_is_refused_in_one_sentence(tmp_path: Path, command: Command) -> None:
    assert "needs a script" in command("run", status=2).err
    assert "There is no script" in command("run", tmp_path / "no.py", status=2).err
    (tmp_path / "a.py").touch()
    for steps in ("5", "[a]"):
        refused = command("run", f"profiler.at_steps={steps}", tmp_path / "a.py", status=2).err
        assert refused.startswith("instrument: profiler.at_steps")
    assert "two presets" in command("run", "trace", "full", tmp_path / "a.py", status=2).err
    assert "profiler.wiat" in command("run", "profiler.wiat=1", tmp_path / "a.py", status=2).err
    with pytest.raises(ConfigError, match="needs a script"):
        prepared(["-m"])


TRAIN = """
def main():
    model, loss_fn = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
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

        def of_torch():
            from torch.autograd import profiler
            from torch.multiprocessing import start_processes
            for each in (
                torch.optim.Optimizer.profile_hook_step, torch.autograd.backward, start_processes,
                torch.utils.data.DataLoader.__iter__, nn.Module.__call__, sys.modules["torch.multiprocessing.spawn"].start_processes,
                profiler.profile._prepare_trace, profiler._run_on_profiler_start,
            ):
                print(each.__code__.co_filename, hasattr(each, "__wrapped__"))
            print("record_steps" in vars(torch.profiler.profile))

        atexit.register(of_torch)
        main()
        raise OSError("the script's own")
        """
    )
    script = write(tmp_path, code)
    plain = run(tmp_path, script, "--epochs", "-m")
    options = ["profiler.active=3", "profiler.export=inline", "--", script, "--epochs", "-m"]
    done = run(tmp_path, "-m", "instrument", "run", *options)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    trace = plain.stderr[plain.stderr.index(f'  File "{script}"') :]
    assert f"Traceback (most recent call last):\n{trace}" in done.stderr
    _, _, after = done.stderr.partition("OSError: the script's own\n")
    (capture,) = map(Capture.load, (tmp_path / "profile").glob("steps_*"))
    page = capture.folder / "report.html"
    assert after.splitlines()[-1] == f"The report page is {page}."
    assert page.is_file()
    assert capture.steps.column("number") == [3, 4, 5]
    assert ranges(capture) == {
        "Optimizer.zero_grad#SGD.zero_grad": 3,
        "Sequential": 3,
        "MSELoss": 3,
        "Optimizer.step#SGD.step": 3,
    }


def test_the_lines_of_an_unedited_script_are_sampled(tmp_path: Path) -> None:
    code = """
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    for step in range(8):
        loss = sum(mlp()(torch.ones(4, 8)).sum() for _ in range(100))
        loss.backward()
        optimizer.step()
    """
    done = run(tmp_path, "-m", "instrument", "run", "profiler.export=inline", write(tmp_path, code))
    assert done.returncode == 0, done.stderr
    (capture,) = map(Capture.load, (tmp_path / "profile").glob("steps_*"))
    assert {row.line.partition(":")[0] for row in capture.lines} == {"train.py"}


# Each program has its own class of optimizers, because torch wraps the `step` of a class once.
PROGRAMS = """
import gc, json, sys, threading

from instrument import Session
from instrument.cli.run import config_of
from instrument.record.unedited import Watch

def optimizer(*modules, kind=torch.optim.SGD):
    parameters = [each for module in modules for each in module.parameters()]
    return type("Own", (kind,), {})(parameters, lr=0.01)

def loss_of(model, batch=4):
    return model(torch.randn(batch, 8)).square().mean()

def train(steps, model, own, update=True):
    for _ in range(steps):
        loss_of(model).backward()
        own.step()
        own.zero_grad()

def simple():
    model = mlp()
    train(7, model, optimizer(model))

def loader():
    model = mlp()
    own = optimizer(model)
    for batch in torch.utils.data.DataLoader(torch.randn(28, 8), batch_size=4):
        model(batch).sum().backward()
        own.step()

def accumulation():
    model = mlp()
    own = optimizer(model)
    for number in range(21):
        loss_of(model).backward()
        if number % 3 == 2:
            own.step()

def alternating(of_d=1):
    net_d, net_g, criterion = mlp(), mlp(), nn.MSELoss()
    own_d, own_g = optimizer(net_d), optimizer(net_g)
    for _ in range(7):
        for _ in range(of_d):
            criterion(net_d(torch.randn(4, 8)), torch.zeros(4, 8)).backward()
            own_d.step()
        loss_of(nn.Sequential(net_g, net_d)).backward()
        own_g.step()

def five_to_one():
    alternating(of_d=5)

def one_for_each_parameter():
    model = mlp()
    class Own(torch.optim.SGD): pass
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda own, opt=Own([each], lr=0.01): opt.step())
    for _ in range(7):
        loss_of(model).backward()

def never_called():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = mlp(), mlp()
    agent = Agent()
    own = optimizer(agent)
    for _ in range(7):
        (loss_of(agent.actor) + loss_of(agent.critic)).backward()
        own.step()

def closure():
    model = mlp()
    own = optimizer(model, kind=torch.optim.LBFGS)
    def evaluate():
        own.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss
    for _ in range(7):
        own.step(evaluate)

def scaled():
    model = mlp()
    own, scaler = optimizer(model), torch.amp.GradScaler("cpu")
    for number in range(14):  # each second step is skipped
        scaler.scale(loss_of(model) * (torch.inf if number % 2 else 1)).backward()
        scaler.step(own)
        scaler.update()
        own.zero_grad()

def by_hand():
    model = mlp()
    for _ in range(7):
        loss_of(model).backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.01 * each.grad
                each.grad = None

def inference():
    model, transform = mlp(), nn.Identity()
    with torch.no_grad():
        for _ in range(12):
            model(transform(torch.randn(4, 8)))

class Bare(nn.Module):
    def forward(self, inputs):
        return inputs * 2

def without_parameters():
    model = Bare()
    for _ in range(72):
        model(torch.randn(4, 8))

def transforms_before_inference():
    without_parameters()
    inference()

def inference_with_gradients():
    model = mlp()
    for _ in range(24):
        loss_of(model)

def training_after_inference():
    inference()
    simple()

def own_profiler():
    model = mlp()
    own = optimizer(model)
    train(5, model, own)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(4, model, own)
    assert "aten::addmm" in {each.key for each in profile.key_averages()}

def own_profiler_first():
    model = mlp()
    own = optimizer(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(7, model, own)
    train(9, model, own)

def own_session():
    model = mlp()
    own = optimizer(model)
    train(5, model, own)
    with Session(active=None, output_dir="theirs", export="inline") as theirs:
        train(4, model, own)
    assert len(theirs.captures) == 1

def meta():
    model = mlp()
    outer = optimizer(model)
    for _ in range(8):
        loss_of(model).backward()
        optimizer(model).step()  # a new one in each step
        outer.step()

def checkpointed():
    from torch.utils.checkpoint import checkpoint
    model = mlp()
    for _ in range(7):
        checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=True).sum().backward()

def odd():
    class Broken(nn.Module):
        def parameters(self, recurse=True):
            raise ValueError("no parameters here")
        def forward(self, inputs):
            return inputs
        def __eq__(self, other):
            raise ValueError("not to be compared")
    class Strange(torch.optim.SGD):
        def step(self): pass
        __eq__ = Broken.__eq__
    broken, model = Broken(), mlp()
    own, strange = optimizer(model), Strange(mlp().parameters())
    for _ in range(7):
        broken(torch.ones(1))
        strange.step()
        train(1, model, own)

def others_step_while_the_session_starts():
    model, start = mlp(), Session.start
    own = optimizer(model)
    def start_meanwhile(*args, **options):
        thread = threading.Thread(target=train, args=(9, model, own))
        thread.start()
        thread.join()
        return start(*args, **options)
    Session.start = start_meanwhile
    train(7, model, own)
    Session.start = start

def no_folder():
    open("no_folder", "w").close()
    simple()

for name in sys.argv[1:]:
    torch.manual_seed(0)
    watch = Watch(config_of("trace", ["profiler.active=3", "profiler.export=inline", f"profiler.output_dir={name}"]))
    watch.begin()
    globals()[name]()
    watch.end(None)
    gc.collect()  # what is garbage counts as alive
    captures = [] if watch.session is None else watch.session.captures
    print(json.dumps({
        "program": name,
        "steps": [each.steps.column("number") for each in captures],
        "ranges": {row.path.removeprefix("Optimizer."): row.calls for each in captures for row in each.ranges
                   if row.depth == 0 and row.calls and "zero_grad" not in row.path},
        "loaders": [each.metadata["environment"].get("loaders") for each in captures],
        "gave_up": watch.gave_up,
    }))
"""
STEP, THREE = "step#Own.step", [[3, 4, 5]]
FOUND: dict[str, tuple[list[list[int]], dict[str, int]]] = {
    # first, because the hooks of a later program keep its optimizers alive
    "by_hand": (THREE, {"Sequential": 3}),
    "checkpointed": (THREE, {"Sequential": 3, "Sequential (recomputed)": 3}),
    "inference": (THREE, {"Sequential": 3, "Identity": 3}),
    "without_parameters": (THREE, {"Bare": 3}),
    "transforms_before_inference": (THREE, {"Sequential": 3, "Identity": 3}),
    "inference_with_gradients": (THREE, {"Sequential": 3}),
    "simple": (THREE, {"Sequential": 3, STEP: 3}),
    "loader": (
        THREE,
        {
            "Sequential": 3,
            STEP: 3,
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": 3,
        },
    ),
    "accumulation": (THREE, {"Sequential": 9, STEP: 3}),
    "alternating": (THREE, {"0.Sequential": 6, "1.Sequential": 3, "MSELoss": 3, STEP: 6}),
    "five_to_one": (THREE, {"0.Sequential": 4, "1.Sequential": 1, "MSELoss": 3, STEP: 4}),
    "one_for_each_parameter": (THREE, {"Sequential": 3, STEP: 12}),
    "never_called": (THREE, {"actor": 3, "critic": 3, STEP: 3}),
    "closure": (THREE, {STEP: 3}),
    "scaled": (THREE, {"Sequential": 6, STEP: 3}),
    "training_after_inference": (THREE, {"Sequential": 3, STEP: 3}),
    "own_profiler": ([[3, 4]], {"Sequential": 2, STEP: 2}),
    "own_profiler_first": ([[10, 11, 12]], {"Sequential": 3, STEP: 3}),
    "own_session": ([[3, 4]], {"Sequential": 2, STEP: 2}),
    "odd": (THREE, {"Sequential": 3, STEP: 3, "step#Strange.step": 3}),
    "meta": (THREE, {"Sequential": 3, STEP: 6}),
    "others_step_while_the_session_starts": (THREE, {"Sequential": 3, STEP: 3}),
    "no_folder": ([], {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str]:
    """What the watch finds in each program, and the log."""
    folder = tmp_path_factory.mktemp("programs")
    done = run(folder, "-c", MODEL + dedent(PROGRAMS), *FOUND)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["program"]: line for line in lines}, done.stderr


@pytest.mark.parametrize("program", FOUND)
def test_found_steps_and_models(program: str, found: tuple[dict[str, dict[str, Any]], str]) -> None:
    its = found[0][program]
    assert (its["steps"], its["ranges"]) == FOUND[program]
    assert its["gave_up"] is (program in ("own_session", "no_folder"))


def test_loader_is_known(found: tuple[dict[str, dict[str, Any]], str]) -> None:
    (loaders,) = found[0]["loader"]["loaders"]
    assert [(each["phase"], each["batch_size"]) for each in loaders] == [("train", 4)]


def test_giving_up_is_logged_once(found: tuple[dict[str, dict[str, Any]], str]) -> None:
    assert found[1].count("no window while the script itself records with torch.profiler.") == 2
    for why in (
        "the script itself records with instrument.Session.",
        "`instrument run` records nothing: ",
    ):
        assert found[1].count(why) == 1, found[1]


def test_as_many_graphs_are_compiled_as_without_the_command(tmp_path: Path) -> None:
    """Also if the optimizer is inside a compiled function, where torch breaks the graph."""
    code = """
    from torch._dynamo.utils import counters
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="eager")
    def step(inputs):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(mlp(), backend="eager")
    for _ in range(7):
        step(torch.ones(4, 8))
        print(compiled(torch.ones(4, 8)).sum().item())
    print(counters["stats"], counters["frames"], len(counters["graph_break"]))
    """
    script = write(tmp_path, code)
    plain = run(tmp_path, script)
    done = run(tmp_path, "-m", "instrument", "run", "profiler.export=inline", script)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert "unique_graphs" in plain.stdout
    assert "The report page is" in done.stderr
    assert "\nRecorded /" in done.stderr
    assert "\nProfiler records steps " in f"\n{done.stderr}"
    assert "| INFO " not in done.stderr


def test_what_a_script_keeps_stays_as_it_is(tmp_path: Path) -> None:
    """Its `locals()`, its dropped models, and its own end in a child that it forks."""
    program = """
        import gc, os, sys, weakref

        def train(lr=0.1):
            config = locals()
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), config["lr"])
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            print(sorted(config))
            return weakref.ref(model)

        models = [train() for _ in range(3)]
        gc.collect()
        print([model() is None for model in models])
        child = os.fork()
        if child == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    file = write(tmp_path, program)
    plain, ours = run(tmp_path, file), run(tmp_path, "-m", "instrument", "run", file)
    assert plain.stdout.splitlines() == ["['lr']", *["['lr']"] * 2, "[True, True, True]", "5"]
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)
    assert ours.stderr.count("The report page is") == 1


def test_windows_are_diagnosed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (3, 6):
        write_capture(tmp_path, in_steps(3, 1000, span("aten::mm", 0, 900)), f"steps_{number}")
    alive, seen, add = weakref.WeakSet[Capture](), list[tuple[str, int]](), Diagnosing.add

    def noted(diagnosing: Diagnosing, capture: Capture) -> bool:
        alive.add(capture)
        gc.collect()
        seen.append((capture.name, len(alive)))
        return add(diagnosing, capture)

    monkeypatch.setattr(Diagnosing, "add", noted)
    verdict = "\n".join(_verdict([tmp_path / "steps_3", tmp_path / "steps_6"]))
    assert seen == [("steps_3", 1), ("steps_6", 1)]
    assert "A step takes 1.000 ms (median of the captures)." in verdict
    assert (tmp_path / "steps_6" / "report.html").exists()


def every(period: int, took_ns: int, steps: int = 120, usual_ns: int = 100) -> dict[int, int]:
    """The times of steps 2 to `steps` - 1; those that the period divides take `took_ns`."""
    return {step: usual_ns if step % period else took_ns for step in range(2, steps)}


# Five of the 110 steps from 10 on are long: 20, 40, 60, 80 and 100.
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "5 of 110 steps take 33 %.* step 60, takes 1.100 µs instead of 100 ns.*=[20,40]"),
        ({20: 400, 61: 301}, "6 of 110 steps take 32 %.*=[40,60]"),  # chance, with the others
        ({20: 0}, "4 of 109 steps take 28 %.*=[40,60]"),
        ({2: 100_000, 9: 100_000}, "5 of 110 steps take 33 %"),  # the run begins
        ({3: -400, 4: -490}, "5 of 110 steps take 33 %"),  # recorded, but not such a step
        ({20: -900}, None),
        ({40: 100, 60: 100, 80: 100, 100: 100}, None),  # one
        (dict.fromkeys(range(20, 101, 20), 200), None),
        (dict.fromkeys(range(20, 101, 40), 100) | {40: 450, 80: 450}, None),  # 8 %
        (dict.fromkeys(range(28, 120), 0), None),  # few steps
    ],
)
def test_long_steps_outside_windows_are_found(changed: dict[int, int], said: str | None) -> None:
    times = no_times()
    for step, took_ns in {**every(20, 1000), 60: 1100, **changed}.items():
        times[step] = took_ns
    found = [*long_steps(times)]
    assert len(found) == (said is not None)
    if found and said is not None:
        ((share, sentence, options),) = found
        assert re.search(said.replace("[", r"\["), f"{sentence} {options}"), found
        steps = config_of("summary", [word.strip("'") for word in options.split()])
        assert (steps.active, len(steps.at_steps or [])) == (1, 2)
        assert share > 0.1


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([100 + 2 * k for k in range(300)], ("199 ns", "599 ns")),
        # with an evaluation after each fiftieth step
        ([(100 + 2 * k) * (20 if k % 50 == 49 else 1) for k in range(300)], ("201 ns", "601 ns")),
        ([100 + 5 * (k % 7) + k // 20 for k in range(300)], None),  # 10 % slower at the end
        ([100] * 150 + [200] * 50 + [100] * 100, None),  # for a while
        ([100] * 200 + [160] * 100, None),  # only at the end
        ([700 - 2 * k for k in range(300)], None),
        ([100 + 50 * k for k in range(19)], None),  # too few
    ],
)
def test_steps_that_get_slower_are_found(times: list[int], said: tuple[str, str] | None) -> None:
    kept = no_times()
    kept[10 : 10 + len(times)] = array("q", times)
    found = [*long_steps(kept)]
    assert bool(found) == (said is not None)
    if found and said is not None:
        share, sentence, options = found[0]
        assert re.search(
            "Steps get slower: in the first third of 300 steps, the median one takes {}, in the "
            r"last third {}\.".format(*said),
            sentence,
        )
        assert share == pytest.approx(0.5, abs=0.01)
        assert options == "profiler.active=1 'profiler.at_steps=[10,308]'"


def test_slower_steps_hide_no_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_capture(tmp_path, in_steps(3, 1000, span("aten::mm", 0, 900)), "steps_3")
    cause = Finding("loader-wait", "It waits", "change", "verify", share=0.4)
    monkeypatch.setattr("instrument.read.advise.verdict.causes", lambda _: [cause])
    times = no_times()
    times[10:100] = array("q", [10_000] * 30 + [12_000] * 30 + [14_000] * 30)
    times[50] = times[90] = 3_000_000
    (slower, _, _), (long, _, _) = long_steps(times)
    assert slower == pytest.approx(1 / 6)
    assert long == pytest.approx(0.85, abs=0.01)
    said = "\n".join(_verdict([tmp_path / "steps_3"], times))
    places = [said.index(each) for each in ("Outside the", "A step takes", "Steps get slower")]
    assert places == sorted(places), "what costs more comes first"


@pytest.mark.parametrize("count", [20, 30, 50, 90])
def test_steps_that_vary_do_not_get_slower(count: int) -> None:
    random, found = np.random.default_rng(3), 0
    for _ in range(500):
        for ns in (1e6 * random.lognormal(0, 0.6, count), random.choice([10**6, 2 * 10**6], count)):
            times = array("q", bytes(80)) + array("q", ns.astype(np.int64).tobytes())
            found += any("Steps get slower" in sentence for _, sentence, _ in long_steps(times))
    assert found < 5, "of 1000"


def test_a_few_steps_that_get_slower_are_enough() -> None:
    times = array("q", [0] * 10 + [1000 + 100 * k for k in range(20)])
    assert [sentence[:17] for _, sentence, _ in long_steps(times)] == ["Steps get slower:"]


@pytest.mark.parametrize(
    ("overrides", "loader", "windows"),
    [
        ([], {"workers": 2, "prefetch_factor": 2}, ["3–7", "13–17"]),
        (["profiler.active=2"], {"workers": 4, "prefetch_factor": 8}, ["3–4", "38–39"]),
        ([], {"workers": 0, "prefetch_factor": None}, None),
        ([], None, None),
        (["profiler.at_steps=[4]"], {"workers": 2, "prefetch_factor": 2}, None),
        (["profiler.repeat=3"], {"workers": 2, "prefetch_factor": 2}, None),
    ],
)
def test_a_second_window_begins_when_the_loaded_batches_are_used_up(
    overrides: list[str], loader: dict[str, Any] | None, windows: list[str] | None
) -> None:
    config = with_later_window(config_of("summary", overrides), loader)
    assert (config is None) == (windows is None)
    if config is not None:
        assert [str(each) for each in planned(config)] == windows
        assert config.keep == 1


@pytest.mark.parametrize(
    ("steps", "options", "recorded"),
    [
        (24, (), "steps_000013-000017"),
        (15, (), "steps_000003-000007"),  # the second window is not complete
        (24, ("profiler.wait=2",), "steps_000003-000007"),
    ],
)
def test_later_window(tmp_path: Path, steps: int, options: tuple[str, ...], recorded: str) -> None:
    program = f"""
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for batch in DataLoader(torch.ones({steps}, 8), num_workers=2):
                model(batch).sum().backward()
                optimizer.step()
    """
    file = write(tmp_path, program)
    done = run(tmp_path, "-m", "instrument", "run", *options, file)
    assert [each.name for each in (tmp_path / "profile").glob("steps_*")] == [f"{recorded}_rank0"]
    assert f"{recorded}_rank0/report.html" in done.stderr


@pytest.mark.parametrize(
    ("recorded", "others", "said"),
    [
        # batches that were loaded before the window
        ([500, 1, 1, 1, 1], [1, 29] * 20, "they take 1 ns on average, and 38 others 15 ns. .*"),
        ([30, 30, 30], [10] * 40, "take 30 ns on average, .* 10 ns, because of recording or"),
        ([900, 31, 1, 31, 1], [1, 31] * 20, None),  # whole periods of the same kinds
        ([900, 11, 11], [10] * 40, None),
        ([], [10] * 40, None),
        ([30, 30, 30], [10] * 10, None),  # too few
        # a short script
        (
            [1, 1, 1],
            [10] * 5 + [30 | EXPORTING] * 30,
            "1 ns .* 29 ns, perhaps because a window was",
        ),
        ([9, 10, 10], [10] * 30 + [30 | EXPORTING] * 30, None),
    ],
)
def test_unlike_window(recorded: list[int], others: list[int], said: str | None) -> None:
    times = no_times()
    values = [0, 0, 0, *(-each for each in recorded), *others]
    times[: len(values)] = array("q", values)
    found = unlike_window(times, 3, len(recorded))
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        sentence, options = found
        assert re.search(said, sentence), sentence
        config = config_of("summary", [word.strip("'") for word in options.split()])
        assert config.active == len(recorded)
        assert min(config.at_steps or []) >= 10


def test_watch_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[int]) -> None:
    config = {"at_steps": [5], "warmup": 1, "active": 2, "export": "inline"}
    watch = Watch(ProfilerConfig(**config))
    times = watch.times
    with Session(config, output_dir=tmp_path) as session:
        for step in range(12):
            if step in (8, 9):
                monkeypatch.setattr(session._loop.run.finisher, "pending", [tmp_path] * (9 - step))
            now[0] += 100 + step
            watch._end_step(session)
        session._loop.train.step_number = MOST_KEPT - 1
        for _ in range(2):
            now[0] += 7
            watch._end_step(session)
    # step 4 warms up
    expected = [100, 101, 102, 103, 0, -105, -106, 107, 108 | EXPORTING, 109, 110, 111, 0]
    assert times[:13].tolist() == expected
    assert (times[-1], len(times)) == (7, MOST_KEPT)


@pytest.mark.parametrize(("share", "place"), [(0.4, 2), (0.3, 0)])
def test_long_steps_come_first_only_if_nothing_costs_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, place: int
) -> None:
    write_capture(tmp_path, in_steps(3, 1000, span("aten::mm", 0, 900)), "steps_3")
    cause = Finding("loader-wait", "It waits", "change", "verify", share=share)
    monkeypatch.setattr("instrument.read.advise.verdict.causes", lambda _: [cause])
    times = no_times()
    for step, took_ns in every(20, 1000).items():
        times[step] = took_ns
    said = _verdict([tmp_path / "steps_3"], times)
    begins = [number + 1 for number, line in enumerate(said) if not line]
    assert said[begins[place]].startswith("Outside the windows, 5 of 110 steps take 32 % of ")
    assert said[begins[place + 1] - 2] == "profiler.active=1 'profiler.at_steps=[20,40]'"


def test_ctrl_c_ends_the_script_as_without_the_command(tmp_path: Path) -> None:
    kill = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGINT)"
    script = write(tmp_path, TRAIN + "main()" + kill)
    done = run(tmp_path, "-m", "instrument", "run", "profiler.export=inline", script)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("KeyboardInterrupt") == 1
    _, _, after = done.stderr.partition("KeyboardInterrupt\n")
    assert after.splitlines()[-1].startswith("The report page is ")


def test_a_running_job_is_asked_for_another_window(tmp_path: Path) -> None:
    code = """
    from pathlib import Path
    from instrument.record.triggers.file import ask
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while len([*Path("profile").glob("steps_*")]) < 2:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        step += 1
        if step == 10:
            ask(Path(), 2)
    """
    words = ["run", "profiler.active=3", "profiler.export=inline", write(tmp_path, code)]
    done = run(tmp_path, "-m", "instrument", *words)
    assert done.returncode == 0, done.stderr
    counts = [len(Capture.load(each).steps) for each in (tmp_path / "profile").glob("steps_*")]
    assert sorted(counts) == [2, 3]


def test_what_cannot_be_recorded_is_said_in_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("import sys, torch\nsys.meta_path.clear()")

    def lines(*words: str) -> list[str]:
        done = run(tmp_path, "-m", "instrument", "run", *words, "empty.py")
        assert done.returncode == 0
        return done.stderr.splitlines()

    (line,) = lines()
    assert "no step was found: --step optimizer" in line
    (line,) = lines("--step", "backward")
    assert "no step was found: --step backward" in line
    script.write_text("import torch\nfor _ in range(9): torch.nn.ReLU()(torch.ones(2))")
    assert "have no parameters, so they may be transforms. With --step forward" in lines()[0]
    script.write_text(MODEL + dedent(TRAIN.replace("range(8)", "range(3)") + "main()"))
    assert "The run ended after 3 steps, before the first window" in "".join(lines())
    script.write_text("def f(:")
    plain = run(tmp_path, "-m", "instrument", "run", "disabled", "empty.py")
    assert plain.returncode == 1
    assert plain.stderr.splitlines()[0].endswith('empty.py", line 1')
    missing = run(tmp_path, "-m", "instrument", "run", "-m", "no.such")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert "No module named 'no'" in missing.stderr


@pytest.mark.parametrize(("ends", "status"), [("raise ValueError(1)", 1), ("sys.exit(3)", 3)])
def test_the_scripts_own_excepthook_may_fail(tmp_path: Path, ends: str, status: int) -> None:
    hook = f"\nimport sys\ndef hook(*_):\n    {ends}\nsys.excepthook = hook\nmain()\n1 / 0"
    script = write(tmp_path, TRAIN + hook)
    done = run(tmp_path, "-m", "instrument", "run", "profiler.active=3", script)
    assert done.returncode == run(tmp_path, script).returncode == status
    assert "The report page is " in done.stderr


@pytest.mark.parametrize("compiled", [False, True])
def test_own_excepthook_is_called_once(tmp_path: Path, compiled: bool) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        dedent(
            """
            import sys
            def hook(kind, error, trace):
                print(kind, sys.last_value is error, sys.last_traceback is trace, sys.exc_info())
                raise ValueError("in the hook")
            sys.excepthook = hook
            print(__file__, __cached__, type(__loader__).__name__)
            1 / 0
            """
        )
    )
    if compiled:
        script = Path(py_compile.compile(str(script), str(tmp_path / "fails.pyc")) or "")
    command = ["-m", "instrument", "run", script]
    plain, ours = (
        subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        for words in ([script], command)
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[:-1] == plain.stderr.splitlines()


def test_threads_of_the_script_end_before_the_recording(tmp_path: Path) -> None:
    """But not the idle threads of an executor, which wait for Python's end."""
    code = """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(1)
    pool.submit(print, "in a pool").result()
    threading.Thread(target=lambda: [main_ended.wait(), main()]).start()
    main_ended.set()
    """
    script = write(
        tmp_path, TRAIN + "import threading\nmain_ended = threading.Event()" + dedent(code)
    )
    done = run(tmp_path, "-m", "instrument", "run", "profiler.active=3", script)
    assert done.returncode == 0
    (capture,) = map(Capture.load, (tmp_path / "profile").glob("steps_*"))
    assert capture.steps.column("number") == [3, 4, 5]


def test_a_thread_that_never_ends_does_not_stop_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a process pool: Python tells them to end after the script."""
    monkeypatch.setattr("instrument.cli.run._LONGEST_STEP_S", 0.0)
    told = threading.Event()
    thread = threading.Thread(target=told.wait)
    thread.start()
    _join_threads([])
    assert thread.is_alive()
    told.set()
    thread.join()


def test_two_runs_in_a_folder_have_their_own_verdicts(tmp_path: Path) -> None:
    """The first one ends after the second, and its window is older."""
    code = """
    import os, sys
    from pathlib import Path
    main()
    if len(sys.argv) == 1:
        words = ["-m", "instrument", "run", "profiler.export=inline", __file__, "x"]
        print(warm.run(words, Path.cwd(), os.environ).stdout)
    """
    find = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import warm\n"
    script = write(tmp_path, find + TRAIN + dedent(code))
    done = run(tmp_path, "-m", "instrument", "run", "profiler.export=inline", script)
    pages = [
        line.removeprefix("The report page is ").removesuffix(".")
        for text in (done.stdout, done.stderr)
        for line in text.splitlines()
        if line.startswith("The report page is")
    ]
    assert len({*pages}) == 2
    assert all(Path(page).is_file() for page in pages)
    first, second = (Capture.load(Path(page).parent).metadata["run"] for page in pages)
    assert first != second


def test_children_that_mp_forks_are_recorded(tmp_path: Path) -> None:
    """The parent has trained with the same class of optimizers."""
    code = """
    main()
    torch.multiprocessing.start_processes(lambda index: main(), nprocs=1, start_method="fork")
    """
    script = write(tmp_path, TRAIN + dedent(code))
    done = run(
        tmp_path, "-m", "instrument", "run", "profiler.export=inline", "profiler.detail=0", script
    )
    assert done.returncode == 0, done.stderr
    captures = [*map(Capture.load, (tmp_path / "profile").glob("steps_*"))]
    assert [len(each.steps) for each in captures] == [5, 5]
    assert len({each.metadata["run"] for each in captures}) == 2


# What a new interpreter shows: nothing of torch is loaded before the script loads it.
BARE = """
import importlib.util, multiprocessing, os, sys

def double(number):
    return 2 * number

if __name__ == "__main__":
    assert "torch" not in sys.modules or "INSTRUMENT_TESTS_WARM" in os.environ
    os.environ["OMP_NUM_THREADS"] = "1"
    assert importlib.util.find_spec("torch") is not None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
    import sibling
    print(sibling.__name__, sys.path[0], sys.argv, __file__, __spec__ and __spec__.name)
    import torch
    print(torch.get_num_threads(), torch.manual_seed(0).initial_seed())
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        print(model.weight.sum().item().hex())
    sys.exit(7)
"""


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(["package/train.py"], id="file"),
        pytest.param(["-m", "package.train"], id="module", marks=pytest.mark.nightly),
    ],
)
def test_a_new_interpreter(tmp_path: Path, named: list[str]) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "train.py").write_text(BARE)
    for place in (folder, tmp_path):
        (place / "sibling.py").touch()

    plain = run(tmp_path, *named, "--lr", "3")
    command = [sys.executable, "-m", "instrument", "run", *named, "--lr", "3"]
    env = os.environ | {"PYTHONPATH": str(Path(instrument.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (plain.returncode, plain.stderr) == (7, "")
    assert (done.returncode, done.stdout) == (7, plain.stdout)
    result = done.stderr.splitlines()[-1]
    assert result == f"The report page is {tmp_path}/profile/steps_000003-000007_rank0/report.html."


# Modules that we or packages of ours import too, before the script, while it runs, or at its end.
DOUBLES = (
    "attr", "hydra", "instrument", "jinja2", "loguru", "msgspec", "packaging", "pydantic",
    "statistics", "yaml",
)  # fmt: skip
NAMESAKES = """
import attr, hydra, loguru, packaging.version, statistics, sys, yaml
print(attr.ITS, hydra.ITS, loguru.ITS, packaging.version.ITS, statistics.ITS, yaml.ITS)
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
import instrument.tools
print(instrument.tools.ITS, sorted(name for name in sys.modules if name in ("jinja2", "msgspec")))
print(yaml.ITS, sys.modules["yaml"].ITS, sys.path[0], "pydantic" in sys.modules)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (["-m", "train"], ["folder"], ["program.pyz"])
        ),
    ],
    ids=" ".join,
)
def test_the_scripts_own_modules_win_but_are_not_ours(tmp_path: Path, words: list[str]) -> None:
    """Each runs as often as with `python`, and none in the exporter."""
    folder = tmp_path / "folder" if words == ["folder"] else tmp_path
    folder.mkdir(exist_ok=True)
    its = "ITS = __name__\nopen('ran.txt', 'a').write(__name__ + '\\n')\n"
    for name in DOUBLES:
        if name in ("instrument", "packaging"):
            (folder / name).mkdir()
            for module in ("__init__", "tools", "version"):
                (folder / name / f"{module}.py").write_text(its)
        else:
            (folder / f"{name}.py").write_text(its)
    (folder / "sitecustomize.py").write_text(its)
    (folder / "train.py").write_text(NAMESAKES)
    (folder / "__main__.py").write_text(NAMESAKES)
    if words == ["program.pyz"]:
        shutil.make_archive(str(tmp_path / "program"), "zip", folder)
        (tmp_path / "program.zip").rename(tmp_path / "program.pyz")
        for each in folder.glob("*.py"):
            each.unlink()

    def done(*command: str | Path) -> tuple[int, str, list[str], str]:
        its = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)
        ran = (tmp_path / "ran.txt").read_text().splitlines()
        (tmp_path / "ran.txt").unlink()
        return its.returncode, its.stdout, ran, its.stderr

    python = Path(sys.executable)
    plain, ours = done(python), done(python.with_name("instrument"), "run")
    assert plain[0] == 0, plain[3]
    assert ours[:3] == plain[:3]
    assert "The report page is" in ours[3], ours[3]


DDP = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = mlp()
if sharded:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sums = [(each.full_tensor() if sharded else each).sum().item() for each in model.parameters()]
if dist.get_rank() == 0:
    print(sums)
# destroyed after its process group, it would wait for a thread of gloo that may wait for the GIL
del model
dist.destroy_process_group()
"""
SPAWN = """
def train(index):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    if index == 0:
        print(model[0].weight.sum().item())

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
HYDRA = """
import hydra

@hydra.main(config_path=None, version_base=None)
def main(cfg):
    print(cfg)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    for _ in range(9):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    print(model[0].weight.sum().item())

main()
"""
LIGHTNING = """
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

module = Module()
loader = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=4)
trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, loader)
print(module.net[0].weight.sum().item())
"""
TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

example = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16, n_positions=8))
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, disable_tqdm=True, report_to=[], per_device_train_batch_size=2,
    gradient_accumulation_steps=2, num_train_epochs=3, save_strategy="no", logging_strategy="no")
print(Trainer(model=model, args=arguments, train_dataset=[example] * 16).train().training_loss)
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator, model = Accelerator(cpu=True), mlp()
loader = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
print(model[0].weight.sum().item())
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("code", "launcher", "words", "ranks", "package"),
    [
        pytest.param("sharded = False" + DDP, TORCHRUN, [], 2, "torch", id="ddp"),
        pytest.param("sharded = True" + DDP, TORCHRUN, [], 2, "torch", id="fsdp2"),
        pytest.param(SPAWN, [], [], 2, "torch", id="spawn"),
        pytest.param(HYDRA, [], ["+lr=0.1", "+profiler.active=9"], 1, "hydra", id="hydra"),
        pytest.param(LIGHTNING, [], [], 1, "lightning", id="lightning"),
        pytest.param(TRANSFORMERS, [], [], 1, "transformers", id="transformers"),
        pytest.param(ACCELERATE, [], [], 1, "accelerate", id="accelerate"),
        pytest.param(ACCELERATE, LAUNCH, [], 1, "accelerate", id="accelerate_launch"),
    ],
)
def test_launchers_and_trainers(
    tmp_path: Path, code: str, launcher: list[str], words: list[str], ranks: int, package: str
) -> None:
    """The output is the same, each rank has a window of five steps, and only rank 0 gives a verdict, at the end."""
    need(package)
    script = write(tmp_path, code)
    env = os.environ | FORKED | {"PYTHONPATH": str(Path(instrument.__file__).parent.parent)}
    env["INSTRUMENT_DIR"] = str(tmp_path / "profile")

    def start(*before: str) -> CompletedProcess[str]:
        command = [sys.executable, *launcher, *before, str(script), *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    plain, done = start(), start("-m", "instrument", "run", *(["--"] if launcher else []))
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert plain.stdout.strip()
    assert _without_times(done.stdout) == _without_times(plain.stdout)
    captures = [*map(Capture.load, (tmp_path / "profile").glob("steps_*"))]
    assert [len(each.steps) for each in captures] == [5] * ranks
    assert done.stderr.count("The report page is ") == 1
    assert done.stderr.splitlines()[-1].startswith("The report page is ")


def _without_times(text: str) -> list[str]:
    return [line for line in text.splitlines() if "train_runtime" not in line]


TWO_RANKS = """
import sys
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(rank, endpoint):
    dist.init_process_group("gloo", init_method=endpoint, rank=rank, world_size=2)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        for _ in range(3000 if rank else 1):  # rank 1 has much more work of its own
            torch.ones(32, 32) @ torch.ones(32, 32)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    del model  # torch hangs if it is freed after its process group
    dist.destroy_process_group()

endpoint = f"file://{sys.argv[1]}"
torch.multiprocessing.start_processes(train, args=(endpoint,), nprocs=2, start_method="fork")
"""


def test_ranks_are_diagnosed_together(tmp_path: Path) -> None:
    script = write(tmp_path, TWO_RANKS)
    done = run(tmp_path, "-m", "instrument", "run", "profiler.active=5", script, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The report page is ") == 1
    assert "Rank 1 is late" in done.stderr
    assert "no_sync" not in done.stderr.split("Change: ")[0]
