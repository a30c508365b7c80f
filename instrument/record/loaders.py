"""`Loaders` records the settings of the data loaders over which a run iterates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from instrument.record.torch_support import known

T = TypeVar("T")

# A window rarely iterates more than a training and a validation loader.
_MOST_LOADERS = 16


class Loaders:
    """The settings of the data loaders over which a run iterates.

    Attributes:
        seen: the settings of the loaders over which the run has iterated in the current window,
            without duplicates.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._open: dict[object, dict[str, Any]] = {}

    @contextmanager
    def iterating(self, loader: Any, phase: str) -> Iterator[None]:
        """Record the settings of `loader` while the `with` block iterates over it in `phase`."""
        iteration = object()
        self._add(iteration, loader, phase)
        try:
            yield
        finally:
            self._open.pop(iteration, None)

    def add(self, loader: Any, phase: str) -> None:
        """Record that a trainer, such as Lightning's, iterates over `loader` from now on.

        `loader` replaces the trainer's earlier loader of the same phase.
        """
        self._open.pop(phase, None)
        self._add(phase, loader, phase)

    def end_run(self) -> None:
        """Forget the loaders that `add` has recorded, because the run has ended."""
        for phase in [each for each in list(self._open) if isinstance(each, str)]:
            del self._open[phase]

    def begin_window(self) -> None:
        """Remove from `seen` the loaders over which the run no longer iterates."""
        self.seen = {tuple(facts.values()): facts for facts in list(self._open.values())}

    def _add(self, iteration: object, loader: Any, phase: str) -> None:
        facts = known(lambda: loader_settings(loader))
        if facts is None:
            return
        self._open[iteration] = facts = {"phase": phase, **facts}
        if len(self.seen) < _MOST_LOADERS:
            self.seen[tuple(facts.values())] = facts


def loader_settings(loader: Any) -> dict[str, Any] | None:
    """The settings of a `DataLoader`, or of an object that has the same attributes.

    None for all other objects.
    """
    workers = _of_type(int, loader, "num_workers")
    if workers is None:
        return None
    batch_size = _of_type(int, loader, "batch_size")
    if batch_size is None:  # a loader with a batch sampler has no batch size of its own
        sampler = known(lambda: loader.batch_sampler)
        batch_size = _of_type(int, sampler, "batch_size")
    return {
        "workers": workers,
        "batch_size": batch_size,
        "pin_memory": _of_type(bool, loader, "pin_memory"),
        "persistent_workers": _of_type(bool, loader, "persistent_workers"),
        "prefetch_factor": _of_type(int, loader, "prefetch_factor"),
        "iterable": known(lambda: _is_iterable(loader.dataset)),
    }


def _is_iterable(dataset: Any) -> bool:
    """Whether a dataset is an `IterableDataset`; raises if torch.utils.data is not loaded."""
    return isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def _of_type(kind: type[T], owner: Any, name: str) -> T | None:
    """The value of an attribute; None unless it is of type `kind` and between 0 and 2**50."""
    value = known(lambda: getattr(owner, name))
    return value if type(value) is kind and 0 <= value <= 2**50 else None  # type: ignore[operator]
