"""Load the captures at a path or URL of the command line, and say on stderr what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.base.errors import CaptureError, TraceError
from instrument.cli.output import say

if TYPE_CHECKING:
    from instrument.read.capture import Capture
    from instrument.read.ranks.run import Ranks

# At most this many other captures, or captures that are left out, are listed on stderr.
_OTHERS = 10


def newest_capture(path: Path | str) -> Capture:
    """Return the newest capture of a whole window of training at a path or URL, if there is one.

    Else return the most complete capture of the newest run. The others are listed on stderr.
    """
    from instrument.read.capture import Capture
    from instrument.read.views.find_captures import captures_at, of_newest_run

    found = captures_at(path)
    newest = of_newest_run(found).captures[-1]
    others = [each for each in found if each != newest]
    tell_others(newest, others, "captures", "newest" if newest == found[-1] else "most complete")
    return Capture.load(newest)


def readable_captures(paths: Iterable[Path | str]) -> Iterator[Capture]:
    """Load the captures of the newest run at each path, one after the other, and read their events.

    Older runs, and captures that hold no trace or cannot be read, are reported on stderr. If no
    capture can be read, the last error is raised. Several traces of the same steps that record no
    rank are ranks: those in the names of their files, or else in the order of the paths.

    Raises:
        CaptureError: there are no captures, or none can be read.
        TraceError: no trace can be read.
    """
    from instrument.read.capture import Capture
    from instrument.read.ranks.rank_summary import without_trace
    from instrument.read.ranks.run import free_rank
    from instrument.read.views.find_captures import captures_at, of_newest_run, with_parts
    from instrument.read.views.views import rank_in

    found: list[Path | str] = []
    named = set[Path | str]()  # by the user, not found in a folder
    for path in paths:
        at_path = captures_at(path, or_traces=True)
        if at_path == [path] and isinstance(path, Path):
            at_path = with_parts(path)
        run = of_newest_run(at_path)
        found += run.captures  # the page shows the last one
        named.update({path}.intersection(run.captures))
        if run.left_out:
            say(run.left_out)
    failed = reduced = 0
    in_names = {rank_in(Path(path).name) for path in named}
    taken: dict[Any, set[int | None]] = {}  # by the phase and the first step
    for path in found:
        try:
            capture = Capture.load(path)
            is_reduced = without_trace(capture) is not None
            if not is_reduced and len(named) > 1 and path in named:
                first = min(capture.steps.column("number"), default=None)
                of_steps = taken.setdefault((capture.phase, first), set())
                if capture.about.rank is None and capture.events.rank is None:
                    capture.given_rank = free_rank(capture.rank, of_steps, in_names)
                of_steps.add(capture.rank)
            reduced += is_reduced or capture.events is None  # reads it
        except (CaptureError, TraceError) as error:
            failed += 1
            if failed == len(found):
                raise
            if failed <= _OTHERS:
                say(f"Left out: {error}")
            continue
        yield capture
    if failed > _OTHERS:
        say(f"Left out: {failed - _OTHERS} more")
    if reduced:
        say(f"{reduced} of {len(found)} captures hold no trace: only their summaries are compared.")


def chosen_window(paths: Iterable[Path | str], name: str | None = None) -> Ranks:
    """Return the window with a name, or else the newest one; list other windows on stderr.

    Raises:
        CaptureError: there are no captures, none can be read, or the window does not exist.
    """
    from instrument.read.ranks.run import Run

    run = Run.load(*paths)
    for sentence in run.unread:
        say(f"Left out: {sentence}")
    if name is not None:
        return run.window(name)
    *others, newest = run.windows
    tell_others(newest.where, [window.where for window in others], "windows")
    return newest


def tell_others(
    newest: Path | str, others: Sequence[Path | str], kind: str, which: str = "newest"
) -> None:
    """Print on stderr which capture is shown, and which others are not, the newest first.

    `kind` says what the paths are, such as "captures" or "windows".
    """
    if others:
        listed = [f"  {path}" for path in others[: -_OTHERS - 1 : -1]]
        listed += [f"  and {len(others) - _OTHERS} more"] if len(others) > _OTHERS else []
        say(f"Showing the {which} of {len(others) + 1} {kind}, {newest}; the others are:", *listed)
