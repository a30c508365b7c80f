"""Each example, run as a user runs it, in an empty folder, but small and in a process that is forked (see warm.py).

`make nightly` starts every example and the demo as a user starts them, in their full size.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import warm
from collected import problems_in
from installed import need

from instrument import Capture
from instrument.base.units import duration

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTRUMENT = Path(sys.prefix) / "bin" / "instrument"
SMALL = (
    "model.width=32", "model.layers=2", "model.context=32", "training.batch_size=8", "device=cpu",
)  # fmt: skip
MARKED = (
    "data", "forward", "transformer_block", "attention_block", "mlp_block", "loss_fn", "backward",
    "optimizer",
)  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUTF8": "1",
    # one thread: runs equal one another to the last bit, and do not wait for cores that others use
    "OMP_NUM_THREADS": "1",
}

# so that code can import the examples
FORKED = {**ENVIRONMENT, warm.EXPORTER: "yes", "PYTHONPATH": str(EXAMPLES)}


def run(example: str, folder: Path, *arguments: str) -> str:
    """Everything that the example printed; it must have ended well."""
    return forked([str(EXAMPLES / example), *arguments], folder)


def forked(command: list[str], folder: Path) -> str:
    more = warm.with_trainers() if Path(command[0]).name in NEEDS else {}
    return printed(warm.run(command, folder, {**FORKED, **more}))


def ended_well(command: list[str], folder: Path) -> str:
    """The same, in a new process."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    return printed(ended)


def printed(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stdout
    assert not problems_in(ended.stdout), ended.stdout
    assert "Traceback" not in ended.stdout, ended.stdout
    return ended.stdout


def captures(folder: Path, pattern: str = "profile") -> list[Capture]:
    """The captures in the profile folder, by name."""
    return [
        Capture.load(path.parent) for path in sorted(folder.glob(f"{pattern}/[!.]*/capture.json"))
    ]


def shown_times(text: str) -> dict[str, str]:
    """The names in the first column of printed tables, each with its first time, such as "1.234 ms"."""
    rows = re.findall(
        r"^ *(\S+?)(?:: \w+)? +\d+ +(\d+\.\d+ (?:ns|µs|ms|s)|\d+ ns) ", text, re.MULTILINE
    )
    return dict(reversed(rows))  # the range table comes before the operators


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", text)]


def with_small_images(example: str, folder: Path) -> str:
    """What an example printed, on a wide terminal, whose images are two of 64 × 64 pixels."""
    code = f"import os, {example}; os.environ['COLUMNS'] = '200'; {example}.INPUT = (2, 3, 64, 64); {example}.main()"
    return forked(["-c", code], folder)


class Demo(NamedTuple):
    """What `make demo` printed with a small model, and its folder."""

    text: str
    folder: Path


def of_the_demo(folder: Path, overrides: str, *options: str) -> list[str]:
    """The command of `make demo`, which takes the environment that runs this test as it is."""
    if not (shutil.which("make") and INSTRUMENT.exists()):
        pytest.skip("needs make and an installed package")
    installed = ["-o", f"{sys.prefix}/.installed-demo", f"VENV={sys.prefix}"]
    where = ["-C", str(EXAMPLES.parent), "--no-print-directory"]
    return [
        "make",
        *where,
        *installed,
        f"DEMO={folder}",
        f"OVERRIDES={overrides}",
        *options,
        "demo",
    ]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "run"
    overrides = " ".join([*SMALL, "profiler.export=inline"])
    commands = ended_well(of_the_demo(folder, overrides, "--dry-run"), EXAMPLES.parent)
    training, listing = commands.replace("\\\n", "").split("\n", 1)
    python, *arguments = shlex.split(training)
    assert python == f"{sys.prefix}/bin/python"
    text = forked(arguments, EXAMPLES.parent)
    return Demo(text + ended_well(["sh", "-ec", listing], EXAMPLES.parent), folder)


def test_the_demo_learns_and_the_same_without_a_profiler(demo: Demo, tmp_path: Path) -> None:
    found = losses(demo.text)
    assert found[0] == pytest.approx(5.55, abs=0.3)  # ln 256: nothing known yet
    assert found[-1] < 4.5
    bare = run("train_lm.py", tmp_path, *SMALL, "profiler=disabled")
    assert losses(bare) == found
    assert "Profiler" not in bare
    assert not shown_times(bare)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert not list(tmp_path.glob("outputs/*/*/profile"))


def test_the_demo_records_what_it_marks(demo: Demo) -> None:
    found = captures(demo.folder)
    assert [capture.steps.column("number") for capture in found] == [
        [31, 32, 33, 34, 35],
        [67, 68, 69, 70, 71],
        [103, 104, 105, 106, 107],
    ]
    for capture in found:
        calls = {row.path: row.calls for row in capture.ranges}
        for path in ("data", "forward", "forward/loss_fn", "backward", "optimizer"):
            assert calls[path] == 5
        blocks = "forward/transformer_block"
        for path in (blocks, f"{blocks}/attention_block", f"{blocks}/mlp_block"):
            assert calls[path] == 10, "two layers"
        assert f"\nAll of it: {capture.folder / 'table.txt'}\n" in demo.text
    times = shown_times((found[0].folder / "table.txt").read_text(encoding="utf-8"))
    assert set(MARKED) <= times.keys()
    attention = found[0].ranges.where(name="attention_block").column("cpu_ns")
    assert times["attention_block"] == duration(sum(attention))


def test_the_demo_lists_what_it_wrote_and_how_to_open_it(demo: Demo, tmp_path: Path) -> None:
    folder, windows = re.escape(str(demo.folder)), demo.text.index("windows wrote:")
    listed = re.findall(rf"^{folder}\S+$", demo.text[windows:], re.MULTILINE)
    assert sorted(map(Path, listed)) == sorted(
        path for path in demo.folder.glob("profile/**/*") if path.is_file()
    )
    found = captures(demo.folder)
    for capture in found:
        names = {path.name for path in capture.folder.iterdir()}
        assert names >= {"trace.json.gz", "table.txt", "stacks.txt"}
    show = re.findall(rf"^ +{re.escape(str(INSTRUMENT))} (show \S+)$", demo.text, re.MULTILINE)
    shown = forked(["-m", "instrument", *show[0].split()], tmp_path)
    table = (found[-1].folder / "table.txt").read_text(encoding="utf-8").strip()
    # what samples say of the run changes until its end; the tables do not
    printed, written = (
        each.partition("Cost of recording: ")[0].partition(f"{found[-1].folder.name}: steps")[2]
        for each in (shown.strip().replace("\n", " "), table.replace("\n", " "))
    )
    assert printed == written != ""
    (logdir,) = re.findall(r"tensorboard --logdir (\S+)$", demo.text, re.MULTILINE)
    assert len(list(Path(logdir).rglob("events.out.tfevents.*"))) == 3


def test_resnet_inference(tmp_path: Path) -> None:
    """It shows each step of the recipe, and leaves the files that it names."""
    text = with_small_images("resnet_inference", tmp_path)
    _, *steps = re.split(r"^## (\d)\. .*$", text, flags=re.MULTILINE)
    assert steps[0::2] == list("12345678")
    shown = dict(zip(steps[0::2], steps[1::2]))
    assert "11,689,512 parameters, input (2, 3, 64, 64)" in shown["2"]
    assert {"model_inference", "basic_block", "aten::conv2d"} <= shown_times(shown["3"]).keys()
    assert "[[2, 64, 16, 16], [64, 64, 3, 3], " in shown["3"]
    assert re.search(r"^aten::empty +\d+ +\d+\.\d+ [KM]iB", shown["4"], re.MULTILINE)
    assert re.search(r"^    .*conv\.py\(\d+\): (_conv_)?forward$", shown["6"], re.MULTILINE)
    assert shown_times(shown["8"]).keys() >= {"model_inference", "basic_block"}

    files = re.findall(r"\S+/(?:trace\.json\.gz|stacks\.txt)$", text, re.MULTILINE)
    assert {Path(name).name for name in files} == {"trace.json.gz", "stacks.txt"}
    assert all(Path(name).stat().st_size for name in files)
    found = {capture.name: capture for capture in captures(tmp_path)}
    assert found["steps_000002-000003_rank0"].steps.column("number") == [2, 3]
    assert found["steps_000006-000007_rank0"].steps.column("number") == [6, 7]
    (blocks,) = found["steps_000006-000007_rank0"].ranges.where(name="basic_block")
    assert (blocks.path, blocks.calls) == ("model_inference/basic_block", 16)
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_graph_nodes(tmp_path: Path) -> None:
    text = with_small_images("graph_nodes", tmp_path)
    assert re.search(
        r"^layer1_0_conv1 +call_module +layer1\.0\.conv1 .* \[2, 64, 16, 16\] +37\.75 M$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^add +call_function +operator\.add ", text, re.MULTILINE)
    assert re.search(
        r"^75 nodes take .* that the model itself takes(, but the runs vary too much for a conclusion)?\.$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^Conv2d +20 ", text, re.MULTILINE)
    assert "resnet_inference.py:" in text
    assert not list(tmp_path.iterdir())


def test_lightning_fit(tmp_path: Path) -> None:
    need("lightning")
    text = run("lightning_fit.py", tmp_path)
    (capture,) = captures(tmp_path)
    assert capture.steps.column("number") == [5, 6, 7, 8, 9]
    table = (capture.folder / "table.txt").read_text(encoding="utf-8")
    assert {"encoder", "loss"} <= shown_times(table).keys()
    for name in ("encoder", "loss"):
        (row,) = capture.ranges.where(name=name)
        assert row.calls == 5
        assert f"{capture.name}: {name} took {row.cpu_ns / 5 / 1e6:.3f} ms a call" in text
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_transformers_trainer(tmp_path: Path) -> None:
    need("transformers")
    text = run("transformers_trainer.py", tmp_path)
    (capture,) = captures(tmp_path)
    assert capture.steps.column("number") == [4, 5, 6, 7, 8]
    calls = {row.path: row.calls for row in capture.ranges}
    for name, times in {"data": 5, "forward": 10, "backward": 10, "optimizer": 5}.items():
        assert calls[name] == times, "two batches to a step"
        (row,) = capture.ranges.where(path=name)
        assert f"{capture.name}: {name} took {row.cpu_ns / 5 / 1e6:.3f} ms a step" in text
    assert calls["validation/forward"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "profile"]


def test_accelerate_loop(tmp_path: Path) -> None:
    need("accelerate")
    text = run("accelerate_loop.py", tmp_path)
    found = captures(tmp_path)
    assert [capture.steps.column("number") for capture in found] == [
        [2, 3, 4],
        [7, 8, 9],
        [12, 13, 14],
    ]
    for capture in found:
        assert {"data", "forward", "backward", "optimizer"} <= {row.path for row in capture.ranges}
        assert f"{capture.name}: backward took" in text
    logged = b"".join(
        path.read_bytes() for path in tmp_path.glob("runs/circle/events.out.tfevents.*")
    )
    assert logged.count(b"profiler/ranges/backward/cpu_ms") == 3, (
        "beside the loss, once for each window"
    )


def test_ignite_engine(tmp_path: Path) -> None:
    need("ignite")
    text = run("ignite_engine.py", tmp_path)
    train, validation = captures(tmp_path)
    assert {"data", "forward", "backward", "optimizer"} <= {row.path for row in train.ranges}
    assert {"data", "Sequential"} <= {row.path for row in validation.ranges}
    for capture in (train, validation):
        assert f"{capture.name}: steps [2, 3, 4, 5, 6]" in text
        assert f"All of it: {capture.folder / 'table.txt'}" in text


def test_custom_sink(tmp_path: Path) -> None:
    text = run("custom_sink.py", tmp_path)
    plain, named = captures(tmp_path)
    for capture, separator in ((plain, ","), (named, ";")):
        written = (capture.folder / "ranges.csv").read_text(encoding="utf-8")
        assert written in text
        rows = list(csv.DictReader(written.splitlines(), delimiter=separator))
        assert [(row["path"], int(row["calls"]), int(row["cpu_ns"])) for row in rows] == [
            (row.path, row.calls, row.cpu_ns) for row in capture.ranges
        ]
        assert {"forward", "backward", "optimizer"} <= {row["path"] for row in rows}
    target = json.loads((named.folder / "capture.json").read_text(encoding="utf-8"))["config"][
        "sinks"
    ]["csv"]
    assert target == {"_target_": "__main__.RangesCsv", "separator": ";"}
    assert text.count(f"{named.name}: a step takes ") == 1, "only the second has the callback"
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


# What torchrun does, but the ranks are forked from the agent and need not load torch.
TORCHRUN = """
import ddp_ranks
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="none", rdzv_backend="c10d",
    rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork",
)
elastic_launch(config, ddp_ranks.main)()
"""


def test_ddp_ranks(tmp_path: Path) -> None:
    text = forked(["-c", TORCHRUN], tmp_path)
    found = captures(tmp_path)
    assert [capture.name for capture in found] == [
        f"steps_000011-000013_rank{rank}" for rank in range(2)
    ]
    for rank, capture in enumerate(found):
        with gzip.open(capture.folder / "trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        reduced = [event["dur"] for event in events if event.get("name") == "gloo:all_reduce"]
        assert len(reduced) == 3
        said = rf"^rank {rank}, steps \[11, 12, 13\]: \d+\.\d+ ms a step, {sum(reduced) / 3e3:.3f} ms of it in all_reduce$"
        assert re.search(said, text, re.MULTILINE), (said, text)
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_everything_that_can_be_marked_shows_up(tmp_path: Path) -> None:
    printed = run("annotate_everything.py", tmp_path)
    (capture,) = captures(tmp_path)
    names = {row.name for row in capture.ranges}
    assert {
        "a_function", "named in the mark", "power 3", "4 rows", "partial", "Members.method",
        "class method", "static method", "property", "callable object", "a_generator",
        "a_coroutine", "an_async_generator", "square.forward", "square.backward", "layer 0",
        "layer 1", "one instance", "Sequential", "0",
    } <= names  # fmt: skip
    assert names <= {name for name in names if name in printed}
    assert "Ranges inside compiled region 0/0, not timed: named in the mark, a_function" in printed


# The stall of the loader takes no time, but the clock of the steps goes on by a year.
LONG_JOB = """
import time
from types import SimpleNamespace
import long_job
from instrument.record import step_loop

ahead_ns = 0

def stall(seconds):
    global ahead_ns
    ahead_ns = 365 * 24 * 3600 * 10**9

step_loop.time = SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + ahead_ns)
long_job.time = SimpleNamespace(sleep=stall)
long_job.TRIGGERS["slow_step"]["factor"] = 100_000
long_job.main()
"""


def test_long_job_records_when_a_second_shell_asks(tmp_path: Path) -> None:
    job = warm.Script(["-c", LONG_JOB], tmp_path, FORKED)
    log: list[str] = []

    def next_window() -> Capture:
        for line in job.stderr:
            log.append(line)
            if found := re.search(r"Recorded (\S+)", line):
                return Capture.load(found[1])
        raise AssertionError("".join(log))

    try:
        assert job.stdout.readline() == f"kill -USR2 {job.pid} records the next steps\n"
        windows = [next_window()]
        said = forked(["-m", "instrument", "trigger", str(tmp_path), "--steps", "5"], tmp_path)
        windows.append(next_window())
        job.send_signal(signal.SIGUSR2)
        windows.append(next_window())
        job.send_signal(signal.SIGINT)
        text, errors = job.communicate(300)
        assert job.returncode == 0, errors
    finally:
        if job.returncode is None:
            job.kill()
    assert said.startswith("Asked for the next 5 steps in ")
    assert [len(window.steps) for window in windows] == [3, 5, 3]
    triggers = [window.metadata["window"]["trigger"] for window in windows]
    assert triggers == ["slow_step", "file", "signal"]
    stalled, by_file, by_signal = windows
    slow = r"step 200 took 31,536,\d+ s, [\d.]+ × the median of [\d.]+ [mµ]?s"
    assert re.fullmatch(slow, stalled.metadata["window"]["trigger_reason"])
    assert f"{by_file.name}: file, because instrument trigger requested a window" in text
    assert f"{by_signal.name}: signal, because SIGUSR2 was received" in text
    assert not problems_in("".join(log) + errors)
    assert "Traceback" not in errors
    assert not [*(tmp_path / "profile").glob(".listens-*")]


NEEDS = {
    "accelerate_loop.py": "accelerate",
    "ignite_engine.py": "ignite",
    "lightning_fit.py": "lightning",
    "transformers_trainer.py": "transformers",
}
ENDLESS = {"long_job.py"}


# Start new interpreters and train in full.
@pytest.mark.nightly
def test_the_demo_in_full_as_a_user_starts_it(tmp_path: Path) -> None:
    text = ended_well(of_the_demo(tmp_path / "run", ""), tmp_path)
    assert losses(text)[-1] < 3
    assert len(captures(tmp_path / "run")) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("example", sorted({path.name for path in EXAMPLES.glob("*.py")} - ENDLESS))
def test_each_example_in_full_as_a_user_starts_it(example: str, tmp_path: Path) -> None:
    if example in NEEDS:
        need(NEEDS[example])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = torchrun if example == "ddp_ranks.py" else []
    text = ended_well([sys.executable, *launcher, str(EXAMPLES / example)], tmp_path)
    assert captures(tmp_path) or captures(tmp_path, "outputs/*/*/profile") or "nodes take" in text
    if example == "train_lm.py":
        assert losses(text)[-1] < 3
