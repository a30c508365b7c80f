"""What annotations cost, idle and recording, beside their peers; run by `make bench`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from rounds import Row, medians, report
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from instrument import Session, instrument_model, profiled
from instrument.annotate import backends
from instrument.annotate.modules import ModuleRanges, forget

warnings.simplefilter("ignore")
CALLS = 20_000


def bare(x: int, y: int = 2) -> int:
    return x


def variadic(*args: int, **kwargs: int) -> int:
    return args[0]


def idle() -> list[Row]:
    """Idle cost per call over the bare function."""
    exact, loose = profiled("f")(bare), profiled("f")(variadic)
    theirs, theirs_loose = record_function("f")(bare), record_function("f")(variadic)
    lightning = PassThroughProfiler()

    def passed_through(x: int) -> int:
        with lightning.profile("f"):
            return bare(x)

    few = 10  # calls of ours for one of record_function's, so that each gets a similar share of the time

    def times(function: Callable[..., Any]) -> Callable[[], object]:
        def act() -> None:
            for _ in range(few):
                function(1)

        return act

    took = medians(
        {
            "bare": times(bare),
            "exact": times(exact),
            "bare variadic": times(variadic),
            "variadic": times(loose),
            "lightning": times(passed_through),
            "record_function": times(theirs),
            "record_function variadic": times(theirs_loose),
        },
        calls=CALLS // few,
    )
    took = {name: value / few for name, value in took.items()}
    ours, ours_loose = took["exact"] - took["bare"], took["variadic"] - took["bare variadic"]
    peer = took["record_function"] - took["bare"]
    peer_loose = took["record_function variadic"] - took["bare variadic"]
    through = took["lightning"] - took["bare"]
    return [
        Row(
            "idle, explicit signature, over the bare function",
            ours,
            "record_function as decorator",
            peer,
            1 / 80,
        ),
        Row(
            "idle, *args and **kwargs",
            ours_loose,
            "record_function as decorator",
            peer_loose,
            1 / 40,
        ),
        Row(
            "idle, explicit signature",
            ours,
            f"Lightning {version('lightning')} pass-through profile()",
            through,
            1 / 10,
        ),
    ]


@contextmanager
def recording() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]):
        backends.arm()
        try:
            yield
        finally:
            backends.disarm()


def while_recording() -> list[Row]:
    """Cost per range while a profiler records, over the bare function."""
    exact, theirs = profiled("f")(bare), record_function("f")(bare)
    contestants = {
        "bare": lambda: bare(1),
        "ours": lambda: exact(1),
        "record_function": lambda: theirs(1),
    }
    with recording():
        took = medians(contestants, calls=1000)
    ours, peer = took["ours"] - took["bare"], took["record_function"] - took["bare"]
    return [
        Row(
            "recording, over the bare function",
            ours,
            "record_function, same profiler on",
            peer,
            1 / 3,
        )
    ]


def kill_switch() -> list[Row]:
    """With INSTRUMENT_DISABLE=1 the decorator returns the very object: there is nothing left to measure."""
    code = "from instrument import profiled\ndef f(): pass\nprint(profiled(f) is f and profiled('x')(f) is f)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"INSTRUMENT_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return [
        Row(
            "with INSTRUMENT_DISABLE=1",
            0.0 if said == "True" else 1.0,
            "the very same object",
            1.0,
            0.0,
        )
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def models() -> list[Row]:
    """A training step of a toy model of 100 blocks, every module a range."""
    torch.manual_seed(0)
    nets = {
        name: nn.Sequential(*(Block() for _ in range(100)))
        for name in ("bare", "ours", "lightning")
    }
    x = torch.ones(8, 32)

    def step(net: nn.Module) -> Callable[[], object]:
        def act() -> None:
            net(x).sum().backward()
            net.zero_grad()

        return act

    with (
        RegisterRecordFunction(nets["lightning"]),
        Session(
            {"wait": 10**9, "active": 1, "output_dir": tempfile.mkdtemp()}, model=nets["bare"]
        ) as session,
    ):

        def waiting() -> None:
            step(nets["bare"])()
            session.step()

        # the same model for both, since nothing is attached to it; of two models one is always a percent slower
        contestants = {
            "bare": step(nets["bare"]),
            "ours": waiting,
            "lightning": step(nets["lightning"]),
        }
        took = medians(contestants, calls=3, rounds=81)
    rows = [
        Row(
            "100 blocks, session waiting, step time", took["ours"], "bare model", took["bare"], 1.01
        ),
        Row(
            "100 blocks, Lightning's hooks waiting (for comparison)",
            took["lightning"],
            "bare model",
            took["bare"],
            9.0,
        ),
    ]
    instrument_model(nets["ours"])
    with profile(activities=[ProfilerActivity.CPU]):
        backends.arm()
        with ModuleRanges(), RegisterRecordFunction(nets["lightning"]):
            took = medians({name: step(net) for name, net in nets.items()}, calls=3, rounds=41)
        backends.disarm()
    forget(nets["ours"])
    rows += [
        Row(
            "100 blocks, recording, step time",
            took["ours"],
            "recording without module ranges",
            took["bare"],
            1.25,
        ),
        Row(
            "100 blocks, recording, step time",
            took["ours"],
            "Lightning's hooks, same profiler on",
            took["lightning"],
            1.0,
        ),
    ]
    return rows


def imports() -> list[Row]:
    """What `import instrument` adds."""

    def took(before: str, statement: str = "import instrument") -> float:
        code = f"{before}\nimport time\nt = time.perf_counter_ns()\n{statement}\nprint(time.perf_counter_ns() - t)"
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(7)
        ]
        return sorted(int(run.stdout) for run in runs)[3]

    limit = 20e6
    return [
        Row("import instrument, after torch", took("import torch"), "limit", limit, 1.0),
        Row(
            "from instrument import profiled, after torch",
            took("import torch", "from instrument import profiled"),
            "limit",
            limit,
            1.0,
        ),
        Row("import instrument, after nothing", took(""), "limit", limit, 1.0),
    ]


def main() -> int:
    title = f"Annotations: torch {torch.__version__}, Python {sys.version.split()[0]}, medians of interleaved rounds"
    rows = [
        row
        for measure in (idle, while_recording, kill_switch, models, imports)
        for row in measure()
    ]
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
