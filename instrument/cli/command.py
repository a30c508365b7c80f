"""The entry point of the command line: the parser, the commands, and the handling of errors.

Each command is a module with three members. `HELP` is the command's line in the list of commands.
`add_arguments` adds the command's arguments to a parser. `run` returns text, a list of text and
tables, or a `Result`; its errors, `InstrumentError` and `OSError`, are printed as one line.
Importing these modules loads neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NoReturn

from instrument.base.errors import InstrumentError, reason_of
from instrument.base.files import fill_standard_streams
from instrument.cli import (
    ab,
    baseline,
    check,
    diagnose,
    diff,
    export,
    graph,
    ls,
    mcp,
    open,
    ranks,
    report,
    run,
    samples,
    show,
    skill,
    sql,
    trigger,
    try_,
    verify,
    version,
    watch,
    whatif,
)
from instrument.cli.output import Result, Written, say, saying_warnings, show_result

COMMANDS = {
    "run": run,
    "show": show,
    "sql": sql,
    "ls": ls,
    "report": report,
    "open": open,
    "diagnose": diagnose,
    "check": check,
    "whatif": whatif,
    "diff": diff,
    "ab": ab,
    "try": try_,
    "verify": verify,
    "baseline": baseline,
    "export": export,
    "ranks": ranks,
    "trigger": trigger,
    "watch": watch,
    "graph": graph,
    "samples": samples,
    "skill": skill,
    "mcp": mcp,
}

# What need not be installed where captures are only read.
_TO_RECORD = ("torch", "hydra", "omegaconf")
# The exit status after Ctrl-C, as in shells.
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in the command line as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        say(f"instrument: {message}; {self.prog} --help lists the arguments.")
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0 after success, 2 after an error, and 130 after Ctrl-C. The command `diff` also
    returns 1 and 3; see `read.compare.limits`. An error is printed as one line on stderr.

    Args:
        argv: the arguments without the name of the program; None means those of this process.
    """
    fill_standard_streams()
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what can follow; nothing may run
        try:
            import argcomplete
        except ImportError:
            return 2
        argcomplete.autocomplete(parser)
    words, program = _split(sys.argv[1:] if argv is None else argv)
    arguments, rest = parser.parse_known_args(words)
    options = [
        word for word in rest if "options" in arguments and "=" in word and not word.startswith("-")
    ]
    if len(options) < len(rest):
        arguments.parser.error(
            f"unrecognized arguments: {' '.join(word for word in rest if word not in options)}"
        )
    if arguments.verbose and arguments.run is not version.run:
        arguments.parser.error("--verbose needs --version")
    arguments.options = options
    arguments.program = program
    status = 0
    try:
        with saying_warnings():
            made = arguments.run(arguments)
        if not callable(made):
            shown, status = made if isinstance(made, Result) else Result(made)
            show_result(shown)
    except BrokenPipeError:  # the reader has ended, as `| head` does; the flush at exit must work
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        say("instrument: interrupted")
        return _INTERRUPTED
    except (InstrumentError, OSError) as error:
        say(f"instrument: {error}")
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _TO_RECORD:
            raise
        needed = error.name if find_spec("torch") else "torch"
        say(
            f"instrument: {arguments.parser.prog} needs {needed}, which is not installed: pip "
            "install torch-instrument installs all that recording needs."
        )
        return 2
    except MemoryError as error:
        say(f"instrument: {reason_of(error)}: read a trace of fewer steps, or allow more memory.")
        return 2
    return made() if callable(made) else status  # errors of a script are not ours


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the words of `ab`, `run` and `try`: their own, and those of the command or script."""
    if argv[:1] in (["run"], ["try"]):
        own, program = (run if argv[0] == "run" else try_).split(argv[1:])
        return [argv[0], *own], program
    if argv[:1] != ["ab"] or "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="instrument", description="Read what torch-instrument or torch.profiler has recorded."
    )
    parser.add_argument(
        "--version",
        dest="run",
        action="store_const",
        const=version.run,
        help="print the version, and whether the compiled trace reader is installed",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="with --version: also Python, torch, the other packages, and the devices",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.HELP)
        command.add_arguments(one)
        one.set_defaults(run=command.run, parser=one)
    parser.set_defaults(run=lambda _: Written(parser.format_help().rstrip()), parser=parser)
    return parser
