"""Runs all commands on mutated traces and capture folders; `make fuzz` runs it last. Ends with 1 after a failure.

A command must end with status 0, 1 or 2 (`diff` also 3), without a traceback or a warning. Its memory and CPU time are
limited by the number of events. It must print nothing that controls a terminal, and write only where it was told to.

Failures at the same place of the code count as one. The first of them is reduced, and kept in `outputs/fuzz` with its
command, which runs in the folder `target`. `python tools/fuzz/commands.py --seed 7 --count 1` makes the input 7 again,
if INSTRUMENT_TRACES, a folder of real traces, and the recording in `outputs/fuzz/recorded` are the same.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from builders import allocation, annotation, is_harmless, launched, span, step

import instrument
from fuzz.mutations import Tree, document_of, mutated, packed, unpacked, write
from instrument.cli import command, open
from instrument.read.advise.diagnose import CHECKS

KEPT = Path("outputs/fuzz").absolute()
# The columns of an event take 121 bytes. A command may use 60 times as much, and a constant.
MEMORY_BYTES, BYTES_EACH = 400 << 20, 60 * 121
CPU_S, CPU_S_EACH, HANGS = 6, 100e-6, 20  # after 20 times its CPU time, a command hangs
LARGE = 10_000  # events; on more, only a few commands run
RECORD = """
import sys, torch
from instrument import Session
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
options = dict(active=1, repeat=2, wait=1, warmup=1, export="inline", timings={"every": 1})
with Session("full", model=model, output_dir=sys.argv[1], **options) as session:
    for _ in session.steps(range(8)):
        model(torch.randn(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
# These commands run programs; `skill` reads nothing.
SKIPPED = {"ab", "graph", "mcp", "run", "skill", "try"}
SINKS = ("table", "stacks", "memory", "parquet", "report", "tensorboard", "chrome_trace")
# Values of options by the name that the help gives them; PATH stands for a path of the input.
OPTIONS: dict[str | None, Sequence[str]] = {
    **dict.fromkeys(("PATH", "TRACE", "CAPTURE", "RUN_FOLDER", "OTHER", "PROOF"), ("PATH",)),
    **dict.fromkeys(("FILE", "FOLDER"), ("out",)),
    None: ("",),  # a flag has no value
    "N": ("1", "7"),
    "SHARE": ("0.5", "1"),
    "KEY": ("name", "calls", "self_cpu_ns", "none"),
    "A,B": ("all", "name,calls"),
    "CODE": tuple(check.code for check in CHECKS),
    "KIND:GLOB=FACTOR": ("range:*=0.5", "kernel:*=0", "operator:*=1e9", "thread:*=2"),
    "KIND:GLOB": ("range:*", "kernel:*"),
    "GLOB": ("*", "*aten*"),
    "FACTOR": ("2", "0.1"),
    "CONDITION": ("syncs>0", "operators>+5%", "step>5%"),
    "NAME": ("steps_000002", *SINKS),
    "TABLE": ("ranks", "stragglers", "ranges", "collectives", "clocks"),
    "K/N": ("0/1", "1/3", "auto"),
    "URL": ("memory://fuzz",),
    "N[-M]": ("1", "0-3"),
    "WHERE": ("duration_ns > 100", "kind = 'kernel' or flops is null", "path like 'a%'"),
    "QUERY": (
        "select * from events",
        "select lane, kind, sum(duration_ns) as ns from segments group by lane, kind",
        "select k.name, l.name as by from events k join events l on k.launcher = l.id",
    ),
}
# What runs on traces of 100,000 events of one shape; the other commands show the same views.
ON_SHAPES = [
    [*words.split(), *["../run/trace.json.gz"] * (2 if words == "diff" else 1)]
    for words in (
        "report --output out.html",
        "diagnose",
        "whatif",
        "diff",
        "show --ranges --ops --kernels --steps --moments --memory --streams --launches --queue",
        "show --interruptions --synchronisations --breakdown --copies --coverage",
        "check",
    )
]
WRITES = {"os.rename": 2, "os.link": 2, "os.symlink": 2} | dict.fromkeys(
    ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.rmtree"), 1
)


class Failure(NamedTuple):
    kind: str
    place: str
    words: list[str]
    text: str


class TooSlow(BaseException):
    """A command used too much CPU time; no command catches this."""


# ---- Inputs ----


def seeds() -> list[Tree]:
    """A run with two windows and two ranks, and the same run with a part of each real trace."""
    run, tree = KEPT / "recorded/run", Tree()
    if not run.exists():
        subprocess.run([sys.executable, "-c", RECORD, str(run)], check=True, capture_output=True)
    for path in sorted(run.glob("**/*.json*")):
        name, content = f"run/{path.relative_to(run)}", path.read_bytes()
        other = name.replace("rank0", "rank1")
        if path.name == "trace.json.gz":
            tree[name] = tree[other] = trimmed(content)
        elif path.name == "capture.json":
            tree[other] = json.dumps(document_of(content) | {"rank": 1, "world_size": 2}).encode()
        tree.setdefault(name, content)
    given = os.environ.get("INSTRUMENT_TRACES")
    found = Path(given).glob("*.json.gz") if given else ()
    traces = [name for name in tree if name.endswith("trace.json.gz")]
    of_trees = [tree[traces[0]], *(trimmed(path.read_bytes()) for path in sorted(found))]
    return [
        {**tree, **dict.fromkeys(traces[:2], trace), "traces/bare.json": unpacked(trace)}
        for trace in of_trees
    ]


def trimmed(content: bytes, most: int = 250) -> bytes:
    """The metadata of a trace, three steps, and the events around the middle."""
    document = document_of(content)
    is_list = isinstance(document, list)
    events = document if is_list else document["traceEvents"]
    timed = sorted((each for each in events if each.get("ph") != "M"), key=lambda each: each["ts"])
    first = max(len(timed) // 2 - most // 2, 0)
    steps = [each for each in timed if str(each.get("name")).startswith("ProfilerStep")]
    kept = [*events[:10], *steps[:3], *timed[first : first + most]]
    found = kept if is_list else document | {"traceEvents": kept}
    return packed(json.dumps(found).encode(), content)


def shapes(count: int) -> Iterator[tuple[str, Tree]]:
    """Traces of `count` events each on which a loop over one kind of thing would take minutes."""
    every = range(count)
    made: dict[str, Iterable[Any]] = {
        "nested calls": (span("aten::a", k, 2 * (count - k)) for k in every),
        "nested ranges": (annotation(f"r {k}", k, 2 * (count - k)) for k in every[: count // 5]),
        "threads": (span("aten::a", k, 1, tid=k) for k in every),
        "threads with memory": (
            each
            for k in every[::2]
            for each in (span("aten::a", k, 1, tid=k), allocation(k, 8, k, 8, tid=k))
        ),
        "names": (span(f"name {k}", 2 * k, 1) for k in every),
        "ranges": (annotation(f"name {k}", 2 * k, 1) for k in every),
        "streams": (
            each
            for k in every[1::2]
            for each in launched("gemm", 10 * k, 10 * k + 6, 1, k, tid=k, stream=k)
        ),
        "kernels": (
            each for k in every[1::2] for each in launched(f"name {k}", 10 * k, 10 * k + 6, 1, k)
        ),
        "steps": (step(k, 10 * k, 9) for k in every),
        "mistyped": (span("aten::a", k, 1, f"category {k}", External_id="x") for k in every[::2]),
        "processes": (span("aten::a", k, 1, pid=k) for k in every),
    }
    for shape, events in made.items():
        content = json.dumps({"traceEvents": [*events]}).encode()
        yield shape, {"run/trace.json.gz": packed(content, b"\x1f\x8b")}


def size(tree: Tree) -> int:
    """The number of events in all files; long texts count too."""
    texts = map(unpacked, tree.values())
    return sum(text.count(b'"ph"') + len(text) // 10_000 for text in texts)


def commands(paths: Sequence[str], random: Random) -> Iterator[list[str]]:
    """Each command without options, with some flags, and with some options; then each sink."""
    (parsers,) = command._parser()._subparsers._group_actions
    for name, parser in parsers.choices.items():
        if name not in SKIPPED:
            for flags, options in ((0, 0), (0.4, 0), (0.15, 0.15)):
                yield [name, *words(parser, paths, flags, options, random)]
    for sink in SINKS:
        yield ["export", random.choice(paths), "--sink", sink, "--to", "sink"]


def words(
    parser: Any, paths: Sequence[str], flags: float, options: float, random: Random
) -> Iterator[str]:
    """Arguments for a command, with given shares of its flags and of its options with a value."""
    groups = [each._group_actions for each in parser._mutually_exclusive_groups]
    left_out = {id(action) for group in groups for action in random.sample(group, len(group))[1:]}
    for action in parser._actions:
        share = flags if action.nargs == 0 else options
        if not action.option_strings or "--no-browser" in action.option_strings:
            share = 1
        elif id(action) in left_out or {"--help", "--open", "--on"} & {*action.option_strings}:
            share = 0
        if random.random() < share:
            yield from action.option_strings[-1:]
            number = random.choice((1, 1, 2, 3)) if action.nargs == "+" else action.nargs != 0
            for value in random.choices(action.choices or OPTIONS[action.metavar], k=number):
                yield random.choice(paths) if value == "PATH" else value


# ---- Runs ----


class Commands:
    """Runs commands on an input in a fork of this process, which has loaded what they need.

    This process itself reads no capture: polars, whose threads no fork has, would hang in the forks.
    """

    def __init__(self, box: Path) -> None:
        self._box, self._results = box, box.with_name("results")
        self._outside: list[str] = []
        self._allowed = ""  # the folder into which a command may write; empty between commands
        open._TIMEOUT_S = 0  # nobody opens the address of the trace
        os.environ["XDG_CACHE_HOME"] = os.environ["HOME"] = str(box / "target/home")
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, self._stop)
        for each in pkgutil.walk_packages(instrument.__path__, "instrument."):
            if each.name.split(".")[1] in ("cli", "export", "read"):
                importlib.import_module(each.name)
        gc.freeze()  # so that collections in forks are fast

    def failures(self, tree: Tree, every: Iterable[list[str]]) -> list[Failure]:
        """How commands fail on an input."""
        self._fill(tree)
        events, child = size(tree), os.fork()
        if not child:
            try:
                self._run(every, events)
                os._exit(0)
            finally:
                os._exit(9)
        _, status = os.waitpid(child, 0)
        *done, last = self._results.read_text().rpartition("\n@")
        failures = [Failure(*json.loads(line)) for line in done[0].splitlines() if line[:1] == "["]
        if status:
            line, _, text = last.partition("\n")
            failures.append(Failure(f"ends with {status}", place_in(text), json.loads(line), text))
        return failures

    def _fill(self, tree: Tree) -> None:
        shutil.rmtree(self._box, ignore_errors=True)
        (self._box / "target").mkdir(parents=True)
        write(tree, self._box)
        os.chdir(self._box / "target")

    def _run(self, every: Iterable[list[str]], events: int) -> None:
        """Run commands in this process; note each command and its failures in `results`."""
        log = self._results.open("w", buffering=1)
        printed = [os.open(f"../../{name}", os.O_RDWR | os.O_CREAT) for name in ("out", "err")]
        for number, handle in enumerate(printed, 1):
            os.dup2(handle, number)
        for each in every:
            print(f"\n@{json.dumps(each)}", file=log)
            for handle in printed:
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
            self._outside.clear()
            self._begin(each, events, log)
            status, error = None, ""
            try:
                status = command.main(each)
            except SystemExit as end:
                status = end.code
            except BaseException:
                error = traceback.format_exc()
            self._end()
            out, err = (os.pread(handle, 1 << 22, 0).decode(errors="replace") for handle in printed)
            for kind, text in judged(each, status, error, out, err, self._outside):
                print(json.dumps(Failure(kind, place_in(text), each, text[-5000:])), file=log)
        print("\n@", file=log)

    def _begin(self, each: list[str], events: int, log: TextIO) -> None:
        gc.collect()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + MEMORY_BYTES + BYTES_EACH * events
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        seconds = CPU_S + CPU_S_EACH * events
        faulthandler.dump_traceback_later(HANGS * seconds, exit=True, file=log)
        in_place = each[0] in ("export", "trigger") and not {"--sink", "--to"} <= {*each}
        self._allowed = f"{self._box}/" if in_place else f"{self._box}/target/"
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._allowed = ""
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdout.flush()

    def _stop(self, *_: Any) -> None:
        if self._allowed:
            raise TooSlow

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        """Note what Python writes outside of the allowed folder."""
        names = given[: WRITES.get(event, 0)]
        if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            names = given[:1]
        for name in names if self._allowed else ():
            if isinstance(name, (str, bytes, os.PathLike)):
                folder, own = os.path.split(os.fsdecode(name))
                folder = os.path.realpath(folder)
                if not f"{folder}/{own}".startswith((self._allowed, os.devnull)):
                    self._outside.append(f"{event} in {folder.removeprefix(str(self._box))}")


def judged(
    each: Sequence[str], status: Any, error: str, out: str, err: str, outside: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """What is wrong with how a command ended: a kind of failure, and the text that shows it."""
    if error:
        yield error.strip().rpartition("\n")[2].partition(":")[0], error
    elif status not in (0, 1, 2, 3 if each[0] == "diff" else 2):
        yield "status", repr(status)
    elif status == 2 and not err.strip():
        yield "no sentence", out
    if "this process was forked" in err:
        yield "reads nothing", err
    if "Traceback (most" in err:
        yield "traceback on stderr", err
    elif re.search(r"\w+Warning: ", err):
        yield "warning", err
    if not is_harmless(out) or not is_harmless(err):
        yield "controls the terminal", f"{each[0]}: {out + err!r}"
    for text in outside:
        yield "writes outside", text


def place_in(text: str) -> str:
    """Where in our code a traceback or a warning comes from, else the start of the text."""
    found = re.findall(r'File "[^"]*/(instrument/[^"]*)", line (\d+),? in (\w+)', text)
    if found:  # faulthandler prints the innermost call first
        return "{}:{} {}".format(*found[-1 if "Traceback (most" in text else 0])
    warned = re.search(r"(instrument/\S+:\d+): \w+Warning", text)
    return warned[1] if warned else " ".join(text[:60].split())


# ---- Failures ----


def reduced(tree: Tree, failure: Failure, run: Commands, seconds: float = 60) -> Tree:
    """A smaller tree with the same failure: without files, events and keys that it does not need."""
    until = time.monotonic() + seconds

    def tree_of(parts: dict[str, Any]) -> Tree:
        return {
            name: packed(json.dumps(part).encode(), tree[name])
            if isinstance(part, (dict, list))
            else part
            for name, part in parts.items()
        }

    def fails(parts: dict[str, Any]) -> bool:
        if time.monotonic() > until:
            return False
        found = run.failures(tree_of(parts), [failure.words])
        return any(each[:2] == failure[:2] for each in found)

    parsed = {name: document_of(content) or content for name, content in tree.items()}
    return tree_of(shrunk(parsed if fails(parsed) else dict(tree), fails))


def shrunk(value: Any, fails: Callable[[Any], bool]) -> Any:
    """A document without the parts that it needs not to fail; large parts are left out first."""

    def only(kept: Sequence[Any]) -> Any:
        some = {key: value[key] for key in kept}
        return some if is_object else list(some.values())

    is_object = isinstance(value, dict)
    keys = list(value) if is_object else list(range(len(value)))
    size = len(keys)
    while size:
        for begin in range(0, len(keys), size)[::-1]:
            fewer = keys[:begin] + keys[begin + size :]
            keys = fewer if fails(only(fewer)) else keys
        size //= 2
    value = only(keys)
    for key in list(value) if is_object else range(len(value)):
        if isinstance(value[key], (dict, list)):
            part = partial(put, value, key)
            value = part(shrunk(value[key], lambda inner, part=part: fails(part(inner))))
    return value


def put(value: Any, key: Any, inner: Any) -> Any:
    """A copy of a document with another part."""
    changed = value.copy()
    changed[key] = inner
    return changed


def keep(tree: Tree, failure: Failure, seed: object) -> Path:
    """Write an input and the command on it; the command runs in the folder `target`."""
    name = re.sub(r"[^\w.-]+", "_", f"{failure.kind}_{failure.place}")[:100]
    folder = KEPT / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "target").mkdir(parents=True)
    write(tree, folder)
    text = f"seed {seed}\ninstrument {shlex.join(failure.words)}\n\n{failure.text}\n"
    (folder / "command.txt").write_text(text, errors="replace")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=sys.maxsize)
    given = parser.parse_args(argv)
    found, number, here = Counter[tuple[str, str]](), given.seed, Path.cwd()
    trees = seeds()

    def note(failure: Failure, tree: Tree, seed: object) -> None:
        found[failure[:2]] += 1
        if found[failure[:2]] == 1:
            where = keep(tree, failure, seed)
            print(f"{failure.kind}: {failure.place}, seed {seed}: {where}", flush=True)

    with tempfile.TemporaryDirectory(prefix="instrument-fuzz-") as name:
        run = Commands(Path(name) / "box")
        for shape, tree in shapes(100_000):
            for failure in run.failures(tree, ON_SHAPES):
                note(failure, tree, shape)
        until = time.monotonic() + given.seconds
        while number < given.seed + given.count and time.monotonic() < until:
            random = Random(number)
            tree, changed = mutated(random.choice(trees), random)
            traces = [name for name in changed if "trace" in name]
            folders = map(os.path.dirname, changed + traces)
            paths = [f"../{path}" for path in (*traces, *traces, *folders, "run", min(tree))]
            every = list(commands(paths, random))
            every = random.sample(every, 3) if size(tree) > LARGE else every
            for failure in run.failures(tree, every):
                is_new = failure[:2] not in found
                note(failure, reduced(tree, failure, run) if is_new else tree, number)
            number += 1
        os.chdir(here)
    print(f"{number - given.seed} inputs, {found.total()} failures at {len(found)} places")
    for (kind, place), times in found.most_common():
        print(f"{times:6} {kind}: {place}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
