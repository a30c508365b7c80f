"""The docs name all keys of `capture.json` and of the JSON of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from instrument import Session
from instrument.read.ranks import Run
from instrument.read.ranks.run import SCHEMAS
from instrument.read.show.ranks import JSON_KEYS, as_json
from instrument.read.trace.capture_json import Metadata

PAGE = Path(__file__).parents[1] / "docs" / "capture-json.md"


def test_each_key_of_a_capture_is_documented(tmp_path: Path) -> None:
    with Session("trace", wait=1, warmup=1, active=1, output_dir=tmp_path, export="inline") as run:
        for _ in run.steps(range(4)):
            pass
    written = json.loads((run.captures[0].folder / "capture.json").read_text())
    sections = re.split(r"^## (\w+)$", PAGE.read_text(), flags=re.MULTILINE)
    of_file, *parts = (
        [*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)] for text in sections[::2]
    )
    assert {*written} == {*of_file} - {"scalars"}, "scalars are for sinks in training"
    assert {*Metadata.__struct_fields__} <= {*of_file}
    for name, keys in zip(sections[1::2], parts, strict=True):
        assert {*written[name]} == {*keys}
    assert sections[1::2] == ["window", "cost", "environment"]

    (window,) = Run.load(tmp_path).windows
    assert [*json.loads(as_json(window))] == ["version", *JSON_KEYS, *SCHEMAS]
