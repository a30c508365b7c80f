"""The findings about a run: the collector, torch.compile, the first step, threads, memory, autograd."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import Event, accumulation, annotation, call, frame, made, node, span, step

from findings.by_hand import Case, check, environment
from instrument import Capture, diff
from instrument.read.advise.check import NotRecorded

oversubscription = partial(Case, "thread-oversubscription")
memory_growth = partial(Case, "memory-growth")
unused_gradients = partial(Case, "unused-gradients")
frozen_modules = partial(Case, "frozen-modules")
unused_autograd = partial(Case, "unused-autograd")
garbage_collection = partial(Case, "garbage-collection")
debug_modes = partial(Case, "debug-modes")
recompilation = partial(Case, "recompilation")
first_step = partial(Case, "first-step")


def steps(count: int, duration_us: float = 1000, first_us: float | None = None) -> list[Event]:
    """Steps after each other, each with an operator that fills the last 10 µs; the first may be longer."""
    events, start = [], 0.0
    for number in range(count):
        length = first_us if number == 0 and first_us is not None else duration_us
        events += [step(number, start, length), span("aten::mm", start + length - 10, 9)]
        start += length
    return events


# The collector


def collected(*durations_us: int) -> dict[str, Any]:
    """What a session counts without events of collections."""
    return environment(
        garbage_collection={
            "collections": len(durations_us),
            "total_ns": sum(durations_us) * 1000,
            "longest_ns": max(durations_us) * 1000,
        }
    )


def collections(*durations_us: int) -> list[Event]:
    return [frame("Python GC", 1000 * k + 100, each) for k, each in enumerate(durations_us, 1)]


CALLED_FOR = [
    event
    for start in (0, 1000, 2000, 3000)
    for event in (
        frame("train.py(9): main", start + 1, 500),
        frame("<built-in function collect>", start + 99, 102),
        frame("Python GC", start + 100, 100),
    )
]
ONE_IS_LONG, EQUAL = (300, 20, 20), (110, 110, 110)
COLLECTOR = {
    "the whole window": garbage_collection(steps(4), collected(100, 100, 80, 120)),
    "one collection is long": garbage_collection([*steps(4), *collections(*ONE_IS_LONG)]),
    "one is long, of a window": garbage_collection(steps(4), collected(*ONE_IS_LONG)),
    "the only one": garbage_collection([*steps(4), *collections(300)]),
    "the only one of a window": garbage_collection(steps(4), collected(300)),
    "equal collections": garbage_collection([*steps(4), *collections(*EQUAL)]),
    "equal collections of a window": garbage_collection(steps(4), collected(*EQUAL)),
    "collections that the program calls for": garbage_collection([*steps(4), *CALLED_FOR]),
}


# torch.compile


def compilation(start_us: float, again: int = 1) -> list[Event]:
    """A compilation of 400 µs, as torch records it."""
    note = f"entire_frame_compile_data: fn_name=f, compile_id=0/{again}"
    return [
        span("dynamo", start_us, 400),
        span("entire_frame_compile", start_us + 1, 398),
        annotation(note, start_us + 2, 1),
        span("_compile.compile_inner (dynamo_timed)", start_us + 4, 390),
        span("build_guards (dynamo_timed)", start_us + 100, 100),
    ]


FIRST_COMPILATION = [*steps(4), *compilation(0, 0)]
LATER = [*compilation(1100), *compilation(2100), *compilation(3100)]
GUARDS = {"train.py:3 in f: k == 2": 1, "train.py:3 in f: tensor 'x' size mismatch": 5}
BREAKS = {"call to print": 1, "Tensor.item()\n  at train.py:3": 2}
COMPILING = {
    "a compilation in a later step": recompilation([*FIRST_COMPILATION, *LATER]),
    "recompilations that only the session counted": recompilation(
        steps(4), environment(dynamo={"recompilations": 2, "graphs": 2})
    ),
    "guards that failed": recompilation(
        steps(4), environment(dynamo={"recompilations": 2, "failed_guards": GUARDS})
    ),
    "graph breaks with their reasons": Case(
        "graph-breaks", steps(4), environment(dynamo={"graphs": 4, "graph_breaks": BREAKS})
    ),
}

# The first step

LOADED = [*steps(5, first_us=20_000), call("cudaModuleLoadData", 100, 15_000)]
SEARCHED = [*steps(5, first_us=20_000), span("aten::cudnn_convolution", 100, 15_000)]
FIRST = {
    "kernel code is loaded": first_step(LOADED),
    "an operator is slow": first_step(SEARCHED),
    "cuDNN searches": first_step(SEARCHED, environment(cudnn_benchmark=True)),
}


# Threads


def threads(
    loaders: Any = None, cpu_wait: dict[str, int] | None = None, **changed: Any
) -> dict[str, Any]:
    known = {"intra_op": 8, "inter_op": 8, "cpus": 8, "local_ranks": 1, **changed}
    return environment(threads=known, loaders=loaders, cpu_wait=cpu_wait)


def scheduled(waited: int, ran: int, workers: int) -> dict[str, int]:
    """What the scheduler says of a window of 40 ms: times of the thread of the steps and of others, in ms."""
    each = {"waited_ns": waited, "ran_ns": ran, "workers_waited_ns": workers, "window_ns": 40}
    return {key: ms * 1_000_000 for key, ms in each.items()}


def waiting_operators(*, shapes: bool = False, extra: int = 0, alone_us: int = 20) -> list[Event]:
    """Four steps of 10 ms with 20 equal operators; in each step, others of them wait for a thread until 420 µs.

    Step k has `extra` * k operators more.
    """
    events, sizes = [], {"Input_Dims": [[8, 8], [8, 8]]} if shapes else {}
    for number in range(4):
        events.append(step(number, 10_000 * number, 10_000))
        for k in range(20 + extra * number):
            lasts = 420 if (k + number) % 3 == 0 else alone_us
            events.append(span("aten::mm", 10_000 * number + 450 * k, lasts, **sizes))
    return events


# Of the operators of 420 µs, each waits in one of three steps; of the last one, the shortest time of
# 30 ms includes waiting, too.
ALL_WAIT = [
    each
    for n in range(4)
    for each in (
        step(n, 200_000 * n, 200_000),
        *(
            span("aten::mm", 200_000 * n + 1000 * k, 20 + 900 * ((k + n) % 3 > 0))
            for k in range(60)
        ),
        span("aten::_fused_adam_", 200_000 * n + 60_000, 30_000 if n % 2 else 90_000),
    )
]
LONG = [*steps(4), *(span("aten::mm", 1000 * k + 100, 400) for k in range(4))]
BOTH = [{"phase": "train", "workers": 6}, {"phase": "validation", "workers": 2}]
FITTING = [{"phase": "train", "workers": 8}]
WAITING_LESS = scheduled(8, 32, 12)
WAITING, IDLE_WORKERS = scheduled(20, 20, 12), scheduled(20, 20, 1)
THREADS = {
    "as many threads as CPUs on each rank": oversubscription(LONG, threads(local_ranks=4)),
    "workers of loaders": oversubscription(LONG, threads(BOTH)),
    "more processes than CPUs": oversubscription(steps(4), threads(intra_op=1, local_ranks=16)),
    "threads that wait for each other": oversubscription(
        waiting_operators(), threads(cpu_wait=WAITING)
    ),
    "threads that wait, and operators that do not": oversubscription(
        [
            *waiting_operators(alone_us=60),
            *(
                span("aten::add", 10_000 * n + 9000 + 20 * k, 15)
                for n in range(4)
                for k in range(50)
            ),
        ],
        threads(intra_op=2, cpus=2, cpu_wait=WAITING_LESS),
    ),
    "threads that wait, with shapes": oversubscription(
        waiting_operators(shapes=True, extra=1), threads(cpu_wait=WAITING)
    ),
    "threads that wait, another number of operators in each step": oversubscription(
        waiting_operators(extra=1), threads(cpu_wait=WAITING)
    ),
    # One thread takes twice as long for operators of 60 µs, which are worth two threads.
    "two threads that are worth it and wait": oversubscription(
        waiting_operators(alone_us=60), threads(intra_op=2, cpus=2, cpu_wait=WAITING_LESS)
    ),
    "eight threads on two CPUs that are worth it and wait": oversubscription(
        waiting_operators(alone_us=60), threads(intra_op=8, cpus=2, cpu_wait=WAITING_LESS)
    ),
    "an operator that waits in each step, because it divides its work often": oversubscription(
        ALL_WAIT, threads(intra_op=2, cpus=2, cpu_wait=WAITING)
    ),
    "more threads than CPUs, which wait": oversubscription(
        waiting_operators(), threads(cpus=4, cpu_wait=WAITING)
    ),
}


# Memory


def growth(count: int, kept: int, device: int | None = 0, *, more: int = 0) -> list[Event]:
    """Steps in which a range keeps memory, in each `more` than before; each also allocates and frees a megabyte."""
    events, total = steps(count), 10**9
    for number in range(count):
        start, address = number * 1000, 10**6 + number * 10**6
        events.append(annotation("forward", start + 100, 200))
        events.append(span("aten::exp", start + 150, 50))
        held = kept + number * more
        total += held
        events.append(builders.allocation(start + 160, held, address, total, device=device))
        events.append(builders.allocation(start + 500, 2**20, 77, total + 2**20, device=device))
        events.append(builders.allocation(start + 600, -(2**20), 77, total, device=device))
    return events


# Of a device with 24 GiB, of which 10**9 bytes were in use.
OF_24_GIB = {"deviceProperties": [{"id": 0, "totalGlobalMem": 24 * 2**30}]}
FREED_ONCE = [*growth(5, 2**20), builders.allocation(3700, -(2**21), 3 * 10**6, device=0)]


# Autograd


def owned(**by: tuple[int | None, int]) -> dict[str, Any]:
    """Facts of submodules: for each, the number of its optimizer, and how many gradients it has."""
    return {
        "owners": {
            name: {"optimizer": optimizer, "gradients": gradients, "differentiates": False}
            for name, (optimizer, gradients) in by.items()
        }
    }


def training(count: int, *, validates: bool = True, validation: str = "validation") -> list[Event]:
    """Steps with a forward and its backward, and a validation that records gradients, in a range."""
    events, number = steps(count), 10
    for start in range(0, 1000 * count, 1000):
        events += [annotation("forward", start + 10, 60), made("aten::mm", start + 20, 20, number)]
        events.append(made("aten::relu", start + 45, 20, number + 1))
        events += [
            node("ReluBackward0", start + 100, 30, number + 1),
            node("MmBackward0", start + 140, 30, number),
        ]
        number += 2
        if validates:
            events.append(annotation(validation, start + 300, 300))
            events += [made("aten::mm", start + 310 + 20 * k, 15, number + k) for k in range(10)]
            number += 10
    return events


def without_nodes() -> list[Event]:
    """Operators of a validation that make no node: gradients are enabled, and the number stays."""
    events = training(4, validates=False)
    for start in range(0, 4000, 1000):
        number = 12 + start // 500
        events.append(annotation("validation", start + 300, 300))
        events += [made("aten::mm", start + 310 + 20 * k, 15, number) for k in range(10)]
    return events


def probe(*, inputs: bool = False) -> list[Event]:
    """Steps of a backbone, a layer without parameters and a head; the input can get a gradient too."""
    events = steps(4)
    for start in range(0, 4000, 1000):
        number = start // 100
        for k, name in enumerate(("backbone", "act", "head")):
            at = start + 10 + 50 * k
            events += [annotation(name, at, 40), made("aten::mm", at + 5, 30, number + k)]
        for k, at in ((2, 200), (1, 300), (0, 400)):
            events.append(node("MmBackward0", start + at, 60, number + k))
            events += [] if k == 1 else accumulation(start + at + 65, 20)
        events += accumulation(start + 490, 20) if inputs else []
    return events


def taught(*, adds: bool = True) -> list[Event]:
    """Steps of a teacher and a student with one layer each, of which only the student's is trained.

    The teacher is called last, so its backward comes first; its input gets no gradient. If the backward `adds` to the
    teacher's gradients, nothing clears them.
    """
    events = steps(4)
    for start in range(0, 4000, 1000):
        number = start // 100
        for k, name in enumerate(("student", "teacher")):
            at = start + 10 + 50 * k
            events += [annotation(name, at, 40), made("aten::mm", at + 5, 30, number + k)]
        for k, at in ((1, 200), (0, 400)):
            events.append(node("MmBackward0", start + at, 160, number + k))
            events += accumulation(start + at + 165, 20)
            events += [span("aten::add_", start + at + 170, 8, tid=2)] if k and adds else []
    return events


def adversarial(
    *, clears: bool = True, keeps: str = "", count: int = 4, closure: bool = False
) -> list[Event]:
    """Steps of a critic, then of a generator, whose backward leaves gradients of the critic too.

    The critic's next backward adds to these, unless the program `clears` them. Before its step, the program calls
    `keeps`, such as "aten::clone", for each of the critic's two gradients. With `closure`, all of this is in the step.
    """
    events = steps(count)
    for start in range(0, 1000 * count, 1000):
        number = start // 100
        for at, names in ((0, ["critic"]), (400, ["generator", "critic"])):
            begin = start + at
            for k, name in enumerate(names):
                events.append(annotation(name, begin + 10 + 50 * k, 40))
                events.append(made("aten::addmm", begin + 15 + 50 * k, 30, number + at // 100 + k))
            for k, name in reversed([*enumerate(names)]):
                then = begin + 120 + 100 * (len(names) - k - 1)
                events.append(node("AddmmBackward0", then, 60, number + at // 100 + k))
                events.append(span("AddmmBackward0", then + 2, 56, tid=2))
                products = [5, 30] if k else [5]
                events += [span("aten::mm", then + each, 20, tid=2) for each in products]
                for at_sum in (65, 80):
                    events += accumulation(then + at_sum, 12)
                    if name == "critic" and (len(names) > 1 or not clears):
                        events.append(span("aten::add_", then + at_sum + 3, 5, tid=2))
            calls = [span(keeps, begin + 340 + 5 * k, 4) for k in range(2) if keeps]
            events += [] if at else calls
            if not closure:
                events.append(annotation("Optimizer.step#Adam.step", begin + 360, 30))
        if closure:
            events.append(annotation("Optimizer.step#Adam.step", start + 1, 998))
    return events


def searching() -> list[Event]:
    """Anomaly mode searches each gradient for NaN."""
    return [
        *training(4, validates=False),
        *(
            span(name, start + at + k, 5, tid=2)
            for start in range(0, 4000, 1000)
            for at in (110, 150)
            for name, k in (("aten::isnan", 0), ("aten::_is_any_true", 6), ("aten::item", 12))
        ),
    ]


def frozen(length_us: float = 400, *, trains: bool = True) -> list[Event]:
    """Steps that train a head on the results of an encoder, which records no gradients."""
    events = training(4, validates=False) if trains else steps(4)
    for start in range(0, 4000, 1000):
        events.append(annotation("encoder", start + 300, length_us))
        events.append(span("aten::mm", start + 310, length_us - 20))
    return events


FROZEN = owned(encoder=(None, 0))
NO_BACKWARD = [*steps(4), *(made("aten::mm", 10 + 50 * k, 30, k) for k in range(78))]
EARLIER_FORWARD = [
    *steps(4),
    *(made("aten::mm", 10 + 50 * k, 30, 100 + k) for k in range(20)),
    *(node("MmBackward0", 1200 + 40 * k, 30, 90 - k) for k in range(10)),
]
HOOK = [*training(4, validates=False), span("aten::isnan", 1110, 5, tid=2)]
# Another program takes the CPU from one of the ten operators in each step, which the graph does not cost.
DISTURBED = [{**each, "dur": 100} if each["ts"] % 1000 == 490 else each for each in training(4)]


ADVERSARIAL = owned(critic=(0, 2), generator=(1, 2)) | {"optimizer_steps": [0, 1] * 4}
ADVERSARIAL["owners"]["critic"]["differentiates"] = True
AVERAGE = owned(teacher=(None, 1), student=(0, 1))
AVERAGE["owners"]["teacher"]["changed"] = True
UNUSED = owned(backbone=(None, 1), head=(0, 1))
UNUSED["owners"]["backbone"]["differentiates"] = True
AUTOGRAD = {
    "a range whose graph no backward uses": unused_autograd(training(4)),
    "calls of a range whose other calls have a backward": unused_autograd(
        training(4, validation="forward")
    ),
    "a graph on a busy machine": unused_autograd(DISTURBED),
    "a program without any backward": unused_autograd(NO_BACKWARD),
    "gradients of a backbone that nothing uses": unused_gradients(probe(), UNUSED),
    "gradients that are cleared before a step": unused_gradients(adversarial(), ADVERSARIAL),
    "an average of a model, in which gradients add up": unused_gradients(taught(), AVERAGE),
    "a module that nothing trains": frozen_modules(frozen(), FROZEN),
    "anomaly mode of which the trace shows nothing": debug_modes(
        steps(4), environment(anomaly_mode=True)
    ),
    "the search of anomaly mode in the backward": debug_modes(searching()),
}

FOUND = {
    **COLLECTOR,
    **COMPILING,
    **FIRST,
    **THREADS,
    "a range keeps memory in each step": memory_growth(growth(5, 2**20)),
    "a leak that soon ends the run": memory_growth(growth(5, 12 * 2**20), document=OF_24_GIB),
    "a leak on the CPU that soon ends the run": memory_growth(
        growth(5, 40 * 2**20, None), {"machine": {"memory_bytes": 64 * 2**30}}
    ),
    "a leak on the CPU that soon ends the run on 8 ranks": memory_growth(
        growth(5, 4 * 2**20, None),
        {**environment(threads={"local_ranks": 8}), "machine": {"memory_bytes": 64 * 2**30}},
    ),
    "a leak on a device of 8 ranks": memory_growth(
        growth(5, 4 * 2**20),
        {**environment(threads={"local_ranks": 8}), "machine": {"memory_bytes": 64 * 2**30}},
    ),
    "a buffer that may fill up to a bound": memory_growth(
        growth(4, 5 * 2**19, None), {"machine": {"memory_bytes": 64 * 2**30}}
    ),
    "growth that is not steady": memory_growth(growth(5, 2**24, more=2**23), document=OF_24_GIB),
    "a device with memory of unknown size": memory_growth(growth(5, 40 * 2**20)),
    **AUTOGRAD,
}
NOT_FOUND = {
    "a collector that takes little": garbage_collection(steps(4), collected(10, 10, 10, 10)),
    "the first step compiles": recompilation(FIRST_COMPILATION),
    "workers of loaders that leave the CPUs to the training": oversubscription(
        LONG, threads(BOTH, cpu_wait=scheduled(1, 40, 1))
    ),
    "nothing is compiled": Case("graph-breaks", steps(4), environment(dynamo=None)),
    "no compilation in a bare trace": Case("graph-breaks", steps(4)),
    "an equal first step": first_step(steps(5, 1000, 1000)),
    "every second step is as long as the first": first_step(
        [step(k, 31_000 * k, 30_000 if k % 2 == 0 else 1000) for k in range(4)]
    ),
    "a first step longer by little time": first_step(steps(5, 1000, 9000)),
    "a first step of less than twice the time": first_step(steps(5, 10_000, 19_000)),
    "threads without work": oversubscription(steps(4), threads(local_ranks=4)),
    "workers beside one thread": oversubscription(LONG, threads(FITTING, intra_op=1)),
    "the default threads": oversubscription(LONG, threads()),
    "one thread waits for no other": oversubscription(
        waiting_operators(), threads(intra_op=1, cpu_wait=WAITING)
    ),
    "threads that wait little": oversubscription(
        waiting_operators(), threads(cpu_wait=scheduled(2, 30, 2))
    ),
    "little memory is kept": memory_growth(growth(5, 1000)),
    "memory is freed once": memory_growth(FREED_ONCE),
    "ranges with a backward": unused_autograd(training(4, validates=False)),
    "operators that make no node": unused_autograd(without_nodes()),
    "no unused gradients": unused_gradients(probe(), owned(backbone=(0, 1), head=(0, 1))),
    "unused gradients of a module behind a trained one": unused_gradients(
        probe(), owned(backbone=(0, 1), head=(None, 0))
    ),
    "gradients that the next backward adds to": unused_gradients(
        adversarial(clears=False), ADVERSARIAL
    ),
    "gradients that the program keeps before it clears them": unused_gradients(
        adversarial(keeps="aten::clone"), ADVERSARIAL
    ),
    "gradients within the step of an optimizer": unused_gradients(
        adversarial(closure=True), ADVERSARIAL | {"optimizer_steps": [0] * 4}
    ),
    "a model that the program itself trains": unused_gradients(taught(adds=False), AVERAGE),
    "gradients of optimizers that step in unknown order": unused_gradients(
        adversarial(), ADVERSARIAL | {"optimizer_steps": None}
    ),
    "a copy of a trained module": frozen_modules(
        frozen(), {"owners": {"encoder": {**FROZEN["owners"]["encoder"], "is_copy": True}}}
    ),
    "a module that the program itself changes": frozen_modules(
        frozen(), {"owners": {"encoder": {**FROZEN["owners"]["encoder"], "changed": True}}}
    ),
    "a small module that nothing trains": frozen_modules(frozen(100), FROZEN),
    "a module of which nothing is known": frozen_modules(frozen(), owned()),
    "a module that nothing trains, in inference": frozen_modules(frozen(trains=False), FROZEN),
    "a module that nothing trains, with a backward": frozen_modules(
        probe(), owned(backbone=(None, 0))
    ),
    "an input that gets a gradient too": unused_gradients(probe(inputs=True), UNUSED),
    "a program that infers": unused_gradients(steps(4)),
    "anomaly mode was off": debug_modes(steps(4), environment(anomaly_mode=False)),
    "a hook that searches one gradient": debug_modes(HOOK),
}
REGION = [*steps(4), span("Torch-Compiled Region: 0/0", 10, 20)]
THREADS_AND_CPUS = "how many threads and CPUs"
UNKNOWN = {
    "collections": (garbage_collection(steps(4)), "record_python_gc_info"),
    "collections of a window that ended early": (
        garbage_collection(steps(4), {**collected(20_000), "window": {"truncated": True}}),
        "share of Python's garbage collector is not known",
    ),
    "one step compiles": (
        recompilation([*steps(1), *compilation(0)]),
        "fewer than two finished steps",
    ),
    "graph breaks": (Case("graph-breaks", REGION), "does not count graph breaks"),
    "few steps and a slow first one": (
        first_step(steps(3, first_us=50_000)),
        "fewer than 4 finished steps: record",
    ),
    "threads": (oversubscription(steps(4)), THREADS_AND_CPUS),
    "CPUs": (oversubscription(steps(4), threads(cpus=None)), THREADS_AND_CPUS),
    "threads on a busy machine": (
        oversubscription(waiting_operators(), threads(cpu_wait=IDLE_WORKERS)),
        "record while no other program uses the CPUs",
    ),
    "operators for which one thread needs longer than two that wait": (
        oversubscription(
            waiting_operators(alone_us=60), threads(intra_op=2, cpus=2, cpu_wait=WAITING)
        ),
        "threads may have waited for each other",
    ),
    "equal operators on a busy machine": (
        oversubscription(LONG, threads(cpu_wait=WAITING)),
        "threads may have waited for each other",
    ),
    "memory": (memory_growth(steps(5)), "profile_memory=true"),
    "memory of few steps": (
        memory_growth(growth(3, 2**20)),
        "fewer than 4 finished steps: record with",
    ),
    "an earlier forward": (unused_autograd(EARLIER_FORWARD), "the backward of an earlier forward"),
    "what trains modules": (frozen_modules(frozen(), {}), "which parameters are in an optimizer"),
    "optimizers": (unused_gradients(probe(), {}), "which parameters are in an optimizer"),
    "anomaly mode": (debug_modes(steps(4)), "whether anomaly detection was on"),
}


def test_threads_that_wait_for_each_other_explain_why_the_cpus_are_busy(tmp_path: Path) -> None:
    def busy(name: str, events: list[Event], **facts: Any) -> list[Any]:
        return Case("busy-cpus", events, threads(**facts)).findings(tmp_path / name)

    (rest,) = busy("rest", waiting_operators(), cpu_wait=WAITING)
    (thread,) = THREADS["threads that wait for each other"].findings(tmp_path / "threads")
    assert thread.share is not None
    assert rest.share == pytest.approx(0.5 * (1 - thread.share))
    assert "the part that thread-oversubscription explains" in rest.title
    (alone,) = busy("alone", waiting_operators(), intra_op=1, cpu_wait=WAITING)
    assert alone.share == 0.5
    (many,) = busy("too many", LONG, local_ranks=4, cpu_wait=WAITING)
    assert many.share == 0.5


def test_other_work_on_the_cpus(tmp_path: Path) -> None:
    def waiting(waited_ns: int) -> Capture:
        wait = {"waited_ns": waited_ns, "window_ns": 1_000_000}
        return builders.write_capture(
            tmp_path / str(waited_ns), steps(4), **environment(cpu_wait=wait)
        )

    (finding,) = check(waiting(350_000), "busy-cpus")
    assert finding.title.startswith("For 35 % of the window, the thread of the steps was ready")
    assert (finding.saving, finding.share, finding.is_caveat) == (None, 0.35, True)
    assert not check(waiting(99_000), "busy-cpus")
    busy = "35 % of a window of {}, the thread of the steps was ready to run, but got no CPU"
    for sides, at in (((350_000, 99_000), "BEFORE"), ((99_000, 350_000), "AFTER")):
        captures = [Capture.load(tmp_path / str(ns) / "steps_3-4") for ns in sides]
        (sentence,) = [each.sentence for each in diff(*captures).unlike]
        assert busy.format(at) in sentence
    for unknown in (None, {}, {"waited_ns": 5, "window_ns": 0}):
        with pytest.raises(NotRecorded, match="waited for a CPU"):
            Case("busy-cpus", steps(4), environment(cpu_wait=unknown)).findings(
                tmp_path / f"unknown {unknown}"
            )


def test_a_second_model_whose_gradients_nothing_uses_is_found(tmp_path: Path) -> None:
    facts = owned(teacher=(None, 1), student=(0, 1))
    (found,) = unused_gradients(taught(), facts).findings(tmp_path)
    assert "'teacher'" in found.title
