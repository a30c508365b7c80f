"""Find the compilations of torch.compile in a window, and why torch compiles code again."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from instrument.analysis.interruptions import is_compilation
from instrument.analysis.views import Views
from instrument.findings.finding import Evidence
from instrument.trace.events import ANNOTATION, OPERATOR, Ints

# torch opens these events around each compilation. Inside are events of the parts of the
# compilation, whose names end with "(dynamo_timed)".
_AROUND = frozenset({"dynamo", "entire_frame_compile"})
# For example, "entire_frame_compile_data: …, compile_id=0/2" is the third compilation of frame 0.
_FRAME = re.compile(r"entire_frame_compile_data: .*compile_id=(?:!\d+/)?(\d+)/(\d+)")

_MOST_REASONS = 5
_LONGEST_REASON = 200


def reasons(name: str, counts: Mapping[str, int]) -> tuple[Evidence, ...]:
    """Make rows of evidence, named `name`, for the most frequent reasons in `counts`."""
    # A text such as "(other reasons)" comes last.
    order = sorted(counts, key=lambda reason: (reason.startswith("("), -counts[reason]))
    return tuple(
        Evidence(name, counts[reason], detail=" ".join(reason.split())[:_LONGEST_REASON])
        for reason in order[:_MOST_REASONS]
    )


def compilations(capture: Views) -> Ints:
    """The outermost events in which torch.compile compiles, on any thread, sorted by start."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    timed = events.named(is_compilation)[tree.index]
    timed &= is_operator | events.among(ANNOTATION)[tree.index]
    holds_timed = tree.with_descendants(timed.astype(np.int64)) > 0
    around = events.named(_AROUND.__contains__)[tree.index] & is_operator & holds_timed
    found: Ints = tree.index[tree.outermost(timed | around)]
    return found[np.argsort(events.start_ns[found], kind="stable")]


def frames_compiled_again(capture: Views) -> Ints:
    """The positions of the events in which torch compiles a Python frame again."""
    events = capture.events

    def is_again(name: str) -> bool:
        found = _FRAME.match(name)
        return found is not None and int(found[2]) > 0

    again: Ints = np.flatnonzero(events.among(ANNOTATION) & events.named(is_again))
    return again
