"""Compiles the modules in C, such as the trace reader, while the package is built or installed.

The modules use Python's stable ABI, so that one file serves Python 3.11 and all newer versions.
`CC`, `CFLAGS` and `ARCHFLAGS` are respected. Without a working C compiler, the package is built
without them. It then reads traces more slowly, with the same result.

Links in README.md name files of the repository. On PyPI's page they get the repository's address.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# The repository's address; only README.md names it too.
REPOSITORY = "https://github.com/torch-instrument/torch-instrument"
MODULES = ("instrument/read/trace/_scanner", "instrument/read/facts/_loops")


class CompiledModules(BuildHookInterface[Any]):
    """Adds the modules to a wheel, or to the source folder of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules. If one is compiled, the wheel is for this platform only."""
        self._folder = Path(tempfile.mkdtemp(prefix="instrument-build-"))
        for module in MODULES:
            name = f"{module}.abi3.so"
            compiled = self._folder / Path(name).name
            reason = _compile(Path(self.root, f"{module}.c"), compiled)
            if reason:
                self.app.display_warning(f"{module}.c is not compiled: {reason}")
            if version == "editable":
                _put(compiled, Path(self.root, name))
            elif not reason:
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["force_include"][str(compiled)] = name
                build_data["pure_python"] = False
                build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, *_: Any) -> None:
        """Remove the compiled files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _compile(source: Path, target: Path) -> str:
    """Compile a module; return the reason if this fails, else an empty text."""
    if os.name != "posix" or sys.implementation.name != "cpython":
        return "it needs CPython on a POSIX system."
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python without the GIL has no stable ABI."
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    bundle = ["-bundle", "-undefined", "dynamic_lookup"]
    command = [
        *shlex.split(compiler),
        *("-std=c99", "-O3", "-fPIC"),
        *(bundle if sys.platform == "darwin" else ["-shared"]),
        *(
            flag
            for name in ("CFLAGS", "ARCHFLAGS")
            for flag in shlex.split(os.environ.get(name, ""))
        ),
        f"-I{sysconfig.get_path('include')}",
        *(str(source), "-o", str(target)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})."
    return f"{shlex.join(command)} failed:\n{done.stderr[-1000:]}" if done.returncode else ""


def _put(compiled: Path, target: Path) -> None:
    """Copy the compiled file to `target`; if there is no compiled file, remove `target`.

    A rename replaces the old file, because a process may have loaded the old file.
    """
    if not compiled.exists():
        target.unlink(missing_ok=True)
        return
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy(compiled, beside)
    beside.replace(target)


class PackageIndexPage(MetadataHookInterface):
    """Sets the long description and the addresses that PyPI's page shows."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = _with_addresses(text, Path(self.root), f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        owner, name = REPOSITORY.split("/")[-2:]
        metadata["urls"] = {
            "Repository": REPOSITORY,
            "Documentation": f"https://{owner}.github.io/{name}/",
            "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
            "Issues": f"{REPOSITORY}/issues",
        }


def _with_addresses(text: str, root: Path, tag: str) -> str:
    """A text in which links and pictures that name files of the repository are URLs."""

    def url(match: re.Match[str]) -> str:
        opening, path, anchor = match.groups()
        if not (root / path).exists():
            return match[0]
        kind = "raw" if opening.startswith("!") else "blob"
        return f"{opening}{REPOSITORY}/{kind}/{tag}/{path}{anchor})"

    return re.sub(r"(!?\[[^\]]*\]\()([\w./-]+)((?:#[\w-]+)?)\)", url, text)
