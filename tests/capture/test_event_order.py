"""No table depends on which event a file holds first."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
from builders import Event, call, capture, kernel, launched, span, step

from capture.test_autograd import TRAINING
from capture.test_breakdown import MIXED
from capture.test_cuda_graphs import REPLAYS
from capture.test_efficiency import BY_HAND
from capture.test_live_memory import EVENTS
from capture.test_operators import GPU
from capture.test_steps import TWO_STEPS
from capture.test_synchronisations import CASES, PLACES
from instrument.read.views.operators import GROUPINGS
from instrument.read.views.views import VIEWS

TRACES = {
    "backward": TRAINING,
    "efficiency": BY_HAND,
    "graphs": REPLAYS,
    "kernels": GPU,
    "memory": EVENTS,
    "mixed": MIXED,
    "steps": TWO_STEPS,
    "synchronisations": PLACES,
    "two steps": [
        *(step(1, 0, 100), step(2, 100, 100), *launched("runs in the next step", 90, 110, 10, 1)),
        span("aten::mm", 95, 20, External_id=5),
        *(
            call("cudaLaunchKernel", 102, 3, 2, External_id=5),
            kernel("gemm", 125, 5, correlation=2),
        ),
        span("aten::relu", 140, 5, External_id=6),
        *(
            call("cudaLaunchKernel", 150, 3, 3, External_id=6),
            kernel("relu", 160, 5, correlation=3),
        ),
    ],
    **CASES,
}
# The gate tries each eighth of the waits.
IN_GATE = [*TRACES][:9] + [*CASES][::8]
PROPERTIES = [name for name in VIEWS if not name.endswith("()")]


def tables(folder: Path, events: list[Event]) -> dict[str, list[str]]:
    """The rows of every table; their order may depend on the file where two rows are alike."""
    found = capture(folder, events)
    views = {name: attrgetter(name)(found) for name in PROPERTIES}
    groups = {group: found.operators_by(group) for group in GROUPINGS}
    return {name: sorted(map(str, table)) for name, table in (views | groups).items()}


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, False) for name in IN_GATE),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in TRACES),
    ],
)
def test_no_table_depends_on_which_event_is_the_first(tmp_path, name, every) -> None:
    """Each event in turn is the first in `make nightly`, and the first and the last of each category in `make test`."""
    events = TRACES[name]
    expected = tables(tmp_path, events)
    categories = [event["cat"] for event in events]
    first = {categories.index(category) for category in categories}
    last = {
        number
        for number, category in enumerate(categories)
        if category not in categories[number + 1 :]
    }
    for number in range(len(events)) if every else sorted(first | last):
        found = tables(tmp_path, [*events[number:], *events[:number]])
        assert found == expected, events[number]["name"]
