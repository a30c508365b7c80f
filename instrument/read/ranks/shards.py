"""Shards: each machine summarizes a part of a run's captures, and writes them into a file.

A line of the file is a JSON object: the path of a capture and its summary, or a sentence about a
capture that could not be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from instrument.base.errors import CaptureError, ConfigError
from instrument.base.files import encodable, is_regular, replacing
from instrument.base.units import few
from instrument.read.ranks.rank_summary import MOST_BYTES, RankSummary, encoded, read_all
from instrument.read.trace.capture_json import BAD_JSON
from instrument.read.trace.reader import collector_off
from instrument.read.views.find_captures import Place, captures_at, place_of

_FILE = re.compile(r"ranks-(\d{5})-of-(\d{5})\.jsonl")


class _Line(msgspec.Struct, omit_defaults=True):
    capture: str | None = None
    summary: RankSummary | None = None
    unread: str | None = None


_DECODER = msgspec.json.Decoder(_Line)


class Shard(NamedTuple):
    """The part `number`, counted from 0, of `parts` parts of a run's captures."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> Shard:
        """Read K/N; /N, where K is the number of the task in the job's array; or `auto`.

        For `auto`, the tasks of Slurm's array count from 0, and N is the number of tasks.

        Raises:
            ConfigError: the text is something else, or the job is not part of an array.
        """
        task, first, step, count = (
            environment.get(f"SLURM_ARRAY_TASK_{name}", "")
            for name in ("ID", "MIN", "STEP", "COUNT")
        )
        given, _, of = text.partition("/")
        try:
            if text == "auto":
                found = cls((int(task) - int(first or 0)) // int(step or 1), int(count))
            else:
                index = task or environment.get("JOB_COMPLETION_INDEX", "")  # of Kubernetes
                found = cls(int(given or index), int(of))
        except (ValueError, ZeroDivisionError):
            found = cls(0, 0)
        if not 0 <= found.number < found.parts < 100_000:
            raise ConfigError(
                f"--shard is {text!r}, but it must be K/N with K from 0 to N - 1, auto in an array "
                "of Slurm, or /N in an array of Slurm or an indexed job of Kubernetes."
            )
        return found

    def part_of(self, places: Sequence[Place], below: Place) -> list[Place]:
        """The places of this part; it does not depend on the other places or their order."""
        names = [str(place).removeprefix(str(below)) for place in places]
        # not a checksum, in which names that differ in one digit leave parts empty
        digests = [blake2b(name.encode("utf-8", "surrogateescape")).digest() for name in names]
        parts = [int.from_bytes(digest[:8], "big") % self.parts for digest in digests]
        return [place for place, part in zip(places, parts) if part == self.number]


def make(paths: Sequence[Place], shard: Shard, folder: Path) -> tuple[Path, list[str]]:
    """Write the summaries of a part of the captures or traces into a file in `folder`.

    Returns the file, and a sentence for each capture that cannot be read.

    Raises:
        CaptureError: there are no captures at a path.
        OSError: the file cannot be written.
    """
    places = [(path, captures_at(path, or_traces=True)) for path in paths]
    chosen = [each for path, found in places for each in shard.part_of(found, path)]
    answers = read_all(chosen, keep_copies=False)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"ranks-{shard.number:05d}-of-{shard.parts:05d}.jsonl"
    with replacing(target) as file:
        for place, answer in answers.items():
            capture = encodable(str(place))
            line = _Line(unread=answer) if isinstance(answer, str) else _Line(capture, answer)
            file.write(encoded(line) + b"\n")
    return target, [each for each in answers.values() if isinstance(each, str)]


def files_at(place: Place) -> list[Path]:
    """The shards in a folder; the file itself, if `place` is a shard."""
    path = Path(place)
    every = [path] if _FILE.fullmatch(path.name) else []
    with suppress(ValueError):  # from Python 3.13 on, for a name that no folder can have
        every = every or sorted(path.glob("ranks-*.jsonl"))
    return [file for file in every if _FILE.fullmatch(file.name) and is_regular(file)]


def missing(files: Sequence[Path]) -> list[str]:
    """A sentence that names the missing shards, if there are any.

    Raises:
        CaptureError: the files are parts of different numbers of parts.
    """
    found = [Shard(*map(int, re.findall(r"\d{5}", file.name))) for file in files]
    parts = sorted({shard.parts for shard in found})
    if len(parts) > 1:
        of = few(parts)
        raise CaptureError(f"The shards are of {of} parts: remove those of an earlier run.")
    left = sorted({*range(*parts)} - {shard.number for shard in found}) if found else []
    if not left:
        return []
    return [
        f"shards {few(left)} of {parts[0]}, which are missing: make them with --shard K/{parts[0]}."
    ]


@collector_off()
def read(file: Path) -> tuple[dict[Place, RankSummary], list[str]]:
    """Return the summaries of a shard, and a sentence for each capture that could not be read.

    Raises:
        CaptureError: the file is not a shard of this version.
    """
    found: dict[Place, RankSummary] = {}
    unread: list[str] = []
    try:
        with file.open("rb") as lines:
            while text := lines.readline(MOST_BYTES):
                line = _DECODER.decode(text)
                if line.capture is not None and line.summary is not None:
                    found[place_of(line.capture)] = line.summary
                elif line.unread is not None:
                    unread.append(line.unread)
                else:
                    raise msgspec.DecodeError("a line without a summary")
    except (OSError, *BAD_JSON) as error:
        raise CaptureError(
            f"{file} is no shard of this version ({error}): make it again with --shard."
        ) from None
    return found, unread
