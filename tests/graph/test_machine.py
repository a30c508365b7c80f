"""The machine's rates: what is counted is what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from instrument.errors import ConfigError
from instrument.fx import machine
from instrument.fx.machine import measured


class Measuring:
    """Stands in for the clock: each run takes 20 ms; notes what was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Callable[[], object]] = []
        monkeypatch.setattr(machine, "_best_ns", self)
        monkeypatch.setattr(machine, "_COPIED_BYTES", 2**16)

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    return Measuring(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rates_count_what_runs(clock: Measuring, dtype: str) -> None:
    found = measured(dtypes=[dtype])
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

    monkeypatch.setattr(machine, "_best_ns", grown)
    assert machine._matmul_rate("cpu", "float32") == 2 * 512**3 * 10**9 // 16_000_000
    assert sizes == [256, 512]


def test_each_type_is_measured_once(clock: Measuring) -> None:
    found = measured(dtypes=["float32", "float64", "float32"])
    assert set(found.flops_per_second) == {"float32", "float64"}
    assert len(clock.runs) == 3


def test_the_name_tells_what_the_rates_depend_on(
    clock: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert f", 77 threads, torch {torch.__version__}, float32 " in measured().device


def test_the_clock_of_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 10, 1000, 1070, 2000, 2050, 3000, 3060, 4000, 4090, 5000, 5080])
    monkeypatch.setattr(machine, "perf_counter_ns", lambda: next(times))
    runs: list[int] = []
    assert machine._best_ns(lambda: runs.append(1), "cpu") == 50
    assert len(runs) == 6


def test_a_type_that_cannot_be_measured() -> None:
    with pytest.raises(ConfigError) as error:
        measured(dtypes=["int8"])
    sentence = (
        "The rate of 'int8' cannot be measured; choose one of float32, float64, bfloat16, float16."
    )
    assert str(error.value) == sentence
