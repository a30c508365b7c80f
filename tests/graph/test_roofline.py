"""The bounds of nodes, by numbers worked out by hand, and the machine's rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_nodes import nodes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from instrument.graph import profile_graph
from instrument.graph import roofline as rates
from instrument.graph.roofline import Machine, measured, roofline
from instrument.read.views.table import Table

# A hundred FLOPs and ten bytes in a nanosecond, ten FLOPs for a byte; a quarter of that for float64.
MACHINE = Machine("by hand", {"float32": 100 * 10**9, "float64": 25 * 10**9}, 10 * 10**9)


@pytest.mark.parametrize(
    ("node", "bounds"),
    [
        ({"flops": 100_000, "moved_bytes": 1_000, "median_ns": 4_000}, ("compute", 1_000, 0.25)),
        ({"flops": 1_000, "moved_bytes": 1_000, "median_ns": 400}, ("bandwidth", 100, 0.25)),
        # both take as long, from a cache
        ({"flops": 10_000, "moved_bytes": 1_000, "median_ns": 50}, ("compute", 100, 2.0)),
        ({"flops": 5_000, "moved_bytes": 1_000, "output_dtype": "float64"}, ("compute", 200, 0.2)),
        ({"flops": None, "moved_bytes": 1_000}, ("bandwidth", 100, 0.1)),
        # no rate for it
        ({"flops": 9_000_000, "moved_bytes": 1_000, "output_dtype": "int8"}, (None, 100, 0.1)),
        (
            {"flops": 100_000, "moved_bytes": 1_000, "output_dtype": "int64, float32"},
            ("compute", 1_000, 1.0),
        ),
        ({"flops": None, "moved_bytes": 0}, (None, None, None)),
        ({"flops": None, "moved_bytes": None, "output_dtype": None}, (None, None, None)),
        ({"flops": None, "moved_bytes": 1_000, "median_ns": None}, ("bandwidth", 100, None)),
    ],
)
def test_the_bounds_of_a_node(node: dict[str, Any], bounds: tuple[Any, ...]) -> None:
    (row,) = roofline(nodes(node), MACHINE)
    assert (row.bound_by, row.bound_ns, row.bound_share) == bounds


def test_a_product_of_large_matrices_computes_and_an_addition_moves() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.randn(128, 256)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(x)
    with torch.no_grad():
        product, relu = list(profile_graph(model, x, runs=1, warmup=0).roofline(MACHINE))[1:3]
    assert (product.bound_by, relu.bound_by) == ("compute", "bandwidth")
    assert product.bound_ns == round(counted.get_total_flops() / 100)
    assert relu.bound_ns == round(2 * 4 * 128 * 256 / 10)


class Measuring:
    """Stands in for the clock: each run takes 20 ms; notes what was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Callable[[], object]] = []
        monkeypatch.setattr(rates, "_best_ns", self)
        monkeypatch.setattr(rates, "_COPIED_BYTES", 2**16)

    def __call__(self, run: Callable[[], object], device: str) -> int:
        self.runs.append(run)
        run()
        return 20_000_000


class Moved(TorchDispatchMode):
    """The bytes that copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default
        self.bytes += sum(each.numel() * each.element_size() for each in args[:2])
        return func(*args, **(kwargs or {}))


def computing(*dtypes: str) -> Table:
    """Nodes with results of these types that compute, and one of another type that moves."""
    computes = ({"flops": 1, "output_dtype": dtype} for dtype in dtypes)
    return nodes(*computes, {"output_dtype": "float16"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    return Measuring(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rates_count_what_runs(clock: Measuring, dtype: str) -> None:
    found = measured("cpu", computing(dtype))
    product, copy = clock.runs
    with FlopCounterMode(display=False) as flops:
        assert product().dtype is getattr(torch, dtype)
    assert found.flops_per_second == {dtype: flops.get_total_flops() * 50}
    with Moved() as moved:
        copy()
    assert found.bytes_per_second == moved.bytes * 50 > 0


def test_matrices_grow_until_a_product_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def grown(run: Callable[[], Any], device: str) -> int:
        sizes.append(len(run()))
        return 10**6 * len(sizes) ** 4

    monkeypatch.setattr(rates, "_best_ns", grown)
    assert rates._matmul_rate("cpu", "float32") == 2 * 512**3 * 10**9 // 16_000_000
    assert sizes == [256, 512]


def test_the_types_of_nodes_that_compute_are_measured_once(clock: Measuring) -> None:
    found = measured("cpu", computing("float32", "float64", "float32", "int8"))
    assert set(found.flops_per_second) == {"float32", "float64"}
    assert len(clock.runs) == 3


def test_name_says_what_rates_depend_on(clock: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert (
        f", 77 threads, torch {torch.__version__}, float32 " in measured("cpu", computing()).device
    )


def test_the_clock_of_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 10, 1000, 1070, 2000, 2050, 3000, 3060, 4000, 4090, 5000, 5080])
    monkeypatch.setattr(rates, "perf_counter_ns", lambda: next(times))
    runs: list[int] = []
    assert rates._best_ns(lambda: runs.append(1), "cpu") == 50
    assert len(runs) == 6
