"""Comparisons resampled from 400 real blocks of a noisy machine; `benchmarks/ab.py` prints the whole power curve."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ab.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_ab", BENCHMARK)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_half_of_the_blocks_have_a_hog_beside_and_all_have_the_same_counters(benchmark) -> None:
    with np.load(benchmark.DATA) as data:
        assert data["step_us"].shape == (400, 4, 12)
        assert data["hog"].sum() == 200
        assert (data["counters"] == data["counters"][0, 0]).all()
    assert benchmark.DATA.stat().st_size < 300_000


@pytest.mark.parametrize("trials", [300, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_at_most_5_percent_of_comparisons_with_itself_report_a_change(benchmark, trials) -> None:
    _, times = benchmark.load()
    assert benchmark.alarms(times, blocks=10, trials=trials) <= 0.05


@pytest.mark.parametrize(
    ("planted", "least"), [(0.1, 0.8), pytest.param(0.2, 0.9, marks=pytest.mark.nightly)]
)
def test_a_planted_change_is_found_named_and_sized(benchmark, planted, least) -> None:
    names, times = benchmark.load()
    column = names.index("mlp")
    assert benchmark.power(times, 200, column, planted, trials=20) >= least
    assert benchmark.power(times, 2, column, planted, trials=20) == 0
