"""Chooses the newest version of each package that the tests and CI install, and writes them into constraints.txt.

`make lock` runs it. The comments at the top of the file and the version of torch stay. Use the oldest Python that the
package supports: newer ones can install what this one can, but not the other way around.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# torch itself pins these, which are not there with a build for CPUs.
LEFT_OUT = re.compile(r"(nvidia|cuda)-|triton\b|torch-instrument\b|torch\b")


def main() -> None:
    """Install all in a new environment, and write what it holds."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    (torch,) = (line for line in lines if line.startswith("torch=="))
    with TemporaryDirectory(prefix="instrument-lock-") as folder:
        venv.create(folder, with_pip=True)
        pip = (f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input")
        subprocess.run([*pip, "install", "--quiet", torch], check=True)
        subprocess.run(
            [*pip, "install", "--quiet", torch, f"{ROOT}[dev,docs]"], check=True, cwd=folder
        )
        subprocess.run([*pip, "check"], check=True)
        frozen = subprocess.run(
            [*pip, "freeze"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    pinned = sorted(  # versions of pip differ in the order
        (line for line in frozen.splitlines() if "==" in line and not LEFT_OUT.match(line)),
        key=str.lower,
    )
    CONSTRAINTS.write_text("\n".join([*comments, torch, *pinned]) + "\n", encoding="utf-8")
    print(
        f"{CONSTRAINTS.name}: {len(pinned)} packages and {torch}, on Python {sys.version.split()[0]}"
    )


if __name__ == "__main__":
    main()
