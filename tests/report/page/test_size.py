"""The page of a large capture stays small."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from builders import annotation, launched, span, step

from instrument.read.capture import Capture

OPERATORS = [f"aten::operator_{k}" for k in range(150)]
KERNELS = [
    f"void at::native::vectorized_elementwise_kernel<{k}, at::native::functor_{k}<float>>(int)"
    for k in range(120)
]


def generated(path: Path, events: int) -> Path:
    """A trace of operators with random times, in ranges and steps; every third launches a kernel.

    Random times shrink less than real ones, so this is the worst case for the size of the page.
    """
    drawn, now, launches, made = random.Random(3), 1000.0, 0, []
    for number in range(10):
        begin = now
        for layer in range(50):
            first = now
            for _ in range(events // 500 // 2):
                lasts = round(drawn.uniform(2, 60), 3)
                made.append(span(drawn.choice(OPERATORS), round(now, 3), lasts))
                if drawn.random() < 0.5:
                    launches += 1
                    made += launched(
                        drawn.choice(KERNELS),
                        round(now + 1, 3),
                        round(now + lasts, 3),
                        lasts,
                        launches,
                    )
                now += lasts + drawn.uniform(0.1, 5)
            made.append(annotation(f"blocks.{layer}", first, now - first))
        made.append(step(number, begin, now - begin))
    path.write_text(json.dumps({"traceEvents": made}))
    return path


@pytest.mark.parametrize(
    ("events", "most"),
    [
        (25_000, 700_000),
        pytest.param(100_000, 2_000_000, marks=pytest.mark.nightly),
        pytest.param(1_000_000, 2_000_000, marks=pytest.mark.soak),
    ],
)
def test_the_page_has_at_most_two_megabytes(tmp_path: Path, events: int, most: int) -> None:
    capture = Capture.load(generated(tmp_path / "trace.json", events))
    assert len(capture.events) >= events * 0.95
    html = capture.report().html
    assert 100_000 < len(html.encode()) <= most  # something is on it
