"""`instrument samples`: list small captures that come with the package, and copy one of them."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.printable import printable
from instrument.cli.output import Parts, Written, writing

HELP = "list small captures that come with the package, and copy one of them"

FOLDER = Path(__file__).parent.parent / "samples"


class Sample(NamedTuple):
    """A program and what was recorded of it, in the folder of the sample's name."""

    shows: str
    #: The code of the first finding of `instrument diagnose`; None if there is none.
    fault: str | None
    program: str = "train.py"
    ranks: int = 1
    device: str = "CPU"


#: All samples by their names. `tools/samples.py` records them.
SAMPLES = {
    "starved": Sample("a training that waits for its loader", "loader-wait"),
    "python-bound": Sample("a training with a loop over small operators", "loop"),
    "two-ranks": Sample("two ranks, one of which gets more work", "stragglers", ranks=2),
    "before": Sample("a training that computes in float64", "float64"),
    "after": Sample("the same training in float32", None),
    "compiled": Sample("a model that torch compiles in each step", "recompilation"),
    "inference": Sample("a server whose batcher waits for too much", "waiting", "serve.py"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "List the samples: small programs, most of them with a fault, and the captures that "
        "`instrument run` made of them. With a name, copy the sample, to read its captures or to "
        "run its program."
    )
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="the sample to copy (default: list all)")
    add(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        help="a new folder for the copy (default: NAME in the current folder)",
    )


def run(arguments: argparse.Namespace) -> Written | Parts:
    """Return the list of samples, or copy one and return what to do with it."""
    if arguments.name is None:
        return _listed()
    name: str = arguments.name
    if name not in SAMPLES:
        raise ConfigError(f"There is no sample {name!r}{did_you_mean(name, SAMPLES)}")
    folder: Path = arguments.folder or Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a new folder after {name}.")
    with writing(folder):
        shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    sample, quoted = SAMPLES[name], shlex.quote(str(folder))
    program = shlex.quote(str(folder / sample.program))
    launcher = f"torchrun --nproc-per-node {sample.ranks} -m " if sample.ranks > 1 else ""
    lines = [
        f"{printable(str(folder))}: {sample.shows}, recorded on a {sample.device}.",
        "",
        f"Read what was recorded:  instrument diagnose {quoted}",
        f"Record its program:      {launcher}instrument run {'-- ' if launcher else ''}{program}",
    ]
    return Written("\n".join(lines))


def _listed() -> Parts:
    from instrument.read.views.section import Section
    from instrument.read.views.table import Table

    columns = {
        "sample": [*SAMPLES],
        "device": [each.device for each in SAMPLES.values()],
        "ranks": [each.ranks for each in SAMPLES.values()],
        "finding": [each.fault for each in SAMPLES.values()],
        "shows": [each.shows for each in SAMPLES.values()],
    }
    table = Table(columns)
    return [Section(table, [*columns]), "`instrument samples NAME` copies one of them."]
