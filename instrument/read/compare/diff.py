"""`diff`: compare two captures or runs, and split the change of the step into parts."""

from __future__ import annotations

from instrument.base.errors import CaptureError
from instrument.read.compare.conditions import Unlike, unlike
from instrument.read.compare.difference import Difference
from instrument.read.compare.rows import compared, counters_compared
from instrument.read.compare.side import Comparable, Side, common_phase, left_out, load
from instrument.read.compare.step_change import whole
from instrument.read.compare.totals import added

__all__ = ["Comparable", "compare", "diff"]


def diff(before: Comparable | Side, after: Comparable | Side, *, force: bool = False) -> Difference:
    """Compare two captures, two runs, or their traces.

    The steps of all windows of a run are compared together. If both sides have several ranks, each
    rank is also compared with the same rank of the other side.

    Args:
        before: a capture, a run, or the path or URL of a capture, a trace or a run. Of a folder
            with several runs, the newest is used.
        after: the side after the change, in one of the same forms.
        force: compare the sides even if the comparison would mislead.

    Cost: about as much as reading all captures and making their operator tables.

    Raises:
        CaptureError: a side has no capture that can be read, or the sides are so unlike that a
            comparison would mislead.
        TraceError: no trace of a side can be read.
    """
    found = compare(load(before), load(after))
    if found.refusal and not force:
        raise CaptureError(
            f"{found.refusal} Use instrument diff --force (force=True) to compare them "
            "nevertheless."
        )
    return found


def compare(was: Side, now: Side) -> Difference:
    """Compare two sides that were already read, even if the comparison would mislead.

    Raises:
        CaptureError: no phase, such as training or validation, was recorded on both sides.
    """
    phase = common_phase(was, now)
    of_was, of_now = was.of_phase(phase), now.of_phase(phase)
    old, new = added(of_was.values()), added(of_now.values())
    found = unlike(was.conditions[phase], now.conditions[phase], old, new)
    found += [Unlike(sentence, misleads=False) for sentence in left_out(was, now, phase)]
    step = whole(None, old, new)
    ranks = [rank for rank in of_was if rank in of_now] if len(of_was) > 1 < len(of_now) else []
    return Difference(
        given=(was.name, now.name),
        before=old.captures,
        after=new.captures,
        what="step" if old.what == new.what == "step" else "recording",
        wholes=(step, *(whole(rank, of_was[rank], of_now[rank]) for rank in ranks)),
        ranges=compared("ranges", old, new, step),
        operators=compared("operators", old, new),
        shapes=compared("shapes", old, new),
        kernels=compared("kernels", old, new),
        counters=counters_compared(old, new),
        unlike=tuple(found),
    )
