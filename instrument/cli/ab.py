"""`instrument ab`: compare two versions of a program on this machine."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from instrument.base.errors import ConfigError, InstrumentError
from instrument.cli.arguments import positive
from instrument.cli.output import Parts, Written, say, show_result

if TYPE_CHECKING:
    from instrument.read.compare.ab import Comparison
    from instrument.read.compare.ab_runs import Finished, Program
    from instrument.read.compare.proof import Works

HELP = "run two versions of a program alternately, and judge which one is faster"

_FORMS = (
    "give two revisions and a command (BASE HEAD -- COMMAND), two lists of overrides and a command "
    "(--a OVERRIDES --b OVERRIDES -- COMMAND), or two commands (--a COMMAND --b COMMAND)"
)
# If a program fails, its last lines of output are shown: at most this many lines and bytes.
_LINES, _TAIL_BYTES = 15, 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "instrument ab [options] BASE HEAD -- COMMAND\n"
        "       instrument ab [options] --a OVERRIDES --b OVERRIDES -- COMMAND\n"
        "       instrument ab [options] --a COMMAND --b COMMAND"
    )
    parser.description = (
        "Run A and B in alternating blocks, and judge whether a step is slower, faster or the\n"
        "same in B.\n\n"
        "BASE HEAD -- COMMAND: A and B are two git revisions. Each revision is checked out into\n"
        "a temporary folder. The command runs in this folder.\n\n"
        "--a OVERRIDES --b OVERRIDES -- COMMAND: A and B both run COMMAND. A gets the words of\n"
        "--a as its last arguments, and B the words of --b, such as overrides of Hydra.\n\n"
        "--a COMMAND --b COMMAND: A and B are two commands, each given as one argument.\n\n"
        "The commands run without a shell. Each run must use a Session that records a window of\n"
        "several steps (profiler=trace)."
    )
    add = parser.add_argument
    add("revisions", metavar="REVISION", nargs="*", help="two git revisions: BASE, then HEAD")
    add("--a", metavar="WORDS", help="the overrides or the command of A")
    add("--b", metavar="WORDS", help="the overrides or the command of B")
    add(
        "--blocks",
        metavar="N",
        type=positive,
        default=10,
        help="number of blocks to run; a block is two runs of A and two runs of B (default: 10)",
    )
    add(
        "--margin",
        metavar="PERCENT",
        type=percentage,
        default=0.02,
        help="a change of at most ±PERCENT counts as the same (default: 2)",
    )
    add(
        "--output",
        metavar="FOLDER",
        type=Path,
        help="keep the captures and the output of all runs in this new folder",
    )
    add(
        "--continue",
        dest="continued",
        metavar="FOLDER",
        type=Path,
        help="run more blocks of the undecided comparison in this folder, and judge all its blocks",
    )
    add(
        "--proof",
        metavar="FOLDER",
        type=Path,
        help="write a certificate, proof.json and proof.md, into this new folder: run A once more, "
        "B, and A again, not timed, to compare their losses and their work",
    )
    add(
        "--gradients",
        action="store_true",
        help="with --proof, also compare the norms of gradients",
    )
    add("--json", action="store_true", help="print JSON, with all runs and times in nanoseconds")


def percentage(text: str) -> float:
    """Parse a percentage greater than 0 and less than 100; return it as a fraction."""
    share = float(text) / 100
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and less than 100, not {text}")
    return share


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the comparison of A and B; print a line on stderr after each block.

    If a run fails or is interrupted, the result of the finished blocks is printed before the error.
    """
    from instrument.read.compare.ab import Comparison
    from instrument.read.compare.ab_runs import (
        BLOCKS_FILE,
        RunError,
        observe,
        run_blocks,
        save_blocks,
    )
    from instrument.read.compare.proof import Works, save_work
    from instrument.read.show.ab import as_json, parts, progress

    with _sigterm_as_interrupt(), _programs(arguments) as (a, b):
        proof = None if arguments.proof is None else _folder(arguments.proof, "--proof")
        folder, finished = _begin(arguments, a, b)
        blocks, more = finished.blocks, arguments.blocks
        total = len(blocks) + more

        def comparison() -> Comparison:
            return Comparison(blocks, arguments.margin, finished.continued)

        def result() -> str | Parts:
            found = comparison()
            if arguments.json:
                return Written(as_json(a, b, found, folder))
            return parts(a, b, found, folder)

        try:
            if proof is not None:
                works = Works(*(observe(each, proof / "run") for each in (a, b, a)))
                save_work(works, proof)
            for block in run_blocks(a, b, more, folder, finished.keep, len(blocks)):
                blocks.append(block)
                save_blocks(finished, folder)
                say(progress(len(blocks), total, block))
        except (InstrumentError, KeyboardInterrupt) as error:
            if isinstance(error, RunError) and (lines := _last_lines(error.output)):
                say(*lines)
            if blocks:
                show_result(result())
            if proof is not None:  # without a certificate, it would only be in the way of the next
                shutil.rmtree(proof, ignore_errors=True)
            raise
        finally:
            if blocks and not finished.keep and comparison().step.verdict != "undecided":
                (folder / BLOCKS_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds the failed run, the kept runs or the blocks
                folder.rmdir()
        shown = result()
        if proof is None:
            return shown
        certificate = _certify((a, b), comparison(), works, proof, arguments.gradients)
        if isinstance(shown, str):
            say(*certificate)
            return shown
        return [*shown, certificate]


def _certify(
    programs: tuple[Program, Program],
    comparison: Comparison,
    works: Works,
    folder: Path,
    gradients: bool,
) -> list[str]:
    """Write the certificate of a comparison, and return it as lines."""
    from instrument.read.compare.ab_runs import LABELS
    from instrument.read.compare.proof import proof_of, run_times, save
    from instrument.read.show.proof import lines, markdown

    waits = [[each.cpu_wait for each in comparison.runs(label)] for label in LABELS]
    known = [[each for each in side if each is not None] for side in waits]
    paths = [each.path for each in comparison.quantities if each.path is not None]
    proof = proof_of(
        programs,
        run_times(comparison.blocks, paths),
        works,
        folder,
        margin=comparison.margin,
        level=comparison.level,
        gradients=gradients,
        load={label: median(side) if side else None for label, side in zip(LABELS, known)},
    )
    path = save(proof, markdown(proof), folder)
    return [*lines(proof), f"The certificate is {path}"]


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a cancelled CI job leaves no git worktree or program."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(arguments: argparse.Namespace, a: Program, b: Program) -> tuple[Path, Finished]:
    """Return the folder of the comparison, and what it has measured so far."""
    from instrument.read.compare.ab_runs import Finished, digest, read_blocks

    if arguments.continued is None:
        keep = arguments.output is not None
        return _folder(arguments.output, "--output"), Finished(digest(a, b), keep)
    folder: Path = arguments.continued
    if arguments.output is not None:
        raise ConfigError("--continue uses the folder of the comparison: leave out --output.")
    finished = read_blocks(folder)
    if finished.programs != digest(a, b):
        raise ConfigError(
            f"--continue is {str(folder)!r}, which compares other programs: give the same "
            "revisions, --a, --b and command as before; a revision must be the same commit."
        )
    finished.continued += 1
    return folder.absolute(), finished


def _folder(given: Path | None, option: str) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="instrument-ab-"))
    try:
        given.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{option} is {str(given)!r}, which exists: give a new folder"
            f"{', or use --continue' * (option == '--output')}."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(given)!r}, which cannot be created ({error.strerror}): give another "
            "folder."
        ) from None
    return given.absolute()


def _last_lines(output: Path) -> list[str]:
    with output.open("rb") as file:
        file.seek(max(output.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    shown = [f"  {line}" for line in lines[-_LINES:]]
    return ["The last lines of its output:", *shown] if shown else []


@contextmanager
def _programs(arguments: argparse.Namespace) -> Iterator[tuple[Program, Program]]:
    """Yield the two programs that the arguments name; remove the worktrees of revisions after."""
    from instrument.read.compare.ab_runs import LABELS, Program, program_of_revision, worktrees

    sides, command, here = (arguments.a, arguments.b), arguments.program, Path.cwd()
    given = [each for each in sides if each is not None]
    if len(arguments.revisions) == 2 and not given and command:
        with worktrees(arguments.revisions, here) as folders:
            a, b = (
                program_of_revision(label, name, command, folder)
                for label, name, folder in zip(LABELS, arguments.revisions, folders)
            )
            yield a, b
    elif len(given) == 2 and not arguments.revisions:
        a, b = (
            Program(label, text or "(no overrides)", [*command, *_words(label, text)], here)
            for label, text in zip(LABELS, given)
        )
        if not a.command or not b.command:
            raise ConfigError(f"--a or --b is an empty command: {_FORMS}.")
        yield a, b
    else:
        raise ConfigError(f"These arguments do not name two programs: {_FORMS}.")


def _words(label: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        option = f"--{label.lower()}"
        raise ConfigError(f"{option} is {text!r}: {error}; close the quotation.") from None
