"""Nodes of a graph on a CUDA device, against events of the test's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instrument.graph import profile_graph


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2048, 8)).to(
        device
    )


def test_a_graph_runs_where_its_model_is(device: str) -> None:
    model, x = model_on(device), torch.randn(64, 2048, device=device)
    profile = profile_graph(model, x, runs=3, warmup=1)
    assert profile.device == device
    assert [row.flops for row in profile.nodes.where(module_type="Linear")] == [
        2 * 64 * 2048 * 2048,
        2 * 64 * 2048 * 8,
    ]
    assert all(ns > 0 for ns in profile.nodes.where(op="call_module").column("median_ns"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
)
def test_a_node_takes_as_long_as_its_kernels() -> None:
    model, x = nn.Sequential(nn.Linear(8192, 8192)).cuda(), torch.randn(8192, 8192, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        profile = profile_graph(model, x, runs=5)
        begin.record()
        model(x)
        end.record()
    torch.cuda.synchronize()
    (linear,) = profile.nodes.where(module_type="Linear")
    assert linear.median_ns == pytest.approx(begin.elapsed_time(end) * 1e6, rel=0.2)
