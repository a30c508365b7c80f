"""Each example, run as a user runs it: a process of its own, in an empty folder.

That process is forked from one that has loaded torch (see warm.py), except for some examples that start as a user
starts them: `train_lm.py`, `resnet_inference.py`, `ddp_ranks.py` and `long_job.py`.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from collected import errors_in
from installed import need

from instrument import Capture

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTRUMENT = Path(sys.prefix) / "bin" / "instrument"
# Ten steps are enough for the window of the summary preset, steps 2 to 4.
SMALL = (
    "model.width=32",
    "model.layers=2",
    "model.context=32",
    "training.batch_size=8",
    "training.steps=10",
    "training.log_every=1",
    "device=cpu",
)
MARKED = (
    "data",
    "forward",
    "transformer_block",
    "attention_block",
    "mlp_block",
    "loss_fn",
    "backward",
    "optimizer",
)


def run_cold(example: str, folder: Path) -> str:
    """Everything that the example printed; it must have ended well."""
    return ended_well([sys.executable, str(EXAMPLES / example)], folder)


def run(example: str, folder: Path, *arguments: str) -> str:
    """The same, in a process that is forked."""
    return printed(warm.run([str(EXAMPLES / example), *arguments], folder, environment()))


def environment() -> dict[str, str]:
    # one thread: runs equal one another to the last bit, and do not wait for cores that others use
    return {**os.environ, "HYDRA_FULL_ERROR": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}


def ended_well(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    return printed(ended)


def printed(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stdout
    assert not errors_in(ended.stdout), ended.stdout
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


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`python examples/train_lm.py` without a single override."""
    folder = tmp_path_factory.mktemp("train_lm")
    return run_cold("train_lm.py", folder), folder


def test_train_lm_learns(as_it_is: tuple[str, Path]) -> None:
    found = losses(as_it_is[0])
    assert found[0] == pytest.approx(5.55, abs=0.3)  # ln 256: nothing known yet
    assert found[-1] < 3


def test_train_lm_shows_its_ranges_with_times(as_it_is: tuple[str, Path]) -> None:
    text, folder = as_it_is
    (capture,) = captures(folder, "outputs/*/*/profile")
    times = shown_times(text)
    assert set(MARKED) <= times.keys()
    assert times["attention_block"] == _as_shown(
        sum(capture.ranges.where(name="attention_block").column("cpu_ns"))
    )
    assert (capture.folder / "table.txt").read_text(encoding="utf-8") in text


def test_train_lm_records_what_it_marks(as_it_is: tuple[str, Path]) -> None:
    (capture,) = captures(as_it_is[1], "outputs/*/*/profile")
    assert capture.steps.column("number") == [2, 3, 4]
    calls = {row.path: row.calls for row in capture.ranges}
    for path in ("data", "forward", "forward/loss_fn", "backward", "optimizer"):
        assert calls[path] == 3
    blocks = "forward/transformer_block"
    assert (
        calls[blocks] == calls[f"{blocks}/attention_block"] == calls[f"{blocks}/mlp_block"] == 9
    )  # three layers


def test_train_lm_writes_only_into_hydras_folder(as_it_is: tuple[str, Path]) -> None:
    assert [path.name for path in as_it_is[1].iterdir()] == ["outputs"]


def test_disabled_records_nothing_and_trains_the_same(tmp_path: Path) -> None:
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    recorded = run("train_lm.py", tmp_path / "on", *SMALL, "profiler.active=2")
    bare = run("train_lm.py", tmp_path / "off", *SMALL, "profiler=disabled")
    assert len(losses(bare)) == 10
    assert losses(bare) == losses(recorded)
    assert captures(tmp_path / "on", "outputs/*/*/profile")
    assert not list(tmp_path.glob("off/outputs/*/*/profile"))
    assert "Profiler" not in bare
    assert not shown_times(bare)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("resnet")
    return run_cold("resnet_inference.py", folder), folder


def test_resnet_walks_through_the_recipe(resnet: tuple[str, Path]) -> None:
    _, *steps = re.split(r"^## (\d)\. .*$", resnet[0], flags=re.MULTILINE)
    assert steps[0::2] == list("12345678")
    shown = dict(zip(steps[0::2], steps[1::2]))
    assert "11,689,512 parameters, input (5, 3, 224, 224)" in shown["2"]
    assert {"model_inference", "basic_block", "aten::conv2d"} <= shown_times(shown["3"]).keys()
    assert "[[5, 64, 56, 56], [64, 64, 3, 3], " in shown["3"]
    assert re.search(r"^aten::empty +\d+ +\d+\.\d+ MiB", shown["4"], re.MULTILINE)
    assert re.search(r"^    .*conv\.py\(\d+\): (_conv_)?forward$", shown["6"], re.MULTILINE)
    assert shown_times(shown["8"]).keys() >= {"model_inference", "basic_block"}


def test_resnet_leaves_the_files_it_names(resnet: tuple[str, Path]) -> None:
    text, folder = resnet
    named = {
        Path(name)
        for name in re.findall(r"\S+/(?:trace\.json\.gz|stacks\.txt)$", text, re.MULTILINE)
    }
    assert {path.name for path in named} == {"trace.json.gz", "stacks.txt"}
    assert all(path.stat().st_size and path.is_relative_to(folder) for path in named)
    found = {capture.name: capture for capture in captures(folder)}
    assert found["steps_000002-000003_rank0"].steps.column("number") == [2, 3]
    assert found["steps_000006-000007_rank0"].steps.column("number") == [6, 7]
    (blocks,) = found["steps_000006-000007_rank0"].ranges.where(name="basic_block")
    assert (blocks.path, blocks.calls) == ("model_inference/basic_block", 16)
    assert [path.name for path in folder.iterdir()] == ["profile"]


def test_graph_nodes(tmp_path: Path) -> None:
    text = run("graph_nodes.py", tmp_path)
    assert re.search(
        r"^call_module +layer1_0_conv1 +layer1\.0\.conv1 .* \[5, 64, 56, 56\] +1\.16 G$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^call_function +add +operator\.add ", text, re.MULTILINE)
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
    assert capture.steps.column("number") == [5, 6, 7]
    assert {"encoder", "loss"} <= shown_times(text).keys()
    for name in ("encoder", "loss"):
        (row,) = capture.ranges.where(name=name)
        assert row.calls == 3
        assert f"{capture.name}: {name} took {row.cpu_ns / 3 / 1e6:.3f} ms a call" in text
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_transformers_trainer(tmp_path: Path) -> None:
    need("transformers")
    text = run("transformers_trainer.py", tmp_path)
    (capture,) = captures(tmp_path)
    assert capture.steps.column("number") == [4, 5, 6]
    calls = {row.path: row.calls for row in capture.ranges}
    for name, times in {"data": 3, "forward": 6, "backward": 6, "optimizer": 3}.items():
        assert calls[name] == times, "two batches to a step"
        (row,) = capture.ranges.where(path=name)
        assert f"{capture.name}: {name} took {row.cpu_ns / 3 / 1e6:.3f} ms a step" in text
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
        assert f"{capture.name}: steps [2, 3, 4]" in text
        assert (capture.folder / "table.txt").read_text(encoding="utf-8") in text


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
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_ddp_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    text = ended_well([*torchrun, str(EXAMPLES / "ddp_ranks.py")], tmp_path)
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


@pytest.mark.skipif(
    not (shutil.which("make") and INSTRUMENT.exists()), reason="needs make and an installed package"
)
def test_the_demo_lists_what_it_wrote_and_how_to_open_it(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    # -o: the environment that runs this test is taken as it is
    installed = ["-o", f"{sys.prefix}/.installed-demo", f"VENV={sys.prefix}", f"DEMO={demo}"]
    small = "OVERRIDES=model.width=32 model.layers=2 training.batch_size=8"
    text = ended_well(["make", "-C", str(EXAMPLES.parent), *installed, small, "demo"], tmp_path)
    found = captures(demo)
    assert [capture.steps.column("number") for capture in found] == [
        [31, 32, 33],
        [65, 66, 67],
        [99, 100, 101],
    ]
    listed = re.findall(
        rf"^{re.escape(str(demo))}\S+$", text[text.index("windows wrote:") :], re.MULTILINE
    )
    assert sorted(map(Path, listed)) == sorted(
        path for path in demo.glob("profile/**/*") if path.is_file()
    )
    for capture in found:
        assert {path.name for path in capture.folder.iterdir()} >= {
            "trace.json.gz",
            "table.txt",
            "stacks.txt",
        }
        assert (capture.folder / "table.txt").read_text(encoding="utf-8") in text
    show = re.findall(rf"^ +({re.escape(str(INSTRUMENT))} show \S+)$", text, re.MULTILINE)
    shown = ended_well(show[0].split(), tmp_path)
    table = (found[-1].folder / "table.txt").read_text(encoding="utf-8").strip()
    printed, written = (each.partition("Cost of recording: ")[0] for each in (shown.strip(), table))
    assert printed == written != ""
    (logdir,) = re.findall(r"tensorboard --logdir (\S+)$", text, re.MULTILINE)
    assert len(list(Path(logdir).rglob("events.out.tfevents.*"))) == 3


def _as_shown(ns: int) -> str:
    unit, divisor = next(pair for pair in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)) if ns >= pair[1])
    return f"{ns / divisor:.3f} {unit}"


def test_everything_that_can_be_marked_shows_up(tmp_path: Path) -> None:
    printed = run("annotate_everything.py", tmp_path)
    (capture,) = captures(tmp_path)
    names = {row.name for row in capture.ranges}
    assert {
        "a_function",
        "named in the mark",
        "power 3",
        "4 rows",
        "partial",
        "Members.method",
        "class method",
        "static method",
        "property",
        "callable object",
        "a_generator",
        "a_coroutine",
        "an_async_generator",
        "square.forward",
        "square.backward",
        "layer 0",
        "layer 1",
        "one instance",
        "Sequential",
        "0",
    } <= names
    assert names <= {name for name in names if name in printed}
    assert "Ranges inside compiled region 0/0, not timed: named in the mark, a_function" in printed


def test_long_job_records_when_a_second_shell_asks(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "long_job.py")]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    def wait_for(trigger: str) -> Capture:
        for _ in range(600):
            assert job.poll() is None, (tmp_path / "log").read_text()
            said = (tmp_path / "log").read_text()
            for capture in captures(tmp_path):
                if (
                    capture.metadata["window"]["trigger"] == trigger
                    and f"Recorded {capture.folder}" in said
                ):
                    return capture
            time.sleep(0.1)
        raise AssertionError(f"no window for {trigger}: {(tmp_path / 'log').read_text()}")

    try:
        stalled = wait_for("slow_step")
        said = ended_well(
            [sys.executable, "-m", "instrument", "trigger", str(tmp_path), "--steps", "5"], tmp_path
        )
        by_file = wait_for("file")
        os.kill(job.pid, signal.SIGUSR2)
        by_signal = wait_for("signal")
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert said.startswith("Asked for the next 5 steps in ")
    assert [len(capture.steps) for capture in (stalled, by_file, by_signal)] == [3, 5, 3]
    slow = r"step \d+ took [\d.]+ [mµ]?s, \d+\.\d × the median of [\d.]+ [mµ]?s"
    assert re.fullmatch(slow, stalled.metadata["window"]["trigger_reason"])
    text = (tmp_path / "log").read_text()
    assert f"{by_file.name}: file, because instrument trigger requested a window" in text
    assert f"{by_signal.name}: signal, because SIGUSR2 was received" in text
    assert "Traceback" not in text
    assert not [*(tmp_path / "profile").glob(".listens-*")]
