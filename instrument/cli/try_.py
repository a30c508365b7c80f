"""`instrument try`: make changes to a script from outside, and measure which make it faster."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from instrument.base.errors import ConfigError
from instrument.base.prose import wrapped
from instrument.cli.arguments import add_formats, add_step_kind, positive
from instrument.cli.output import Parts, Written, say

HELP = "try changes that need no edit of a script, and measure which make it faster"

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.usage = (
        "instrument try [options] [CHANGE ...] [--] SCRIPT [ARGUMENTS ...]\n"
        "       instrument try [options] [CHANGE ...] -m MODULE [ARGUMENTS ...]"
    )
    parser.description = (
        "Run a training script many times, diagnose it, and make changes to it from outside, such "
        "as a fused optimizer or workers of its loader. Measure each change against the script as "
        "it is, compare the losses step by step, and write a certificate for each. No file of the "
        "script is changed. Without CHANGE, all that fit are tried, those that findings predict "
        "first. `instrument run --with CHANGES SCRIPT` trains with the changes."
    )
    add = parser.add_argument
    add("changes", metavar="CHANGE", nargs="*", help="what to try, such as fused or workers=2")
    add(
        "--budget",
        metavar="TIME",
        type=seconds,
        default=600.0,
        help="the longest time, such as 90s, 10m or 1h (default: 10m)",
    )
    add(
        "--steps",
        metavar="N",
        type=positive,
        help="steps of a timed block (default: as many as take 0.3 s)",
    )
    add(
        "--output",
        metavar="FOLDER",
        type=Path,
        default=Path("tried"),
        help="the folder for the results; a call that was interrupted goes on (default: tried)",
    )
    add(
        "--here",
        action="store_true",
        help="run the script in this folder, not in a copy of it",
    )
    add(
        "--gradients",
        action="store_true",
        help="compare the norms of the gradients in certificates",
    )
    add("--yes", action="store_true", help="do not ask before the first run")
    add("--dry-run", action="store_true", help="list the changes, and run nothing")
    add_step_kind(parser)
    add_formats(parser, json="print JSON", markdown="print Markdown for a pull request")


def seconds(text: str) -> float:
    """Parse a time such as 90s, 10m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 1h, not {text}")
    return float(found[1]) * _SECONDS[found[2]]


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the words after `instrument try` into the command's own and those of the script.

    The script begins after `--`, with `-m`, or with the first word that names a file.
    """
    before = ""
    for number, word in enumerate(words):
        if word == "--":
            return words[:number], words[number + 1 :]
        is_value = before in ("--budget", "--steps", "--output", "--step")
        if word == "-m" or (not is_value and (word.endswith(".py") or Path(word).exists())):
            return words[:number], words[number:]
        before = word
    return words, []


def run(arguments: argparse.Namespace) -> str | Parts:
    """Try the changes; return what was measured, as a table, JSON or Markdown."""
    from instrument.read.compare.tries import Plan, try_changes
    from instrument.read.show.proof import markdown
    from instrument.read.show.tries import as_json, as_markdown, parts
    from instrument.record.applied_changes import variables
    from instrument.record.changes import CHANGES, parse
    from instrument.record.script import prepared

    # a change without its value means each value that fits
    wanted = [word for part in arguments.changes for word in part.split(",") if word]
    for word in wanted:
        if not (word in CHANGES and CHANGES[word].values):
            parse(word)
    if arguments.dry_run:
        chosen = {each.partition("=")[0] for each in wanted} or CHANGES.keys()
        rows = (
            wrapped(each.does, f"{name}{'=…' if each.values else ''}: ", indent="  ")
            for name, each in CHANGES.items()
            if name in chosen
        )
        return [[line for each in rows for line in each]]
    prepared(arguments.program)  # raises if there is no script
    launchers = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
    if any(Path(each).name.startswith(launchers) for each in arguments.program[:2]):
        raise ConfigError(
            "instrument try cannot stop the ranks of a launcher such as torchrun between two steps:"
            " give the script itself, for one rank, or one that starts its ranks with mp.spawn."
        )
    folder: Path = arguments.output.absolute()
    here = Path.cwd() if arguments.here else folder / "copy"
    if not arguments.yes:
        _ask(arguments, here, len(wanted) or len(CHANGES))
    with _locked(folder):
        linked = _made(here, folder)
        if linked:
            say(f"Too large to be copied, so linked: {', '.join(linked)}.")
        found = try_changes(
            Plan(
                script=arguments.program,
                options=["--step", arguments.step] if arguments.step else [],
                folder=folder,
                here=here,
                wanted=wanted,
                until=time.monotonic() + arguments.budget,
                steps=arguments.steps,
                gradients=arguments.gradients,
                variables_of=variables,
                by_hand_of=_by_hand,
                predict=_predicted,
                text_of=markdown,
                say=say,
            )
        )
    if arguments.json:
        return Written(as_json(found))
    return Written(as_markdown(found)) if arguments.markdown else parts(found, arguments.program)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and let no other process use it until the end of the block."""
    from instrument.base.file_lock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    if not lock.hold():
        raise ConfigError(
            f"Another instrument try uses {folder}: wait for its end, or give another --output."
        )
    try:
        yield
    finally:
        lock.release(done=True)


def _by_hand(words: str) -> str:
    from instrument.record.changes import CHANGES

    name, _, value = words.partition("=")
    return CHANGES[name].by_hand_with(value)


def _ask(arguments: argparse.Namespace, here: Path, changes: int) -> None:
    place = "this folder" if arguments.here else f"a copy of this folder, {here}"
    said = (
        f"The script will run at most {2 * changes + 4} times, two of them at a time, in {place}, "
        f"for at most {arguments.budget / 60:.3g} minutes. Each run is ended after some steps. "
        "What it sends to others, or writes to other folders, it does in each run."
    )
    say(*wrapped(said))
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("Nobody can answer here: give --yes to run the script.")
    if input("Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("Nothing was run.")


def _made(here: Path, folder: Path) -> list[str]:
    from instrument.read.compare.scratch import copy_folder, edited

    if not here.exists():
        return copy_folder(Path.cwd(), here, folder)
    if (name := edited(Path.cwd(), here)) is not None:
        raise ConfigError(
            f"{name} has changed since {folder} was made: give another --output, or remove it."
        )
    return []


def _predicted(captures: Sequence[Path]) -> Mapping[str, tuple[float, float, float]]:
    """The savings that the findings of captures predict, by code, and by code and variant."""
    from instrument.read.advise.diagnose import Diagnosing
    from instrument.read.advise.settings import read_settings
    from instrument.read.capture import Capture

    seen = Diagnosing(settings=read_settings())
    for each in captures:
        seen.add(Capture.load(each))
    found: dict[str, tuple[float, float, float]] = {}
    for finding in seen.diagnosis.findings:
        if (saving := finding.saving) is None or saving.saving_ns <= 0:
            continue
        low, high = (bound.share for bound in saving.bounds)
        for code in (finding.code, f"{finding.code}:{finding.variant}"):
            found.setdefault(code, (saving.share, low, high))
    return found
