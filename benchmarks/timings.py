"""What timing a whole run costs: a range, a step, a write, and memory; run by `make bench`."""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from loguru import logger
from rounds import Row, medians, report
from torch import nn
from torch.profiler import profile, record_function, schedule

from instrument import Session, instrument_model, profiled
from instrument.annotate.modules import forget
from instrument.record.config.schema import TimingsConfig
from instrument.record.timings import Timings

warnings.simplefilter("ignore")
CALLS = 20_000
LIMIT_NS = 1_500.0


def bare(x: int, y: int = 2) -> int:
    return x


def started(**options: bool) -> Timings:
    timings = Timings(TimingsConfig(device=False, **options), Path(tempfile.mkdtemp()), 0)
    timings.start()
    timings.begin_step()
    return timings


def ranges() -> list[Row]:
    """Cost of a range over an idle one; timings go on and off between rounds, on the same objects."""
    block, theirs = profiled("block"), record_function("f")

    def in_block() -> None:
        with block:
            bare(1)

    def in_theirs() -> None:
        with record_function("f"):
            bare(1)

    decorated, their_decorated = profiled("f")(bare), theirs(bare)
    ours: dict[str, Callable[[], object]] = {"decorator": lambda: decorated(1), "block": in_block}
    peers: dict[str, Callable[[], object]] = {
        "decorator": lambda: their_decorated(1),
        "block": in_theirs,
    }
    idle, timed, peer = [], [], []
    for _ in range(5):
        idle.append(medians(ours, calls=CALLS, rounds=5))
        timings = started()
        timed.append(medians(ours, calls=CALLS, rounds=5))
        timings.stop()
        peer.append(medians(peers | {"bare": lambda: bare(1)}, calls=CALLS // 10, rounds=5))
    rows = []
    for form in ours:
        took = median(one[form] for one in timed) - median(one[form] for one in idle)
        theirs_took = median(one[form] - one["bare"] for one in peer)
        rows += [
            Row(f"timed range, {form}, over idle", took, "limit", LIMIT_NS, 1.0),
            Row(
                f"timed range, {form}, over idle",
                took,
                f"record_function, {form}",
                theirs_took,
                1 / 5,
            ),
        ]
    return rows


def steps() -> list[Row]:
    """A step of a session that times the run, over that of torch's profiler while it waits."""
    session = Session("timings", timings={"every": 10**9}, output_dir=tempfile.mkdtemp())
    with session, profile(schedule=schedule(wait=10**9, warmup=0, active=1)) as theirs:
        took = medians({"ours": session.step, "theirs": theirs.step}, calls=CALLS // 10)
    return [
        Row(
            "session.step(), timed",
            took["ours"],
            "torch.profiler.profile.step() waiting",
            took["theirs"],
            1 / 3,
        )
    ]


def in_a_loop() -> list[Row]:
    """What a timed range adds to a step of training, where other code has driven ours out of the caches.

    Twenty ranges a step of some milliseconds; rounds of ten steps with timings, with `record_function` and with neither
    follow each other, and a round counts by its median. It is the thread's own time, as what else runs on the machine
    would cover so little.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(20))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    x, plain = torch.randn(32, 128), (lambda layer, x: torch.relu(layer(x)))
    timed, theirs = profiled("layer")(plain), record_function("layer")(plain)

    def step(call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        out = x
        for layer in layers:
            out = call(layer, out)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def round_of(
        call: Callable[[nn.Module, torch.Tensor], torch.Tensor], timings: Timings | None
    ) -> float:
        taken = []
        for number in range(10):
            began = time.thread_time_ns()
            step(call)
            if timings is not None:
                timings.end_step(number)
                timings.begin_step()
            taken.append(time.thread_time_ns() - began)
        return median(taken)

    taken: dict[str, list[float]] = {"idle": [], "timed": [], "theirs": []}
    for _ in range(60):
        taken["idle"].append(round_of(timed, None))
        timings = started()
        taken["timed"].append(round_of(timed, timings))
        timings.stop()
        taken["theirs"].append(round_of(theirs, None))
    added = {
        name: median(one - idle for one, idle in zip(taken[name], taken["idle"])) / len(layers)
        for name in ("timed", "theirs")
    }
    torch.set_num_threads(threads)
    name = f"timed range in a step of {median(taken['idle']) / 1e6:.1f} ms"
    return [Row(name, added["timed"], "record_function there", added["theirs"], 1 / 2)]


def writes() -> list[Row]:
    """A write of twenty ranges with a hundred calls each since the last."""
    timings, twenty = started(), [profiled(f"range {number}") for number in range(20)]

    def calls() -> None:
        for each in twenty:
            for _ in range(100):
                with each:
                    pass

    def written() -> None:
        calls()
        timings.end_step(99)
        timings.begin_step()

    took = medians({"written": written, "calls": calls}, calls=10)
    timings.stop()
    return [Row("a write of 20 ranges", took["written"] - took["calls"], "limit", 5e6, 1.0)]


def modules() -> list[Row]:
    """The hooks of `timings.modules`, per submodule and call."""
    net, x, theirs = (
        nn.Sequential(*(nn.Identity() for _ in range(100))),
        torch.ones(1),
        record_function("f")(bare),
    )
    contestants = {"forward": lambda: net(x), "record_function": lambda: theirs(1)}
    instrument_model(net, types=["Identity"])
    before = medians(contestants, calls=200)
    timings = started(modules=True)
    timed = medians(contestants, calls=200)
    timings.stop()
    forget(net)
    took = (timed["forward"] - before["forward"]) / 100
    return [
        Row(
            "a submodule, timed by hooks, over idle",
            took,
            "record_function alone",
            timed["record_function"],
            1.0,
        )
    ]


def memory() -> list[Row]:
    """What is held after a million calls, over what is held after ten thousand."""
    timed = profiled("f")(bare)
    tracemalloc.start()
    timings = started()
    held = []
    for calls in (10_000, 990_000):
        for _ in range(calls // 100):
            for _ in range(100):
                timed(1)
            timings.end_step(0)
            timings.begin_step()
        held.append(tracemalloc.get_traced_memory()[0] / 1e3)
    tracemalloc.stop()
    timings.stop()
    return [Row("memory held after 1 M calls", held[1], "after 10 k", held[0], 1.05, "kB")]


def main() -> int:
    logger.disable("instrument")
    title = f"Timings: torch {torch.__version__}, Python {sys.version.split()[0]}, medians of interleaved rounds"
    rows = [
        row for measure in (ranges, in_a_loop, steps, writes, modules, memory) for row in measure()
    ]
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
