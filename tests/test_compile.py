"""Marked code under torch.compile and the other ways to capture a model: one graph, and nothing shown as zero."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch._dynamo.testing
import torch._dynamo.utils
from collected import Log
from recording import run_session, window
from torch import nn

from instrument import Capture, Session, profiled
from instrument.annotate import backends, module_calls
from instrument.read.show.text import render

X = torch.ones(2, 4)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
# A range that inductor opens itself, in torch before 2.13.
INDUCTORS = "## Call CompiledFxGraph"
pytestmark = [
    pytest.mark.usefixtures("inline_export"),
    pytest.mark.filterwarnings("ignore::Warning:torch.*"),  # Dynamo's and inductor's own
]


@pytest.fixture(autouse=True)
def _fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backends.compiled_ranges.clear()
    # a capture names those that other tests have marked, once Dynamo has compiled a graph
    monkeypatch.setattr(module_calls, "_marked", WeakSet())
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@profiled("marked")
def marked(x: torch.Tensor) -> torch.Tensor:
    with profiled("block"):
        return x.sin()


@profiled("layer {self.index}")
class Layer(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return marked(self.linear(x))


def model() -> nn.Module:
    return nn.Sequential(Layer(), Layer(1))


def run(folder: Path, compiled: Any, steps: int = 6, **options: Any) -> Session:
    def each() -> None:
        with profiled("outside"):
            compiled(X).sum().backward()

    return run_session(folder, steps, each, **options)


@pytest.mark.parametrize(
    "backend",
    ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.nightly, NEEDS_COMPILER])],
)
def test_one_graph_before_during_and_after_a_window(tmp_path: Path, backend: str) -> None:
    compiled = torch.compile(model(), backend=backend, fullgraph=True)
    session = run(tmp_path, compiled, wait=2, warmup=1, active=2)
    assert graphs() == (1, 0)
    (capture,) = session.captures
    assert [row.name for row in capture.ranges if not row.name.startswith(INDUCTORS)] == ["outside"]
    assert {(row.name, row.region) for row in capture.compiled_ranges} == {
        (name, "0/0") for name in ("marked", "block", "layer {self.index}")
    }
    sentence = "Ranges inside compiled region 0/0, not timed: layer {self.index}, marked, block"
    assert sentence in render(capture)
    assert capture.metadata["graphs_compiled"] == 0


@profiled
def multiples(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for factor in range(3):
        yield x * factor


def test_a_marked_generator_in_a_compiled_function_stays_in_its_graph(tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: sum(multiples(x)), backend="eager", fullgraph=True)
    weights = torch.ones(4, requires_grad=True)
    session = run(tmp_path, lambda x: compiled(x * weights), wait=2, active=2)
    assert graphs() == (1, 0)
    (capture,) = session.captures
    assert [row.name for row in capture.ranges] == ["outside"]
    assert [row.name for row in capture.compiled_ranges] == ["multiples"]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.nightly, NEEDS_COMPILER])]
)
def test_an_instrumented_model_stays_at_one_graph(tmp_path: Path, backend: str) -> None:
    net = model()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    session = run(tmp_path, compiled, wait=2, warmup=1, active=2, model=compiled)
    assert graphs() == (1, 0)
    (capture,) = session.captures
    paths = [row.path for row in capture.ranges if not row.name.startswith(INDUCTORS)]
    assert paths == ["outside", "outside/Sequential"]
    assert capture.metadata["modules_not_seen"] == ["0", "0.linear", "1", "1.linear"]
    few = "0 (with 1 inside), 1 (with 1 inside)"
    said = f"Modules not called in this window, or inside a compiled region: {few}"
    assert said in " ".join(render(capture).split())


def test_a_compiled_function_is_recorded_around_its_region(tmp_path: Path) -> None:
    outer = profiled("outer")(torch.compile(marked, backend="aot_eager", fullgraph=True))
    outer(X)
    capture = window(tmp_path, lambda: outer(X))
    assert [row.name for row in capture.ranges] == ["outer"]
    assert graphs() == (1, 0)


def test_regions_that_did_not_run_in_the_window_are_not_listed(tmp_path: Path) -> None:
    torch.compile(marked, backend="aot_eager")(X)
    capture = window(tmp_path, lambda: marked(X))
    assert capture.metadata["compiled_ranges"] != []
    assert list(capture.compiled_ranges) == []
    assert [row.name for row in capture.ranges] == ["marked", "block"]


def test_compiled_regions_of_earlier_models(tmp_path: Path, log: Log) -> None:
    log.expect("torch.compile compiled")

    def timed(compiled: Any, folder: str) -> tuple[Capture, str]:
        session = run(tmp_path / folder, compiled, steps=1, active=1, timings={})
        return session.captures[0], [each for each in log if "Timings of the run" in each][-1]

    first, said = timed(torch.compile(model(), backend="aot_eager"), "first")
    assert {row.region for row in first.compiled_ranges} == {"0/0"}
    assert (
        "Not timed, because they are inside compiled regions: layer {self.index}, marked, block."
        in said
    )
    torch._dynamo.reset()
    later, said = timed(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="aot_eager"), "later")
    assert "Torch-Compiled Region: 0/0" in later.events.names
    assert list(later.compiled_ranges) == later.metadata["compiled_ranges"] == []
    assert "Inside compiled" not in said


def test_a_first_compilation_inside_a_window_is_told(tmp_path: Path, log: Log) -> None:
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    session = run(tmp_path, compiled, steps=3, active=1)
    assert session.captures[0].metadata["graphs_compiled"] == 1
    assert log.at("WARNING") == [
        "torch.compile compiled 1 graphs inside the window of step 0 or its warm-up, so the window's "
        "times may include the compilation: wait longer before the window (profiler.wait)."
    ]
    assert graphs() == (1, 0)


def test_export_and_the_older_tracers(tmp_path: Path) -> None:
    net = model()
    expected = net(X)
    for strict in (True, False):
        exported = torch.export.export(net, (X,), strict=strict)
        assert torch.equal(exported.module()(X), expected)
    assert torch.equal(torch.fx.symbolic_trace(net)(X), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace")  # TorchScript is deprecated
        traced = torch.jit.trace(net, X)
    assert torch.equal(traced(X), expected)


def test_functional_transforms() -> None:
    x = torch.arange(4.0)
    expected = x.cos()
    scalar = profiled("scalar")(lambda x: marked(x).sum())
    backends.arm()  # whether recording or not
    try:
        recording = torch.func.grad(scalar)(x), torch.func.vmap(marked)(x)
    finally:
        backends.disarm()
    idle = torch.func.grad(scalar)(x), torch.func.vmap(marked)(x)
    for gradient, mapped in (recording, idle):
        assert torch.equal(gradient, expected)
        assert torch.equal(mapped, x.sin())


def test_a_marked_module_in_a_compiled_region_is_told(tmp_path: Path, log: Log) -> None:
    log.expect("torch.compile compiled")
    inside = profiled("inside")(nn.Linear(4, 4))
    compiled = torch.compile(nn.Sequential(inside), backend="eager")
    outside = profiled("outside")(nn.Linear(4, 4))
    capture = window(tmp_path, lambda: outside(compiled(X)))
    unseen = capture.metadata["modules_not_seen"]
    assert "inside" in unseen
    assert "outside" not in unseen


class Broken(nn.Module):
    """A module that torch.compile leaves to Python, with one that it compiles in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("compile_within", "how", "hooked"),  # each value once, and nightly each pair of values
    [
        (False, "torch.compile", False),
        pytest.param(True, "Module.compile", False, marks=pytest.mark.nightly),
        pytest.param(True, "torch.compile", True, marks=pytest.mark.nightly),
        pytest.param(False, "Module.compile", True, marks=pytest.mark.nightly),
        (True, "Module.compile", True),
    ],
)
def test_no_window_compiles_anew(
    tmp_path: Path, compile_within: bool, how: str, hooked: bool, log: Log
) -> None:
    """Whatever the model has in it: hooks of its owner's, and parts that are not compiled."""
    if compile_within:
        log.expect("torch.compile compiled")
    net: Any = nn.Sequential(Layer(), Broken(), Layer(1))
    if hooked:
        net[0].linear.register_forward_hook(lambda module, inputs, output: output * 2)
    compiled = torch.compile(net, backend="eager") if how == "torch.compile" else net
    if how == "Module.compile":
        net.compile(backend="eager")
    if not compile_within:
        compiled(X)
    capture = window(tmp_path, lambda: compiled(X), model=compiled)
    seen = graphs()
    compiled(X)
    assert graphs() == seen
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled(X)
    assert graphs() == seen, "as where nothing was ever recorded"
    names = capture.ranges.column("name")
    ours = {name for name in names if "compile" not in name and "dynamo" not in name}
    assert ours == {"Sequential", "0", "1", "1.layer", "2"}


def test_what_the_compiler_notes_in_a_window_are_no_ranges(tmp_path: Path, log: Log) -> None:
    log.expect("torch.compile compiled")
    compiled = torch.compile(lambda x: (x @ x.T).relu(), backend="eager")
    capture = window(tmp_path, lambda: profiled("around")(compiled)(X))
    # torch 2.10 and older write no such event
    noted = any("_data: compile_id=" in name for name in capture.events.names)
    assert noted or torch.__version__ < (2, 13)
    # in torch 2.10 and older, the phases of a compilation are annotations, and so ranges
    paths = [path for path in capture.ranges.column("path") if "(dynamo_timed)" not in path]
    assert paths == ["around"]
