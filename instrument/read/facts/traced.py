"""What a question about one trace needs: the relations of its events and the work of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from instrument.read.facts.device_work import Work
from instrument.read.facts.links import Links
from instrument.read.facts.once import Once

if TYPE_CHECKING:
    from instrument.read.facts.lines import Sampled


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

    @property
    def once(self) -> Once:
        """What was computed about the trace."""

    @property
    def sampled(self) -> Sampled:
        """The samples of the stacks in the window; none without `profiler.lines`."""

    @property
    def detailed(self) -> tuple[Links, Sampled] | None:
        """The detail window, and the samples in it; None without one."""
