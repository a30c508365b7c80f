"""Find the captures at a path or URL of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.cli.output import say
from instrument.errors import CaptureError, TraceError
from instrument.files import exists

if TYPE_CHECKING:
    from instrument.capture import Capture

# The names of the files of timings that a run writes, one for each rank.
TIMINGS_FILES = "timings_rank*.jsonl"
# At most this many other captures are listed on stderr.
_OTHERS = 10


def newest_capture(path: Path | str) -> Capture:
    """Return the newest capture at a path or URL; list other captures on stderr."""
    from instrument.capture import Capture

    *others, newest = captures_at(path)
    tell_others(newest, others, "captures")
    return Capture.load(newest)


def captures_at(path: Path | str) -> Sequence[Path | str]:
    """Return the captures at or below a path or URL, the newest last.

    Raises:
        CaptureError: there are no captures, or the path does not exist.
    """
    if isinstance(path, str):
        from instrument.storage import captures

        return captures(path)
    from instrument.analysis.views import kind_of, no_capture_at

    if kind_of(path) is None:
        raise no_capture_at(path)
    if _is_one(path):
        return [path]
    return sorted(
        captures_in(path), key=lambda folder: (folder / "capture.json").stat().st_mtime_ns
    )


def readable_captures(paths: Iterable[Path | str]) -> Iterator[Capture]:
    """Load the captures at the paths, one after the other, and read their events.

    If a path is a folder with several runs, only the newest run is loaded; see `of_newest_run`.

    A capture that cannot be read is reported on stderr. If no capture can be read, the last error
    is raised.

    Raises:
        CaptureError: there are no captures, or none can be read.
        TraceError: no trace can be read.
    """
    from instrument.capture import Capture

    found = [each for path in paths for each in of_newest_run(path)]
    failed: list[CaptureError | TraceError] = []
    for path in found:
        try:
            capture = Capture.load(path)
            capture.events  # noqa: B018 - reads the trace
        except (CaptureError, TraceError) as error:
            failed.append(error)
            if len(failed) == len(found):
                raise
            say(f"Left out: {error}")
            continue
        yield capture


def of_newest_run(path: Path | str) -> Sequence[Path | str]:
    """Return the captures of the newest run at or below a path; list older runs on stderr.

    Raises:
        CaptureError: as `captures_at`.
    """
    from instrument.runs import newest

    found, _, left_out = newest.of_newest_run(captures_at(path))
    if left_out:
        say(left_out)
    return found


def _is_one(path: Path) -> bool:
    """Whether a path is one capture or trace, and not a folder of captures."""
    return not path.is_dir() or any(
        exists(path / name) for name in ("capture.json", "trace.json.gz", "trace.json")
    )


def captures_in(folder: Path) -> list[Path]:
    """Return the folders of the captures below a folder.

    Raises:
        CaptureError: there are no captures.
    """
    from instrument.runs.run import DEPTH, captures_below

    found = list(captures_below(folder))
    if not found:
        patterns = ("*/" * depth + TIMINGS_FILES for depth in range(DEPTH))
        if any(any(folder.glob(pattern)) for pattern in patterns):
            raise CaptureError(
                f"{folder} holds timings and no capture: "
                f"`instrument show {shlex.quote(str(folder))} --timings` shows them."
            )
        raise CaptureError(
            f"{folder} holds no capture: "
            "give the folder of a capture, a folder above it, or a trace file."
        )
    return found


def tell_others(newest: Path | str, others: Sequence[Path | str], kind: str) -> None:
    """Print on stderr which capture is shown, and which others are not, the newest first.

    `kind` says what the paths are, such as "captures" or "windows".
    """
    if others:
        listed = [f"  {path}" for path in others[: -_OTHERS - 1 : -1]]
        listed += [f"  and {len(others) - _OTHERS} more"] if len(others) > _OTHERS else []
        say(f"Showing the newest of {len(others) + 1} {kind}, {newest}; the others are:", *listed)
