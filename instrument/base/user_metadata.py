"""Checks the user's own keys and values for `capture.json` and the trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from instrument.base.errors import ConfigError
from instrument.base.files import encodable

# The top-level keys of the trace that torch and Kineto write. Such a key would hide a user's key of
# the same name.
_RESERVED = frozenset({
    "DISABLE_CUPTI_LAZY_REINIT", "baseTimeNanoseconds", "cuda_driver_version",
    "cuda_runtime_version", "cupti_version", "deviceProperties", "displayTimeUnit",
    "distributedInfo", "hip_driver_version", "hip_runtime_version", "host_name", "profile_memory",
    "record_shapes", "roctracer_version", "schemaVersion", "traceEvents", "traceName", "trace_id",
    "with_flops", "with_modules", "with_stack",
})  # fmt: skip


def as_json(metadata: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Convert keys and values to JSON values; `whose` is the subject of an error sentence.

    Raises:
        ConfigError: torch itself writes one of the keys, or JSON cannot hold a value.
    """
    reserved = sorted(_RESERVED & metadata.keys())
    if reserved:
        raise ConfigError(
            f"{whose} cannot hold {reserved[0]!r}: torch writes that key; choose another name."
        )
    return {
        encodable(str(key)): encodable(_as_json(key, value, whose))
        for key, value in metadata.items()
    }


def _as_json(key: str, value: Any, whose: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        # Only numbers are shown, because the repr of a tensor runs operators and waits for the
        # device.
        shown = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
        raise ConfigError(
            f"{whose} {key!r} is {shown}, which JSON cannot hold; give it as text."
        ) from None
