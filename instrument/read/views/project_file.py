"""The tables for instrument in a user's pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from instrument.base.errors import ConfigError, reason_of

_FILE = "pyproject.toml"


def project_table(name: str, folder: Path | None = None) -> tuple[Path, Any] | None:
    """Return the path of the nearest pyproject.toml for instrument, and its [tool.instrument.NAME].

    The file is searched in `folder` (the working directory if it is None) and in the folders above;
    one without a table for instrument does not count. A table that the file lacks is empty. None if
    there is no such file.

    Raises:
        ConfigError: a pyproject.toml cannot be read.
    """
    start = (folder or Path()).absolute()
    for path in (each / _FILE for each in (start, *start.parents)):
        if not path.is_file():
            continue
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({reason_of(error)}): correct it.") from error
        tools = content.get("tool")
        own = tools.get("instrument") if isinstance(tools, dict) else None
        if own is not None:
            return path, own.get(name, {}) if isinstance(own, dict) else own
    return None
