"""`session.steps` over torch's own loaders: of known and unknown length, with workers, left early, nested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

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
    ],
    ids=["map", "map with a worker", "iterable", "iterable with a worker", "generator"],
)
def test_each_batch_is_a_step_that_holds_its_wait(tmp_path: Path, loader: Iterable[Any], ends: int) -> None:
    seen = []
    with Session(wait=1, phases=["train", "validation"], output_dir=tmp_path) as session:
        for epoch in range(2):
            for batch in session.steps(loader):
                seen.append(int(batch))
                if epoch == 1 and batch == 2:
                    break
            assert [int(batch) for batch in loader] == list(range(5)), "a loop of the user's own counts for nothing"
            with session.phase("validation"):
                seen += [-int(batch) for batch in session.steps(loader)]
    assert seen == [0, 1, 2, 3, 4, -0, -1, -2, -3, -4, 0, 1, 2, -0, -1, -2, -3, -4]
    (capture,) = session.captures
    assert capture.steps.column("number") == [1, 2, 3, 4, 5, 6, 7]
    waits = {row.path: row.calls for row in capture.ranges if row.name == "data"}
    assert waits == {"data": 7 + ends, "validation/data": 2 * (5 + ends)}


def test_a_loader_within_a_loader_takes_no_steps(tmp_path: Path) -> None:
    with Session(active=3, output_dir=tmp_path) as session:
        for _ in session.steps(DataLoader(range(3))):  # type: ignore[arg-type]
            assert len(list(session.steps(DataLoader(Stream())))) == 5
    (capture,) = session.captures
    assert capture.steps.column("number") == [0, 1, 2]
    assert [row.calls for row in capture.ranges if row.path == "data"] == [3]
