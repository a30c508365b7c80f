"""Which planted damage `instrument check` finds, and what it says of traces without damage.

Each kind of damage is planted into sound traces, in 1, 5 and 20 % of the events that it concerns: those that
INSTRUMENT_TRACES names, and one that is made here and has events of all kinds. It is found if a claim breaks that
holds in the sound trace. Prints in how many of the traces each kind is found, and by which claims.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from instrument.read.capture import Capture
from instrument.read.views.witness import Seen, claims, job_claims, seen

Event = dict[str, Any]
SHARES = (0.01, 0.05, 0.2)
FOLDER = Path(os.environ.get("INSTRUMENT_TRACES") or "no folder")
REAL = (
    "v100_resnet50_workers0", "v100_ns_resolution", "h100_qwen_0.5b_inference", "h100_timesformer_inference",
    "a100_megatron_tp8_rank0", "mi300x_resnet_checkpoint_train", "mi300x_vllm_graph", "b200_eager",
)  # fmt: skip
WORLD = 8
BEGIN_US = 1000.5
STEP_US, OPERATORS = 4000, 100
FOUND_AT, LEAST_FOUND = 0.05, 38 / 40
ENCODER = msgspec.json.Encoder(decimal_format="number")


def trace(events: list[Event], rank: int = 0) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "cuda_runtime_version": 13020,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": WORLD},
        "traceEvents": events,
    }


def sound(steps: int = 8) -> list[Event]:
    """Steps of operators in frames, each with a launch and memory, a replay of a graph, a copy, a wait for the device."""
    made = _Made()
    made.add(
        "Trace",
        "PyTorch Profiler (0)",
        BEGIN_US - 10,
        steps * STEP_US + 20,
        pid="Spans",
        tid="PyTorch Profiler",
    )
    for k in range(steps):
        begin = BEGIN_US + k * STEP_US
        made.operator(f"ProfilerStep#{k + 3}", begin, STEP_US - 1, "user_annotation")
        made.frame("train.py(1): step", begin + 1, STEP_US - 5)
        at, free = begin + 5.25, begin + 20.5
        for j in range(OPERATORS):
            made.frame(f"layer.py({j}): forward", at, 19)
            made.operator("aten::linear", at + 1, 17)
            made.operator("aten::addmm" if j % 3 else "aten::mm", at + 2, 14)
            made.memory(at + 3, 512 if j % 2 else -512)
            free = made.launched("cudaLaunchKernel", at + 5, free, [(f"gemm_{j % 5}", 6 + j % 7)])
            at += 20
        made.operator("graph", at, 40)
        free = made.launched(
            "cudaGraphLaunch", at + 2, free, [(f"node_{n}", 5) for n in range(64)], graph=7
        )
        made.operator("aten::copy_", at + 50, 20)
        free = made.launched(
            "cudaMemcpyAsync", at + 55, free, [("Memcpy DtoH (Device -> Pinned)", 20)], "gpu_memcpy"
        )
        made.add(
            "cuda_runtime",
            "cudaDeviceSynchronize",
            at + 80,
            max(free - at - 80, 0) + 20,
            correlation=made.call(),
        )
        made.add("overhead", "Buffer Flush", at + 85, 8, pid=-1)
    return made.events


class _Made:
    """The events of a trace that is made, numbered as torch numbers them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.operators = self.frames = self.calls = self.total = 0

    def add(
        self,
        cat: str,
        name: str,
        at: float,
        length: float,
        *,
        pid: Any = 1,
        tid: Any = 2,
        **args: Any,
    ) -> None:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": round(at, 3),
            "dur": round(length, 3),
        }
        self.events.append(
            {**event, "args": {key.replace("_", " "): value for key, value in args.items()}}
        )

    def call(self) -> int:
        self.calls += 5
        return self.calls

    def operator(self, name: str, at: float, length: float, cat: str = "cpu_op") -> None:
        self.operators += 1
        self.add(cat, name, at, length, External_id=self.operators, Input_Dims=[[4, 4]])

    def frame(self, name: str, at: float, length: float) -> None:
        self.frames += 1
        self.add("python_function", name, at, length, Python_id=self.frames)

    def memory(self, at: float, size: int) -> None:
        self.total += size
        args = {
            "Bytes": size,
            "Device Type": 1,
            "Device Id": 0,
            "Total Allocated": self.total + 10**6,
            "Addr": 4096,
        }
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "name": "[memory]",
                "pid": 1,
                "tid": 2,
                "ts": round(at, 3),
                "args": args,
            }
        )

    def launched(
        self,
        call: str,
        at: float,
        free: float,
        work: list[tuple[str, int]],
        cat: str = "kernel",
        graph: int = 0,
    ) -> float:
        """A call, and the work that it launches once the stream is free; returns when this work ends."""
        number = self.call()
        self.add("cuda_runtime", call, at, 4, correlation=number, External_id=self.operators)
        free = max(free, at + 6.125)
        for k, (name, length) in enumerate(work):
            ids = {"graph_id": graph, "graph_node_id": k + 1} if graph else {}
            args = {
                "stream": 7,
                "device": 0,
                "grid": [8, 1, 1],
                "block": [128, 1, 1],
                "External_id": self.operators,
            }
            self.add(cat, name, free, length, pid=0, tid=7, correlation=number, **args, **ids)
            free += length + 0.625
        return free


def is_kernel(event: Event) -> bool:
    return str(event.get("cat")).lower() == "kernel"


def is_copy(event: Event) -> bool:
    return str(event.get("cat")).lower() in ("gpu_memcpy", "memcpy")


def is_work(event: Event) -> bool:
    return (
        is_kernel(event)
        or is_copy(event)
        or str(event.get("cat")).lower() in ("gpu_memset", "memset")
    )


def is_call(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver", "Runtime")


def is_launch(event: Event) -> bool:
    return is_call(event) and "aunch" in event["name"] and "ernel" in event["name"]


def is_operator(event: Event) -> bool:
    return event.get("cat") in ("cpu_op", "Operator") and not is_step(event)


def is_frame(event: Event) -> bool:
    return event.get("cat") == "python_function"


def is_step(event: Event) -> bool:
    return event.get("ph") == "X" and "ProfilerStep#" in event["name"] and "gpu" not in event["cat"]


def is_memory(event: Event) -> bool:
    return event.get("name") == "[memory]"


def is_on_cpu(event: Event) -> bool:
    return (
        is_operator(event)
        or is_call(event)
        or is_frame(event)
        or event.get("cat") == "user_annotation"
    )


def is_node(event: Event) -> bool:
    return is_work(event) and "graph node id" in event.get("args", {})


def is_any(event: Event) -> bool:
    return is_on_cpu(event) or is_work(event)


Test = Callable[[Event], bool]
# Changes events, but not their arguments, in place, and returns those that stay; the events are a copy.
Plant = Callable[[list[Event], float, Random], list[Event]]


class Damage(NamedTuple):
    """A kind of damage, and the events that it concerns: a trace must have some, at least twenty."""

    name: str
    concerns: Test
    plant: Plant


def chosen(events: list[Event], test: Test, share: float, random: Random) -> list[Event]:
    found = [event for event in events if test(event)]
    return random.sample(found, max(round(share * len(found)), 1))


def block(
    events: list[Event], test: Test, share: float, random: Random, at: float | None = None
) -> list[Event]:
    """Successive events; `at` is where they begin, from 0 to 1, as the share of the others that come before."""
    found = sorted((event for event in events if test(event)), key=lambda event: float(event["ts"]))
    count = max(round(share * len(found)), 1)
    first = round((len(found) - count) * (random.uniform(0.2, 0.8) if at is None else at))
    return found[first : first + count]


def without(events: list[Event], lost: Iterable[Event]) -> list[Event]:
    ids = {id(event) for event in lost}
    return [event for event in events if id(event) not in ids]


def correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", 0))


def with_work(events: list[Event], calls: list[Event]) -> list[Event]:
    ids = {correlation(call) for call in calls}
    return [*calls, *(event for event in events if is_work(event) and correlation(event) in ids)]


def losing(test: Test, of: Callable[..., list[Event]] = chosen, **more: Any) -> Plant:
    return lambda events, share, random: without(events, of(events, test, share, random, **more))


def changing(
    test: Test,
    change: Callable[[Event, Random], None],
    of: Callable[..., list[Event]] = chosen,
    **more: Any,
) -> Plant:
    def plant(events: list[Event], share: float, random: Random) -> list[Event]:
        for event in of(events, test, share, random, **more):
            change(event, random)
        return events

    return plant


def moved(microseconds: float) -> Callable[[Event, Random], None]:
    def change(event: Event, _: Random) -> None:
        event["ts"] = round(float(event["ts"]) + microseconds, 3)

    return change


def setting(**values: Any) -> Callable[[Event, Random], None]:
    return lambda event, _: event.update(values)


def argument(name: str, value: Callable[[Any, Random], Any]) -> Callable[[Event, Random], None]:
    def change(event: Event, random: Random) -> None:
        event["args"] = {**event["args"], name: value(event["args"].get(name, 0), random)}

    return change


def stretched(times: float) -> Callable[[Event, Random], None]:
    def change(event: Event, _: Random) -> None:
        event["dur"] = round(float(event["dur"]) * times + 1, 3)

    return change


def twice(test: Test) -> Plant:
    return lambda events, share, random: (
        events + [copy.deepcopy(event) for event in chosen(events, test, share, random)]
    )


def span_of(events: list[Event]) -> tuple[float, float]:
    times = [
        (float(e["ts"]), float(e["ts"]) + float(e.get("dur") or 0)) for e in events if is_any(e)
    ]
    return min(begin for begin, _ in times), max(end for _, end in times)


def at_edge(test: Test, *, late: bool) -> Plant:
    """Move events out of the recording, by a tenth of its length."""

    def plant(events: list[Event], share: float, random: Random) -> list[Event]:
        begin, end = span_of(events)
        for event in chosen(events, test, share, random):
            event["ts"] = round(end + (end - begin) / 10 if late else begin - (end - begin) / 10, 3)
        return events

    return plant


def until_end(events: list[Event], share: float, random: Random) -> list[Event]:
    _, end = span_of(events)
    for event in chosen(events, is_kernel, share, random):
        event["dur"] = round(end - float(event["ts"]), 3)
    return events


def drifting(events: list[Event], share: float, _: Random) -> list[Event]:
    begin, _ = span_of(events)
    for event in events:
        if is_work(event):
            event["ts"] = round(begin + (float(event["ts"]) - begin) * (1 + share / 10), 3)
    return events


def exchanged(events: list[Event], share: float, random: Random) -> list[Event]:
    found = [event for event in chosen(events, is_kernel, share, random) if correlation(event)]
    ids = [correlation(event) for event in found]
    for event, other in zip(found, ids[1:] + ids[:1]):
        event["args"] = {**event["args"], "correlation": other}
    return events


def slice_lost(events: list[Event], share: float, random: Random) -> list[Event]:
    begin, end = span_of(events)
    first = begin + (end - begin) * random.uniform(0.2, 0.7)
    last = first + (end - begin) * share
    return [e for e in events if not is_any(e) or is_step(e) or not first <= float(e["ts"]) <= last]


def replays_cut(events: list[Event], share: float, random: Random) -> list[Event]:
    """Some replays lack their last nodes; together, this share of all nodes."""
    nodes: dict[int, list[Event]] = {}
    for event in events:
        if is_node(event):
            nodes.setdefault(correlation(event), []).append(event)
    cut = random.sample(sorted(nodes), max(len(nodes) // 2, 1))
    return without(
        events,
        [event for k in cut for event in nodes[k][-max(round(2 * share * len(nodes[k])), 1) :]],
    )


def same_name(events: list[Event], share: float, _: Random) -> list[Event]:
    """All kernels of some names are lost."""
    names = Counter(event["name"] for event in events if is_kernel(event))
    lost, wanted = set[str](), share * sum(names.values())
    for name, count in sorted(names.items(), key=lambda each: each[1]):
        if wanted > 0:
            lost.add(name)
            wanted -= count
    return [event for event in events if not (is_kernel(event) and event["name"] in lost)]


def over_previous(events: list[Event], share: float, random: Random) -> list[Event]:
    lanes: dict[Any, list[Event]] = {}
    for event in sorted(filter(is_kernel, events), key=lambda event: float(event["ts"])):
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    pairs = [pair for lane in lanes.values() for pair in pairwise(lane)]
    for one, other in random.sample(pairs, max(round(share * len(pairs)), 1)):
        other["ts"] = one["ts"]
    return events


def to_other_stream(events: list[Event], share: float, random: Random) -> list[Event]:
    """Kernels of several streams on one, as if they ran at the same time."""
    for event in chosen(events, is_kernel, share, random):
        length = float(event["dur"])
        event["dur"] = round(length + 1, 3)
        events.append(
            {
                **copy.deepcopy(event),
                "name": "other stream",
                "ts": round(float(event["ts"]) + length / 2, 3),
            }
        )
    return events


def step_changed(change: Callable[[list[Event]], None]) -> Plant:
    def plant(events: list[Event], _: float, __: Random) -> list[Event]:
        steps = sorted(filter(is_step, events), key=lambda event: float(event["ts"]))
        change(steps)
        return [event for event in events if event.get("name") != "lost"]

    return plant


def flushed(events: list[Event], share: float, _: Random) -> list[Event]:
    begin, end = span_of(events)
    length = max((end - begin) * share, 0)
    event = {
        "ph": "X",
        "cat": "overhead",
        "name": "Buffer Flush",
        "pid": -1,
        "tid": 0,
        "ts": round((begin + end) / 2, 3),
    }
    return [*events, {**event, "dur": round(length, 3), "args": {}}]


def unlike(event: Event, random: Random) -> None:
    event["name"] = f"?{random.random()}"
    event.pop("cat", None)


def many_steps(events: list[Event]) -> bool:
    return sum(map(is_step, events)) > 2


DAMAGES = (
    Damage("kernels lost here and there", is_kernel, losing(is_kernel)),
    Damage("kernels lost in a row", is_kernel, losing(is_kernel, block)),
    Damage("last kernels lost", is_kernel, losing(is_kernel, block, at=1)),
    Damage("first kernels lost", is_kernel, losing(is_kernel, block, at=0)),
    Damage("all kernels of some names lost", is_kernel, same_name),
    Damage("copies lost", is_copy, losing(is_copy)),
    Damage("launches lost here and there", is_launch, losing(is_launch)),
    Damage("launches lost in a row", is_launch, losing(is_launch, block)),
    Damage("launches and kernels lost here and there", is_launch, lambda e, s, r: without(e, with_work(e, chosen(e, is_launch, s, r)))),
    Damage("launches and kernels lost in a row", is_launch, lambda e, s, r: without(e, with_work(e, block(e, is_launch, s, r)))),
    Damage("operators lost here and there", is_operator, losing(is_operator)),
    Damage("operators lost in a row", is_operator, losing(is_operator, block)),
    Damage("Python frames lost here and there", is_frame, losing(is_frame)),
    Damage("Python frames lost in a row", is_frame, losing(is_frame, block)),
    Damage("memory events lost", is_memory, losing(is_memory)),
    Damage("everything lost for a while", is_operator, slice_lost),
    Damage("nodes of replays lost here and there", is_node, losing(is_node)),
    Damage("last nodes of some replays lost", is_node, replays_cut),
    Damage("kernels before their launch", is_kernel, changing(is_kernel, moved(-100_000))),
    Damage("kernels of 0 ns", is_kernel, changing(is_kernel, setting(dur=0))),
    Damage("kernels that end before they begin", is_kernel, changing(is_kernel, setting(dur=-5))),
    Damage("kernels at time 0", is_kernel, changing(is_kernel, setting(ts=0, dur=0))),
    Damage("kernels without a duration", is_kernel, changing(is_kernel, lambda event, _: event.pop("dur"))),
    Damage("kernels ten times as long", is_kernel, changing(is_kernel, stretched(10))),
    Damage("kernels that last until the end", is_kernel, until_end),
    Damage("kernels that begin with the one before", is_kernel, over_previous),
    Damage("kernels twice", is_kernel, twice(is_kernel)),
    Damage("kernels of other streams on one", is_kernel, to_other_stream),
    Damage("kernels after the end", is_kernel, at_edge(is_kernel, late=True)),
    Damage("operators before the begin", is_operator, at_edge(is_operator, late=False)),
    Damage("calls after the end", is_call, at_edge(is_call, late=True)),
    Damage("operators that end before they begin", is_operator, changing(is_operator, setting(dur=-5))),
    Damage("operators three times as long", is_operator, changing(is_operator, stretched(3))),
    Damage("operators moved", is_operator, changing(is_operator, lambda e, _: moved(float(e["dur"]) / 2 + 3)(e, _))),
    Damage("operators twice", is_operator, twice(is_operator)),
    Damage("operators on another thread", is_operator, changing(is_operator, setting(tid=99))),
    Damage("calls moved out of their operators", is_call, changing(is_call, moved(-70))),
    Damage("Python frames that last too long", is_frame, changing(is_frame, stretched(5))),
    Damage("Python frames twice", is_frame, twice(is_frame)),
    Damage("device clock steps ahead", is_kernel, changing(is_work, moved(20_000), block, at=1)),
    Damage("device clock steps back", is_kernel, changing(is_work, moved(-20_000), block, at=1)),
    Damage("device clock drifts (a tenth of the share)", is_kernel, drifting),
    Damage("CPU clock steps ahead", is_call, changing(is_on_cpu, moved(20_000), block, at=1)),
    Damage("CPU clock steps back", is_call, changing(is_on_cpu, moved(-2_000), block, at=1)),
    Damage("correlations exchanged", is_kernel, exchanged),
    Damage("kernels without a correlation", is_kernel, changing(is_kernel, argument("correlation", lambda *_: 0))),
    Damage("launches without a correlation", is_launch, changing(is_launch, argument("correlation", lambda *_: 0))),
    Damage("correlations of 16 bits", is_kernel, changing(is_work, argument("correlation", lambda old, _: int(old) + 2**20))),
    Damage("operators with another number", is_operator, changing(is_operator, argument("External id", lambda old, _: int(old) - 1))),
    Damage("memory events of another size", is_memory, changing(is_memory, argument("Bytes", lambda old, _: int(old) + 64))),
    Damage("events of an unknown category", is_any, changing(is_any, setting(cat="?"))),
    Damage("events without category and name", is_any, changing(is_any, unlike)),
    Damage("a long flush of buffers", is_any, flushed),
)  # fmt: skip
# Damage of a step, whatever the share; and of the ranks, which are copies of one trace.
STEPS = (
    Damage("a step lost", is_step, step_changed(lambda steps: steps[1].update(name="lost"))),
    Damage("a step's number twice", is_step, step_changed(lambda steps: steps[1].update(name=steps[0]["name"]))),
    Damage("steps that overlap", is_step, step_changed(lambda steps: steps[0].update(dur=float(steps[0]["dur"]) * 1.5))),
    Damage("a step that ends before it begins", is_step, step_changed(lambda steps: steps[1].update(dur=-9))),
)  # fmt: skip
JOBS: dict[str, Callable[[list[Seen]], list[Seen]]] = {
    "a rank missing": lambda ranks: ranks[:-1],
    "a rank twice": lambda ranks: [*ranks[:-1], ranks[0]],
    "a rank of another time": lambda ranks: [
        *ranks[:-1],
        ranks[-1]._replace(begin_ns=ranks[-1].end_ns + 10**9, end_ns=ranks[-1].end_ns + 2 * 10**9),
    ],
    "a rank of other steps": lambda ranks: [*ranks[:-1], ranks[-1]._replace(job=("train", 99))],
}


def capture_of(
    folder: Path, document: dict[str, Any], text: Callable[[bytes], bytes] = bytes
) -> Capture:
    path = folder / "trace.json"
    path.write_bytes(text(ENCODER.encode(document)))
    return Capture.load(path)


def broken(capture: Capture) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {each.code for each in claims(capture) if each.holds() is False}


def found(document: dict[str, Any], damage: Damage, share: float, folder: Path) -> set[str]:
    """The claims that break where the damage is planted."""
    events = [dict(event) for event in document["traceEvents"]]
    planted = damage.plant(events, share, Random(f"{damage.name} {share}"))
    return broken(capture_of(folder, {**document, "traceEvents": planted}))


def cut_short(document: dict[str, Any], share: float, folder: Path) -> set[str]:
    return broken(capture_of(folder, document, lambda text: text[: int(len(text) * (1 - share))]))


def of_job(document: dict[str, Any], name: str, folder: Path) -> set[str]:
    ranks = [
        seen(
            capture_of(
                folder, {**document, **trace([], rank), "traceEvents": document["traceEvents"]}
            )
        )
        for rank in range(WORLD)
    ]
    return {each.code for each in job_claims(JOBS[name](ranks)) if each.holds() is False}


def is_possible(damage: Damage, events: list[Event]) -> bool:
    return sum(map(damage.concerns, events)) >= (3 if damage in STEPS else 20)


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "made", trace(sound())
    for name in REAL:
        if (path := FOLDER / f"{name}.json.gz").is_file():
            document = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
            # without arrows and labels, which no claim is about
            events = [event for event in document["traceEvents"] if event["ph"] in "XiC"]
            begin = min(event["ts"] for event in events)
            for event in events:  # absolute microseconds with decimals do not fit into floats
                event["ts"] = float(event["ts"] - begin) + 1
                event["dur"] = float(event["dur"]) if "dur" in event else None
                event["args"] = event.get("args", {})
            yield name, document | {"traceEvents": [without_none(event) for event in events]}


def without_none(event: Event) -> Event:
    return {key: value for key, value in event.items() if value is not None}


def table(only: str = "") -> float:
    """Print in how many traces each damage is found; return the share of kinds found at 5 % in most traces."""
    rows: dict[str, dict[float, list[set[str]]]] = {}
    missed: list[str] = []
    with TemporaryDirectory() as place:
        folder = Path(place)
        for trace_name, document in documents():
            before, events = broken(capture_of(folder, document)), document["traceEvents"]
            print(
                f"{trace_name}: without damage, {', '.join(before) or 'no claim'} is broken",
                flush=True,
            )
            for damage in (*DAMAGES, *STEPS):
                if only not in damage.name or not is_possible(damage, events):
                    continue
                for share in SHARES:
                    each = found(document, damage, share, folder) - before
                    rows.setdefault(damage.name, {}).setdefault(share, []).append(each)
                    if not each and share == FOUND_AT:
                        missed.append(f"{damage.name}: {trace_name}")
            for share in SHARES:
                rows.setdefault("the file is cut short", {}).setdefault(share, []).append(
                    cut_short(document, share, folder)
                )
            if trace_name == "made":
                for name in JOBS:
                    rows[name] = {share: [of_job(document, name, folder)] for share in SHARES}
    print(
        f"\n{'damage':45}{'':3}"
        + "".join(f"{share:>9.0%}" for share in SHARES)
        + "   claims that break at 5 %"
    )
    for name, cells in rows.items():
        counts = "".join(f"{sum(map(bool, each)):>5} / {len(each)}" for each in cells.values())
        by = Counter(code for each in cells[FOUND_AT] for code in each)
        print(f"{name:45}{counts}   {', '.join(code for code, _ in by.most_common(4))}")
    cells_at = [cells[FOUND_AT] for cells in rows.values()]
    everywhere, mostly = (
        sum(map(all, cells_at)),
        sum(2 * sum(map(bool, each)) > len(each) for each in cells_at),
    )
    pairs, found_pairs = sum(map(len, cells_at)), sum(sum(map(bool, each)) for each in cells_at)
    print(
        f"\nAt 5 %, {mostly} of {len(rows)} kinds are found in most traces, {everywhere} in every trace that can have them,"
    )
    print(
        f"and {found_pairs} of {pairs} pairs of a kind and a trace ({found_pairs / pairs:.1%}). Not found:"
    )
    print("\n".join(f"  {each}" for each in missed))
    return mostly / len(rows)


def timing() -> None:
    """Print how long reading and checking takes for a trace made of many copies of one."""
    with TemporaryDirectory() as place:
        for steps in (200, 800):
            path = Path(place) / f"{steps}.json"
            path.write_text(json.dumps(trace(sound(steps))))
            begin = time.perf_counter()
            capture = Capture.load(path)
            count, read = len(capture.events), time.perf_counter()
            claims(capture)
            megabytes, checked = path.stat().st_size / 1e6, time.perf_counter()
            print(
                f"{megabytes:.0f} MB, {count:,} events: read in {read - begin:.2f} s, checked in {checked - read:.2f} s"
            )


if __name__ == "__main__":
    timing()
    sys.exit(table(*sys.argv[1:]) < LEAST_FOUND)
