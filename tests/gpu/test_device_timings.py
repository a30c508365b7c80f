"""Timings on a CUDA device, against events of the test's own and a profiler's trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instrument import Session, profiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]

CYCLES = 20_000_000  # some 10 ms


def test_a_range_lasts_on_the_device_as_long_as_its_kernel(tmp_path: Path) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # the first is slower
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize()
    kernel_ns = begin.elapsed_time(end) * 1e6
    with Session("timings", output_dir=str(tmp_path)) as session:
        for _ in range(5):
            with profiled("busy"):
                torch.cuda._sleep(CYCLES)
            with profiled("idle"):
                pass
            session.step()
        torch.cuda.synchronize()
        session.step()
    rows = {row.name: row for row in session.timings.table()}
    assert (rows["busy"].calls, rows["busy"].device_calls) == (5, 5)
    assert rows["busy"].device_mean_ns == pytest.approx(kernel_ns, rel=0.1)
    assert rows["idle"].device_mean_ns < kernel_ns / 10
    assert rows["busy"].mean_ns < kernel_ns / 2, "the CPU waited for the device"


def test_a_graph_is_captured_and_replayed_while_ranges_are_timed(tmp_path: Path) -> None:
    x = torch.ones(8, device="cuda")
    with Session("timings", output_dir=str(tmp_path)) as session:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), profiled("captured"):
            y = x * 2
        session.step()
        with profiled("replayed"):
            graph.replay()
        torch.cuda.synchronize()
        session.step()
    rows = {row.name: row for row in session.timings.table()}
    assert rows["captured"].device_calls is None
    assert rows["replayed"].device_calls == 1
    assert y.tolist() == [2.0] * 8
