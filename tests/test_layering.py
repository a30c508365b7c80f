"""Who may import whom, and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import instrument

ROOT = Path(instrument.__file__).parent

# Each room may import those on its own line and above, and the packages named; optional packages are imported
# inside the function that needs them, and named with it.
LINES: list[tuple[set[str], set[str]]] = [
    ({"printable"}, set()),
    ({"errors", "files", "range_names", "redact", "config.schedule"}, set()),
    ({"cache"}, set()),
    ({"threads"}, {"loguru"}),
    ({"config.activities"}, set()),
    ({"config.options"}, {"pydantic", "pydantic_core"}),
    (
        {
            "patterns",
            "storage",
            "trace",
            "links",
            "analysis",
            "capture",
            "report.notebook",
            "runs.run",
            "runs.rank_summary",
            "runs.rank_comparison",
            "runs.clock_skew",
            "runs.timings_file",
        },
        {"numpy", "msgspec", "pandas", "polars", "pyarrow", "fsspec"},
    ),
    ({"report"}, {"rich"}),
    ({"sinks"}, {"pydantic", "pydantic_core", "loguru", "tensorboard", "pyarrow", "wandb", "mlflow"}),
    ({"worker.job", "worker.run_lock"}, {"msgspec"}),
    ({"runs"}, {"loguru", "msgspec"}),
    ({"config.presets"}, {"omegaconf"}),
    ({"config.instantiate"}, {"pydantic", "omegaconf", "hydra"}),
    ({"config.step_actions"}, {"loguru"}),
    ({"config"}, {"pydantic", "pydantic_core", "omegaconf"}),
    ({"worker.queue", "worker.waiting"}, {"loguru"}),
    ({"worker.upload", "worker.finish"}, {"loguru"}),
    ({"annotate.backends"}, {"torch", "loguru"}),
    ({"record.overhead", "record.signals"}, {"loguru"}),
    ({"worker.process"}, {"loguru", "msgspec"}),
    ({"worker.leftovers"}, set()),
    ({"record.metadata"}, {"torch"}),
    ({"record.distributed"}, {"torch", "loguru"}),
    ({"triggers", "record.trigger_runner", "record.loss_reader"}, {"pydantic", "torch", "loguru"}),
    ({"annotate.wrapper"}, set()),
    ({"annotate.module_calls", "annotate.profiled"}, {"torch"}),
    ({"annotate"}, {"torch"}),
    ({"record.phases"}, set()),
    (
        {"record.torch_support", "record.execution_trace", "record.memory_categories", "record.profile_hook"},
        {"torch", "loguru"},
    ),
    ({"record.limits"}, set()),
    ({"record.one_profiler"}, {"torch"}),
    ({"record.recorder"}, {"torch", "loguru"}),
    ({"worker"}, {"loguru", "msgspec"}),
    ({"record.windows"}, {"loguru"}),
    ({"record.timings"}, {"torch", "numpy", "loguru", "tensorboard"}),
    ({"fx"}, {"torch", "numpy", "loguru"}),
    ({"record"}, {"torch", "loguru"}),
    ({"__init__"}, set()),
    ({"integrations", "cli"}, {"torch", "lightning", "transformers", "ignite"}),
    ({"__main__"}, set()),
]
# Models import `annotate`: it must stay far from the configuration and the sinks.
LIGHT = {
    "annotate.profiled": {"errors", "range_names", "annotate.backends", "annotate.wrapper", "annotate.module_calls"},
    "annotate.module_calls": {"range_names", "annotate.backends"},
    "annotate.wrapper": {"range_names", "annotate.backends"},
    "annotate.backends": {"errors", "range_names"},
    "config.schedule": set(),
}
OPTIONAL = {"tensorboard", "wandb", "mlflow", "pandas", "polars", "pyarrow", "fsspec"}


ROOMS = set().union(*(rooms for rooms, _ in LINES))


def room(module: str) -> str:
    """The longest name in the table that a module, without the leading `instrument.`, is or is in."""
    parts = module.split(".")
    found = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in found if name in ROOMS), "__init__")


def room_of(file: Path) -> str:
    if file.name == "__init__.py" and file.parent == ROOT:
        return "__init__"
    return room(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Each module that a file imports, and whether it does so on being loaded."""
    tree = ast.parse(file.read_text())
    inside = {id(node) for block in ast.walk(tree) if is_not_run_at_load(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            own = node.module.partition(".")[0] == "instrument"
            names = [f"{node.module}.{a.name}" for a in node.names] if own else [node.module]
            yield from ((name, id(node) not in inside) for name in names)


def is_not_run_at_load(block: ast.AST) -> bool:
    """Whether it is a function, or for the type checker alone."""
    if isinstance(block, ast.If):
        return isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING" and not block.orelse
    return isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent.name != "conf")


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_from_the_lines_above(file: Path) -> None:
    own = room_of(file)
    line = next(i for i, (rooms, _) in enumerate(LINES) if own in rooms)
    above = set().union(*(rooms for rooms, _ in LINES[: line + 1]))
    for module, at_load in imports(file):
        top, _, rest = module.partition(".")
        if top == "instrument":
            target = room(rest)
            assert target in above, f"{file.name} imports {module}"
            if own in LIGHT:
                assert target in LIGHT[own], f"{file.name} imports {module}"
        elif top not in sys.stdlib_module_names:
            assert top in LINES[line][1], f"{file.name} imports {module}"
            assert not (top in OPTIONAL and at_load), f"{file.name} imports the optional {module} when loaded"


def test_every_room_is_on_a_line() -> None:
    assert {room_of(f) for f in FILES} <= ROOMS
    assert len(FILES) > 15


def test_no_file_is_long_and_no_room_is_nameless() -> None:
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 500, file
        assert file.stem not in {"utils", "util", "core", "common", "base", "helpers", "managers", "misc"}, file


def test_public_names_are_sorted_and_importable() -> None:
    assert instrument.__all__ == sorted(instrument.__all__)
    for name in instrument.__all__:
        assert getattr(instrument, name).__name__ == name
    assert set(instrument.__all__) <= set(dir(instrument))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        instrument.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import instrument", {"torch", "numpy", "pydantic", "hydra", "omegaconf", "loguru"}),
        ("import hydra_plugins.instrument", {"torch", "numpy", "pydantic"}),
        ("import instrument.conf", {"torch", "numpy", "pydantic"}),
        ("from instrument import profiled", {"pydantic", "hydra", "omegaconf", "loguru", "msgspec", "torch._dynamo"}),
        ("from instrument import Capture", {"torch", "pydantic", "hydra", "omegaconf", "loguru"}),
        ("from instrument import Sink", {"torch", "hydra", "omegaconf"}),
        ("import instrument.sinks.table, instrument.sinks.tensorboard, instrument.sinks.stacks", {"torch"}),
        ("from instrument import ProfilerConfig; ProfilerConfig(active=3)", {"torch"}),
        ("import instrument.runs.ranks_report, instrument.runs.merge_traces, instrument.runs.run", {"torch"}),
        ("import instrument.cli.command", {"torch", "numpy", "pydantic", "rich"}),
    ],
)
def test_what_stays_unloaded(statement: str, absent: set[str]) -> None:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert absent.isdisjoint(loaded), absent & set(loaded)


def test_every_module_can_be_imported_where_the_system_is_no_unix() -> None:
    """As on Windows, which nobody has run: without fork, file locks and the signals that POSIX adds."""
    modules = [f"instrument.{file.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}" for file in FILES]
    optional = ("integrations", "__main__", "__init__")
    code = f"""
        import os, signal, sys, torch, pydantic, hydra, loguru
        from importlib import import_module
        del os.register_at_fork, os.fork
        sys.modules["fcntl"] = sys.modules["resource"] = None
        for name in set(dir(signal)) & {{"SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP", "SIGKILL", "setitimer", "alarm"}}:
            delattr(signal, name)
        for name in {[m for m in modules if not any(part in m for part in optional)]}:
            import_module(name)
        from instrument import Session
        session = Session(active=1)
    """
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)
