"""`diff`: compare two captures or runs, and split the change of the step into parts."""

from __future__ import annotations

from instrument.base.errors import CaptureError
from instrument.read.compare.changes import compared, counters_compared
from instrument.read.compare.conditions import Unlike, unlike
from instrument.read.compare.difference import Difference, whole
from instrument.read.compare.side import Comparables, Side, common_phase, left_out, load

__all__ = ["Comparables", "compare", "diff"]


def diff(
    before: Comparables | Side, after: Comparables | Side, *, force: bool = False
) -> Difference:
    """Compare two captures, two runs, or their traces.

    The steps of all windows of a run are compared together. If both sides have several ranks, each
    rank is also compared with the same rank of the other side.

    Args:
        before: a capture, a run, or the path or URL of a capture, a trace or a run; or a list of
            them. With three or more on each side, each change has an interval. Of a folder with
            several runs, the newest is used.
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
    of_was, of_now = was.ranks(phase), now.ranks(phase)
    old, new = was.samples(phase, of_was), now.samples(phase, of_now)
    found = unlike(was.conditions[phase], now.conditions[phase], old.all, new.all)
    found += [Unlike(sentence, misleads=False) for sentence in left_out(was, now, phase)]
    step = whole(None, old, new)
    ranks = [rank for rank in of_was if rank in of_now] if len(of_was) > 1 < len(of_now) else []
    of_ranks = (
        whole(rank, was.samples(phase, [rank]), now.samples(phase, [rank])) for rank in ranks
    )
    return Difference(
        given=(was.name, now.name),
        before=old.all.captures,
        after=new.all.captures,
        what="step" if old.all.what == new.all.what == "step" else "recording",
        wholes=(step, *of_ranks),
        ranges=compared("ranges", old, new, step.parts),
        operators=compared("operators", old, new, step.parts),
        shapes=compared("shapes", old, new, step.parts),
        kernels=compared("kernels", old, new, step.parts),
        counters=counters_compared(old.all, new.all),
        unlike=tuple(found),
    )
