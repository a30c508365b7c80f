"""What a question about one trace needs: the relations of its events and the work of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from instrument.read.facts.device_work import Work
from instrument.read.facts.links import Links

T = TypeVar("T")


class Traced(Protocol):
    """A capture, or the facts about one."""

    @property
    def links(self) -> Links:
        """The relations between events."""

    @property
    def work(self) -> Work:
        """The work of the devices."""

    @property
    def is_ours(self) -> bool:
        """Whether a session recorded the trace, so that its ranges have the session's names."""

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which is called only at the first use of `name`."""
