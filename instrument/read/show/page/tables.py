"""The section *Tables*: the operators, kernels, collectives, copies and other views as tables."""

from __future__ import annotations

from typing import Any

from instrument.read.show.outline import without_ranges
from instrument.read.show.page.parts import columns_of, folded, left_out, section, table
from instrument.read.show.text import label_texts
from instrument.read.views.layers import NO_LAYER, UNKNOWN_LAYER
from instrument.read.views.table import known_columns
from instrument.read.views.views import VIEWS, Views

# The maximum number of rows of a table; the limit keeps the page small.
_MOST_ROWS = 1000
_OPERATORS = (
    "name", "calls", "self_cpu_ns", "share", "cpu_ns", "cpu_ns_per_call", "self_device_ns",
    "device_share", "device_ns", "device_ns_per_call", "self_cpu_bytes", "self_device_bytes",
    "flops", "kind",
)  # fmt: skip
# For each view on the page: its title, and the columns by which the page may sort the view. The
# first of these columns that has a known value is used. Without such a column, the view is not
# sorted.
_TABLES = {
    "operators": ("Operators", ("self_device_ns", "self_cpu_ns")),
    "efficiency": ("Matrix products, convolutions and attention", ("device_ns",)),
    "layers": ("Layers", ()),
    "kernels": ("Kernels", ("device_ns",)),
    "collectives": ("Collectives", ()),
    "copies": ("Copies and memsets", ("device_ns",)),
    "launches": ("Launches", ("launch_ns",)),
    "synchronisations": ("Waits for the device", ()),
    "cuda_graphs": ("CUDA graphs", ()),
    "phases": ("Stages of the engine or pipeline", ()),
    "streams": ("Streams", ()),
    "interruptions": ("Interruptions", ()),
}


def tables(capture: Views) -> dict[str, Any] | None:
    """Return the views that have rows as tables; None if no view has rows.

    The table of operators leaves out the rows that are no operators, such as ranges.
    """
    found: list[Any] = []
    for name, (title, sort_keys) in _TABLES.items():
        view = getattr(capture, name)
        if name == "operators":
            view = without_ranges(view).select(_OPERATORS)
        if not len(view) or (name == "layers" and view[0].name in (NO_LAYER, UNKNOWN_LAYER)):
            continue
        known = known_columns(view)
        by = next((key for key in sort_keys if key in known), None)
        ordered = view if by is None else view.sort(by)
        shown = ordered.head(_MOST_ROWS).select(known)
        columns = columns_of(shown, VIEWS[name].schema, **label_texts(name, shown))
        found.append(
            folded(
                title,
                [
                    table(title, columns, has_filter=len(view) > 5),
                    left_out(len(view) - min(len(view), _MOST_ROWS)),
                ],
                note=str(len(view)),
                id=f"tables-{name}",
                is_open=not found,
            )
        )
    return section("Tables", *found) if found else None
