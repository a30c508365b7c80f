"""Random single edits in the core modules, each run against the tests of its module: does any test notice?

`make mutants` draws 300 with a seed, prints what became of each, and a diff of every survivor; `make mutants-planted`
makes the edits named in `mutants_known.py` instead, each of which one test must notice. Neither is part of CI: the
first takes an hour or more on two cores.

Each worker has its own copy of what is under version control and of the compiled modules, so that the working tree is
never touched, loads torch once, and forks for each run of tests. Neither mutmut 3 nor cosmic-ray does that: mutmut adds
frames which tests of tracebacks count, and draws no sample; cosmic-ray edits the working tree and starts Python, with
torch, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mutants_known import EQUIVALENT, PLANTED, TESTS

ROOT = Path(__file__).parent.parent
WORKERS = 2
_LEAST_TIMEOUT_S, _TIMES_SLOWER = 60, 5
_PAIRS = "< <=,> >=,== !=,in not_in,is is_not,+ -,& |,<< >>,and or"
_OPERATORS = {
    **{a: b for pair in _PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])},
    **dict.fromkeys(("/", "//", "%", "**"), "*"),
    "*": "//",
}
_TOKEN = re.compile(r"not\s+in|is\s+not|\b(?:in|is|and|or)\b|<<|>>|[<>=!]=|\*\*|//|[-+*/%&|<>]")

Edit = tuple[int, int, str]  # from which byte to which, and what stands there instead


class Mutant(NamedTuple):
    """A module with one edit; `was` and `now` are the lines around it, by which it can be named."""

    module: str
    place: str
    was: str
    now: str
    source: bytes


def edits(source: str) -> Iterator[Edit]:
    """Every edit of a module: operators, conditions, small numbers, flags, and calls that are left out."""
    data, starts = source.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[
            node.end_lineno - 1
        ] + node.end_col_offset

    def between(*nodes: ast.expr) -> Iterator[Edit]:
        for left, right in pairwise(nodes):
            begin, end = span(left)[1], span(right)[0]
            text = re.sub("#.*", lambda comment: " " * len(comment[0]), data[begin:end].decode())
            if found := _TOKEN.search(text):
                now = _OPERATORS["_".join(found[0].split())].replace("_", " ")
                yield begin + found.start(), begin + found.end(), now

    def here(node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Compare):
            yield from between(node.left, *node.comparators)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(*node.values)
        elif isinstance(node, ast.AugAssign):
            yield from between(node.target, node.value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
            begin, _ = span(node)
            yield begin, begin + (3 if isinstance(node.op, ast.Not) else 1), ""
        elif isinstance(node, ast.IfExp | ast.If):
            yield *span(node.test), f"not ({ast.get_source_segment(source, node.test)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield (
                *span(node),
                repr(not node.value if isinstance(node.value, bool) else node.value + 1),
            )
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and not _says(node.value)
        ):
            yield *span(node), "pass"

    def below(node: ast.AST) -> Iterator[Edit]:
        if _says(node):
            return
        yield from here(node)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from below(child)

    yield from below(ast.parse(source))


def _says(node: ast.AST) -> bool:
    """Whether a node only says something: to the log, in an error, a text or a table of figures, or as a type."""
    calls = isinstance(node, ast.Call) and re.match(
        r"logger\.|warnings\.|cast|TypeVar", ast.unparse(node.func)
    )
    names = isinstance(node, ast.Assign) and re.search(
        r"= .*(\| None|Callable\[|\| str)", ast.unparse(node)
    )
    # published figures, which a test could only repeat
    figures = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_TABLE"
    return bool(calls or names or figures) or isinstance(
        node, ast.Raise | ast.JoinedStr | ast.Assert
    )


def mutants(module: str) -> Iterator[Mutant]:
    """All edits of a module that leave it Python."""
    data = (ROOT / module).read_bytes()
    for begin, end, text in edits(data.decode()):
        first, last = data.rfind(b"\n", 0, begin) + 1, data.find(b"\n", end)
        source = data[:begin] + text.encode() + data[end:]
        try:
            compile(source, module, "exec")
        except SyntaxError:
            continue
        both = data[first:last], data[first:begin] + text.encode() + data[end:last]
        lines = [" ".join(each.decode().split()) for each in both]
        yield Mutant(
            module, f"{module}:{1 + data.count(10, 0, begin)}", *lines, source
        )  # 10: the end of a line


class Run(NamedTuple):
    """Tests to run, and the source of one module for them."""

    module: str
    source: bytes
    tests: list[str]
    timeout_s: float


class Worker:
    """A copy of the project, and a process that has loaded torch and forks for each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        compiled = [path.relative_to(ROOT) for path in ROOT.glob("instrument/*/*.so")]
        for name in [*filter(None, listed.split("\0")), *compiled]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
        (folder / "tmp").mkdir()
        own = {"PYTHONPATH": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder / "tmp")}
        own["PYTHONDONTWRITEBYTECODE"] = (
            "1"  # a source of the same size and second would not be compiled anew
        )
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tools" / "mutants_fork.py"], cwd=folder, env=os.environ | own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def judge(self, run: Run) -> tuple[str, float]:
        """`passed`, `timed out` or `failed` with the name of a test, and how many seconds that took."""
        assert self.process.stdin
        assert self.process.stdout
        path, began = self.folder / run.module, time.monotonic()
        kept = path.read_bytes()
        path.write_bytes(run.source)
        try:
            print((run.tests, run.timeout_s), file=self.process.stdin, flush=True)
            return self.process.stdout.readline().strip(), time.monotonic() - began
        finally:
            path.write_bytes(kept)
            for left in (self.folder / "tmp").iterdir():
                shutil.rmtree(left, ignore_errors=True)


def judged(runs: Iterable[Run], free: Queue[Worker]) -> Iterator[tuple[str, float]]:
    """What comes of each run, in order, as many at a time as there are workers."""

    def one(run: Run) -> tuple[str, float]:
        worker = free.get()
        try:
            return worker.judge(run)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(WORKERS) as threads:
        yield from threads.map(one, runs)


def plant(free: Queue[Worker]) -> int:
    """Make each named edit: its test must fail, and pass without it."""
    runs = []
    for planted in PLANTED:
        source = (ROOT / planted.module).read_text()
        if source.count(planted.was) != 1:
            sys.exit(
                f"{planted.module} holds {planted.was!r} {source.count(planted.was)} times: change that entry."
            )
        for text in (source, source.replace(planted.was, planted.now)):
            runs.append(Run(planted.module, text.encode(), [planted.test], 300))
    answers = [answer for answer, _ in judged(runs, free)]
    missed = 0
    for planted, before, after in zip(PLANTED, answers[::2], answers[1::2]):
        missed += not (noticed := before == "passed" and after.startswith("failed FAILED"))
        print(
            "noticed" if noticed else f"MISSED ({before}, then {after})",
            planted.name,
            planted.test,
            sep="  ",
        )
    return int(missed > 0)


def draw(free: Queue[Worker], modules: list[str], count: int, seed: int) -> int:
    """Try random mutants of some modules, and tell what became of them."""
    every = [mutant for module in modules for mutant in mutants(module)]
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    tried = [
        mutant for mutant in drawn if (mutant.module, mutant.was, mutant.now) not in EQUIVALENT
    ]
    print(
        f"{len(every)} mutants; {len(drawn)} drawn, {len(drawn) - len(tried)} of them named equivalent.",
        flush=True,
    )
    used = list(dict.fromkeys(mutant.module for mutant in tried))
    as_is, limits = (
        [Run(module, (ROOT / module).read_bytes(), TESTS[module], 600) for module in used],
        {},
    )
    for module, (answer, seconds) in zip(used, judged(as_is, free)):
        if answer != "passed":
            sys.exit(f"{module}: its tests must pass without an edit, but {answer}.")
        limits[module] = max(_LEAST_TIMEOUT_S, _TIMES_SLOWER * seconds)
    ends: dict[str, list[Mutant]] = {"killed": [], "timed out": [], "survived": []}
    runs = [
        Run(mutant.module, mutant.source, TESTS[mutant.module], limits[mutant.module])
        for mutant in tried
    ]
    for mutant, (answer, seconds) in zip(tried, judged(runs, free)):
        end = {"passed": "survived", "timed out": "timed out"}.get(answer, "killed")
        ends[end].append(mutant)
        print(
            f"{end:9} {seconds:4.0f} s  {mutant.place}  {mutant.was}  =>  {mutant.now}  [{answer}]",
            flush=True,
        )
    for mutant in ends["survived"]:
        sides = (ROOT / mutant.module).read_text().split("\n"), mutant.source.decode().split("\n")
        print(
            "", *difflib.unified_diff(*sides, mutant.place, "survived", n=2, lineterm=""), sep="\n"
        )
    print(
        *(f"{len(those)} {end}," for end, those in ends.items()),
        f"of {len(tried)} with seed {seed}",
    )
    return 0


def main() -> int:
    """Run what was asked for; 1 where a planted edit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of the modules' paths, such as links/launches"
    )
    parser.add_argument("--planted", action="store_true", help="the named edits, not random ones")
    chosen = parser.parse_args()
    modules = [
        module for module in TESTS if not chosen.only or any(part in module for part in chosen.only)
    ]
    with TemporaryDirectory(prefix="instrument-mutants-", ignore_cleanup_errors=True) as folder:
        workers = [Worker(Path(folder) / str(number)) for number in range(WORKERS)]
        free: Queue[Worker] = Queue()
        for worker in workers:
            free.put(worker)
        try:
            return plant(free) if chosen.planted else draw(free, modules, chosen.count, chosen.seed)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()


if __name__ == "__main__":
    sys.exit(main())
