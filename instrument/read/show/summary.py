"""The numbers that several texts say of a capture. Each text takes them from here and formats them.

So the log, a terminal, Markdown and the page have one value for each name.
"""

from __future__ import annotations

from typing import NamedTuple

from instrument.read.facts.idle import device_time, lasting_steps
from instrument.read.facts.segments import KINDS, step_parts
from instrument.read.views.views import Views


class Summary(NamedTuple):
    """How long the counted steps take, and what they consist of.

    Attributes:
        has_steps: whether a step finished; if not, the recording counts as one step.
        numbers: the numbers of the counted steps.
        steps_ns: how long each counted step takes, until its device work ends (`lasting_steps`).
        kinds, ranges: the mean time of a step by kind (`segments.KINDS`) and by range.
        idle: the share of `device_time` in which no device works; None without device work.
    """

    has_steps: bool
    numbers: list[int]
    steps_ns: list[int]
    kinds: dict[str, float]
    ranges: dict[str, float]
    idle: float | None

    @property
    def step_ns(self) -> int:
        """The mean of `steps_ns`."""
        return sum(self.steps_ns) // len(self.steps_ns)

    def share(self, ns: float) -> float:
        """A mean time of a step as a share of the step."""
        return ns / (sum(self.kinds.values()) or 1)


def summary(capture: Views) -> Summary:
    """Return the numbers of a capture; computed once."""
    return capture.once("summary", lambda: _summary(capture))


def _summary(capture: Views) -> Summary:
    links = capture.links
    span = lasting_steps(links, capture.work).only(links.counted_steps.kept)
    kinds, ranges = dict.fromkeys(KINDS, 0.0), dict[str, float]()
    for (path, kind), ns in step_parts(capture).items():
        kinds[kind] += ns / span.count
        ranges[path] = ranges.get(path, 0.0) + ns / span.count
    spent = device_time(capture)
    return Summary(
        has_steps=span.what == "step",
        numbers=capture.steps.column("number")[span.kept],
        steps_ns=(span.end_ns - span.start_ns).tolist(),
        kinds=kinds,
        ranges=ranges,
        idle=spent["idle_ns"] / spent["total_ns"] if spent["total_ns"] else None,
    )
