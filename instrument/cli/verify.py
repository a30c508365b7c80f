"""`instrument verify`: check a certificate that `instrument ab --proof` or `try` has written."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.base.errors import ConfigError
from instrument.cli.output import Result, say

if TYPE_CHECKING:
    from instrument.read.compare.ab_runs import Program
    from instrument.read.compare.proof import Check, Proof

HELP = "check a certificate of `ab --proof` or `try`, from its files or by running it again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Check a certificate: the hashes of the files that it names, and whether its change, its "
        "losses, its work and its verdict are those that the files and its blocks give. The status "
        "is 0 if all is right, else 1."
    )
    add = parser.add_argument
    add("proof", metavar="PROOF", type=Path, help="proof.json, or the folder with it")
    add(
        "--repeat",
        action="store_true",
        help="also run both programs again, in the current folder, in as many blocks, and say "
        "whether the new interval of the change overlaps that of the certificate; this runs the "
        "commands that the certificate names",
    )


def run(arguments: argparse.Namespace) -> Result:
    """Return a line for each check."""
    from instrument.base import files
    from instrument.read.compare.proof import PROOF_FILE, check, read_proof

    path: Path = arguments.proof
    path = path / PROOF_FILE if files.is_folder(path) else path
    proof = read_proof(path)
    checks = [*check(proof, path.parent)]
    if arguments.repeat and not any(each.wrong for each in checks):
        checks.append(_repeated(proof))
    lines = [f"{each.what}: {each.wrong or 'right'}" for each in checks]
    is_right = not any(each.wrong for each in checks)
    last = f"Verdict: {proof.verdict}" if is_right else "The certificate is not right."
    return Result([[*lines, last]], int(not is_right))


def _repeated(proof: Proof) -> Check:
    """Run both programs again, and compare the intervals of the change."""
    from instrument.base.units import percent_change
    from instrument.read.compare.ab_runs import run_blocks
    from instrument.read.compare.proof import Check, change_of, run_times

    with _programs(proof) as (a, b), tempfile.TemporaryDirectory() as folder:
        for each in (a, b):
            say(f"{each.label} runs: {shlex.join(each.command)}")
        blocks = [*run_blocks(a, b, len(proof.blocks), Path(folder), keep=False)]
    again, said = change_of(run_times(blocks), proof.change.level), proof.change
    what = f"repeated, {percent_change(again.share)}"
    if again.low is None or again.high is None or said.low is None or said.high is None:
        return Check(what, "has too few blocks for an interval")
    interval = f"{percent_change(again.low)} to {percent_change(again.high)}"
    is_right = again.low <= said.high and said.low <= again.high
    return Check(what, "" if is_right else f"has the interval {interval}, which does not overlap")


@contextmanager
def _programs(proof: Proof) -> Iterator[tuple[Program, Program]]:
    """Yield the programs of a certificate, in worktrees if these are revisions."""
    from instrument.read.compare.ab_runs import Program, program_of_revision, worktrees

    here, commits = Path.cwd(), [each.commit for each in proof.programs]
    if any("***" in word for each in proof.programs for word in each.command):
        raise ConfigError("The certificate hides a word of a command, so --repeat cannot run it.")
    with worktrees(commits, here) if all(commits) else nullcontext([here, here]) as folders:
        a, b = (
            (program_of_revision if each.commit else Program)(
                each.label, each.name, each.command, folder
            )
            for each, folder in zip(proof.programs, folders)
        )
        yield a, b
