"""torch's own operator table, worked out call by call from our events, to compare with `key_averages()`.

Which call lies in which, and which launched what, is what `instrument.read.facts` says. The sums are torch's own, those of
torch/autograd/profiler.py (`_parse_kineto_results`) and profiler_util.py (`EventList`), which ours differ from:
- Python's frames are rows, and take self time from the operators and ranges around them.
- A total counts a call again that lies in another of its row.
- Where two calls in one overlap in part, that one's self time is less by the whole of both.
- A call has the memory of every thread, and of those devices alone that torch's table knows.
- A device's copy of a range counts as a kernel of that range.
- A call folded into its like replaces that one's kernels instead of joining them.
- Device work whose launch is not in the trace has no row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from instrument.read.facts.links import Links
from instrument.read.trace.events import Events
from instrument.read.views.table import Table

# DeviceType: CPU, MKLDNN, IDEEP; CUDA, HIP, XPU, PrivateUse1
CPU, DEVICES = ((0, 2, 5), (1, 6, 12, 20))
COLUMNS = (
    *("calls", "cpu_ns", "self_cpu_ns", "device_ns", "self_device_ns"),
    *("cpu_bytes", "self_cpu_bytes", "device_bytes", "self_device_bytes"),
)


@dataclass(eq=False)
class Call:
    """A call, with what it has in total; `kernels` are the durations of those that it launched itself."""

    name: str
    is_range: bool
    shapes: str
    cpu_ns: int
    cpu_bytes: int
    device_bytes: int
    parent: Call | None
    kernels: list[int] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)
    device_ns: int = 0

    def row(self) -> tuple[int, ...]:
        """What it adds to COLUMNS: of each total, then of that without its children's."""
        values = [1]
        for total in ("cpu_ns", "device_ns", "cpu_bytes", "device_bytes"):
            whole = getattr(self, total)
            values += [whole, whole - sum(getattr(child, total) for child in self.children)]
        return tuple(values)


def torch_table(events: Events, *, input_shapes: bool = False) -> Table:
    """torch's rows by name, or by name and input shapes, with our columns' names and units."""
    sums: dict[tuple[str, str, bool], Any] = defaultdict(lambda: np.zeros(len(COLUMNS), np.int64))
    for call in _calls(events):
        sums[call.name, call.shapes if input_shapes else "", call.is_range] += call.row()
    columns: dict[str, list[Any]] = {"name": [name for name, _, _ in sums]}
    if input_shapes:
        columns["input_shapes"] = [shapes for _, shapes, _ in sums]
    values = [row.tolist() for row in sums.values()]
    return Table(columns | {name: [row[k] for row in values] for k, name in enumerate(COLUMNS)})


def _calls(events: Events) -> list[Call]:
    links = Links(events, python=True)
    call_tree, memory = links.call_tree, events.memory
    on_cpu = np.where(np.isin(memory.device_type, CPU), memory.size_bytes, 0)
    on_device = np.where(np.isin(memory.device_type, DEVICES), memory.size_bytes, 0)
    uncovered = np.ones(len(memory), np.bool_)
    calls: list[Call] = []
    for event, parent in zip(call_tree.index.tolist(), call_tree.parent.tolist()):
        during = (memory.time_ns >= events.start_ns[event]) & (
            memory.time_ns <= events.end_ns[event]
        )
        uncovered &= ~during
        call = Call(
            name=_name(events.names[events.name[event]]),
            is_range=events.categories[events.category[event]] == "user_annotation",
            shapes=_shapes(events, event),
            cpu_ns=int(events.end_ns[event] - events.start_ns[event]),
            cpu_bytes=int(on_cpu[during].sum()),
            device_bytes=int(on_device[during].sum()),
            parent=calls[parent] if parent >= 0 else None,
        )
        if call.parent:
            call.parent.children.append(call)
        calls.append(call)
    _add_kernels(links, calls)
    bare = [
        Call("[memory]", False, "[]", 0, cpu, device, None)
        for cpu, device in zip(on_cpu[uncovered].tolist(), on_device[uncovered].tolist())
    ]
    calls = _folded(calls)
    for call in reversed(calls):  # the children before their parents
        call.device_ns = sum(call.kernels) + sum(child.device_ns for child in call.children)
    return calls + bare


def _name(name: str) -> str:
    return "ProfilerStep*" if name.startswith("ProfilerStep#") else name


def _shapes(events: Events, event: int) -> str:
    """Input shapes as torch prints them: a list of tensors has none of its own."""
    if events.shapes[event] < 0:
        return "[]"
    shapes = json.loads(events.texts[events.shapes[event]])
    return str([[] if any(isinstance(size, list) for size in shape) else shape for shape in shapes])


def _add_kernels(links: Links, calls: list[Call]) -> None:
    """Give each call what it launched, and each range its copies on a device, which bear its external id."""
    events = links.events
    duration = events.duration_ns.tolist()
    for device, node in zip(*(column.tolist() for column in links.launched)):
        if node >= 0:
            calls[node].kernels.append(duration[device])
    category = [events.categories[k] for k in events.category.tolist()]
    external = events.external_id.tolist()
    node_of = {event: node for node, event in enumerate(links.call_tree.index.tolist())}
    bearer: dict[int, int] = {}
    for event, kind in enumerate(category):
        if external[event] and kind in ("cpu_op", "Operator", "user_annotation"):
            bearer.setdefault(external[event], event)
    for event, kind in enumerate(category):
        if kind == "gpu_user_annotation" and bearer.get(external[event]) in node_of:
            calls[node_of[bearer[external[event]]]].kernels.append(duration[event])


def _folded(calls: list[Call]) -> list[Call]:
    """`EventList._remove_dup_nodes`: an only child of its parent's name gives that one its children and kernels."""
    while True:
        kept = []
        for call in calls:
            above = call.parent
            if above is None or above.name != call.name or len(above.children) > 1:
                kept.append(call)
                continue
            above.children, above.kernels = call.children, call.kernels
            for child in call.children:
                child.parent = above
        if len(kept) == len(calls):
            return calls
        calls = kept
