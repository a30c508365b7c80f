"""Write down all that `instrument` answers about traces, to find out what a change of code changed.

    python tools/answers.py write FOLDER TRACE...     # or folders of captures
    python tools/answers.py compare BEFORE AFTER

`write` writes a folder for each trace, with a file for each view, grouping, diagnosis, simulation,
and section of the page. `compare` names each answer that differs, with its first differing lines.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import instrument
from instrument import Capture
from instrument.base.errors import InstrumentError

# Names of answers, which stay the same when an attribute gets another name.
VIEWS = (
    "ranges", "ranges_attribution", "ranges_rest", "ranges_by_name", "operators",
    "operators_without_flops", "kernels", "layers", "steps", "phases", "moments", "interruptions",
    "memory_devices",
    "memory_steps", "memory_events", "memory_categories", "breakdown", "copies",
    "efficiency", "efficiency_steps", "collectives", "collective_calls", "launches", "streams",
    "cuda_graphs", "cuda_graph_nodes", "queue", "synchronisations", "compiled_ranges", "coverage",
)  # fmt: skip
GROUPINGS = (
    "input_shapes", "input_types", "stack", "overload", "thread", "step", "device", "range",
)  # fmt: skip

LIMITS = (
    "syncs>+0", "operators>+5%", "kernels>10", "peak>2GB", "allocated_bytes>+1kB", "step>5%",
    "collectives.all_reduce>1", "(select count(*) from events where kind = 'wait')>0",
)  # fmt: skip


def answers(capture: Capture) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each answer about a capture, and a function that returns it."""
    for view in VIEWS:
        yield f"view {view}", lambda name=view: getattr(capture, name).to_dicts()
    yield "view memory_live", lambda: capture.memory_live().to_dicts()
    for grouping in GROUPINGS:
        yield f"operators by {grouping}", lambda by=grouping: capture.operators_by(by).to_dicts()
    for metric in ("cpu", "device"):
        yield f"stacks {metric}", lambda metric=metric: [list(s) for s in capture.stacks(metric)]
    yield "diagnosis text", lambda: str(capture.diagnose()).splitlines()
    yield "critical path", lambda: str(capture.whatif.critical_path).splitlines()


def sections(capture: Capture) -> dict[str, Any]:
    """The payload of the page by section."""
    from instrument.read.show.page.page import payload

    found: dict[str, Any] = payload([capture])["sections"]
    return found


def command(words: list[str]) -> list[str]:
    """The lines that a command prints."""
    import contextlib
    import io

    from instrument.cli.command import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(words)
    return out.getvalue().splitlines()


def write_one(path: Path, folder: Path) -> str:
    """Write the answers about one trace."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)

    def keep(name: str, answer: Callable[[], Any]) -> None:
        try:
            found = answer()
        except InstrumentError as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"crash": repr(error)}
        text = json.dumps(found, indent=0, default=str, ensure_ascii=False)
        (folder / f"{name.replace('/', '_')}.json").write_text(text + "\n")

    capture = Capture.load(path)
    for name, answer in answers(capture):
        keep(name, answer)
    try:
        for name, section in sections(capture).items():
            keep(f"page {name}", lambda section=section: section)
    except Exception as error:
        keep("page", lambda error=error: {"crash": repr(error)})
    keep("diagnose --json", lambda: command(["diagnose", "--json", str(path)]))
    keep("whatif --json", lambda: command(["whatif", "--json", str(path)]))
    keep("baseline", lambda: command(["baseline", str(path)]))
    for table in ("ranges", "ops", "steps", "kernels", "breakdown", "collectives"):
        keep(f"show --{table}", lambda table=table: command(["show", f"--{table}", str(path)]))
    return path.name


def write_groups(paths: list[Path], folder: Path) -> None:
    """Write the answers about several captures: ranks, runs and comparisons."""
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")

    def keep(name: str, answer: Callable[[], Any]) -> None:
        try:
            found = answer()
        except Exception as error:
            found = {"crash": repr(error)}
        (folder / f"{name}.json").write_text(json.dumps(found, indent=0, default=str) + "\n")

    by_stem: dict[str, list[Path]] = {}
    for path in paths:
        by_stem.setdefault(path.name.split("_rank")[0], []).append(path)
    for stem, ranks in by_stem.items():
        if len(ranks) > 1:
            keep(f"ranks {stem}", lambda r=ranks: command(["ranks", "--json", *map(str, r)]))
            keep(f"diagnose {stem}", lambda r=ranks: command(["diagnose", "--json", *map(str, r)]))
    pairs = [("v100_resnet50_workers0", "v100_resnet50_workers4"),
             ("a100_megatron_tp8_rank0", "a100_megatron_tp8_rank1"),
             ("h100_qwen_0.5b_inference", "h100_timesformer_inference")]  # fmt: skip
    named = {path.name.removesuffix(".json.gz"): path for path in paths}
    for a, b in pairs:
        if a in named and b in named:
            limits = [word for limit in LIMITS for word in ("--fail-on", limit)]
            words = ["diff", "--json", *limits, str(named[a]), str(named[b])]
            keep(f"diff {a} {b}", lambda words=words: command(words))
    for path in paths:
        if path.is_dir():
            keep(f"diagnose {path.name}", lambda p=path: command(["diagnose", "--json", str(p)]))


def compare(before: Path, after: Path) -> int:
    """Print the answers that differ; return their number."""
    folders = [folder.name for folder in after.iterdir()]
    names = sorted(
        {
            path.relative_to(root)
            for root in (before, after)
            for folder in folders
            for path in (root / folder).rglob("*.json")
        }
    )
    different = 0
    for name in names:
        sides = [(root / name).read_text().splitlines() if (root / name).exists() else []
                 for root in (before, after)]  # fmt: skip
        if sides[0] == sides[1]:
            continue
        different += 1
        print(f"== {name}: {len(sides[0])} -> {len(sides[1])} lines")
        if len(sides[0]) + len(sides[1]) < 200_000:
            diff = difflib.unified_diff(*sides, n=0, lineterm="")
            shown = [line[:160] for _, line in zip(range(10), list(diff)[2:])]
            print("\n".join(f"   {line}" for line in shown))
    print(f"{different} of {len(names)} answers differ")
    return different


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    first, *rest = arguments.paths
    if arguments.action == "compare":
        return int(bool(compare(first, rest[0])))
    print(f"instrument from {Path(instrument.__file__).parent}", file=sys.stderr)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        done = [pool.submit(write_one, p, first / p.name.removesuffix(".json.gz")) for p in rest]
        for each in done:
            print(each.result(), file=sys.stderr)
    write_groups(rest, first / "groups")
    return 0


if __name__ == "__main__":
    sys.exit(main())
