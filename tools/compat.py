"""Runs the core suite, without trainers and trackers, under each Python and torch in docs/compatibility.md.

`make compat` runs it. Each pair gets an environment of its own, of some 5 GB where torch brings CUDA along, which is
removed before the next is made; TMPDIR says where. Needs nothing but the standard library. Words like 3.11/2.8.0 choose
pairs: `make compat ONLY="3.12/2.13.0 3.11/2.8.0"`. Ends with the table for that page.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
PINNED = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
OLDEST = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0] + ".0"
BETWEEN, NEWEST = "2.10.0", "2.14.1"
PAIRS = [
    *((python, PINNED) for python in PYTHONS),
    *(("3.11", torch) for torch in (OLDEST, BETWEEN, NEWEST)),
]
LEFT_OUT = ("--ignore=tests/integrations", "--ignore=tests/test_compat.py")
PARALLEL = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile")


def interpreters(python: str) -> Iterator[str]:
    """What may be this Python, on PATH or among pyenv's."""
    if found := shutil.which(f"python{python}"):
        yield found
    yield from map(
        str,
        sorted((Path.home() / ".pyenv" / "versions").glob(f"{python}.*/bin/python"), reverse=True),
    )


def interpreter(python: str) -> str | None:
    """One that runs and is of this version: pyenv puts commands on PATH that refuse to."""
    for path in interpreters(python):
        version = subprocess.run(
            [path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True
        ).stdout
        if version.startswith(f"{python}."):
            return path
    return None


def run(*command: str) -> str:
    """All that a command prints, shown as it comes; what fails shows in the table."""
    print("+", *command, flush=True)
    told = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            told.append(line)
    return "".join(told)


def tested(python: str, torch: str) -> tuple[str, ...]:
    """A row of the table: the Python and torch that ran, and how many tests passed, failed or were skipped."""
    if (base := interpreter(python)) is None:
        return python, torch, "no such Python here"
    with TemporaryDirectory(prefix="instrument-compat-") as folder:
        own = f"{folder}/bin/python"
        run(base, "-m", "venv", folder)
        install = (
            own,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "install",
        )
        run(*install, f"torch=={torch}")
        run(*install, f"torch=={torch}", "-e", ".[test]")
        versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
        found = run(own, "-c", versions).split()[-2:]
        printed = run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PARALLEL, *LEFT_OUT)
    ended = re.findall(r"^(\d+ .*) in [\d.]+s", printed, re.MULTILINE)
    return *found, ended[-1] if ended else "did not run"


def main(chosen: list[str]) -> int:
    """Print the table of the pairs chosen, or of all; 1 where a test failed or nothing ran."""
    rows = [tested(*pair) for pair in PAIRS if not chosen or "/".join(pair) in chosen]
    print(
        "\n| Python | torch | core suite |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        sep="\n",
    )
    return int(
        not rows or any("passed" not in row[2] or re.search("failed|error", row[2]) for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
