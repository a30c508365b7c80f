"""The data loader: steps wait for data."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from instrument.base.errors import CaptureError
from instrument.base.units import duration, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import evidence, in_steps
from instrument.read.advise.finding import Evidence
from instrument.read.facts.idle import is_loading
from instrument.read.facts.segments import time_of_kind, waits_for_data
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT, CpuWait
from instrument.read.trace.events import Ints, loader_iterator
from instrument.read.trace.line_samples import Samples
from instrument.read.views.coverage_rows import STEPS
from instrument.read.views.lines import share_interval
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit
    from instrument.read.trace.capture_json import Loader

_SINGLE = "_SingleProcess"
# The check proposes at most the first number of workers if the number of CPUs is unknown, unless
# there are more already, and at most the second if it is known.
_USUAL_WORKERS, _MOST_WORKERS = 4, 16
# Two CPUs of one core together do about 2 / 1.6 = 1.25 times the work of one.
_SHARED_CORE = 1.6
# To take over a batch from a worker costs the training process 0.8 ms (torch 2.13, CPU), so a
# worker saves nothing if the process itself loads a batch in less than about this time.
_TAKEN_OVER_NS, _SHORT_BATCH_NS = 800_000, 1_000_000

# Where batches are loaded: by a DataLoader in the training process, by a DataLoader in worker
# processes, or by an unknown iterator.
_Kind = Literal["process", "workers", "iterator"]
_TITLES: dict[_Kind, str] = {
    "process": "; the training process loads it",
    "workers": "; worker processes load it",
    "iterator": "",
}
_SHORT = (
    "Use larger batches, or index the tensors directly, with many indices at once: DataLoader(..., "
    "sampler=BatchSampler(...), batch_size=None). Worker processes would not help: to take over a "
    "batch from them costs about as much as to load it."
)
# Torch's file that calls `__getitem__` and `collate_fn`.
_FETCH = "torch/utils/data/_utils/fetch.py"
# A function is named if it has this part, and so many, of the samples of the loading. There must be
# so many samples. Workers that load for this part of their time are what the step waits for.
_MOST_OF, _LEAST_OF_ITEMS, _LEAST_SAMPLES, _MOSTLY_BUSY = 0.4, 30, 100, 0.5
_CHEAPER = (
    "Make {} cheaper: do once, before the training, what is the same for each item (open a file, "
    "make an index) and what each epoch computes again, and work on whole arrays (np.stack, then "
    "torch.from_numpy) instead of lists."
)


def loader_wait(capture: Views) -> Iterator[Problem]:
    """Find the waits for data: torch's ranges around `DataLoader.__next__`, and a session's `data`.

    With a device, a wait counts only while the device is idle. If worker processes load the data,
    the saving is known only by samples of them: the trace does not show how long they need.
    """
    events, steps = capture.events, capture.links.counted_steps
    waits = in_steps(capture, waits_for_data(capture))
    if not len(waits):
        return
    waited_ns, share = time_of_kind(capture, "waiting for data")
    loader, kind = capture.loader, _kind(capture)
    loads_ns = int(steps.within(events.start_ns[waits], events.end_ns[waits]).sum())
    workers = _workers(capture, loads_ns, waited_ns, kind, loader)
    is_short = kind != "workers" and loads_ns < _SHORT_BATCH_NS * len(waits)
    in_each = " in each step" if steps.what == "step" else ""
    edit = None if is_short else _edit(capture, waits, loads_ns, kind, workers)
    change = _SHORT if is_short else _change(capture, loader, kind, workers)
    work, details = None if is_short else _work(capture, kind), _TITLES[kind]
    left: list[float] | None = None
    if work is not None and kind == "workers":
        # the time of a batch in the thread of a worker
        batch_ns = (
            work.busy * steps.total_ns / max(len(waits), 1) * ((loader and loader.workers) or 1)
        )
        if batch_ns < _SHORT_BATCH_NS:
            details += f", in {duration(batch_ns)}: to take it over from them takes longer"
            change = f"{_SHORT} So DataLoader(..., num_workers=0) is faster, too."
            edit, work, left = None, None, [batch_ns * len(waits) / max(loads_ns, 1)] * 3
    if work is not None and work.line is not None:
        details += f"; {percent(work.share)} of the loading is in {work.line}"
        change = f"{_CHEAPER.format(work.line)} Second best: {change}"
        left = _left(capture, waits, loads_ns, kind, work)
    saves = None
    if left and kind == "process":
        by, *bounds = left
        edit = lambda whatif: whatif.scale_events(waits, by, bounds=(bounds[0], bounds[1]))  # noqa: E731
    elif left:  # the simulation lets workers need as long as they did
        at, low, high = (share * (1 - min(each, 1)) for each in left)
        saves = at, low, high
    yield Problem(
        f"{duration(waited_ns / steps.count)}{in_each}{details}",
        waits,
        share,
        edit=None if saves else edit,
        saves=saves,
        place=None if work is None or work.line is None else (None, work.line),
        evidence=(*evidence(capture, waits), *_settings(loader)),
        change=change,
    )


LOADER_WAIT = Check(
    "loader-wait",
    loader_wait,
    title="{share} of the {step} waits for data: {what}",
    verify="--interruptions --steps",
    least_share=0.05,
    least_saving=0.02,
    coverage=STEPS,
)


class _Work(NamedTuple):
    """What loads a batch, by samples: the function with most of it, if there is one.

    `busy` is the part of the time in which the process loads, `share` that of the loading in the
    function, with its bounds, and `line` its line with most samples.
    """

    busy: float
    line: str | None
    share: float
    low: float
    high: float


def _work(capture: Views, kind: _Kind) -> _Work | None:
    """The samples of the loading in this process or in the workers; None if there are too few."""
    found = None
    with suppress(CaptureError):  # only `lines` says that the file is damaged
        found = capture.line_samples
    if found is None or kind == "iterator":
        return None
    whole, of = 0, 0
    # by function of the user, with what it calls: the samples, and those of its lines
    loading, lines = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for samples in found.workers if kind == "workers" else [found]:
        for _, phase, thread, stack, count in samples.counts:
            if thread or (kind == "process" and phase != capture.phase):
                continue
            whole += count
            if (own := _of_items(samples, stack)) is not None:
                of += count
                for function, line in own.items():
                    loading[function] += count
                    lines[function][line] += count
    if whole < _LEAST_SAMPLES:
        return None
    least = max(_MOST_OF * of, _LEAST_OF_ITEMS)
    large = [each for each, count in loading.items() if count >= least]
    # an inner function has fewer samples, or as many, and comes later
    function = min(large[::-1], key=lambda each: loading[each], default="")
    low, high = share_interval(loading[function], of)
    top = lines[function].most_common(1)[0][0] if large else None
    return _Work(of / max(whole, 1), top, loading[function] / max(of, 1), low or 0.0, high or 1.0)


def _of_items(samples: Samples, stack: int) -> dict[str, str] | None:
    """The lines of a stack in functions that loading calls; None for a stack that loads nothing."""
    frames = samples.stacks[stack]
    fetch = [at for at, frame in enumerate(frames) if samples.file(frame) == _FETCH]
    if not fetch:
        return None
    own = [each for each in frames[: fetch[0]] if samples.frames[each][0] == "user"]
    # the innermost call of a function counts
    return {"".join(samples.frames[each][1::2]): samples.place_of(each) for each in own[::-1]}


def _left(
    capture: Views, waits: Ints, loads_ns: int, kind: _Kind, work: _Work
) -> list[float] | None:
    """The part of the waits that is left if the function costs nothing, with its bounds.

    None if the step does not wait for the workers.
    """
    left = [1 - each for each in (work.share, work.low, work.high)]
    if kind == "process":
        return left
    if work.busy < _MOSTLY_BUSY:
        return None
    total_ns = capture.links.counted_steps.total_ns
    rest_ns, taken_ns = total_ns - loads_ns, min(_TAKEN_OVER_NS * len(waits), loads_ns)
    return [max(each * total_ns - rest_ns, taken_ns) / loads_ns for each in left]


def _kind(capture: Views) -> _Kind:
    events = capture.events
    names = [events.names[k] for k in np.unique(events.name[is_loading(events)]).tolist()]
    if not names:
        return "iterator"
    iterators = [loader_iterator(name) or "" for name in names]
    return "process" if all(name.startswith(_SINGLE) for name in iterators) else "workers"


def _workers(
    capture: Views, loads_ns: int, waited_ns: int, kind: _Kind, loader: Loader | None
) -> int:
    """The number of workers to try: as many as the estimate needs, if the training keeps CPUs."""
    cpus, steps = _cpus(capture), capture.links.counted_steps
    present = (loader.workers if loader else None) or 0
    most = max(_USUAL_WORKERS, 2 * present)
    if cpus is not None:
        # Operators on the CPU need the other half, a device one CPU for its launches. Two CPUs can
        # have two workers: if the estimate needs both, the training waits most of the time.
        free = cpus - 1 if len(capture.links.launches.device) else cpus // 2
        most = min(max(free, min(cpus, 2)), _MOST_WORKERS)
    if kind == "workers":
        return most
    needed = math.ceil(_SHARED_CORE * loads_ns / max(steps.total_ns - waited_ns, 1))
    return max(min(needed, most), 1)


def _cpus(capture: Views) -> int | None:
    """The number of CPUs for each rank on this machine, at least 1; None if it is not known."""
    threads = capture.about.environment and capture.about.environment.threads
    if not threads or threads.cpus is None:
        return None
    return max(threads.cpus // max(threads.local_ranks or 1, 1), 1)


def _edit(capture: Views, waits: Ints, loads_ns: int, kind: _Kind, workers: int) -> Edit | None:
    """The step with data that `workers` worker processes load; None if workers already load it.

    A step takes at least as long as the work beside the loading and taking over the batch, as one
    worker's share of a batch, and as the CPUs need for the CPU time of the step's thread.
    """
    if kind == "workers" or not loads_ns:
        return None
    # The expected, the longest and the shortest time of all batches.
    expected_ns, longest_ns, shortest_ns = _batches_ns(capture, loads_ns, workers)
    rest_ns = capture.links.counted_steps.total_ns - loads_ns
    taken_ns = rest_ns + min(_TAKEN_OVER_NS * len(waits), loads_ns)
    batches_ns = max(expected_ns, taken_ns), max(longest_ns, taken_ns), shortest_ns
    if kind == "process":
        count, least, most = (loads_ns / ns for ns in batches_ns)
        return lambda whatif: whatif.workers(count, bounds=(least, most))
    # This assumes that an unknown iterator has no threads or processes of its own.
    by, largest, smallest = (max(ns - rest_ns, 0) / loads_ns for ns in batches_ns)
    return lambda whatif: whatif.scale_events(waits, by, bounds=(largest, smallest))


def _batches_ns(capture: Views, loads_ns: int, workers: int) -> tuple[float, float, float]:
    """The time in which workers deliver the batches of all steps: expected, longest, shortest.

    A session on Linux counts the CPU time of the step's thread; else the thread counts as always
    busy. The longest assumes that two CPUs are one core, and that all threads work in an operator.
    """
    total_ns, cpus = capture.links.counted_steps.total_ns, _cpus(capture)
    alone_ns = loads_ns / workers
    if cpus is None:
        return alone_ns, loads_ns / max(workers / 2, 1), alone_ns
    wait = capture.about.cpu_wait or CpuWait()
    # The CPU time of the steps' thread, and that of the other threads of operators at most.
    ran_ns: float = total_ns
    if wait.ran_ns is not None and wait.window_ns:
        ran_ns = min(total_ns * wait.ran_ns / wait.window_ns, total_ns)
    rest_ns, threads = total_ns - loads_ns, _threads(capture)
    expected_ns = max(alone_ns, ran_ns / cpus)
    longest_ns = max(
        expected_ns,
        loads_ns / max(workers / _SHARED_CORE, 1),
        ran_ns / max(cpus / _SHARED_CORE, 1),
        (ran_ns + (threads - 1) * rest_ns) / cpus,
    )
    shortest_ns = alone_ns if wait.ran_ns is None else expected_ns
    if (wait.share or 0) >= DISTURBING_CPU_WAIT:  # the workers may get no CPU that is not used now
        expected_ns, longest_ns = (expected_ns + total_ns) / 2, total_ns
    return min(expected_ns, total_ns), min(longest_ns, total_ns), min(shortest_ns, total_ns)


def _threads(capture: Views) -> int:
    """The number of threads that work in an operator at most; 1 if a device works."""
    environment, cpus = capture.about.environment, _cpus(capture)
    if environment is None or environment.threads is None or len(capture.links.launches.device):
        return 1
    return max(min(environment.threads.intra_op or 1, cpus or 1), 1)


def _change(capture: Views, loader: Loader | None, kind: _Kind, workers: int) -> str:
    pinned = loader is None or loader.pin_memory is False
    pin = ", pin_memory=True" if pinned and len(capture.links.launches.device) else ""
    if kind == "iterator":
        return (
            "Load in worker processes: give the data as a Dataset to torch.utils.data.DataLoader("
            f"dataset, num_workers={workers}, persistent_workers=True{pin})."
        )
    if kind == "process":
        return f"DataLoader(..., num_workers={workers}, persistent_workers=True{pin})"
    if loader is not None and loader.workers is not None and loader.workers >= workers:
        keep = ""
        if loader.persistent_workers is False:
            keep = (
                " If the waits are where epochs begin, persistent_workers=True keeps the workers."
            )
        return (
            "Make a batch cheaper, for example by decoding and resizing beforehand. More than the "
            f"present {loader.workers} workers help if these wait for files or a network; if they "
            f"compute, there are no CPUs for more.{keep}"
        )
    return (
        f"DataLoader(..., num_workers={workers}, prefetch_factor=4, persistent_workers=True{pin}); "
        "if that does not help, make a batch cheaper, for example by decoding beforehand."
    )


def _settings(loader: Loader | None) -> tuple[Evidence, ...]:
    if loader is None:
        return ()
    names = ("workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor")
    known = [(name, getattr(loader, name)) for name in names]
    text = ", ".join(f"{name}={value}" for name, value in known if value is not None)
    return (Evidence("settings of the loader", 1, detail=text),) if text else ()
