"""What `instrument ranks` says of all ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm
from builders import steps, synchronous_steps, write_capture, write_rank
from collected import Log

from instrument import Session
from instrument.cli.command import main
from instrument.export.window import finish
from instrument.read.capture import Capture
from instrument.read.ranks.run import Ranks, Run
from instrument.read.show.ranks import as_text

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from instrument import Session, profiled

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
slower_s = float(sys.argv[2])
with Session(wait=1, active=3, activities=["cpu"], output_dir=sys.argv[1] + "/out", export="inline") as session:
    for _ in session.steps(range(6)):
        with profiled("load"):
            time.sleep(slower_s * rank)
        model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
"""


def ddp(folder: Path, slower_s: float) -> tuple[Ranks, list[Capture], list[str]]:
    """Let two processes train, the second of which takes longer for its data: what they recorded and logged."""
    command = ["-c", DDP, str(folder), str(slower_s)]
    environment = [
        {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"} for rank in "01"
    ]
    started = [warm.Script(command, folder, each) for each in environment]
    told = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "".join(told)
    (window,) = Run.load(folder / "out").windows
    return window, [Capture.load(path) for path in window.paths], told


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_one_recording_rank_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log, ranks: list[int]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Session(active=1, ranks=ranks, output_dir=tmp_path, export="inline") as session:
        session.step()
    assert len(session.captures) == 1
    assert any("compares the ranks" in line for line in log.at("INFO")) == (len(ranks) > 1)


def test_the_ranks_of_a_distributed_run_are_compared(tmp_path: Path) -> None:
    window, captures, told = ddp(tmp_path, 0)
    assert f"`instrument ranks {tmp_path / 'out'}` compares the ranks." in told[0]
    assert "instrument ranks" not in told[1]
    assert window.clocks.column("matched") == [3, 3]
    (loads,) = window.ranges.where(path="load")
    assert [each.ranges.where(path="load")[0].calls for each in captures] == [3, 3]
    assert loads.calls == 6


@pytest.mark.nightly
def test_a_slower_rank_of_a_distributed_run_is_found(tmp_path: Path) -> None:
    """A quarter of a second for the data, which rank 0 waits for in its communication."""
    window, captures, _ = ddp(tmp_path, 0.25)
    assert "Rank 1 on " in as_text(window)
    (slow,) = window.stragglers
    assert (slow.rank, slow.range) == (1, "load")
    loads = [each.ranges.where(path="load")[0].self_cpu_ns // len(each.steps) for each in captures]
    assert slow.range_excess_ns == pytest.approx(loads[1] - loads[0], abs=1)
    assert slow.others_exposed_communication_ns > slow.exposed_communication_ns
    assert abs(window.clocks[1].offset_ns) < 125e6, (
        "which the ranks begin their steps apart does not count"
    )


def test_newest_window_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, own_us in enumerate((100, 400, 105)):
        write_rank(tmp_path, rank, synchronous_steps(own_us), 3)
        earlier = write_capture(
            tmp_path, steps(), f"before_rank{rank}", rank=rank, started_at="2026-01-01T03:04:05+00:00",
            window={"first_step": 1, "last_step": 2},
        )  # fmt: skip
        assert earlier.folder
    assert main(["ranks", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == (
        f"Showing the newest of 2 windows, {tmp_path}/steps_000003-000004; the others are:\n"
        f"  {tmp_path}/steps_000001-000002\n"
    )
    assert out.splitlines()[:7] == [
        "steps_000003-000004: 3 of 3 ranks",
        "",
        "Ranks",
        "rank  host  steps      step       own  communication  exposed communication  exposed share",
        "----  ----  -----  --------  --------  -------------  ---------------------  -------------",
        "   0  box       2  1.000 ms  200.0 µs       800.0 µs               800.0 µs           80 %",
        "   1  box       2  1.000 ms  500.0 µs       500.0 µs               500.0 µs           50 %",
    ]
    assert (
        "Rank 1 on box is a straggler: its own work takes 500.0 µs per step, and 205.0 µs on the median rank (+144 %); "
        "the largest difference is in the range forward (+295.0 µs). The rank waits 500.0 µs in communication, "
        "other ranks wait 795.0 µs."
    ) in out
    assert "\nClocks: at most 0 ns apart from rank 0's clock, known to ±0 ns.\n" in out
    ranges = [" ".join(line.split()) for line in out.splitlines()[-2:]]
    assert ranges[0] == "forward 3 6 100.0 µs 105.0 µs 400.0 µs 1 2.86"
    assert ranges[1].startswith("gloo:all_reduce 3 6 ")
    for name in ("steps_000001-000002", f"{tmp_path}/steps_000001-000002"):
        assert main(["ranks", str(tmp_path), "--window", name]) == 0
        out, err = capsys.readouterr()
        assert err == ""
    sentence = "No rank is a straggler.\n\nThe ranks' clocks cannot be compared: the ranks have no collective in common.\n"
    assert sentence in out


def test_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, own_us in enumerate((100, 400, 105)):
        write_rank(tmp_path, rank, synchronous_steps(own_us), 3)
    (tmp_path / "steps_000003-000004_rank2" / "summary.json").unlink()
    (tmp_path / "steps_000003-000004_rank2" / "trace.json.gz").write_text("")
    assert main(["ranks", str(tmp_path), "--json", "--trace", str(tmp_path / "all.json.gz")]) == 0
    out, err = capsys.readouterr()
    said, (window,) = json.loads(out), Run.load(tmp_path).windows
    assert (said["name"], said["missing"]) == (window.name, [2])
    assert said["notes"] == ["Of 3 ranks, captures are missing for rank 2."]
    for view in ("ranks", "stragglers", "ranges", "clocks"):
        assert said[view] == [row._asdict() for row in getattr(window, view)]
    assert err.splitlines()[0].startswith("Left out: The trace file ")
    assert err.splitlines()[1] == f"The traces of 2 of 2 ranks are in {tmp_path / 'all.json.gz'}"
    assert len(Capture.load(tmp_path / "all.json.gz").events) == 2 * len(
        Capture.load(window.paths[0]).events
    )
    options = "--rows 1 --sort calls --columns calls,device_min_ns"
    assert main(["ranks", str(tmp_path), *options.split()]) == 0
    out = capsys.readouterr().out
    assert "Ranks, 1 of 2\n" in out
    assert [" ".join(line.split()) for line in out.splitlines()[-4:]][::3] == [
        "Ranges per step over the ranks (the 1 of 2 with the most calls)",
        "forward 4 -",
    ]
    assert main(["ranks", str(tmp_path), "--columns", "cals"]) == 2
    assert capsys.readouterr().err.endswith(
        "The view ranges has no column 'cals'; did you mean 'calls'?\n"
    )


def test_a_summary_that_cannot_be_made_costs_nothing_else(tmp_path: Path, log: Log) -> None:
    for name in ("one", "two"):
        folder = write_capture(tmp_path, steps(), f".{name}.queued").folder
        (folder / "trace.json.gz").write_text("{}")
    failed: set[str] = set()
    places = [finish(tmp_path / f".{name}.queued", {}, failed=failed) for name in ("one", "two")]
    assert places == [tmp_path / "one", tmp_path / "two"]
    assert [sorted(path.name for path in place.iterdir()) for place in places] == [
        ["capture.json", "trace.json.gz"]
    ] * 2
    (said,) = log.at("WARNING")
    assert said.startswith(
        "one: the file summary.json, which is needed to compare ranks, cannot be "
    )


def test_window_names_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "steps_000003-000004"
    for hour, again in enumerate(("", "-2", "-3")):
        for rank in (0, 1):
            started = f"2026-01-02T{hour:02d}:04:05+00:00"
            write_capture(
                tmp_path, steps(), f"{name}_rank{rank}{again}", rank=rank, started_at=started
            )
    windows = Run.load(tmp_path).windows
    assert [[path.name for path in window.paths] for window in windows] == [
        [f"{name}_rank{rank}{again}" for rank in (0, 1)] for again in ("", "-2", "-3")
    ]
    assert main(["ranks", str(tmp_path)]) == 0
    assert capsys.readouterr().err == (
        f"Showing the newest of 3 windows, {tmp_path}/{name}-3; the others are:\n"
        f"  {tmp_path}/{name}-2\n  {tmp_path}/{name}\n"
    )
    for number, again in enumerate(("", "-2", "-3")):
        for chosen in (f"{name}{again}", f"{tmp_path}/{name}{again}"):
            assert Run.load(tmp_path).window(chosen).paths == windows[number].paths
            assert main(["ranks", str(tmp_path), "--window", chosen]) == 0
            assert capsys.readouterr().out.startswith(f"{name}{again}: 2 of ")
