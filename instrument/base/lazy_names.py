"""Names of a package that are loaded when they are first used, so that importing it is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    `homes` has for each name the module below the package that defines it. The modules are not
    imported here: a type checker reads the names from imports under `TYPE_CHECKING`.
    """
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value = getattr(import_module(f"{package}.{homes[name]}"), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return load, names
