"""Read the file with the lines of a run (`profiler.lines`), which a stranger may have written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct, json

from instrument.base import files
from instrument.base.errors import CaptureError

# The functions of torch/autograd/ around the backward.
_BACKWARD = frozenset({"backward", "grad", "_engine_run_backward"})

#: The functions of comprehensions, whose time belongs to the function around them.
COMPREHENSIONS = frozenset({"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"})

_Count = Annotated[int, Meta(ge=0, lt=2**62)]


class LineSamples(Struct):
    """The samples of the stacks of a run; `instrument.record.lines` writes them.

    Attributes:
        frames: the kind (user or library), file, line and function of each frame.
        stacks: the frames of each stack, the innermost first, as indices.
        counts: the part of the run, phase, thread, stack and number of samples; the thread that
            takes the steps is "".
        times: the Unix time in ns, and the stack, of samples of this thread in windows.
        run: the id of the run; "" if unknown.
        interval_ns: the average time between two samples.
    """

    format: _Count
    frames: list[tuple[str, str, _Count, str]]
    stacks: list[list[_Count]]
    counts: list[tuple[_Count, str, str, _Count, _Count]]
    times: list[tuple[_Count, _Count]]
    run: str = ""
    interval_ns: Annotated[int, Meta(ge=1, le=10**10)] = 10_000_000

    def blamed(self, stack: int) -> tuple[int, str | None]:
        """The frame that the samples of a stack count for, and the library function it called.

        It is the innermost frame of the user; where there is none, the innermost one of a library;
        -1 for a stack without frames.
        """
        below = None
        for frame in self.stacks[stack]:
            kind, file, _, function = self.frames[frame]
            if kind == "user":
                return frame, below
            below = f"{function} ({file})"
        return (self.stacks[stack][0] if self.stacks[stack] else -1), None

    def place(self, stack: int) -> str | None:
        """The user's innermost place in a stack, such as "train.py:31 in main"; None for none.

        A comprehension counts for the function around it.
        """
        frame, _ = self.blamed(stack)
        kind, file, line, function = self.frames[frame] if frame >= 0 else ("", "", 0, "")
        names = [each for each in function.split(".<locals>.") if each not in COMPREHENSIONS]
        return f"{file}:{line} in {(names or [function])[-1]}" if kind == "user" else None

    def is_in_torch(self, stack: int) -> bool:
        """Whether the innermost frame of a stack is torch's."""
        innermost = self.frames[self.stacks[stack][0]] if self.stacks[stack] else ("", "", 0, "")
        return innermost[0] == "library" and innermost[1].startswith("torch/")

    def is_backward(self, stack: int) -> bool:
        """Whether a stack lies in torch's backward, and in no code of the user that this calls."""
        for frame in self.stacks[stack]:
            kind, file, _, function = self.frames[frame]
            if kind == "user":
                return False
            if function in _BACKWARD and file.replace("\\", "/").startswith("torch/autograd/"):
                return True
        return False


def read(path: Path, run: object) -> LineSamples | None:
    """The content of the file; None if there is no file, or if it is that of another run.

    Raises:
        CaptureError: the file cannot be read, or is not one.
    """
    if not files.exists(path):
        return None
    try:
        found = json.decode(files.read_bytes(path), type=LineSamples)
    except OSError as error:
        raise CaptureError(f"{path} cannot be read: {error.strerror or error}.") from None
    except MsgspecError as error:
        raise CaptureError(f"{path} does not hold the lines of a run: {error}.") from None
    if found.format > files.LINES_FORMAT:
        raise CaptureError(
            f"{path} has format {found.format}, and this version of torch-instrument reads formats "
            f"up to {files.LINES_FORMAT}: upgrade torch-instrument."
        )
    if found.run and found.run != run:
        return None
    known = all(frame < len(found.frames) for stack in found.stacks for frame in stack)
    if not known or any(stack >= len(found.stacks) for stack in _stacks(found)):
        raise CaptureError(f"{path} does not hold the lines of a run: a frame or stack is missing.")
    return found


def _stacks(found: LineSamples) -> Iterator[int]:
    yield from (count[3] for count in found.counts)
    yield from (stack for _, stack in found.times)
