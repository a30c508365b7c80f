"""`cpu_peak`: how fast torch multiplies matrices on this CPU now."""

from __future__ import annotations

import time

import torch

_SIZE, _ROUNDS = 768, 4


def cpu_peak() -> float:
    """The highest FLOP/s of products of large matrices of float32, with torch's present threads.

    Cost: about 50 ms on two CPUs.
    """
    matrix = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device="cpu")
    shortest_ns = 10**18
    with torch.no_grad():
        for _ in range(_ROUNDS):
            began = time.perf_counter_ns()
            torch.mm(matrix, matrix)
            shortest_ns = min(shortest_ns, time.perf_counter_ns() - began)
    return 2 * _SIZE**3 / shortest_ns * 1e9
