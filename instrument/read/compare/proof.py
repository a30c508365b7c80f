"""The certificate of a change: how much faster, with which numbers, and is it the same work?

docs/proof.md describes `proof.json`. A certificate names files in its own folder, with their
hashes; `check` computes everything that it says from these files and its blocks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from instrument import __version__
from instrument.base import files
from instrument.base.errors import CaptureError, InstrumentError, reason_of
from instrument.base.redact import redact_words
from instrument.read.compare import ab_runs
from instrument.read.compare.ab_runs import LABELS, Label, Program, RunTime, Text, log_ratios
from instrument.read.compare.statistics import LEVEL, Change, changes
from instrument.read.compare.work import (
    Declared,
    Difference,
    Facts,
    Name,
    Numbers,
    Work,
    compare_numbers,
    compare_values,
    differences,
    lowest_bits,
    read_work,
)
from instrument.read.trace.capture_json import BAD_JSON

Verdict = Literal[
    "faster and equal", "faster, numbers differ", "not faster", "not the same work", "undecided"
]
PROOF_FILE, TEXT_FILE = "proof.json", "proof.md"
#: The files with the work of A, of B, and of a second run of A.
WORK_FILES = ("work-A.json", "work-B.json", "work-A-again.json")
_MOST_BYTES = 64 << 20
_WRONG = "is not what the files and the blocks give"
Share = Annotated[float, Meta(ge=-1, le=1e9)]


class Side(Struct, frozen=True):
    """A program: its label, name, command without secrets, and commit."""

    label: Label
    name: Text
    command: Annotated[list[Text], Meta(max_length=1000)]
    commit: Name


Block = Annotated[list[RunTime], Meta(min_length=2, max_length=1000)]


class Speed(Struct, frozen=True):
    """The change of the step from A to B, as a share, with its interval; see `Change`."""

    share: Share
    low: Share | None
    high: Share | None
    p_value: Annotated[float, Meta(ge=0, le=1)]
    level: Annotated[float, Meta(gt=0, lt=1)]
    margin: Annotated[float, Meta(gt=0, lt=1)]


class Predicted(Struct, frozen=True):
    """The saving that a finding predicted, as a share of the step, with its bounds."""

    finding: Name
    share: Share | None
    low: Share | None = None
    high: Share | None = None


class File(Struct, frozen=True):
    """A file in the folder of the certificate: its path there, and the hash of its bytes."""

    path: Annotated[str, Meta(min_length=1, max_length=1000)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Proof(Struct, frozen=True, kw_only=True):
    """A certificate; docs/proof.md describes the fields."""

    schema: Literal[1] = 1
    made_by: Name = f"torch-instrument {__version__}"
    verdict: Verdict
    reason: Text
    programs: Annotated[list[Side], Meta(min_length=2, max_length=2)]
    declared: Declared = "same"
    predicted: Predicted | None = None
    change: Speed
    blocks: Annotated[list[Block], Meta(min_length=1, max_length=10_000)]
    load: dict[Label, Annotated[float, Meta(ge=0, le=1)] | None] | None = None
    numbers: Numbers
    gradients: Numbers | None = None
    differences: Annotated[list[Difference], Meta(max_length=64)]
    work: dict[Label, Facts]
    files: Annotated[list[File], Meta(max_length=10_000)]


class Works(NamedTuple):
    """The work of A, of B and of a second run of A."""

    a: Work
    b: Work
    again: Work | None = None


def proof_of(
    programs: Sequence[Program],
    blocks: Sequence[Sequence[RunTime]],
    works: Works,
    folder: Path,
    *,
    margin: float,
    level: float = LEVEL,
    gradients: bool = False,
    declared: Declared = "same",
    predicted: Predicted | None = None,
    load: dict[Label, float | None] | None = None,
) -> Proof:
    """Make a certificate of two programs, A and B.

    Args:
        programs: A and B.
        blocks: each has as many runs of A as of B.
        works: what the programs did in runs that were not timed.
        folder: the folder of the certificate, which holds `WORK_FILES`.
        margin: a change of at most this share counts as the same.
        level: the significance level of the interval.
        gradients: whether the norms of gradients are compared.
        declared: what the change itself says that it does to the numbers.
        predicted: what a finding predicted.
        load: the share of time in which the steps of a side had no CPU.
    """
    own = [name for name, work in zip(WORK_FILES, works) if work is not None]
    return Proof(
        **_judged(blocks, works, margin, level, declared, gradients),
        programs=[
            Side(each.label, each.name, redact_words(each.command), each.commit)
            for each in programs
        ],
        declared=declared,
        predicted=predicted,
        blocks=[[*each] for each in blocks],
        load=load,
        files=[File(name, _sha256(folder, name)) for name in own],
    )


def _judged(
    blocks: Sequence[Sequence[RunTime]],
    works: Works,
    margin: float,
    level: float,
    declared: Declared,
    gradients: bool,
) -> dict[str, Any]:
    """What a certificate says of measurements: these fields can be computed again."""
    change = change_of(blocks, level)
    numbers, a, b = compare_numbers(*works), works.a.facts, works.b.facts
    found = differences(a, b, numbers, declared)
    verdict, reason = verdict_of(change, margin, numbers, found)
    norms = None
    if gradients:
        bits = lowest_bits(a.precision)
        norms = compare_values(a.gradient_norms or [], b.gradient_norms or [], bits)
    # not all digits, because another machine's logarithms may differ in the last one
    low, high = (None if x is None else round(x, 9) for x in (change.low, change.high))
    speed = Speed(round(change.share, 9), low, high, round(change.p_value, 9), level, margin)
    return {
        "verdict": verdict,
        "reason": reason,
        "change": speed,
        "numbers": numbers,
        "gradients": norms,
        "differences": found,
        "work": {"A": a, "B": b},
    }


def run_times(blocks: Sequence[ab_runs.Block], paths: Sequence[str] = ()) -> list[list[RunTime]]:
    """The times of the step, and of the ranges `paths`, in the runs of each block."""
    return [
        [
            RunTime(each.label, each.step_ns, {path: each.ranges_ns[path] for path in paths})
            for each in block.runs
        ]
        for block in blocks
    ]


def change_of(blocks: Sequence[Sequence[RunTime]], level: float = LEVEL) -> Change:
    """Estimate and test the change of the step, of which the compared ranges are parts."""
    paths = [None, *blocks[0][0].ranges_ns]
    ratios = [log_ratios(blocks, path) for path in paths]
    return changes(np.stack(ratios, axis=1), level)[0]


def verdict_of(
    change: Change, margin: float, numbers: Numbers, found: Sequence[Difference]
) -> tuple[Verdict, str]:
    """The verdict, and its reason in a sentence."""
    refusing = [each for each in found if each.refuses]
    if refusing:
        return "not the same work", refusing[0].text
    speed = change.verdict(margin)
    if speed == "undecided":
        few = change.low is None
        why = "There is no interval" if few else "The interval of the change is too wide"
        return speed, f"{why}: it needs more blocks."
    if speed != "faster":
        return "not faster", f"A step of B is {'slower' if speed == 'slower' else 'as fast'}."
    if any(each.what == "precision" for each in found):
        return "faster, numbers differ", "The change lowers the precision, as it says."
    if numbers.equality == "different":
        return "faster, numbers differ", f"The losses differ: {numbers.why}."
    if numbers.equality == "unknown":
        return (
            "undecided",
            f"B is faster, but whether its losses are equal is not known: {numbers.why}.",
        )
    return "faster and equal", f"B is faster, and its losses are {numbers.equality}."


# The files.


def save_work(works: Works, folder: Path) -> None:
    """Write the work of the runs into the folder of a certificate."""
    for name, work in zip(WORK_FILES, works):
        if work is not None:
            files.write(folder / name, msgspec.json.encode(work))


def save(proof: Proof, text: str, folder: Path) -> Path:
    """Write a certificate, and its text, into a folder; return the path of the certificate."""
    content = msgspec.json.format(msgspec.json.encode(proof), indent=1)
    files.write(folder / PROOF_FILE, content)
    files.write(folder / TEXT_FILE, text)
    return folder / PROOF_FILE


def read_proof(path: Path) -> Proof:
    """Read a certificate.

    Raises:
        CaptureError: it cannot be read, is damaged or of another version, or names a file outside
            of its folder.
    """
    try:
        proof = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=Proof)
    except OSError as error:
        raise CaptureError(f"{path} cannot be read ({error.strerror}).") from None
    except BAD_JSON as error:
        raise CaptureError(f"{path} is no certificate of schema 1 ({error}).") from None
    if [each.label for each in proof.programs] != [*LABELS] or {*proof.work} != {*LABELS}:
        raise CaptureError(f"{path} is damaged: its programs are not A and B.")
    for block in proof.blocks:
        labels = [each.label for each in block]
        paths = {tuple(each.ranges_ns) for each in (*block, *proof.blocks[0])}
        if labels.count("A") != labels.count("B") or len(paths) > 1:
            raise CaptureError(f"{path} is damaged: a block needs as many runs of A as of B.")
    for each in proof.files:
        _inside(path.parent, each.path)
    return proof


def _inside(folder: Path, name: str) -> Path:
    """A file of the certificate's folder.

    Raises:
        CaptureError: the path leads out of the folder, also by a link.
    """
    pure, place = PurePosixPath(name), (folder / name).resolve()
    is_plain = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    if not is_plain or not place.is_relative_to(folder.resolve()):
        raise CaptureError(f"The certificate names {name!r}, which is not in its folder.")
    return place


def _sha256(folder: Path, name: str) -> str:
    found = hashlib.sha256()
    with files.open_regular(_inside(folder, name)) as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


class Check(NamedTuple):
    """A part of a certificate that was checked, and what is wrong with it; "" if nothing is."""

    what: str
    wrong: str


def check(proof: Proof, folder: Path) -> Iterator[Check]:
    """Check the hashes of the files, and compute the rest from the files and the blocks again."""
    for each in proof.files:
        try:
            is_same = _sha256(folder, each.path) == each.sha256
        except OSError as error:
            yield Check(each.path, f"cannot be read: {reason_of(error)}")
        else:
            yield Check(
                each.path, "" if is_same else "is another file than that of the certificate"
            )
    named = {each.path for each in proof.files}
    try:
        a, b, again = (read_work(folder / each) if each in named else None for each in WORK_FILES)
    except InstrumentError as error:
        yield Check("work", str(error).rstrip("."))
        return
    if a is None or b is None:
        yield Check("work", "is in no file that the certificate names")
        return
    speed, gradients = proof.change, proof.gradients is not None
    works = Works(a, b, again)
    found = _judged(proof.blocks, works, speed.margin, speed.level, proof.declared, gradients)
    for name, value in found.items():
        yield Check(name, "" if value == getattr(proof, name) else _WRONG)
