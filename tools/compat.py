"""Runs the core suite, without trainers and trackers, under each Python and torch in docs/compatibility.md.

`make compat` runs it. uv makes each pair's environment, fetches a Python that is not here, and caches what it
downloads, some 3 GB for a torch that brings CUDA along; UV_FIND_LINKS names a folder with other builds. Words like
3.11/2.8.0 choose pairs: `make compat ONLY="3.12/2.13.0 3.11/2.8.0"`. The results go into the table of that page, with
the commit that was tested; rows of pairs that did not run stay.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = "| Python | torch | tests | commit |\n|---|---|---|---|\n"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINNED = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
OLDEST = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0] + ".0"
BETWEEN, NEWEST = "2.10.0", "2.14.1"
PAIRS = [
    *((python, PINNED) for python in PYTHONS),
    *(("3.11", torch) for torch in (OLDEST, BETWEEN, NEWEST)),
]
LEFT_OUT = ("--ignore=tests/integrations", "--ignore=tests/test_compat.py")
PARALLEL = ("-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder")


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


def commit() -> str:
    """The commit that is checked out; a "+" says that files differ from it."""
    shown = ("git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+")
    return (
        subprocess.run(shown, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    )


def with_rows(page: str, rows: list[tuple[str, ...]]) -> str:
    """The page with these rows in its table, which replace those of the same Python and torch."""
    before, head, rest = page.partition(HEAD)
    lines = re.match(r"(?:\|.*\n)*", rest)[0]
    kept = [tuple(line.strip("| ").split(" | ")) for line in lines.splitlines()]
    table = {pair(*row[:2]): row for row in [*kept, *rows]}
    known = sorted(table.items(), key=lambda each: [[*map(int, v.split("."))] for v in each[0]])
    text = "".join(f"| {' | '.join(row)} |\n" for _, row in reversed(known))
    return f"{before}{head}{text}{rest.removeprefix(lines)}"


def pair(python: str, torch: str) -> tuple[str, str]:
    """The versions by which a row is known: 3.11 and 2.8.0 for 3.11.7 and 2.8.0+cu128."""
    return ".".join(python.split(".")[:2]), torch.partition("+")[0]


def tested(python: str, torch: str) -> tuple[str, ...]:
    """A row of the table: the Python and torch that ran, and how many tests passed, failed or were skipped."""
    # fmt: off
    environment = ("uv", "run", "--isolated", "--no-project", "--python", python,
                   "--with", f"torch=={torch}", "--with-editable", ".[test]")
    # fmt: on
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = re.search(
        r"^(3\.\S+) (\S+)$", run(*environment, "python", "-c", versions), re.MULTILINE
    )
    if found is None:
        return python, torch, "no such environment here"
    printed = run(*environment, "pytest", "-q", "-p", "no:cacheprovider", *PARALLEL, *LEFT_OUT)
    ended = re.findall(r"^(\d+ .*) in [\d.]+s", printed, re.MULTILINE)
    return *found.groups(), ended[-1] if ended else "did not run"


def main(chosen: list[str]) -> int:
    """Run the pairs chosen, or all, and write what passed into the page; 1 where a test failed or nothing ran."""
    rows = [(*tested(*pair), commit()) for pair in PAIRS if not chosen or "/".join(pair) in chosen]
    print("", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    passed = [row for row in rows if "passed" in row[2] and not re.search("failed|error", row[2])]
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), passed), encoding="utf-8")
    return int(not rows or passed != rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
