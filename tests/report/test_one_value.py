"""No two surfaces say two values of one name: terminal, Markdown, JSON and page of one capture agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_traces
from builders import annotation, capture, launched, step

from instrument.base.units import duration, percent
from instrument.read.advise.diagnosis import as_json, as_markdown, as_text
from instrument.read.capture import Capture
from instrument.read.show.page.page import payload
from instrument.read.show.step_split import step_split
from instrument.read.show.terminal import draw
from instrument.read.show.text import capture_parts, log_block, render
from instrument.read.show.verdict import first_parts, markdown_of

# How texts say a figure, by its name. A share is named with what it is a share of.
SAID = {
    "the step": r"(?:A|The) (?:\w+ )?(?:step|recording) takes ([\d.]+ \w+)",
    "compute": r"[Tt]he device computes for ([\d.]+ %)",
    "exposed communication": r"only communicates for ([\d.]+ %)",
    "copy": r"only copies for ([\d.]+ %)",
    "idle": r"is idle for ([\d.]+ %)(?! of the (?:step|recording) in gaps)",
    "waiting for data": r"([\d.]+ %) of the step waits for data",
    "the first class of kernels": r"The kernels with the most time: ([\d.]+ % \w+ ?\w*)",
    "the first finding saves": r"^ *1\. .*?; saves ((?:up to )?[\d.]+ \w+ \([\d.]+ %\))",
}


def figures(text: str) -> Iterator[tuple[str, str]]:
    """The figures in a text, by their names."""
    one_line = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text.replace("\n\n", "\f")))
    for name, pattern in SAID.items():
        for part in one_line.split("\f"):
            yield from ((name, found.strip()) for found in re.findall(pattern, part))


def surfaces(found: Capture) -> Iterator[tuple[str, str]]:
    """Each name with its value, as each surface says it."""
    diagnosis, content = found.diagnose(), payload([found])
    parts = [*first_parts(found), *capture_parts(found)]
    texts = [
        draw(parts), render(found), log_block(found, Path("rest"), 100), found._repr_html_(),
        as_text(diagnosis), as_markdown(diagnosis), markdown_of(found),
        json.loads(as_json(diagnosis))["verdict"], content["head"][0]["text"],
    ]  # fmt: skip
    for text in texts:
        yield from figures(text)
    if diagnosis.step_ns is not None:
        yield "the step", duration(diagnosis.step_ns)
    verdict = content["sections"]["verdict"]["parts"]
    boxes = {
        box["label"]: box for part in verdict if part["kind"] == "facts" for box in part["items"]
    }
    yield "the step", next(box["value"] for name, box in boxes.items() if name.endswith(" takes"))
    if "Device idle" in boxes:
        yield "idle", boxes["Device idle"]["value"]
    (bars,) = (part["items"] for part in verdict if part["kind"] == "bars")
    assert {each["name"]: each["share"] for each in bars[0]["parts"]} == {
        kind: percent(share)
        for kind, share in step_split(found)
        if share * (diagnosis.step_ns or 1) >= 1
    }
    if len(found.steps) and len(found.work.event):  # else the sentence names another time
        of_device = ("compute", "exposed communication", "copy", "waiting for data")
        yield from (
            (each["name"], each["share"])
            for each in bars[0]["parts"]
            if each["name"] in of_device and float(each["share"].split()[0]) >= 1
        )
    cards = [part for part in verdict if part["kind"] == "finding"]
    causes = [each for each in diagnosis.findings if not each.is_caveat]
    if causes and causes[0].saving is not None:
        first = next(card for card in cards if card["title"] == causes[0].title)
        yield "the first finding saves", re.sub("^saves ", "", first["saves"])


def agree(found: Capture) -> None:
    values: dict[str, set[str]] = {}
    count = 0
    for name, value in surfaces(found):
        values.setdefault(name, set()).add(value)
        count += 1
    assert {name: said for name, said in values.items() if len(said) > 1} == {}
    assert "the step" in values
    assert count > 8


def test_a_device_that_ends_after_the_steps(tmp_path: Path) -> None:
    """The device works on after each step, and the first step does not count."""
    events = [step(0, 0, 50_000), *launched("ncclDevKernel_AllReduce", 10, 20, 40_000, 1)]
    for number in (1, 2, 3):
        start = 50_000 + 1_000 * (number - 1)
        events += [step(number, start, 1_000), annotation("forward", start, 500)]
        events += [*launched("gemm", start + 10, start + 500, 700, 2 * number)]
        events += launched(
            "ncclDevKernel_AllReduce", start + 20, start + 1_200, 250, 2 * number + 1
        )
    agree(capture(tmp_path, events))


@pytest.mark.parametrize("name", real_traces.every())
def test_real_traces(name: str) -> None:
    agree(real_traces.load(name))
