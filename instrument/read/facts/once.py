"""`Once`: results by name, each computed at its first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Results by name: `once("work", compute)` calls `compute` only the first time."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def __call__(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of that name."""
        if name not in self._results:
            self._results[name] = compute()
        found: T = self._results[name]
        return found
