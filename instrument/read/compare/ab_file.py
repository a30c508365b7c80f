"""The finished blocks of an A/B comparison in a file, from which `instrument ab` continues it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from instrument.base import files
from instrument.base.errors import ConfigError
from instrument.read.compare.ab import LABELS, Block, Program
from instrument.read.trace.capture_json import BAD_JSON

#: The file in the folder of a comparison.
BLOCKS_FILE = "blocks.json"
_FORMAT = 1
# Each time halves the level: after 20 times, a verdict needs at least 26 blocks.
_MOST_CONTINUED = 20
_MOST_BYTES = 256 << 20


@dataclass(slots=True)
class Finished:
    """What a comparison has measured so far.

    Attributes:
        programs: a digest of the names, the commands and the commits of A and B.
        keep: whether the captures and the output of its runs are kept.
        continued: how often the comparison was continued.
        blocks: the finished blocks.
    """

    programs: str
    keep: bool
    continued: int = 0
    blocks: list[Block] = field(default_factory=list)
    format: int = _FORMAT


def digest(a: Program, b: Program) -> str:
    """Return a text that is equal for equal programs, and that does not hold their arguments."""
    content = [[each.name, *each.command, each.commit] for each in (a, b)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def save(finished: Finished, folder: Path) -> None:
    """Write the finished blocks into the folder of the comparison."""
    files.write(folder / BLOCKS_FILE, msgspec.json.encode(finished))


def read(folder: Path) -> Finished:
    """Read the finished blocks from the folder of a comparison.

    Raises:
        ConfigError: the folder holds no such file, or the file is damaged or of another version,
            or the comparison was continued too often.
    """
    path = folder / BLOCKS_FILE
    try:
        found = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=Finished)
    except OSError as error:
        raise ConfigError(
            f"--continue is {str(folder)!r}, whose {BLOCKS_FILE} cannot be read "
            f"({error.strerror}): give the folder that an undecided comparison has named."
        ) from None
    except BAD_JSON as error:
        raise ConfigError(f"{path} cannot be read ({error}): start a new comparison.") from None
    if found.format != _FORMAT or not found.blocks or not all(map(_is_whole, found.blocks)):
        raise ConfigError(
            f"{path} is damaged or of another version of torch-instrument: start a new comparison."
        )
    if not 0 <= found.continued < _MOST_CONTINUED:
        raise ConfigError(
            f"{path}: a comparison can be continued at most {_MOST_CONTINUED} times: start a new "
            "one, with more --blocks."
        )
    return found


def _is_whole(block: Block) -> bool:
    """Whether a block has two runs of each program, whose steps and ranges have lengths."""
    lengths = [run.record.step_ns for run in block.runs]
    times = [ns for run in block.runs for ns in run.record.ranges_ns.values()]
    return (
        sorted(run.label for run in block.runs) == sorted(LABELS * 2)
        and all(0 < ns < math.inf for ns in lengths)
        and all(0 <= ns < math.inf for ns in times)
    )
