"""The names that docs/api.md promises, and the packages that export them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import instrument

ROOT = Path(instrument.__file__).parent
DOCUMENTED = re.findall(
    r"^::: (\S+)$", (ROOT.parent / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE
)
PACKAGES = [
    instrument,
    *(
        import_module("instrument." + ".".join(file.parent.relative_to(ROOT).parts))
        for file in sorted(ROOT.glob("*/**/__init__.py"))
        if "lazy_names(" in file.read_text(encoding="utf-8")
    ),
]


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_name_is_exported_by_a_room(path: str) -> None:
    package, _, name = path.rpartition(".")
    module = import_module(package)
    assert name in getattr(module, "__all__", vars(module))
    assert hasattr(module, name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_exported_names_are_sorted_and_listed(package: ModuleType) -> None:
    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    modules = {file.stem for file in Path(package.__file__ or "").parent.iterdir()}
    assert not modules & set(package.__all__), "a module would hide the name"
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no'"):
        getattr(package, "no")  # noqa: B009
