"""The wheel, installed in a virtual environment of its own, in a folder that is not ours."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from release import COPIED
from test_hydra import FOREIGN

from instrument import __version__
from instrument.cli.samples import FOLDER

ROOT = Path(__file__).parent.parent
ASSETS = [
    file for kind in ("html", "css", "js") for file in (ROOT / "instrument").rglob(f"*.{kind}")
]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    run(*build, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds our wheel and borrows what it depends on."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = (
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
    )  # fmt: skip
    run(*install, wheel, cwd=folder)
    # a .pth gives the packages of this environment, but not what its own .pth files add: the editable install stays out
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_what_it_needs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "instrument/py.typed",
        "instrument/conf/__init__.py",
        "instrument/conf/profiler/_instrument_base.yaml",
        "instrument/conf/profiler/sinks/table.yaml",
        "instrument/read/show/templates/table.html",
        *(file.relative_to(ROOT).as_posix() for file in ASSETS),
        "hydra_plugins/instrument/__init__.py",
    } <= names
    assert "hydra_plugins/__init__.py" not in names, "it would hide other packages' plugins"
    info = f"torch_instrument-{__version__}.dist-info/"
    assert {name.split("/")[0] for name in names} == {"instrument", "hydra_plugins", info[:-1]}
    metadata = zipfile.ZipFile(wheel).read(info + "METADATA").decode()
    assert "Name: torch-instrument\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    for extra in ("lightning", "tensorboard", "pandas", "arrow"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_samples_are_in_the_wheel_and_small(wheel: Path) -> None:
    files = {p.relative_to(ROOT).as_posix() for p in FOLDER.rglob("*") if p.is_file()}
    shipped = {
        each.filename: each.compress_size
        for each in zipfile.ZipFile(wheel).infolist()
        if each.filename.startswith("instrument/samples/")
    }
    assert {*shipped} == {each for each in files if "__pycache__" not in each}
    assert sum(shipped.values()) < 1_500_000


def test_links_on_the_page_of_pypi_are_addresses(wheel: Path) -> None:
    """The package index has no other file of the repository."""
    names = zipfile.ZipFile(wheel)
    (name,) = (name for name in names.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = names.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    (address,) = re.findall(r"^Project-URL: Repository, (.+)$", metadata, re.MULTILINE)
    assert f"git clone {address}`" in metadata
    for file in ("README.md", "CITATION.cff"):
        named = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / file).read_text())
        assert {*named} == {address}, file


def test_the_modules_in_c_are_compiled_for_this_platform(wheel: Path, python: Path) -> None:
    """One file serves all versions of Python; the tests of reading are skipped if it is missing."""
    if "any" in wheel.name:
        pytest.skip("there is no C compiler, or it has no headers of Python")
    assert "-cp311-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    modules = ["instrument/read/facts/_loops.abi3.so", "instrument/read/trace/_scanner.abi3.so"]
    assert sorted(name for name in names if name.endswith(".so")) == modules
    version = run(python.parent / "instrument", "--version", cwd=wheel.parent)
    assert version == f"instrument {__version__}, compiled trace reader\n"


def test_wheel_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("CFLAGS", "-g -Wall")
    monkeypatch.setenv("ARCHFLAGS", "-arch arm64")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path)
    printed = run(*build, ROOT, cwd=tmp_path)
    for module in ("read/facts/_loops", "read/trace/_scanner"):
        assert f"instrument/{module}.c is not compiled: " in printed
    assert printed.count(" -g -Wall -arch arm64 ") == 2, "the flags of the environment are used"
    (built,) = tmp_path.glob("*.whl")
    assert built.name == f"torch_instrument-{__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith((".so", ".c"))]


def test_templates_and_assets_are_found_in_the_wheel(python: Path, tmp_path: Path) -> None:
    code = """
from instrument.read.views.templates import render
styles = ["read/show/assets/page/page.css"]
print(render("read/show/templates/report.html", title="none", styles=styles, scripts=[], payload=""))
"""
    printed = run(python, "-c", code, cwd=tmp_path)
    assert "<title>none</title>" in printed
    assert "--largest-saving" in printed, "the style sheet is in the page"


def test_hydra_finds_our_configs_unloaded(python: Path, tmp_path: Path) -> None:
    (tmp_path / "their_app.py").write_text(FOREIGN)
    composed = run(python, "their_app.py", "+profiler=trace", "--cfg", "job", cwd=tmp_path)
    assert composed.startswith("profiler:\n")
    assert "_target_: instrument.export.sinks.table.TableSink" in composed
    plugins = run(python, "their_app.py", "--info", "searchpath", cwd=tmp_path)
    assert re.search(r"\| instrument +\| pkg://instrument\.conf ", plugins)


@pytest.mark.nightly  # loads torch twice, in new processes; test_hydra.py forks the application
def test_a_foreign_hydra_application_is_served(python: Path, tmp_path: Path) -> None:
    (tmp_path / "their_app.py").write_text(FOREIGN)
    output = run(python, "their_app.py", "+profiler=trace", "profiler.active=3", cwd=tmp_path)
    assert f"FROM {python.parents[1]}/" in output, "this is the checkout, not the wheel"
    folder = output.split("CAPTURES ")[1].split()[0]
    shown = run(python, "-m", "instrument", "show", folder, cwd=tmp_path)
    assert "mine" in shown
    table = (Path(folder) / "table.txt").read_text()
    printed, written = (each.partition("Cost of recording: ")[0] for each in (shown, table))
    assert printed == written != ""


def test_the_wheel_is_tested_with_all_modules_that_its_tests_import() -> None:
    """`make wheel` copies some tests into an empty folder; what they import must be copied too."""
    tests = Path(__file__).parent
    for name in (each for each in COPIED if each.endswith(".py")):
        tree = ast.parse((tests.parent / name).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {
            each.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for each in node.names
        }
        own = {f"tests/{each}.py" for each in imported if each and (tests / f"{each}.py").is_file()}
        assert own <= {*COPIED}, name


@pytest.mark.parametrize("name", ["instrument.read.trace._scanner", "instrument.read.facts._loops"])
def test_the_stub_of_a_compiled_module_names_what_it_has(name: str) -> None:
    module = pytest.importorskip(name, reason="the module is not compiled")
    stub = ast.parse((ROOT / f"{name.replace('.', '/')}.pyi").read_text(encoding="utf-8"))
    classes = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    for owner, body in [(module, stub.body), *((getattr(module, c.name), c.body) for c in classes)]:
        stated = {getattr(node, "name", None) for node in body}
        stated |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
        stated.discard(None)
        assert stated - {"Column"} == {each for each in dir(owner) if not each.startswith("_")}
