"""The bounds of nodes, by numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_nodes import nodes
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from instrument.fx import profile_graph
from instrument.fx.machine import Machine
from instrument.fx.roofline import dtypes, roofline

# A hundred FLOPs and ten bytes in a nanosecond, ten FLOPs for a byte; a quarter of that for float64.
MACHINE = Machine("by hand", {"float32": 100 * 10**9, "float64": 25 * 10**9}, 10 * 10**9)


@pytest.mark.parametrize(
    ("node", "bounds"),
    [
        ({"flops": 100_000, "moved_bytes": 1_000, "median_ns": 4_000}, ("compute", 1_000, 0.25)),
        ({"flops": 1_000, "moved_bytes": 1_000, "median_ns": 400}, ("bandwidth", 100, 0.25)),
        (
            {"flops": 10_000, "moved_bytes": 1_000, "median_ns": 50},
            ("compute", 100, 2.0),
        ),  # both take as long, from a cache
        ({"flops": 5_000, "moved_bytes": 1_000, "output_dtype": "float64"}, ("compute", 200, 0.2)),
        ({"flops": None, "moved_bytes": 1_000}, ("bandwidth", 100, 0.1)),
        (
            {"flops": 9_000_000, "moved_bytes": 1_000, "output_dtype": "int8"},
            (None, 100, 0.1),
        ),  # no rate for it
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


def test_the_types_that_compute_are_those_measured() -> None:
    table = nodes({"flops": 1}, {"flops": 1, "output_dtype": "int8"}, {"output_dtype": "float16"})
    assert dtypes(table) == ["float32"]


def test_a_product_of_large_matrices_computes_and_an_addition_moves() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.randn(128, 256)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(x)
    with torch.no_grad():
        product, relu = list(profile_graph(model, x, runs=1, warmup=0).roofline(MACHINE))[1:3]
    assert (product.bound_by, relu.bound_by) == ("compute", "bandwidth")
    assert product.bound_ns == round(counted.get_total_flops() / 100)
    assert relu.bound_ns == round(2 * 4 * 128 * 256 / 10)
