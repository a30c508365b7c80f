"""docs/json.md names all keys of `capture.json` and of the JSON of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from instrument import Session
from instrument.read.ranks import Run
from instrument.read.ranks.run import SCHEMAS
from instrument.read.show.ranks import JSON_KEYS, as_json
from instrument.read.trace.capture_json import (
    CAPTURE_KEYS,
    COST_KEYS,
    ENVIRONMENT_KEYS,
    WINDOW_KEYS,
    Metadata,
)


def test_each_key_of_a_capture_is_documented(tmp_path: Path) -> None:
    with Session("trace", wait=1, warmup=1, active=1, output_dir=tmp_path, export="inline") as run:
        for _ in run.steps(range(4)):
            pass
    written = json.loads((run.captures[0].folder / "capture.json").read_text())
    assert {*written} == {*CAPTURE_KEYS} - {"scalars"}, "scalars are for sinks in training"
    assert {*written["window"]} == {*WINDOW_KEYS}
    assert {*written["cost"]} == {*COST_KEYS}
    assert {*written["environment"]} == {*ENVIRONMENT_KEYS}
    assert {*Metadata.__struct_fields__} <= {*CAPTURE_KEYS}

    (window,) = Run.load(tmp_path).windows
    assert [*json.loads(as_json(window))] == [*JSON_KEYS, *SCHEMAS]
