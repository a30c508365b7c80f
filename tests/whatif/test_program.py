"""The pass over the moments, beside the longest paths that a few lines of plain Python find."""

from __future__ import annotations

import numpy as np
import pytest
from seeds import seeds

from instrument.read.facts import loops
from instrument.read.simulate.program import NEVER, Program, in_order

MOMENTS, CHAINS = 40, 4
SEEDS = seeds(6, 20)


def drawn(seed: int) -> tuple[Program, np.ndarray]:
    """A program with four chains, and weights of its arcs."""
    random = np.random.default_rng(seed)
    chain, order = random.integers(0, CHAINS, MOMENTS), random.permutation(MOMENTS)
    rank = np.argsort(order)
    target, source, weights = [], [], []
    for number in range(CHAINS):
        own = order[chain[order] == number]
        # Some moments do not follow the one before them.
        linked = random.random(len(own) - 1) < 0.8
        target += own[1:][linked].tolist()
        source += own[:-1][linked].tolist()
        weights += random.integers(0, 9, int(linked.sum())).tolist()
    for _ in range(random.integers(0, 3 * MOMENTS)):
        one, other = sorted(random.integers(0, MOMENTS, 2).tolist(), key=rank.__getitem__)
        if one != other:
            target.append(other)
            source.append(one if random.random() < 0.8 else -1)
            weights.append(NEVER if random.random() < 0.1 else int(random.integers(-3, 30)))
    # The clocks contradict this one.
    target.append(int(order[0]))
    source.append(int(order[-1]))
    weights.append(1000)
    # As in a trace, each moment has an arc that binds.
    for moment in range(MOMENTS):
        target.append(moment)
        source.append(-1)
        weights.append(int(random.integers(0, 5)))
    arcs = (np.array(target), np.array(source))
    kept = in_order(order, *arcs)
    assert not kept.all()
    return Program(order, *arcs, kept), np.array(weights)


def longest(program: Program, weights: np.ndarray) -> np.ndarray:
    times = np.zeros(MOMENTS, weights.dtype)
    for moment in program.moment_order.tolist():
        arcs = np.flatnonzero((program.target == moment) & program.kept)
        begins = np.append(times, 0)[program.source[arcs]]
        times[moment] = (begins + weights[arcs]).max()
    return times


@pytest.fixture(params=["compiled", "Python"])
def _either(request, monkeypatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(loops, "compiled", None)
    elif loops.compiled is None:
        pytest.skip("The module instrument.read.facts._loops is not compiled.")


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_times_are_the_longest_paths(seed) -> None:
    program, weights = drawn(seed)
    assert np.array_equal(program.run(weights), longest(program, weights))


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_a_change_are_scenarios(seed) -> None:
    program, weights = drawn(seed)
    random = np.random.default_rng(seed)
    change = np.where(random.random(len(weights)) < 0.3, -weights // 2, 0)
    change = np.where(weights == NEVER, 0, change)
    shares = np.array([0.5, 1.0])
    found = program.run_shares(weights, change, shares)
    right = [longest(program, weights + np.trunc(share * change).astype(int)) for share in shares]
    assert np.array_equal(found, right)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_critical_path_has_no_gap_and_decides(seed) -> None:
    program, weights = drawn(seed)
    times = longest(program, weights)
    last = int(np.argmax(times))
    path = program.critical(weights, times, last)
    assert path.end_ns[-1] == times[last]
    assert np.array_equal(path.begin_ns[1:], path.end_ns[:-1])
    assert np.array_equal(times[program.target[path.arc]], path.end_ns)
    assert program.kept[path.arc].all()


@pytest.mark.parametrize("share", [np.inf, -np.inf, np.nan, 2.0**53, -(2.0**53)])
def test_a_share_of_a_change_that_does_not_fit_is_the_smallest_number(share) -> None:
    """As NumPy cuts it on x86; the cast alone is undefined in C."""
    compiled = pytest.importorskip("instrument.read.facts._loops")
    arc, earliest = np.zeros(1, np.int32), np.array([np.iinfo(np.int64).min])
    weights = np.array([5]), np.array([2**10])
    times = compiled.longest_paths(arc, arc - 1, arc, *weights, np.array([share]), earliest)
    assert np.frombuffer(times, np.int64).tolist() == [np.iinfo(np.int64).min + 5]
