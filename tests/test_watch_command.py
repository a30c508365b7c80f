"""`instrument watch`: the last lines of hand-written timings files, a terminal of the test's own, and a real job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fsspec
import pytest
from builders import synchronous_steps, write_capture
from commands import Command
from rich.console import Console

from instrument.cli import watch as watching
from instrument.read.show import live, terminal
from instrument.read.show.live import LiveRun
from instrument.read.views.table import Table
from instrument.record.triggers import File, Request

MS = 1_000_000
# 2026-01-01 00:00:00 UTC
BEGIN_S = 1767225600.0


def durations(ms: float, calls: int = 10) -> dict[str, int]:
    ns = int(ms * MS)
    return {"calls": calls, "mean_ns": ns, "p50_ns": ns, "p95_ns": ns + MS, "max_ns": ns + 2 * MS}


def line(
    number: int,
    ms: Mapping[str, float],
    *,
    step_ms: float = 44,
    every: int = 10,
    interval_s: int = 5,
    device: Mapping[str, float] | None = None,
) -> str:
    """The line after the steps of an interval, the first of which has the number 0."""
    found: dict[str, Any] = {}
    for name, value in {"ProfilerStep*": step_ms, **ms}.items():
        since = durations(value, every)
        if device and name in device:
            since |= {f"device_{key}": ns for key, ns in durations(device[name], every).items()}
        found[name] = {"since": since, "run": since | {"calls": every * (number + 1)}}
    written = f"2026-01-01T00:{number * interval_s // 60:02}:{number * interval_s % 60:02}+00:00"
    last = (number + 1) * every - 1
    return json.dumps({"format": 1, "step": last, "time": written, "ranges": found}) + "\n"


def write(folder: Path, rank: int, *lines: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / f"timings_rank{rank}.jsonl"
    with file.open("a", encoding="utf-8") as written:
        written.writelines(lines)
    return file


def train(folder: Path, lines: range, slow: int | None = 2, ranks: int = 4, **more: Any) -> None:
    """Steps of equal length: the slow rank takes 10 ms more in `forward`, the others wait in `backward`."""
    for rank in range(ranks):
        late = 10 * (rank == slow)
        waits = 0 if slow is None else 10 - late
        ms = {"forward": 10 + 0.1 * rank + late, "backward": 20 + waits, "load": 1, **more}
        write(folder, rank, *(line(number, ms) for number in lines))


class Seen(NamedTuple):
    """All that is shown of a run, without its captures."""

    text: str
    title: str
    ranks: Table
    ranges: Table


def of(run: LiveRun, now_s: float = 15) -> Seen:
    run.refresh(BEGIN_S + now_s)
    text, ranks, ranges = run.parts(BEGIN_S + now_s)
    return Seen(text, ranks.title, ranks.table, ranges.table)


def seen(folder: Path, now_s: float = 15) -> Seen:
    return of(LiveRun(folder), now_s)


def behind(folder: Path) -> list[tuple[int, str, str, float]]:
    """The ranks that fall behind, each with the range, the kind of time and the excess in ms."""
    return [
        (row.rank, row.range, row.on, round(row.excess_ns / MS, 1))
        for row in seen(folder).ranks
        if row.excess_ns is not None
    ]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "time", SimpleNamespace(time=lambda: BEGIN_S + 15))


# Which ranks are named


def test_a_slow_rank_is_named_by_its_range_within_three_intervals(tmp_path: Path) -> None:
    for number in range(6):
        train(tmp_path, range(number, number + 1))
        named = [(2, "forward", "CPU", 10.0)] if number >= 2 else []
        assert behind(tmp_path) == named
        assert ("not compared yet" in seen(tmp_path).title) == (number < 2)


def test_the_ranks_that_wait_are_not_named(tmp_path: Path) -> None:
    train(tmp_path, range(5), slow=None)
    assert behind(tmp_path) == []
    assert seen(tmp_path).ranks.column("state") == [None] * 4


@pytest.mark.parametrize("name", ["nccl:all_reduce", "gradients AllReduce", "barrier"])
def test_the_longest_in_a_collective_is_not_named(tmp_path: Path, name: str) -> None:
    for rank in range(5):
        ms = {"forward": 10, name: 30 if rank == 3 else 10}
        write(tmp_path, rank, *(line(number, ms) for number in range(4)))
    assert behind(tmp_path) == []


@pytest.mark.parametrize("slow", [1, 2])
def test_none_of_two_equal_halves_is_named(tmp_path: Path, slow: int) -> None:
    """One half is slow, and the other waits; by their times, it could be the other way round."""
    for rank in range(2 * slow):
        late = 10 * (rank < slow)
        ms = {"forward": 10 + late, "backward": 30 - late}
        write(tmp_path, rank, *(line(number, ms) for number in range(4)))
    assert behind(tmp_path) == []
    assert ("not compared yet" in seen(tmp_path).title) == (slow == 1)


@pytest.mark.parametrize(
    ("slow_ms", "others_ms", "named"),
    [
        (11.4, (10, 10, 10), True),  # 3 % of a step of 44 ms are 1.32 ms
        (11.2, (10, 10, 10), False),
        (32.5, (30, 30, 30), False),  # less than a tenth of the range
        (33.5, (30, 30, 30), True),
        (16.0, (10, 12, 14), False),  # the ranks differ as much by themselves
    ],
)
def test_a_rank_is_named_beyond_each_of_three_limits(
    tmp_path: Path, slow_ms: float, others_ms: tuple[float, ...], named: bool
) -> None:
    for rank, ms in enumerate((*others_ms, slow_ms)):
        write(tmp_path, rank, *(line(number, {"forward": ms}) for number in range(4)))
    assert [rank for rank, *_ in behind(tmp_path)] == [3] * named


def test_one_slow_interval_is_not_enough(tmp_path: Path) -> None:
    train(tmp_path, range(3), slow=None)
    train(tmp_path, range(3, 4), slow=1)
    assert behind(tmp_path) == []
    train(tmp_path, range(4, 5), slow=1)
    assert [rank for rank, *_ in behind(tmp_path)] == [1]


def test_of_ranges_inside_each_other_the_innermost_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        late = 10 * (rank == 1)
        ms = {"forward": 20 + late, "block": 5 + late, "other": 3 + late / 2}
        write(tmp_path, rank, *(line(number, ms) for number in range(4)))
    assert behind(tmp_path) == [(1, "block", "CPU", 10.0)]


def test_a_slow_device_is_named_by_its_own_times(tmp_path: Path) -> None:
    for rank in range(4):
        device = {"forward": 20.0 + 8 * (rank == 0)}
        write(tmp_path, rank, *(line(number, {"forward": 2}, device=device) for number in range(4)))
    assert behind(tmp_path) == [(0, "forward", "device", 8.0)]
    assert [(row.name, row.on, row.median_ns) for row in seen(tmp_path).ranges] == [
        ("ProfilerStep*", "CPU", 44 * MS),
        ("forward", "device", 20 * MS),
        ("forward", "CPU", 2 * MS),
    ]


# Which lines count


def test_figures_are_those_of_the_last_lines(tmp_path: Path) -> None:
    for rank in range(3):
        steps = enumerate([900, 40, 50 + rank, 60, 70])
        write(tmp_path, rank, *(line(number, {"a": ms / 4}, step_ms=ms) for number, ms in steps))
    now = seen(tmp_path)
    assert now.text.endswith(": a step takes 60.00 ms (median), 61.00 ms (95th percentile)")
    rows = [(row.name, row.median_ns, row.share, row.slowest) for row in now.ranges]
    assert rows == [("ProfilerStep*", 60 * MS, 1.0, 0), ("a", 15 * MS, 0.25, 0)]
    assert now.ranks.column("last_step") == [49] * 3


def test_the_first_line_of_a_process_counts_only_alone(tmp_path: Path) -> None:
    write(tmp_path, 0, line(0, {"a": 500}, step_ms=900))
    assert "takes 900.0 ms" in seen(tmp_path).text
    write(tmp_path, 0, line(1, {"a": 5}, step_ms=50))
    assert "takes 50.00 ms" in seen(tmp_path).text


def test_a_job_that_is_restarted_in_the_folder_begins_anew(tmp_path: Path) -> None:
    train(tmp_path, range(5))
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    train(tmp_path, range(2), slow=None)
    now = of(run, 30)
    assert now.ranks.column("last_step") == [19] * 4
    assert now.ranks.column("range") == [None] * 4
    assert "not compared yet" in now.title


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    train(tmp_path, range(5))
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    for file in tmp_path.iterdir():
        file.unlink()
    train(tmp_path, range(3), slow=3)
    assert of(run).ranks.column("rank") == [3, 0, 1, 2]


def test_ranks_come_and_go(tmp_path: Path) -> None:
    train(tmp_path, range(3), ranks=2)
    run = LiveRun(tmp_path)
    assert of(run).ranks.column("rank") == [0, 1]
    train(tmp_path / "later", range(3), ranks=5)
    for file in (tmp_path / "later").iterdir():
        file.replace(tmp_path / file.name)
    (tmp_path / "timings_rank1.jsonl").unlink()
    assert of(run).ranks.column("rank") == [2, 0, 3, 4]


def test_lines_that_are_no_timings_are_skipped(tmp_path: Path) -> None:
    """An incomplete last line counts as soon as it is complete."""
    whole = line(1, {"a": 5})
    bad = [
        "", "{", "[1]", '{"step": 1}', "[" * 10**5, '{"step":1,"time":"x","ranges":{}}', "\0\udcff",
    ]  # fmt: skip
    bad += [whole.replace('"p50_ns": 44000000, ', ""), whole.replace("44000000", "-" + "9" * 30)]
    bad += [whole.replace('"mean_ns": 44000000', '"mean_ns": 0')]
    bad += [whole.replace('"calls": 10,', '"calls": 0,'), whole.replace("2026-01-01", "no")]
    for each in bad:
        file = write(tmp_path, 0, line(0, {"a": 5}), whole)
        with file.open("ab") as opened:
            opened.write(each.encode("utf-8", "surrogateescape").replace(b"\n", b"") + b"\n")
            opened.write(line(2, {"a": 7}).encode()[:-9])
        assert seen(tmp_path).ranks[0].last_step == 19, each
        with file.open("ab") as opened:
            opened.write(line(2, {"a": 7}).encode()[-9:])
        assert seen(tmp_path).ranks[0].last_step == 29, each
        file.unlink()


def test_links_and_other_names_are_not_read(tmp_path: Path) -> None:
    train(tmp_path / "run", range(3), ranks=1)
    outside = write(tmp_path, 7, *(line(number, {"a": 5}) for number in range(3)))
    (tmp_path / "run" / "timings_rank1.jsonl").symlink_to(outside)
    (tmp_path / "run" / "timings_rank2.jsonl").mkdir()
    for name in ("timings_rank03.jsonl", "timings_rank٣.jsonl", "timings_rank4.jsonl.old"):
        (tmp_path / "run" / name).write_bytes(outside.read_bytes())
    assert seen(tmp_path / "run").ranks.column("rank") == [0]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each reading of a file gave."""
    found: list[int] = []
    opened = live.files.open_regular

    class Counted:
        def __init__(self, path: Path) -> None:
            self._file = opened(path)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, *where: int) -> int:
            return self._file.seek(*where)

        def read(self, count: int) -> bytes:
            content = self._file.read(count)
            found.append(len(content))
            return content

    monkeypatch.setattr(live.files, "open_regular", Counted)
    return found


def test_only_the_end_of_a_grown_file_is_read(tmp_path: Path, read: list[int]) -> None:
    write(tmp_path, 0, *(line(number, {"a": 5}) for number in range(2000)))
    train(tmp_path, range(3), ranks=1)
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    assert read == [16 << 10]
    run.refresh(BEGIN_S)
    assert read == [16 << 10]
    write(tmp_path, 0, line(3, {"a": 5}))
    run.refresh(BEGIN_S)
    assert read == [16 << 10] * 2


def test_more_is_read_until_lines_are_enough(tmp_path: Path, read: list[int]) -> None:
    ms = {f"block {k}": 1.0 for k in range(1000)}
    file = write(tmp_path, 0, *(line(number, ms) for number in range(4)))
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    assert run.parts(BEGIN_S)[2].title == "Ranges: 1,001, time per step"
    assert read == [16 << 10, 256 << 10, file.stat().st_size]


def test_the_number_of_names_is_bounded(tmp_path: Path) -> None:
    ms = {f"block {k}": 1.0 for k in range(3000)}
    write(tmp_path, 0, *(line(number, ms) for number in range(2)))
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    assert run.parts(BEGIN_S)[2].title == "Ranges: 2,002, time per step"


# Silence


def test_a_rank_that_has_not_written_for_long_is_silent(tmp_path: Path) -> None:
    """Three intervals of 15 s; the others are compared without it."""
    for rank in range(5):
        ms = {"forward": 10 + 8 * (rank in (3, 4))}
        lines = [line(number, ms, interval_s=15) for number in range(3 if rank == 4 else 8)]
        write(tmp_path, rank, *lines)
    assert seen(tmp_path, now_s=75).ranks.column("state") == ["behind", "behind", *[None] * 3]
    now = seen(tmp_path, now_s=106)
    assert [*zip(now.ranks.column("rank"), now.ranks.column("state"))] == [
        (4, "silent"), (3, "behind"), (0, None), (1, None), (2, None)
    ]  # fmt: skip
    assert now.ranks[0].written_ago_ns == 76e9


def test_a_rank_with_one_line_is_not_yet_silent(tmp_path: Path) -> None:
    write(tmp_path, 0, line(0, {}))
    assert seen(tmp_path, now_s=10**6).ranks.column("state") == [None]


def test_all_ranks_are_silent_when_the_run_has_ended(tmp_path: Path) -> None:
    train(tmp_path, range(4))
    now = seen(tmp_path, now_s=3600)
    assert now.ranks.column("state") == ["silent"] * 4
    assert [row.rank for row in now.ranks if row.excess_ns] == [2]


def test_a_clock_that_is_ahead_gives_no_negative_time(tmp_path: Path) -> None:
    train(tmp_path, range(4))
    assert seen(tmp_path, now_s=-100).ranks.column("written_ago_ns") == [0.0] * 4


# Captures, URLs, the command and its keys


def capture(folder: Path, name: str, changed_s: int = 0, **about: Any) -> Path:
    made = write_capture(folder, [*synchronous_steps(500)], name, **about).folder
    os.utime(made / "capture.json", (BEGIN_S + changed_s, BEGIN_S + changed_s))
    return made


WINDOW = {"first_step": 3, "last_step": 4, "steps": 2, "phase": "train"}


def test_newest_captures_one_of_each_window(tmp_path: Path, command: Command) -> None:
    train(tmp_path / "run", range(4))
    fired = {**WINDOW, "trigger": "slow_step", "trigger_reason": "step 9 took long"}
    for number, name in enumerate(
        ["steps_000090-000091", "steps_000003-000004", "steps_000010-000011"]
    ):
        for rank in (0, 1):
            capture(tmp_path / "run", f"{name}_rank{rank}", number, window=fired, rank=rank)
    capture(tmp_path / "run", "steps_000003-000004_rank0-2", 9, window=WINDOW)
    (tmp_path / "run" / ".steps_000050-000051_rank0.busy").mkdir()
    (tmp_path / "run" / "tensorboard").mkdir()
    run = LiveRun(tmp_path)
    run.refresh(BEGIN_S)
    names = [
        "steps_000003-000004_rank0-2",
        "steps_000010-000011_rank0",
        "steps_000003-000004_rank0",
    ]
    assert run.captures == [tmp_path / "run" / name for name in names]
    capture(tmp_path / "run", "steps_000099-000099_rank0", 10)
    run.refresh(BEGIN_S + 19)
    assert run.captures[0].name == names[0], "looked for every 20 s"
    run.refresh(BEGIN_S + 20)
    assert [each.name for each in run.captures] == ["steps_000099-000099_rank0", *names[:2]]
    out = command("watch", tmp_path).out
    positions = [out.index(f"\n{each.name}  ") for each in run.captures]
    assert positions == sorted(positions)
    assert "slow_step: step 9 took long" in out
    assert out.count("A step takes") == 1, "only the newest capture has a verdict"


def test_a_run_at_a_url_is_watched(tmp_path: Path, command: Command) -> None:
    fs = fsspec.filesystem("memory")
    train(tmp_path / "run", range(4))
    capture(tmp_path / "run", "steps_000003-000004_rank0", window=WINDOW)
    fs.put(str(tmp_path / "run"), "/watched", recursive=True)
    try:
        local = command("watch", tmp_path / "run", "--once").out
        assert command("watch", "memory://watched").out == local.replace(
            str(tmp_path / "run"), "memory://watched"
        )
        run = LiveRun("memory://watched")
        assert "A URL takes no requests" in shown(run, "rq")[2][0]
        assert "memory://nothing" in command("watch", "memory://nothing", status=2).err
        fs.pipe("/empty/x", b"")
        assert "holds no timings" in command("watch", "memory://empty", status=2).err
    finally:
        fs.rm("/watched", recursive=True)
        fs.rm("/empty", recursive=True)


def test_links_at_a_local_url_are_not_followed(tmp_path: Path, command: Command) -> None:
    train(tmp_path / "run", range(3), ranks=1)
    (tmp_path / "run" / "timings_rank1.jsonl").symlink_to(tmp_path / "run" / "timings_rank0.jsonl")
    assert "Ranks: 1," in command("watch", f"file://{tmp_path}/run").out


def shown(run: LiveRun, keys: str) -> list[list[Any]]:
    """What each refresh shows, while these keys are pressed; a blank stands for none."""
    screens: list[list[Any]] = []
    pressed = iter(keys)

    def key_within(seconds: float) -> str:
        assert seconds == 2
        return next(pressed).strip()

    watching.watch(run, screens.append, key_within, lambda: BEGIN_S + 15)
    return screens


def test_keys_ask_for_a_window_and_end(tmp_path: Path) -> None:
    train(tmp_path, range(4))
    _, first, second, third, fourth = shown(LiveRun(tmp_path), "r xq")
    assert first[0] == fourth[0] == "r asks for a window, q ends."
    assert second[0] == third[0]
    assert second[0].startswith(f"No run in or below {tmp_path} has the trigger 'file'")
    requests: list[Request] = []
    hooks = File().begin(tmp_path, requests.append)
    _, _, asked, still, _ = shown(LiveRun(tmp_path), "r xq")
    assert still[0] == asked[0]
    hooks.poll()
    assert asked[0].startswith(f"Asked for the next window in {tmp_path};")
    assert requests == [Request("instrument trigger requested a window", None)]
    hooks.end()


def test_a_run_that_writes_nothing_yet_is_waited_for(tmp_path: Path, command: Command) -> None:
    assert "holds no timings" in command("watch", tmp_path, status=2).err
    run = LiveRun(tmp_path)
    watching_for = iter("   q")

    def key_within(_: float) -> str:
        train(tmp_path / "run", range(1))
        return next(watching_for).strip()

    screens: list[list[Any]] = []
    watching.watch(run, screens.append, key_within, lambda: BEGIN_S)
    assert screens[0] == [f"Reading {tmp_path} …"]
    assert "holds no timings" in screens[1][1]
    assert screens[2][1].startswith(f"{tmp_path / 'run'}: a step takes 44.00 ms")


@pytest.mark.parametrize("ranks", [4, 1200])
def test_everything_fits_into_80_columns(tmp_path: Path, ranks: int) -> None:
    train(tmp_path / "outputs" / "profile", range(4), ranks=ranks)
    run = LiveRun(tmp_path / "outputs")
    text = terminal.draw(
        [watching.KEYS, *watching.state(run, BEGIN_S + 40)],
        Console(width=80, force_terminal=True, color_system=None),
    )
    assert f"Ranks: {ranks:,}" in text
    assert "forward" in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 80


@pytest.mark.nightly
@pytest.mark.parametrize("slow", [2, -1])
def test_a_slow_rank_of_a_real_job_is_named(tmp_path: Path, slow: int, command: Command) -> None:
    """Four ranks of DDP on gloo: the steps of all take equally long; -1 is no rank."""
    script = str(Path(__file__).parent / "watched_training.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*torchrun, script, str(tmp_path), str(slow)], check=True)
    now = seen(tmp_path)
    steps = now.ranges.where(name="ProfilerStep*")[0]
    assert steps.max_ns < 1.1 * steps.median_ns
    assert "not compared yet" not in now.title
    named = [(row.rank, row.range) for row in now.ranks if row.excess_ns is not None]
    assert named == ([(2, "forward")] if slow == 2 else [])
    assert "\nsteps_000005-000006_rank" in command("watch", tmp_path).out
