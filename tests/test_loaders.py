"""`session.steps` over torch's own loaders: of known and unknown length, with workers, left early, nested."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from instrument import Session

pytestmark = pytest.mark.usefixtures("inline_export")


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Five numbers, and no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Generated:
    """As a function of the user's that yields batches, begun anew for each epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)


@pytest.mark.parametrize(
    ("loader", "ends"),
    [
        (DataLoader(range(5)), 0),  # type: ignore[arg-type]
        (DataLoader(range(5), num_workers=1, persistent_workers=True), 0),  # type: ignore[arg-type]
        (DataLoader(Stream()), 1),
        (DataLoader(Stream(), num_workers=1), 1),
        (Generated(), 1),
        (range(5), 0),
    ],
    ids=["map", "map with a worker", "iterable", "iterable with a worker", "generator", "list"],
)
def test_batch_is_a_step_with_its_wait(tmp_path: Path, loader: Iterable[Any], ends: int) -> None:
    seen = []
    options: dict[str, Any] = {"wait": 1, "active": None, "phases": ["train", "validation"]}
    with Session(options, timings={}, output_dir=tmp_path) as session:
        assert list(session.steps([])) == []
        for epoch in range(2):
            for batch in session.steps(loader):
                seen.append(int(batch))
                if epoch == 1 and batch == 2:
                    break
            assert [int(batch) for batch in loader] == list(range(5)), (
                "a loop of the user's own counts for nothing"
            )
            with session.phase("validation"):
                seen += [-int(batch) for batch in session.steps(loader)]
    assert seen == [0, 1, 2, 3, 4, -0, -1, -2, -3, -4, 0, 1, 2, -0, -1, -2, -3, -4]
    (capture,) = session.captures
    assert capture.steps.column("number") == [1, 2, 3, 4, 5, 6, 7]
    waits = {row.path: row.calls for row in capture.ranges if row.name == "data"}
    assert waits == {"data": 7 + ends, "validation/data": 2 * (5 + ends)}
    (timed,) = session.timings.table().where(name="data")
    assert timed.calls == 8 + ends + 2 * (5 + ends)


def test_a_loader_within_a_loader_takes_no_steps(tmp_path: Path) -> None:
    with Session(active=3, output_dir=tmp_path) as session:
        for _ in session.steps(DataLoader(range(3))):  # type: ignore[arg-type]
            assert len(list(session.steps(DataLoader(Stream())))) == 5
    (capture,) = session.captures
    assert capture.steps.column("number") == [0, 1, 2]
    assert [row.calls for row in capture.ranges if row.path == "data"] == [3]


def test_the_loader_answers_what_it_is_asked() -> None:
    data = list(range(8))
    loader = DataLoader(
        data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0)
    )  # type: ignore[arg-type]
    for session in (Session("disabled"), Session(active=1)):
        steps: Any = session.steps(loader)
        assert (len(steps), len(steps.dataset)) == (2, 8)
        assert (steps.batch_size, steps.drop_last) == (2, False)
        steps.sampler.set_epoch(3)
        assert loader.sampler.epoch == 3  # type: ignore[attr-defined]
        steps.epochs_seen = 5
        assert loader.epochs_seen == 5  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="batch_size attribute should not be set"):
            steps.batch_size = 4
        with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'nothing'"):
            steps.nothing  # noqa: B018
        assert not hasattr(steps, "nothing")
        assert copy.copy(steps).dataset is data
        assert len(pickle.loads(pickle.dumps(session.steps([1, 2])))) == 2


def test_the_special_methods_are_the_loaders_too() -> None:
    session = Session("disabled")
    batches: Any = session.steps(["a", "b"])
    assert (batches[-1], list(batches[:1])) == ("b", ["a"])
    assert bool(batches)
    assert not session.steps([])
    assert repr(batches) == "['a', 'b']"
    unsized: Any = session.steps(Generated())
    assert bool(unsized)
    with pytest.raises(TypeError, match="has no len"):
        len(unsized)
    with pytest.raises(TypeError, match="not subscriptable"):
        unsized[0]
    with pytest.raises(TypeError, match="'Stream' has no len"):
        len(session.steps(DataLoader(Stream())))
