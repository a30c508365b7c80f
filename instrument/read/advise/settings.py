"""`Settings`: the findings that a user leaves out, and how large others must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument.base.errors import ConfigError, did_you_mean
from instrument.read.views.project_file import project_table

if TYPE_CHECKING:
    from instrument.read.advise.check import Check, RanksCheck

_TABLE = "tool.instrument.diagnose"
_KEYS = ("ignore", "thresholds")


class Settings(NamedTuple):
    """Codes of findings to leave out, and by code, the least share of the step of a finding."""

    ignore: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = MappingProxyType({})

    def applied(
        self, checks: Iterable[Check], known: Iterable[Check | RanksCheck]
    ) -> tuple[Check, ...]:
        """Return the checks with these thresholds; `known` are all checks that there are.

        Raises:
            ConfigError: a code is unknown, or a threshold is not possible.
        """
        by_code = {each.code: each for each in known}
        for code in (*self.ignore, *self.thresholds):
            if code not in by_code:
                raise ConfigError(f"No finding has the code {code!r}{did_you_mean(code, by_code)}")
        for code, share in self.thresholds.items():
            least, lowest = (getattr(by_code[code], name, 0) for name in ("least_share", "lowest"))
            if not least:
                raise ConfigError(f"The findings {code} have no threshold {share!r}: remove it.")
            is_share = isinstance(share, int | float) and not isinstance(share, bool)
            if not is_share or not lowest <= share <= 1:
                raise ConfigError(
                    f"The threshold of {code} is {share!r}: give a share of the step from "
                    f"{lowest:g} to 1."
                )
        shares = self.thresholds
        return tuple(
            each._replace(least_share=shares.get(each.code, each.least_share)) for each in checks
        )


#: Nothing is left out, and the thresholds are those of the checks.
DEFAULT = Settings()


def read_settings(ignore: Iterable[str] = (), folder: Path | None = None) -> Settings:
    """Return the settings of the nearest pyproject.toml that has some, with more codes to ignore.

    The file is searched in `folder` (the working directory if it is None) and in the folders above.

    Raises:
        ConfigError: the file cannot be read, or has another key or type.
    """
    found = project_table("diagnose", folder)
    given = _checked(*found) if found else DEFAULT
    return given._replace(ignore=(*given.ignore, *ignore))


def _checked(path: Path, table: Any) -> Settings:
    if not isinstance(table, dict):
        raise ConfigError(f"[{_TABLE}] in {path} is {table!r}: write a table.")
    for key in table.keys() - {*_KEYS}:
        raise ConfigError(f"[{_TABLE}] in {path} has the key {key!r}{did_you_mean(key, _KEYS)}")
    ignore, thresholds = table.get("ignore", []), table.get("thresholds", {})
    if not (isinstance(ignore, list) and all(isinstance(each, str) for each in ignore)):
        raise ConfigError(f"`ignore` of [{_TABLE}] in {path} is {ignore!r}: write a list of codes.")
    if not isinstance(thresholds, dict):
        raise ConfigError(
            f"`thresholds` of [{_TABLE}] in {path} is {thresholds!r}: write a table of shares."
        )
    return Settings(tuple(ignore), thresholds)
