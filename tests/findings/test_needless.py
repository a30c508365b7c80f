"""Work that only the values of tensors show as needless: what a detail window observed of traces written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import Event, annotation, in_steps, span
from recording import run_session

from findings.by_hand import Case
from instrument.read.advise.needless import PADDING, REPEATED_WORK

BASE_NS, LENGTH = 10**18, 1000
SOURCE = "train.py:7 in causal"


def case(
    code: str, *inside: Event, detail: list[Event] | None = None, **observed: list[dict[str, Any]]
) -> Case:
    """A window of four steps, and a detail window of two like them, or of other steps."""
    about = {"first_step": 5, "steps": 2, "observed": observed}
    window = in_steps(4, LENGTH, *inside)
    if detail is None:
        detail = in_steps(2, LENGTH, *inside)
    return Case(code, window, {"base_ns": BASE_NS, "detail": about}, detail=detail)


def repair(kind: str, *spans: tuple[float, float, float], steps: int = 2) -> dict[str, Any]:
    """Calls from one time of each step of the detail window to another, and what is kept of them."""
    return {
        "kind": kind,
        "source": SOURCE,
        "functions": ["fill_", "add"],
        "spans": [
            [step, *(BASE_NS + round((step * LENGTH + at) * 1000) for at in (begin, end)), kept]
            for step in range(steps)
            for begin, end, kept in spans
        ],
    }


def work(at: float, lasts: float, name: str = "aten::mm", **more: Any) -> Event:
    return span(name, at, lasts, **more)


MASK = (work(100, 100, "aten::fill_"), work(250, 100, "aten::fill_"), work(400, 500))
COPY = (work(100, 300, "aten::cat"), work(500, 300))
TWICE = (work(100, 200), work(500, 200), work(800, 50, "aten::add"))


def sized(at: float, lasts: float, *shapes: list[int], name: str = "aten::linear") -> Event:
    types = ["float"] * len(shapes)
    return span(name, at, lasts, Input_Dims=[*shapes], Input_type=types)


def padded(valid: int, to_longest: int, **more: Any) -> dict[str, Any]:
    """Eight rows of 64 numbers."""
    counts = {"step": 0, "rows": 8, "length": 64, "valid": valid, "to_longest": to_longest}
    return {"what": "key_padding_mask", "source": SOURCE, **counts, **more}


LAYERS = (
    sized(100, 200, [8, 64, 16], [16, 16]),
    sized(400, 300, [16, 64, 8], [16, 8, 64], name="aten::bmm"),
    sized(800, 100, [8, 16], [16, 16]),  # after the rows are summed
)
UPDATE = (
    work(100, 100),
    work(300, 200, "aten::embedding_dense_backward"),
    annotation("Optimizer.step#Adam.step", 600, 300),
    work(610, 280, "aten::_foreach_mul_"),
)
FEW = {"indexed": 100, "rows": 20_000, "numbers": 600_000, "source": SOURCE}

FOUND = {
    "a mask is built in each step": case(
        "repeated-work", *MASK, repairs=[repair("each step", (90, 360, 0))]
    ),
    "a model is called twice": case(
        "repeated-work", *TWICE, repairs=[repair("twice", (90, 310, 1), (490, 710, 0))]
    ),
    "a buffer grows by copies": case(
        "needless-copies", *COPY, repairs=[repair("grows", (90, 410, 0.1))]
    ),
    "parameters are copied": case(
        "needless-copies", *COPY, repairs=[repair("parameters", (90, 410, 0))]
    ),
    "a permutation of which a part is used": case(
        "unused-results", *COPY, repairs=[repair("unused", (90, 410, 0.01))]
    ),
    "rows of a fixed length": case("padding", *LAYERS, padding=[padded(200, 256)]),
    "rows of all lengths": case("padding", *LAYERS, padding=[padded(200, 512)]),
    "few rows of a table": case("dense-gradients", *UPDATE, embeddings=[FEW]),
}

OTHER = in_steps(2, LENGTH, *MASK, work(950, 10, "aten::fill_"))

NOT_FOUND = {
    "nothing observed": case("repeated-work", *MASK, repairs=[]),
    "another kind": case("needless-copies", *MASK, repairs=[repair("each step", (90, 360, 0))]),
    "only in one step of the detail window": case(
        "repeated-work", *MASK, repairs=[repair("each step", (90, 360, 0), steps=1)]
    ),
    "more operators of the name in the detail window": case(
        "repeated-work", *MASK, detail=OTHER, repairs=[repair("each step", (90, 360, 0))]
    ),
    "too little time": case(
        "repeated-work",
        work(100, 10, "aten::fill_"),
        work(300, 600),
        repairs=[repair("each step", (90, 120, 0))],
    ),
    "no operator in the calls": case(
        "repeated-work", *MASK, repairs=[repair("each step", (910, 920, 0))]
    ),
    "an unknown kind": case("repeated-work", *MASK, repairs=[repair("other", (90, 360, 0))]),
    "little padding": case("padding", *LAYERS, padding=[padded(400, 512)]),
    "padding of rows on which nothing works": case("padding", *MASK, padding=[padded(99, 512)]),
    "most rows of a table": case(
        "dense-gradients", *UPDATE, embeddings=[{**FEW, "indexed": 9_000}]
    ),
    "sparse gradients": case("dense-gradients", *UPDATE[2:], embeddings=[FEW]),
}

UNKNOWN = {
    "no detail window": (Case("repeated-work", in_steps(4, LENGTH, *MASK)), "not observed"),
    "a detail window that observes nothing": (
        Case("padding", in_steps(4, LENGTH, *MASK), {"detail": {"first_step": 5, "steps": 2}}),
        "not observed",
    ),
}


def causal() -> torch.Tensor:
    mask = torch.zeros(48, 48)
    for row in range(48):
        mask[row, row + 1 :] = float("-inf")
    return mask


def adds_a_mask() -> Any:
    layer = torch.nn.Linear(48, 48)
    return lambda: (layer(torch.randn(48, 48)) + causal()).softmax(-1).mean().backward()


def pads() -> Any:
    table, attention = torch.nn.Embedding(50, 16), torch.nn.MultiheadAttention(16, 2)

    def step() -> None:
        valid = torch.arange(128)[None] < torch.randint(2, 40, (8, 1))
        x = table(torch.randint(50, (8, 128))).transpose(0, 1)
        attention(x, x, x, key_padding_mask=~valid)[0].mean().backward()

    return step


@pytest.mark.parametrize(
    ("program", "find", "source", "operator"),
    [
        (adds_a_mask, REPEATED_WORK, "causal", "aten::fill_"),
        (pads, PADDING, "pads.<locals>.step", "aten::bmm"),
    ],
)
def test_a_recorded_program(program, find, source, operator, tmp_path) -> None:
    options: dict[str, Any] = {"wait": 1, "active": 3, "detail": 2}
    (capture,) = run_session(tmp_path, 6, program(), **options).captures
    assert not isinstance(find.find, str)
    problem = max(find.find(capture), key=lambda each: each.share or 0)
    assert problem.place is not None
    assert problem.place[1] is not None
    assert problem.place[1].endswith(source)
    assert problem.events is not None
    inside = capture.links.call_tree.at_or_inside(
        np.isin(capture.links.call_tree.index, problem.events)
    )
    names = capture.facts.events("name")["name"].gather(capture.links.call_tree.index[inside])
    assert operator in [*names]
