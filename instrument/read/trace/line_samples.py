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


# The files of torch that load data.
_LOADER = "torch/utils/data/"


class Samples(Struct, kw_only=True):
    """The samples of the stacks of a process.

    Attributes:
        frames: the kind (user or library), file, line and function of each frame.
        stacks: the frames of each stack, the innermost first, as indices.
        counts: the part of the run, phase, thread, stack and number of samples; the thread that
            takes the steps, or that runs a loader worker, is "".
        waits: of the samples of this thread, those in which it waits; a name of what it waits for
            is in the place of the thread.
    """

    frames: list[tuple[str, str, _Count, str]]
    stacks: list[list[_Count]]
    counts: list[tuple[_Count, str, str, _Count, _Count]]
    waits: list[tuple[_Count, str, str, _Count, _Count]] = []

    def of_phase(self, phase: str) -> Iterator[tuple[int, int, int]]:
        """The part of the run, the stack and the number of samples of the steps of a phase."""
        for part, its_phase, thread, stack, count in self.counts:
            if its_phase == phase and not thread:
                yield part, stack, count

    def file(self, frame: int) -> str:
        """The file of a frame, with slashes."""
        return self.frames[frame][1].replace("\\", "/")

    def place_of(self, frame: int) -> str:
        """The place of a frame; a comprehension counts for the function around it."""
        _, file, line, function = self.frames[frame]
        names = [each for each in function.split(".<locals>.") if each not in COMPREHENSIONS]
        return f"{file}:{line} in {(names or [function])[-1]}"

    def loads(self, stack: int) -> bool:
        """Whether a stack lies in a `DataLoader`, or in what this calls."""
        return any(self.file(frame).startswith(_LOADER) for frame in self.stacks[stack])

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
        """The user's innermost place in a stack, such as "train.py:31 in main"; None for none."""
        frame, _ = self.blamed(stack)
        is_users = frame >= 0 and self.frames[frame][0] == "user"
        return self.place_of(frame) if is_users else None

    def is_in_torch(self, stack: int) -> bool:
        """Whether the innermost frame of a stack is torch's."""
        innermost = self.frames[self.stacks[stack][0]] if self.stacks[stack] else ("", "", 0, "")
        return innermost[0] == "library" and innermost[1].startswith("torch/")

    def are_known(self) -> bool:
        """Whether all frames and stacks exist."""
        stacks = {each[3] for each in (*self.counts, *self.waits)}
        known = all(frame < len(self.frames) for stack in self.stacks for frame in stack)
        return known and max(stacks, default=-1) < len(self.stacks)

    def is_backward(self, stack: int) -> bool:
        """Whether a stack lies in torch's backward, and in no code of the user that this calls."""
        for frame in self.stacks[stack]:
            kind, file, _, function = self.frames[frame]
            if kind == "user":
                return False
            if function in _BACKWARD and file.replace("\\", "/").startswith("torch/autograd/"):
                return True
        return False


class LineSamples(Samples, kw_only=True):
    """The samples of a run; `instrument.record.lines` writes them.

    Attributes:
        times: the Unix time in ns, and the stack, of samples of this thread in windows.
        traced: the Unix times in ns at which this thread began lines in detail windows, and the
            frames of the lines; -1 where the line is unknown.
        run: the id of the run; "" if unknown.
        interval_ns: the average time between two samples.
        first_steps: the first step of each phase, by part of the run.
        marks: at the start of each part and at the end, the time, the CPU time of the process and
            of the thread of the steps, the time in which this was ready but had no CPU, in ns, and
            the memory in bytes.
        used_ns: the CPU time of other threads, by name.
        workers: the samples of the loader workers that were sampled.
    """

    format: _Count
    times: list[tuple[_Count, _Count]]
    traced: tuple[list[_Count], list[Annotated[int, Meta(ge=-1, lt=2**62)]]] = ([], [])
    run: str = ""
    interval_ns: Annotated[int, Meta(ge=1, le=10**10)] = 10_000_000
    first_steps: list[dict[str, _Count]] = []
    marks: list[tuple[_Count, _Count, _Count, _Count, _Count]] = []
    used_ns: dict[str, _Count] = {}
    workers: list[Samples] = []


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
    known = all(each.are_known() for each in (found, *found.workers))
    known &= all(frame < len(found.frames) for frame in found.traced[1])
    known &= len(found.traced[0]) == len(found.traced[1])
    if not known or any(stack >= len(found.stacks) for _, stack in found.times):
        raise CaptureError(f"{path} does not hold the lines of a run: a frame or stack is missing.")
    return found
