"""Timings of a whole run: against numpy, a clock of the tests' own, and beside windows."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from collected import Log
from hypothesis import given
from recording import run_session
from sinks.test_tensorboard_sink import points
from test_nests import Program, programs
from test_nests import start as run_program
from torch import nn

from instrument import ProfilerConfig, Session, instrument_model, profiled
from instrument.annotate import backends
from instrument.annotate.modules import forget
from instrument.base.errors import CaptureError, MissingPackage
from instrument.cli.command import main
from instrument.read.views.timings_file import read_timings
from instrument.record import timings
from instrument.record.step_loop import StepLoop
from instrument.record.timings import OTHERS, STEP, CpuTimes, DurationHistogram, Rows

pytestmark = pytest.mark.usefixtures("inline_export")


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    mine = Clock()
    monkeypatch.setattr(timings, "perf_counter_ns", mine)
    return mine


def timed(tmp_path: Path, every: int = 100, **options: Any) -> Session:
    return Session("timings", timings={"every": every, **options}, output_dir=str(tmp_path))


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (tmp_path / "timings_rank0.jsonl").read_text().splitlines()
    ]


def figures(session: Session) -> dict[str, tuple[int, int, int]]:
    """The calls, mean and longest duration of each range."""
    return {row.name: (row.calls, row.mean_ns, row.max_ns) for row in session.timings.table()}


def calls(session: Session) -> dict[str, int]:
    return {name: times for name, (times, *_) in figures(session).items()}


# The figures


@pytest.mark.parametrize(
    "made",
    [
        lambda random: random.lognormal(math.log(20_000), 1.5, 10_000),
        lambda random: random.integers(0, 50, 3_000),
        lambda random: np.concatenate([random.normal(1e6, 1e4, 949), random.normal(5e8, 1e6, 51)]),
        lambda random: np.full(700, 123_456_789),
        lambda random: random.uniform(1e3, 1e14, 500),
        lambda random: np.array([7]),
        lambda random: np.array([0, 0, 1]),
    ],
)
def test_the_figures_are_those_of_numpy(made: Callable[[np.random.Generator], Any]) -> None:
    data = made(np.random.default_rng(0)).astype(np.int64)
    tally, half = DurationHistogram(), DurationHistogram()
    split = max(1, len(data) // 3)
    tally.add(data[:split].tolist())
    if len(data) > split:
        half.add(data[split:].tolist())
        tally.merge(half)
    said = tally.summary()
    assert (said["calls"], said["max_ns"], tally.total_ns) == (len(data), data.max(), data.sum())
    assert said["mean_ns"] == round(data.sum() / len(data))
    for key, share in (("p50_ns", 0.5), ("p95_ns", 0.95)):
        true = np.quantile(data, share, method="inverted_cdf")
        assert said[key] == pytest.approx(true, rel=0.02, abs=1), key


def test_what_is_added_while_another_counts_is_counted_once() -> None:
    rows, total, turned = Rows(), 4 * 20_000, []
    rows.add("range", 0)
    ((_, row),) = rows.items()
    threads = [
        threading.Thread(target=lambda: [rows.add("range", n) for n in range(20_000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        turned.append(row.take_recent())
    turned.append(row.take_recent())
    assert sum(tally.calls for tally in turned) == row.run.calls == total + 1
    assert sum(tally.total_ns for tally in turned) == row.run.total_ns == 4 * sum(range(20_000))


def test_what_comes_while_others_are_taken_stays_for_the_next_time() -> None:
    class Raced(list[int]):
        """Another thread appends right after the copy."""

        def __getitem__(self, key: Any) -> Any:
            taken = list(super().__getitem__(key))
            self.append(1_000)
            return taken

    row = timings.Row()
    row.uncounted = Raced([3, 4])
    assert [row.take_recent().total_ns for _ in range(3)] == [7, 1_000, 1_000]


def test_counting_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler's does, on the very thread that holds the lock."""
    rows, add, came = Rows(), DurationHistogram.add, []

    def interrupted(tally: DurationHistogram, durations_ns: list[int]) -> None:
        came.append(len(durations_ns))
        if len(came) == 1:
            for _ in range(300):
                rows.add("range", 5)
        add(tally, durations_ns)

    monkeypatch.setattr(DurationHistogram, "add", interrupted)
    for _ in range(256):
        rows.add("range", 3)
    ((_, row),) = rows.items()
    row.take_recent()
    assert came == [256, 300]
    assert (row.run.calls, row.run.total_ns) == (556, 256 * 3 + 300 * 5)


def test_memory_does_not_grow_with_the_calls() -> None:
    timed = CpuTimes()

    def run(times: int) -> int:
        for _ in range(times):
            timed.backend.close(timed.backend.open("range"))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(1_000)
        few, many = run(2_560), run(25_600)
    finally:
        tracemalloc.stop()
    assert many - few < 4_000
    ((_, row),) = timed.rows.items()
    row.take_recent()
    assert row.run.calls == 1_000 + 2_560 + 25_600


def test_names_without_end_share_one_row_after_a_thousand(tmp_path: Path, log: Log) -> None:
    with timed(tmp_path) as session:
        for number in range(1_200):
            with profiled(f"item {number}"):
                pass
        session.step()
    seen = calls(session)
    assert len(seen) == 1_002
    assert seen["item 999"] == seen[STEP] == 1
    assert seen[OTHERS] == 200
    (warning,) = log.at("WARNING")
    assert "Timings keep at most 1000 range names: 'item 1000' and all later names" in warning


# What a range's time is


def test_nested_and_recursive_calls_and_exceptions(tmp_path: Path, clock: Clock) -> None:
    @profiled("recursive")
    def recursive(depth: int) -> None:
        clock.passes(10)
        if depth:
            recursive(depth - 1)

    @profiled("raises")
    def raises() -> None:
        clock.passes(500)
        raise ValueError

    with timed(tmp_path) as session:
        with profiled("outer"):
            clock.passes(1_000)
            recursive(2)
            with pytest.raises(ValueError):  # noqa: PT011 - none of ours
                raises()
        session.step()
        clock.passes(70)
        session.step()
    assert figures(session) == {
        STEP: (2, (1_530 + 70) // 2, 1_530),
        "outer": (1, 1_530, 1_530),
        "recursive": (3, 20, 30),  # 30, 20 and 10: each call whole
        "raises": (1, 500, 500),
    }


def test_suspended_time_is_not_counted(tmp_path: Path, clock: Clock) -> None:
    @profiled("items")
    def items() -> Iterator[int]:
        for item in range(2):
            clock.passes(100)
            yield item

    @profiled("fetch")
    async def fetch() -> None:
        clock.passes(40)
        await asyncio.sleep(0)
        clock.passes(60)

    async def both() -> None:
        task = asyncio.ensure_future(fetch())
        await asyncio.sleep(0)
        clock.passes(10_000)
        await task

    with timed(tmp_path) as session:
        for _ in items():
            clock.passes(10_000)
        asyncio.run(both())
    assert figures(session) == {
        "items": (1, 100, 100),
        "items (resumed)": (2, 50, 100),
        "fetch": (1, 40, 40),
        "fetch (resumed)": (1, 60, 60),
    }


def test_every_thread_is_timed(tmp_path: Path) -> None:
    @profiled
    def work() -> None:
        pass

    with timed(tmp_path, every=1) as session:
        threads = [
            threading.Thread(target=lambda: [work() for _ in range(1_000)]) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            session.step()
    name, written = work.__qualname__, [line["ranges"] for line in lines(tmp_path)]
    assert calls(session)[name] == 5_000
    assert sum(ranges[name]["since"]["calls"] for ranges in written if name in ranges) == 5_000


@given(programs())
def test_the_calls_of_random_programs_are_all_counted(program: Program) -> None:
    timed = CpuTimes()
    before, backends.torch_backend = backends.torch_backend, timed.backend
    try:
        runner = run_program(program)
    finally:
        backends.torch_backend = before
    expected = Counter(name for ranges in runner.model.ranges.values() for name, _ in ranges)
    counted = Counter({name: row.take_recent().calls for name, row in timed.rows.items()})
    assert counted == expected


# The session


def test_a_line_every_n_steps_and_one_for_the_rest(tmp_path: Path, clock: Clock, log: Log) -> None:
    with timed(tmp_path, every=4) as session:
        for number in range(10):
            with profiled('größe "x"'):  # a name that a trace cannot hold
                clock.passes(1_000 * (number + 1))
            session.step()
    assert session.captures == []
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [3, 7, 9]
    forward = [line["ranges"]['größe "x"'] for line in written]
    assert [entry["since"]["calls"] for entry in forward] == [4, 4, 2]
    assert [entry["since"]["mean_ns"] for entry in forward] == [2_500, 6_500, 9_500]
    assert [entry["run"]["calls"] for entry in forward] == [4, 8, 10]
    assert [entry["run"]["max_ns"] for entry in forward] == [4_000, 8_000, 10_000]
    assert forward[-1]["run"]["p50_ns"] == pytest.approx(5_000, rel=0.02)
    assert {name for line in written for name in line["ranges"]} == {'größe "x"', STEP}
    begins = "Timing every range and step; the results are written to "
    (line,) = [line for line in log.at("INFO") if line.startswith(begins)]
    assert "submodules" not in line
    table, heading = read_timings(tmp_path / "timings_rank0.jsonl")
    assert list(table) == list(session.timings.table())
    assert heading[0].startswith("timings_rank0: up to step 9, written 20")
    assert repr(table) in "\n".join(log.at("INFO"))


def test_a_later_session_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for start in (0, 5):
        with timed(tmp_path, every=5) as session:
            session.step_number = start
            for _ in range(5):
                session.step()
    assert [line["step"] for line in lines(tmp_path)] == [4, 9]


def test_beside_windows_both_have_every_range_and_neither_ends_the_other(tmp_path: Path) -> None:
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "timings": {}}
    armed: list[bool] = []
    forward = profiled("forward")(lambda: torch.ones(8).sum())
    both = lambda: (forward(), armed.append(backends.armed))  # noqa: E731
    session = run_session(tmp_path, 10, both, **options)
    assert all(armed)
    assert not backends.armed
    windows = [[(row.name, row.calls) for row in each.ranges] for each in session.captures]
    assert windows == [[("forward", 2)]] * 2
    assert calls(session) == {"forward": 10, STEP: 10}


def test_own_time_is_no_step(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    begins = StepLoop._begin_next_step

    def slowly(loop: StepLoop, *asked: Any) -> None:
        clock.passes(10**9)
        begins(loop, *asked)

    monkeypatch.setattr(StepLoop, "_begin_next_step", slowly)
    with timed(tmp_path) as session:
        for _ in range(3):
            clock.passes(100)
            session.step()
    assert figures(session) == {STEP: (3, 100, 100)}


def test_a_step_that_another_phase_interrupts_is_not_counted(tmp_path: Path, clock: Clock) -> None:
    with timed(tmp_path) as session:
        for step in range(3):
            clock.passes(100)
            if step == 1:
                with session.phase("validation"):
                    clock.passes(7000)
                    session.step()
            session.step()
    assert figures(session)[STEP] == (2, 100, 100)


def test_without_windows_on_schedule_triggers_still_get_theirs(tmp_path: Path) -> None:
    trigger = SimpleNamespace(fires=lambda step: step.number == 2)
    with Session("timings", triggers={"mine": trigger}, output_dir=str(tmp_path)) as session:
        for _ in range(6):
            session.step()
    assert [c.metadata["window"]["first_step"] for c in session.captures] == [3]
    assert calls(session) == {STEP: 6}


def test_an_exception_leaves_nothing_armed_and_the_rest_written(tmp_path: Path) -> None:
    def run() -> None:
        with timed(tmp_path) as session:
            session.step()
            with profiled("forward"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not backends.armed
    written = lines(tmp_path)[0]["ranges"]
    assert {name: entry["run"]["calls"] for name, entry in written.items()} == {
        STEP: 1,
        "forward": 1,
    }


def test_full_disk_is_said_once(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    monkeypatch.setattr(
        "instrument.record.timings.open_to_append",
        lambda path, buffering: full.open("r+b", buffering),
    )
    with timed(tmp_path, every=1) as session:
        for _ in range(4):
            session.step()
    (said,) = log.at("ERROR")
    assert "timings_rank0.jsonl: [Errno 28] No space left on device. Later writes are tried" in said
    assert calls(session) == {STEP: 4}


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "timings_rank0.jsonl"
    path.write_text('{"step": 1, "time": "2026-01-01", "ranges": {"for')
    with timed(tmp_path) as session:
        session.step()
    cut, whole = path.read_text().splitlines()
    assert json.loads(whole)["step"] == 0
    assert cut.endswith('"for')
    assert [row.name for row in read_timings(path)[0]] == [STEP]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork while threads run
def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path: Path) -> None:
    with timed(tmp_path, every=1) as session:
        child = multiprocessing.get_context("fork").Process(target=session.step)
        child.start()
        child.join()
        session.step()
    assert child.exitcode == 0
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_tensorboard_gets_what_came_since_the_last_write(tmp_path: Path, clock: Clock) -> None:
    with timed(tmp_path, every=2, tensorboard=True) as session:
        for ms in (1, 1, 4, 4):
            with profiled("forward"):
                clock.passes(ms * 1_000_000)
            session.step()
    read = points(tmp_path / "tensorboard" / "timings")
    assert read["timings/forward/mean_ms"] == [(1, 1.0), (3, 4.0)]
    assert read["timings/forward/calls"] == [(1, 2.0), (3, 2.0)]
    assert {tag.rsplit("/", 1)[0] for tag in read} == {"timings/forward", f"timings/{STEP}"}


def test_tensorboard_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.base.errors.find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as raised:
        ProfilerConfig(timings={"tensorboard": True})
    assert str(raised.value) == (
        "profiler.timings.tensorboard=true needs the package tensorboard: pip install 'torch-instrument[tensorboard]'."
    )
    assert not ProfilerConfig(enabled=False, timings={"tensorboard": True}).enabled


# Modules and compiled code


@pytest.fixture
def net() -> Iterator[nn.Module]:
    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    yield made
    forget(made)


def test_submodules_are_timed(tmp_path: Path, net: nn.Module, log: Log) -> None:
    net.add_module("unused", nn.Identity())
    for modules, expected in ((False, 2), (True, 6)):
        options = {"wait": 2, "active": 2, "repeat": 1, "timings": {"modules": modules}}
        session = run_session(
            tmp_path / str(modules),
            6,
            lambda: net[1](net[0](torch.ones(1, 4))),
            model=net,
            **options,
        )
        (capture,) = session.captures
        assert calls(session) == {"0": expected, "1": expected, STEP: 6}
        assert [(row.path, row.calls) for row in capture.ranges] == [("0", 2), ("1", 2)]
        assert capture.metadata["modules_not_seen"] == ["Sequential", "unused"]
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in net.modules()
        )
    said = [line for line in log.at("INFO") if line.startswith("Timing every range")]
    hint = "; profiler.timings.modules=true also times submodules"
    assert [hint in line for line in said] == [True, False]


@pytest.mark.filterwarnings("ignore::Warning:torch.*")  # Dynamo's own
def test_compiled_code_stays_one_graph(tmp_path: Path, net: nn.Module, log: Log) -> None:
    @profiled("marked")
    def marked(x: torch.Tensor) -> torch.Tensor:
        return net(x).sin()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backends.compiled_ranges.clear()
    instrument_model(net)
    compiled = torch.compile(marked, backend="eager", fullgraph=True)
    options = {"wait": 2, "active": 1, "timings": {"modules": True}}
    session = run_session(tmp_path, 5, lambda: compiled(torch.ones(1, 4)), **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert calls(session) == {STEP: 5}
    assert any(
        "Not timed, because they are inside compiled regions: marked" in line
        for line in log.at("INFO")
    )
    torch._dynamo.reset()


# Reading


def test_show_timings(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with timed(tmp_path / "run"), profiled("forward"):
        clock.passes(1_250_000)
    path = tmp_path / "run" / "timings_rank0.jsonl"
    capsys.readouterr()
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("timings_rank0: no step ended, written 20")
    assert "\nforward      1  1.250 ms" in shown
    assert main(["show", str(tmp_path), "--timings"]) == 0
    assert capsys.readouterr() == (shown, "")
    assert main(["show", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["timings"]
    assert (row["name"], row["calls"], row["max_ns"]) == ("forward", 1, 1_250_000)
    assert main(["show", str(path), "--csv", "--columns", "name,calls"]) == 0
    assert capsys.readouterr().out == "name,calls\nforward,1\n"
    assert main(["show", str(path), "--csv", "--sort", "cals"]) == 2
    assert "no column 'cals'; did you mean 'calls'?" in capsys.readouterr().err
    (tmp_path / "timings_rank1.jsonl").write_text(path.read_text().replace("forward", "other"))
    assert main(["show", str(tmp_path), "--timings", "--columns", "name,calls"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["other", "1"]
    newest = tmp_path / "timings_rank1.jsonl"
    assert err == (
        f"Showing the newest of 2 files of timings, {newest}; the others are:\n  {path}\n"
    )


@pytest.mark.parametrize("command", ["ls", "diagnose", "show"])
def test_a_folder_of_timings_alone_is_no_capture_and_the_error_says_what_reads_it(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with timed(tmp_path / "run" / "profile"), profiled("forward"):
        clock.passes(1_000)
    capsys.readouterr()
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"instrument: {tmp_path} holds timings and no capture: `instrument show {tmp_path} "
        "--timings` shows them.\n"
    )
    assert main(["show", str(tmp_path), "--timings"]) == 0


def test_unreadable_timings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path), "--timings"]) == 2
    found = capsys.readouterr().err
    assert found == f"instrument: {tmp_path} holds no timings: record them with profiler=timings.\n"
    (tmp_path / "newer.jsonl").write_text('{"format": 2, "step": 1, "time": "now", "ranges": {}}\n')
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n[2]\n\nnull\n"text"\n')
    for name, said in (
        ("gone.jsonl", "cannot be read: No such file or directory"),
        ("newer.jsonl", r"newer.jsonl have format 2, .* reads formats up to 1: upgrade"),
        ("other.jsonl", "holds no timings: give a timings file"),
    ):
        with pytest.raises(CaptureError, match=said):
            read_timings(tmp_path / name)
