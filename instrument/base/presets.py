"""Reads `conf/`: the presets, and the names of the built-in sinks and triggers; without Hydra."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, cast

from instrument.base.errors import ConfigError, suggestion

_PRESETS = files("instrument") / "conf" / "profiler"


def presets() -> list[str]:
    """The names of the built-in presets."""
    return sorted(
        p.name[:-5]
        for p in _PRESETS.iterdir()
        if p.name.endswith(".yaml") and not p.name.startswith("_")
    )


def preset(name: str) -> dict[str, Any]:
    """The options of a built-in preset, equal to what Hydra composes for `profiler=NAME`.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in presets():
        raise ConfigError(
            f"{name!r} is none of the presets ({', '.join(presets())})"
            f"{suggestion(name, presets()) or '.'}"
        )
    return _composed(f"{name}.yaml")


def _composed(path: str) -> dict[str, Any]:
    """The options of a config file, merged with the options of the files in its defaults list."""
    options = _yaml(path)
    included: dict[str, Any] = {}
    for entry in options.pop("defaults", []):
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            included |= _composed(f"{entry}.yaml")
        else:
            for group, names in entry.items():
                included[group] = {
                    key: value
                    for each in names
                    for key, value in _yaml(f"{group}/{each}.yaml").items()
                }
    return merged(included, options)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both; those `above` overwrite those `below`, also in nested mappings."""
    both = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if nested else value
    return both


def _yaml(path: str) -> dict[str, Any]:
    # Imported here, because the export process does not need OmegaConf, whose import takes 0.2 s.
    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(_parsed(path)))


@cache
def _parsed(path: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(_PRESETS.joinpath(*path.split("/")).read_text(encoding="utf-8"))


@cache
def shipped(group: str) -> dict[str, str]:
    """The `_target_` of each built-in object of a group: sinks, triggers or on_capture."""
    # without OmegaConf, which need not be installed to read captures
    found: dict[str, str] = {}
    for file in (_PRESETS / group).iterdir():
        text = file.read_text(encoding="utf-8") if file.name.endswith(".yaml") else ""
        found |= re.findall(r"^(\w+):\n  _target_: (\S+)$", text, re.MULTILINE)
    return dict(sorted(found.items()))
