"""Waiting for data, synchronising calls, loops over tiny operators, float64 and unmarked time."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import real_traces
from builders import (
    PAGEABLE,
    SINGLE_PROCESS,
    WORKERS,
    Event,
    accumulation,
    annotation,
    call,
    capture,
    frame,
    in_steps,
    kernel,
    launched,
    made,
    node,
    span,
    step,
)

from findings.by_hand import Case, check, environment
from instrument.cli.command import main
from instrument.read.advise import loops
from instrument.read.advise.untrained import change_of
from instrument.read.trace.events import is_step

loader_wait = partial(Case, "loader-wait")
in_loop = partial(Case, "loop")
not_training = partial(Case, "not-training")
not_fused = partial(Case, "optimizer-not-fused")
in_float64 = partial(Case, "float64")
in_float16 = partial(Case, "float16")
synchronising_calls = partial(Case, "synchronising-calls")

# Waiting for data


def loading(
    name: str = SINGLE_PROCESS, waits_us: float = 4000, *, cat: str = "user_annotation", **more: Any
) -> list[Event]:
    """Four steps of 10 ms, each with a wait for its batch, then an operator."""
    wait = span(name, 0, waits_us, cat, **more)
    return in_steps(4, 10_000, wait, span("aten::mm", waits_us, 10_000 - waits_us))


def settings(**loader: Any) -> dict[str, Any]:
    threads = {"intra_op": 8, "inter_op": 8, "cpus": 12, "local_ranks": 4}
    return environment(threads=threads, loaders=[{"phase": "train", "workers": 0, **loader}])


def on_cpus(
    ran: float, *, threads: int = 1, waited: float = 0, others: float = 0, cpus: int = 2
) -> dict[str, Any]:
    """The shares of the window in which the thread runs, and waits for a CPU, as do torch's other threads."""
    return environment(
        threads={"intra_op": threads, "inter_op": 2, "cpus": cpus, "local_ranks": 1},
        cpu_wait={
            "waited_ns": round(waited * 10**6),
            "ran_ns": round(ran * 10**6),
            "workers_waited_ns": round(others * 10**6),
            "window_ns": 10**6,
        },
    )


FRAMES = [frame("train.py(7): main", 0, 40_000)]
WORKED = [
    each for k in range(4) for each in launched("gemm", 10_000 * k + 1, 10_000 * k, 9950, k + 1)
]

LOADER = {
    "a wait for data": loader_wait([*loading(), *FRAMES]),
    "threads and CPUs are known": loader_wait(loading(), settings(pin_memory=False)),
    # The loading takes 6.5 of 10 ms. With two CPUs, two workers need 3.25 ms for a batch.
    "two CPUs for 10 ms of work": loader_wait(loading(waits_us=6500), on_cpus(1)),
    "two threads on two CPUs": loader_wait(loading(waits_us=6500), on_cpus(1, threads=2)),
    "a loader that waits for files": loader_wait(loading(waits_us=6500), on_cpus(0.4)),
    "workers leave half of the CPUs to operators": loader_wait(
        loading(waits_us=9000), on_cpus(1, threads=16, cpus=16)
    ),
    "workers leave one CPU to the launches": loader_wait(
        [*loading(waits_us=9000), *launched("gemm", 9010, 9050, 200, 1)], on_cpus(1, cpus=8)
    ),
    "an iterator on two CPUs": loader_wait(loading("data", 6500), on_cpus(1)),
    "CPUs that other programs use": loader_wait(loading(waits_us=6500), on_cpus(0.5, waited=0.5)),
    "no steps": loader_wait([annotation(SINGLE_PROCESS, 0, 4000), span("aten::mm", 4000, 6000)]),
    "with workers the saving is not known": loader_wait(
        loading(WORKERS), settings(workers=1, persistent_workers=True)
    ),
    "as many workers as fit": loader_wait(
        loading(WORKERS), settings(workers=2, persistent_workers=True)
    ),
    "two batches in each step": loader_wait(
        in_steps(4, 10_000, annotation(WORKERS, 0, 2000), annotation(WORKERS, 5000, 2000)),
        settings(workers=2, persistent_workers=False),
    ),
    "the range of session.steps": loader_wait(loading("data"), {}),
    # With 4 workers, 9 ms of loading give a batch each 2.25 ms; the step works for 1 ms.
    "a batch that loads longer than the step works": loader_wait(loading("data", 9000), {}),
    "a batch that loads in less time than a worker hands it over": loader_wait(
        loading(waits_us=990)
    ),
    # A worker saves the 1.5 ms, but to take over the batch takes 0.8 ms.
    "a batch that loads in twice this time": loader_wait(loading(waits_us=1500)),
}
NO_WAIT = {
    "data in a trace of another program": loader_wait(loading("data")),
    "no wait": loader_wait(loading(waits_us=0)),
    "a short wait": loader_wait(loading(waits_us=400)),
    "on another thread": loader_wait(loading(tid=5)),
    "one CPU, which computes all the time": loader_wait(loading(), on_cpus(1, cpus=1)),
    "while the device works": loader_wait([*loading(), *WORKED]),
}


# Synchronising calls


def synchronising(works_us: float = 300, *, to_device: bool = False) -> list[Event]:
    """Four steps; in each, a kernel that `.item()` waits for, then 500 µs of work on the CPU."""
    events = []
    for number in range(4):
        start, first = 1000.0 * number, 10 * number + 1
        until = start + 20 + works_us
        copied = {"tid": 7, "correlation": first + 1}
        copy = PAGEABLE if to_device else "Memcpy DtoH (Device -> Pageable)"
        events += [
            step(number, start, 1000),
            annotation("train", start, 900),
            *launched("gemm", start, start + 10, works_us, first),
            span("aten::item", start + 10, works_us + 20),
            span("aten::_local_scalar_dense", start + 11, works_us + 18),
            call("cudaMemcpyAsync", start + 12, 3, first + 1),
            span(copy, start + 11 + works_us, 2, "gpu_memcpy", **copied),
            call("cudaStreamSynchronize", start + 16, until + 2 - start - 16),
            frame("train.py(9): log", start + 10, works_us + 20),
            *launched("gemm", until + 500, until + 505, 990 - 505 - works_us - 20, first + 2),
        ]
    return events


# The device has work of its own beside the wait, on another stream.
BUSY = [
    each
    for k in range(4)
    for each in launched("long", 1000 * k, 1000 * k + 5, 990, 1000 + k, tid=8)
]
LOADS = [annotation(SINGLE_PROCESS, 1000 * k + 325, 490) for k in range(4)]

SYNCHRONISING = {"an item in each step": synchronising_calls(synchronising())}
NOT_SYNCHRONISING = {
    "a copy to the device": synchronising_calls(synchronising(to_device=True)),
    "a busy device": synchronising_calls([*synchronising(), *BUSY]),
    "the loader explains the idle time": synchronising_calls([*synchronising(), *LOADS]),
    "a session on the CPU": synchronising_calls([step(0, 0, 1000), span("aten::mm", 0, 900)], {}),
}


# Loops over tiny operators


def looping(
    rounds: int, names: tuple[str, ...] = ("aten::select", "aten::add"), every_us: float = 5
) -> list[Event]:
    """Three steps of 2000 µs, each with a loop in the range `rows` that calls an operator every 5 µs."""
    count = rounds * len(names)
    calls = [span(names[k % len(names)], every_us * k, every_us - 1) for k in range(count)]
    rows = annotation("rows", 0, every_us * count)
    return in_steps(3, 2000, rows, *calls, span("aten::mm", 1500, 400))


def renamed(events: list[Event], name: str, cat: str = "user_annotation") -> list[Event]:
    """The range `rows` is something else."""
    return [
        {**event, "name": name, "cat": cat} if event["name"] == "rows" else event
        for event in events
    ]


def update_of_parameters() -> list[Event]:
    """A loop over parameters: 90 small ones, and 10 large ones that take nearly all its time."""
    calls, at = [], 0
    for k in range(100):
        calls.append(span("aten::mul_", at, 300 if k % 10 == 0 else 4))
        at += 301 if k % 10 == 0 else 5
    return in_steps(3, 5000, annotation("update", 0, at), *calls)


def before_a_busy_device() -> list[Event]:
    """The kernels keep the device busy for the whole step, so that calling less wins nothing."""
    events = looping(100)
    for k in range(3):  # launched in the step before, and waited for at the end of the step
        events += [call("cudaLaunchKernel", 2000 * k - 400, 2, k + 1)]
        events += [kernel("gemm", 2000 * k + 5, 1990, correlation=k + 1)]
        events += [call("cudaStreamSynchronize", 2000 * k + 1905, 92)]
    return events


def augmenting(*, steps: bool = True) -> list[Event]:
    """Three steps of 10 ms; in each, 40 samples with up to 20 operators, not the same for each sample."""
    calls = [
        span(f"aten::op{k}", 200 * sample + 8 * k, 6)
        for sample in range(40)
        for k in range(20)
        if sample % (k + 1) < 15
    ]
    events = in_steps(3, 10_000, *calls, span("aten::conv2d", 8500, 1000))
    return events if steps else [event for event in events if event["cat"] == "cpu_op"]


def trained(
    times: int,
    parameters: int,
    *,
    name: str = "",
    works_us: float = 4,
    sums: int = -1,
    gradients: bool = True,
) -> list[Event]:
    """Three steps of 20 ms, each with a layer of 100 µs that is called several times, and its backward.

    With a name, each call is in a range of this name; a name with a place for a number is another one for each call. The
    backward adds `sums` gradients to earlier ones, by default those of all calls but one.
    """
    sums = times - 1 if sums < 0 else sums
    events, sequence = [], 0
    for start in (0, 20_000, 40_000):
        events.append(step(start // 20_000, start, 20_000))
        for k in range(times):
            sequence, at = sequence + 1, start + 100 * k
            events += [annotation(name.format(k), at, 70)] if name else []
            layer = made("aten::linear", at + 2, works_us, sequence)
            if not gradients:
                layer = span("aten::linear", at + 2, works_us)
            events += [layer, span("aten::view", at + 40, 4)]
            if gradients:
                events.append(node("AddmmBackward0", start + 10_000 + 40 * k, 30, sequence))
            if gradients and k < sums:
                events.append(span("aten::add_", start + 10_020 + 40 * k, 5, tid=2))
        for k in range(parameters):
            events += accumulation(start + 19_000 + 10 * k, 5)
    return events


def beside(events: list[Event], *inside: Event) -> list[Event]:
    """Steps of 20 ms that also have these events."""
    more = in_steps(3, 20_000, *inside)
    return [*events, *(event for event in more if not is_step(event["name"]))]


UPDATES = looping(50, ("aten::mul_", "aten::add_", "aten::sqrt", "aten::div"))
LOOPS = {
    "a loop over rows": in_loop(looping(100)),
    "a loop in no range": in_loop([event for event in looping(100) if event["name"] != "rows"]),
    "rounds of many operators that differ": in_loop(augmenting()),
    "a module that is called for each sample": in_loop(trained(80, 4, name="policy")),
    "a layer that is called for each sample, in no range": in_loop(trained(80, 4)),
    "a module that is called for each sample, without gradients": in_loop(
        trained(80, 0, name="policy", gradients=False)
    ),
    "three calls for each gradient, added to all others": in_loop(trained(80, 26, sums=54)),
    "a loop between the layers of two models": in_loop(
        beside(
            trained(40, 80, sums=0),
            *(span("aten::mul", 5000 + 20 * k, 15) for k in range(200)),
            *(span("aten::linear", 9500 + 10 * k, 4) for k in range(40)),
        )
    ),
    "the work of a layer is not saved": in_loop(trained(80, 4, name="policy", works_us=38)),
    # The thread waits for a CPU as long as it runs, so the gaps between the calls are twice as long.
    "a loop on a busy machine": in_loop(
        trained(80, 4, name="policy"),
        environment(cpu_wait={"waited_ns": 9, "ran_ns": 9, "window_ns": 20}),
    ),
    "a backward after the last step does not count": in_loop(
        [
            {**each, "ts": each["ts"] + 20_000}
            if each["tid"] == 2 and each["ts"] > 40_000
            else each
            for each in trained(80, 4, name="policy")
        ]
    ),
    "the work of large calls in a loop is not saved": in_loop(update_of_parameters()),
}
NO_LOOP = {
    "an optimizer": in_loop(renamed(UPDATES, "Optimizer.step#Adam.step")),
    "few rounds": in_loop(looping(31)),
    "little time": in_loop(looping(32, ("aten::add",), 2)),
    "a long pattern, as of layers": in_loop(looping(10, tuple(f"layer{k}" for k in range(20)))),
    "layers of a model": in_loop(trained(80, 160, sums=0)),
    "layers of a model in ranges of one name": in_loop(trained(80, 160, name="block", sums=0)),
    "layers with few gradients in ranges of one name": in_loop(
        trained(80, 20, name="block", sums=0)
    ),
    "inference": in_loop(trained(80, 0, gradients=False)),
    "inference, on a device": in_loop(
        [*trained(80, 0, gradients=False), *launched("gemm", 100, 105, 20, 1)]
    ),
    "frozen layers below a head": in_loop(trained(80, 2, gradients=False)),
    # As with LoRA: there are few gradients, and some layers have the same input.
    "frozen layers between those that are trained": in_loop(trained(80, 20, sums=40)),
    "layers that add the gradients of their inputs": in_loop(trained(80, 26, sums=53)),
    "less than three layers for each gradient": in_loop(trained(80, 27)),
    "layers with the same activation": in_loop(
        beside(
            trained(80, 0, name="layers.{}", gradients=False),
            *(annotation("act", 100 * k + 75, 20) for k in range(80)),
            *(span("aten::relu", 100 * k + 77, 15) for k in range(80)),
        )
    ),
    "ranges that hold more large operators than tiny ones": in_loop(
        in_steps(
            3,
            20_000,
            *(
                each
                for k in range(40)
                for each in (
                    annotation("part", 400 * k, 390),
                    span("aten::mul", 400 * k + 80, 10),
                    span("aten::exp", 400 * k + 180, 60),
                    span("aten::sin", 400 * k + 280, 60),
                )
            ),
        )
    ),
    "iterations of a recording without steps": in_loop(augmenting(steps=False)),
    "large operators": in_loop(
        in_steps(3, 10_000, *(span("aten::mm", 100 * k, 90) for k in range(90)))
    ),
    "a busy device": in_loop(before_a_busy_device()),
    "a dataset that a loader indexes": in_loop(renamed(looping(100), SINGLE_PROCESS)),
    "inside an operator": in_loop(renamed(looping(100), "aten::lstm", "cpu_op")),
    # Between its tiny operators, the loop sleeps: no batched operator would save that.
    "a loop that something else fills": in_loop(
        in_steps(3, 100_000, *(span("aten::randn", 1000 + 700 * n, 14) for n in range(64)))
    ),
}

# Optimizers


def updating(
    optimizer: str, names: tuple[str, ...] = ("aten::mul_", "aten::add_", "aten::sqrt", "aten::div")
) -> list[Event]:
    """Three steps with an optimizer that calls these operators for each of 50 parameters."""
    return renamed(looping(50, names), f"Optimizer.step#{optimizer}.step")


FOREACH = [span(f"aten::_foreach_{k}", 100 * k, 95) for k in range(10)]
OPTIMIZERS = {
    "an optimizer with fused": not_fused(updating("Adam")),
    "an optimizer with foreach alone": not_fused(updating("RMSprop")),
    "an optimizer of the program": not_fused(updating("Lion")),
    "foreach on a CPU": not_fused(
        in_steps(3, 2000, annotation("Optimizer.step#AdamW.step", 0, 1000), *FOREACH)
    ),
}
NO_OPTIMIZER = {
    # On a CPU, foreach takes longer than a loop over the parameters.
    "ASGD on a CPU": not_fused(updating("ASGD")),
    "fused": not_fused(
        in_steps(
            3,
            2000,
            annotation("Optimizer.step#AdamW.step", 0, 1000),
            span("aten::_fused_adamw_", 0, 900),
        )
    ),
    "one operator for each parameter": not_fused(updating("SGD", ("aten::add_",))),
    "foreach on a device": not_fused(
        [
            *in_steps(3, 2000, annotation("Optimizer.step#AdamW.step", 0, 1000), *FOREACH),
            *launched("multi_tensor", 100, 105, 500, 1),
        ]
    ),
    "a forward in the closure of a step": not_fused(
        [
            {**event, "args": {"Sequence number": number}} if event["cat"] == "cpu_op" else event
            for number, event in enumerate(updating("LBFGS"))
        ]
    ),
}


# Float64


def typed(name: str, start_us: float, duration_us: float, *types: Any) -> Event:
    return span(name, start_us, duration_us, Input_type=list(types))


DOUBLES = in_steps(
    3,
    1000,
    typed("aten::linear", 0, 300, "double", "double"),
    typed("aten::addmm", 10, 200, "double", "double", "double"),
    typed("aten::mul", 400, 500, "float", "double"),
    typed("aten::_foreach_add_", 900, 100, ["double", "double"], "Scalar"),
)
# A wait for data, and an operator of a layer.
UNTYPED = in_steps(
    3, 1000, annotation("data", 0, 300), span("aten::randn", 10, 280), span("aten::mm", 400, 500)
)
COPIED_ONCE = [
    *in_steps(4, 1000, span("aten::clone", 0, 20), span("aten::copy_", 1, 18)),
    *[step(4, 4000, 9000), span("aten::clone", 4000, 8000), span("aten::copy_", 4001, 7990)],
]
FLOATS = in_steps(3, 1000, typed("aten::mul", 0, 900, "float", "double"))

# Python's number is converted inside of the first operator.
NUMBERS = in_steps(
    3,
    1000,
    typed("aten::mul_", 0, 900, "float", "double"),
    span("aten::to", 10, 800, Input_type=["double", "Scalar"], Input_Dims=[[], []]),
)


def products(dtype: str, duration_us: float, rows: int = 128) -> list[Event]:
    """Three steps with a product of 67 MFLOP, or with fewer rows."""
    shapes, types = [[rows, 512], [512, 512]], [dtype, dtype]
    product = span("aten::mm", 0, duration_us, Input_type=types, Input_Dims=shapes)
    return in_steps(3, 20_000, product, span("aten::relu", 15_000, 4000))


AS_LONG = in_steps(
    3, 1000, typed("aten::sort", 0, 500, "double"), typed("aten::index", 500, 400, "double", "long")
)

# Unmarked time

IN_FLOAT64 = {
    "float64": in_float64(DOUBLES),
    "a table in float64, and a Fourier transform": in_float64(
        in_steps(
            3,
            1000,
            span("aten::mul", 0, 300, Input_type=["float", "double"], Input_Dims=[[8, 64], [64]]),
            typed("aten::_fft_c2r", 300, 300, "c10::complex<double>"),
        )
    ),
    "a convolution in float64": in_float64(
        in_steps(
            3,
            1000,
            typed("aten::conv2d", 0, 600, "double", "double"),
            typed("aten::relu", 600, 100, "double"),
        )
    ),
    "float16 on a CPU": in_float16(products("c10::Half", 10_000)),
    "bfloat16 on a CPU without it": in_float16(products("c10::BFloat16", 10_000)),
    "float64 by the parameters": in_float64(
        UNTYPED, {"parameter_types": {"float64": 99_000, "float32": 1_000}}
    ),
}


def training_and(*inside: Event, of: tuple[int, ...] = (0, 1, 2, 3)) -> list[Event]:
    """Four steps of 1000 µs with a forward and its backward in 500 µs; in the chosen steps also the given events."""
    events = []
    for number in range(4):
        start, sequence = 1000 * number, 10 + 2 * number
        events += [
            step(number, start, 1000),
            annotation("Net", start, 200),
            made("aten::mm", start + 10, 90, sequence),
            made("aten::relu", start + 110, 80, sequence + 1),
            node("ReluBackward0", start + 210, 100, sequence + 1, tid=1),
            node("MmBackward0", start + 320, 100, sequence, tid=1),
        ]
        if number in of:
            events += [{**event, "ts": event["ts"] + start} for event in inside]
    return events


def of_validation(name: str = "Net") -> list[Event]:
    """Two calls of a module without gradients."""
    return [*called(500, 140, name), *called(650, 140, name)]


def called(start: float, lasts: float, name: str = "Net") -> list[Event]:
    """A call of a module without gradients."""
    return [annotation(name, start, lasts), span("aten::mm", start + lasts / 14, lasts * 6 / 7)]


# Work that does not train

SAVED = annotation("save_checkpoint", 550, 300)
IN_EVAL_MODE = {"eval_calls": {"Net": 8}}
NO_TRAINING = {
    "a validation in each step": not_training(
        training_and(annotation("validation", 500, 400), *of_validation())
    ),
    "a validation in the only step": not_training(
        [
            each
            for each in training_and(annotation("validation", 500, 400), *of_validation())
            if each["ts"] < 1000
        ]
    ),
    "checkpoints in some steps": not_training(
        training_and(annotation("Trainer.save_checkpoint", 500, 400), of=(1, 3))
    ),
    "a checkpoint in one step": not_training(
        training_and(annotation("log_metrics", 500, 400), of=(2,))
    ),
    "a range, the function that it calls, and what this calls in eval mode": not_training(
        training_and(
            annotation("validation", 490, 410),
            frame("train.py(9): evaluate", 495, 400),
            *of_validation(),
        ),
        IN_EVAL_MODE,
    ),
    "in one of two steps that count, and in the first step": not_training(
        [each for each in training_and(SAVED, of=(0, 2)) if each["ts"] < 3000]
    ),
    "calls in eval mode": not_training(training_and(*of_validation()), IN_EVAL_MODE),
    "calls with the inputs of other calls": not_training(
        training_and(*of_validation()), {"repeated_calls": {"Net": 7}}
    ),
    "many calls in eval mode in each step": not_training(
        training_and(*(call for k in range(25) for call in called(500 + 18 * k, 16))),
        {"eval_calls": {"Net": 100}},
    ),
}
ALL_TRAINING = {
    "in another thread": not_training(training_and(annotation("save_checkpoint", 500, 400, tid=3))),
    "without any backward": not_training(in_steps(4, 1000, annotation("evaluate", 500, 400))),
    "a short validation": not_training(training_and(annotation("validation", 500, 90))),
    "a validation around training": not_training(
        training_and(annotation("eval_and_train", 0, 900))
    ),
    "a module with such a name": not_training(
        training_and(annotation("layers.0.val", 500, 400)),
        {"module_types": {"layers.0.val": "Linear"}},
    ),
    "a window of validation": not_training(
        training_and(annotation("evaluate", 500, 400)), {"window": {"phase": "validation"}}
    ),
    "calls of unknown mode": not_training(training_and(*of_validation()), {}),
    "fewer calls in eval mode than without gradients": not_training(
        training_and(*of_validation()), {"eval_calls": {"Net": 7}}
    ),
    "fewer calls with the inputs of other calls": not_training(
        training_and(*of_validation()), {"repeated_calls": {"Net": 6}}
    ),
    "calls of a module that is not trained": not_training(
        training_and(*of_validation("teacher")), {"eval_calls": {"teacher": 8}}
    ),
}

# Names of functions of real projects, such as Lightning, Transformers, timm, nanoGPT, detectron2, fairseq, Megatron
# and Stable-Baselines3: those that validate, save and log, and those that compute something in a training step.
NAMES = {
    "Validate": """validate validation val eval evaluate test validation_step on_validation_epoch_end evaluation_loop
        prediction_loop do_test _do_eval inference_on_dataset estimate_loss validate_and_save run_validation val_step
        after_val_epoch val_epoch eval_loop evaluate_model evaluate_and_print_results final_eval evaluate_policy valid_step
        evaluate_batch _fit_valid validate_one_epoch log_validation _do_epoch_validate perform_actual_validation test_epoch
        eval_iteration Trainer.evaluate validate_epoch runEval""",
    "Save": """save save_checkpoint _save_checkpoint _save_topk_checkpoint _save_last_checkpoint save_model save_pretrained
        save_state push_to_hub _save_optimizer_and_scheduler save_recovery save_checkpoint_and_time save_on_master
        save_networks save_progress _save_intra_epoch_ckpt save_snapshot checkpoint maybe_save_checkpoint save_state_dict
        save_model_hook saveCheckpoint""",
    "Log": """log logging log_metrics log_dict log_image log_images log_hyperparams log_table compute_metrics _write_metrics
        update_summary training_log plot_images plot_metrics plot_training_samples _dump_logs plot_attention add_scalar
        plot_progress_png visualize log_to_wandb wandb.log log_step log_histogram save_image""",
    "": """next_val target_val val_head get_val min_val max_val val_proj val_embed value interval retrieval contest latest
        is_valid valid_mask get_valid_mask valid_lengths validate_inputs _validate_model_kwargs validate_args
        validate_state_dict_keys evaluate_actions evaluate_spline evaluate_at evaluate_logits eval_sh eval_polynomial
        eval_mode test_matrix train_test_split save_for_backward save_hidden_states save_activations save_kv_cache
        save_attention_maps save_rng_state load_checkpoint checkpoint_sequential _gradient_checkpointing_func
        activation_checkpoint checkpoint_forward log_step_size log_prob log_softmax log_likelihood log_abs_det_jacobian
        log_scale log_sigma log_std log_mel_spectrogram log_normal log_loss log_weights log_stats_head logit_scale
        logsumexp metric_loss forward training_step""",
}


@pytest.mark.parametrize("verb", NAMES)
def test_a_name_says_whether_a_function_trains(verb: str) -> None:
    changes = {name: change_of(name) or "" for name in NAMES[verb].split()}
    assert {name: change.partition(" ")[0] for name, change in changes.items()} == dict.fromkeys(
        changes, verb
    )


def test_the_search_for_a_name_of_a_stranger_ends() -> None:
    """Its time must not double with each part of the name."""
    assert change_of("save" + "_and_a" * 50 + "!") is None
    assert change_of("run_" * 100_000 + "val") is None


WITHOUT_CPU = {
    "a copy is long in one step, longer than the thread had no CPU": Case(
        "layout-and-casts", COPIED_ONCE, environment(cpu_wait={"waited_ns": 7_000_000})
    )
}
FOUND = {
    **LOADER,
    **SYNCHRONISING,
    **LOOPS,
    **OPTIMIZERS,
    **IN_FLOAT64,
    **NO_TRAINING,
    **WITHOUT_CPU,
}
NOT_FOUND = {
    **NO_WAIT,
    **NOT_SYNCHRONISING,
    **NO_LOOP,
    **NO_OPTIMIZER,
    **ALL_TRAINING,
    "float32 beside numbers": in_float64(FLOATS),
    "operators that take as long in float32": in_float64(AS_LONG),
    "a number of Python": in_float64(NUMBERS),
    "a tensor times a number": in_float64(
        in_steps(
            3, 1000, span("aten::mul", 0, 900, Input_type=["float", "double"], Input_Dims=[[8], []])
        )
    ),
    "a CPU that multiplies bfloat16": in_float16(products("c10::BFloat16", 3000)),
    "slow products of float32": in_float16(products("float", 10_000)),
    "float16 on a device": in_float16(
        [*products("c10::Half", 10_000), *launched("gemm", 5, 20, 500, 1)]
    ),
    "short products of float16": in_float16(products("c10::Half", 15, rows=1)),
}
CALLS = [step(0, 0, 1000), call("cudaStreamSynchronize", 10, 500)]
UNKNOWN = {
    "no device work": (synchronising_calls(CALLS), r"profiler\.activities"),
    "a session with a device without device work": (
        synchronising_calls([step(0, 0, 1000)], {"devices": ["NVIDIA H100"]}),
        r"profiler\.activities",
    ),
    "no input types": (in_float64(UNTYPED), "shapes"),
    "no input types, and half of the parameters are float32": (
        in_float64(UNTYPED, {"parameter_types": {"float64": 100, "float32": 100}}),
        "shapes",
    ),
    "a copy is long in one step, but the thread had no CPU for as long": (
        Case("layout-and-casts", COPIED_ONCE, environment(cpu_wait={"waited_ns": 9_000_000})),
        "without a CPU may explain the time",
    ),
}


def test_the_command_of_float64_shows_the_types(tmp_path, capsys) -> None:
    (found,) = in_float64(DOUBLES).findings(tmp_path)
    assert main(shlex.split(found.verify, comments=True)[1:]) == 0
    shown = capsys.readouterr().out
    assert "[double, double, double]" in shown
    assert "[[double, double], Scalar]" in shown


def test_loops_of_several_threads_do_not_add_up(tmp_path: Path) -> None:
    loop = [each for each in looping(100) if each["name"] != "rows"]
    threads = [
        {**each, "tid": thread} for thread in (3, 4, 5) for each in loop if each["cat"] == "cpu_op"
    ]
    shares = [each.share for each in in_loop([*loop, *threads]).findings(tmp_path)]
    assert max(shares) == pytest.approx(0.5, abs=0.02)


def test_the_cost_of_loops_does_not_grow_with_the_number_of_ranges(tmp_path, monkeypatch) -> None:
    passes, of = [], loops.backward_of
    monkeypatch.setattr(loops, "backward_of", lambda *given: passes.append(given) or of(*given))
    counts = []
    for ranges in (1, 30):
        inside = [
            each
            for k in range(ranges)
            for each in (
                annotation(f"rows{k}", 1000 * k, 990),
                *(span("aten::add", 1000 * k + 20 * n, 15) for n in range(40)),
            )
        ]
        folder = tmp_path / str(ranges)
        recorded = capture(folder, in_steps(3, 30_000, *inside))
        passes.clear()
        assert len([*loops.loop(recorded)]) == ranges
        counts.append(len(passes))
    assert counts[0] == counts[1]


@real_traces.needs_traces
@pytest.mark.nightly  # reads 75,000 events
def test_the_loader_is_the_bottleneck_of_a_real_trace() -> None:
    """Its twin with four workers took 126.5 ms a step, and subtraction says 105.5."""
    (found,) = check(real_traces.load("v100_resnet50_workers0"), "loader-wait")
    assert found.source == "resnet50_profiler_api.py:42 in <module>"
    assert found.saving is not None
    assert found.saving.share == pytest.approx(0.33, abs=0.05)
    assert found.saving.step_ns == pytest.approx(126.5e6, rel=0.1)
