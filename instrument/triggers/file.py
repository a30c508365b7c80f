"""A touched file asks for a window; `ask` touches it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from instrument.errors import CaptureError
from instrument.triggers import Ask, Hooks, Request, Trigger

_NAME = "record"
_LONGEST = 20  # bytes that such a file has at most


class File(Trigger):
    """Records the next window when a file in the session's folder is touched, by hand or by `instrument trigger`.

    The file, `record`, is made at the start and goes at the end; a number in it is the window's steps. Each process of
    a run looks at its time stamp every half second and takes each change once; ranks of a job record the same steps.
    """

    cooldown: int = Field(0, ge=0)
    max_windows: int | None = Field(20, ge=1)

    def begin(self, folder: Path, ask: Ask) -> Hooks:
        """Make the file, and take its present stamp for old."""
        path = folder / _NAME
        with suppress(FileExistsError):
            path.touch(exist_ok=False)  # and nothing written: another rank may have taken the stamp already
        seen = _stamp(path)

        def poll() -> None:
            nonlocal seen
            stamp = _stamp(path)
            if stamp is not None and stamp != seen:
                ask(Request(f"the file {_NAME} was touched", _steps_asked(path)))
            seen = stamp

        return Hooks(poll=poll, end=lambda: path.unlink(missing_ok=True))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _steps_asked(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def ask(folder: Path, steps: int | None) -> list[Path]:
    """Touch the file of every run that listens in or below a folder, and return those files.

    Raises:
        CaptureError: there is none.
    """
    found = [path for depth in range(6) for path in folder.glob("*/" * depth + _NAME) if _is_ours(path)]
    if not found:
        raise CaptureError(
            f"No run listens in or below {folder}: it must run, with the file trigger: 'profiler/triggers=[file]'."
        )
    for path in found:
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(f"{steps}\n" if steps else "", encoding="utf-8")
        written.replace(path)  # at once, so that nobody reads half a number
    return found


def _is_ours(path: Path) -> bool:
    """Whether a file is one that the file trigger made, and no other of that name."""
    if not path.is_file() or path.stat().st_size > _LONGEST:
        return False
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return not text or text.isdecimal()
