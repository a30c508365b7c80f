"""The changes that can be made to a training script from outside: the table `CHANGES`.

A change with `on` is switched between two steps, and is really off again afterwards, so one run can
alternate it. If several are on, switch them off in reverse order. The others need a run each:
`prepare` changes how the script's objects are built, `environment` how the process starts.
"""

from __future__ import annotations

import gc
import inspect
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.amp import GradScaler
from torch.backends import cudnn
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.log import logger
from instrument.record.facts import local_ranks, usable_cpus
from instrument.record.parameters import alive
from instrument.record.torch_support import known

Call: TypeAlias = Callable[..., Any]
Undo: TypeAlias = Callable[[], None]


@dataclass
class Program:
    """What is known of a running script at the end of a step: what it calls, and what is alive."""

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    loaders: Sequence[DataLoader[Any]]
    autocast: torch.dtype | None = None

    @property
    def outermost(self) -> list[nn.Module]:
        """The models that are in no other model."""
        every = {id(each): each for each in self.models.values()}
        inner = {id(part) for each in every.values() for part in [*each.modules()][1:]}
        return [each for key, each in every.items() if key not in inner]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the models."""
        return [part for each in self.outermost for part in each.modules()]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the models and of the optimizers."""
        groups = [group["params"] for each in self.optimizers for group in each.param_groups]
        of_models = [[*each.parameters()] for each in self.outermost]
        return [*{id(each): each for some in (*of_models, *groups) for each in some}.values()]

    @property
    def device(self) -> str:
        """The kind of device that has parameters; "cpu" if there is no other."""
        kinds = {each.device.type for each in self.parameters} - {"cpu"}
        return min(kinds, default="cpu")


Fits: TypeAlias = Callable[[Program], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Change:
    """A change that can be made to a script; it has one of `on`, `prepare` and `environment`."""

    name: str  # its name for `--with`
    does: str  # what it changes, and what is lost, in one line
    by_hand: str  # how to write it in the script, with {value}
    numbers: Literal["same", "rounding", "precision"]  # what it may change in the results
    findings: tuple[str, ...]  # codes of the findings whose saving it realises, some ":variant"
    fits: Fits  # the values worth trying on a program, "" for a change without value
    #: Switches it on between two steps; the result switches it off.
    on: Callable[[Program, str], Undo] | None = None
    #: Called once torch is loaded, before the script builds its objects.
    prepare: Callable[[str], None] | None = None
    #: The variables that must be set before the process starts.
    environment: Callable[[str], Mapping[str, str]] | None = None
    values: str = ""  # a regular expression of its values

    def by_hand_with(self, value: str) -> str:
        """How to write it in the script with a value."""
        text = self.by_hand.replace("{value}", value or "default")
        return text.replace(f"={value} > 0", f"={value != '0'}")


def parse(text: str) -> list[tuple[str, str]]:
    """Split the text of `--with` into names and values: "fused,workers=2".

    Raises:
        ConfigError: a change is unknown or named twice, or its value is missing or wrong.
    """
    found = dict[str, str]()
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        change = CHANGES.get(name)
        if change is None:
            raise ConfigError(f"There is no change {name!r}{did_you_mean(name, CHANGES)}")
        if name in found:
            raise ConfigError(f"{text!r} names the change {name!r} twice: name it once.")
        if not re.fullmatch(change.values, value):
            examples = "2" if _NUMBER in change.values else change.values.strip("()?")
            write = " or ".join(f"{name}={each}" for each in examples.split("|") if each) or name
            is_wrong = f"has the value {value!r}" if value else "has no value"
            raise ConfigError(f"The change {name!r} {is_wrong}: write {write}.")
        found[name] = value
    return [*found.items()]


def applicable(program: Program) -> list[dict[str, Any]]:
    """The changes worth trying on a program, with their values, as rows for JSON."""
    rows = list[dict[str, Any]]()
    for name, change in CHANGES.items():
        try:
            values = change.fits(program)
        except Exception as error:  # an object of the script is odd
            logger.debug("Whether the change {} applies is not known: {!r}.", name, error)
            continue
        for value in values:
            row = {"name": name, "value": value, "with": f"{name}={value}" if value else name}
            by_hand = change.by_hand_with(value)
            row |= {"does": change.does, "by_hand": by_hand, "numbers": change.numbers}
            is_switchable = change.on is not None
            rows.append({**row, "findings": [*change.findings], "switchable": is_switchable})
    return rows


_NUMBER = "[1-9][0-9]{0,3}"


def _once(applies: bool) -> tuple[str, ...]:
    """The values of a change that has none, if it applies."""
    return ("",) if applies else ()


def _put(owner: Any, **values: Any) -> Undo:
    """Set attributes of an object or a class; the result restores them."""
    undo = ExitStack()
    for name, value in values.items():
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)
    return undo.close


def _set(read: Call, write: Call, wanted: Call) -> Callable[[Program, str], Undo]:
    """`on` of a setting of torch."""

    def on(_: Program, value: str) -> Undo:
        before = read()
        write(wanted(value))
        return partial(write, before)

    return on


def _edit_arguments(owner: type, edit: Callable[[dict[str, Any]], None]) -> None:
    """Let `edit` change the arguments of the objects of a class that are built from now on."""
    init: Call = owner.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @wraps(init)
    def edited(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        edit(bound.arguments)
        init(*bound.args, **bound.kwargs)

    owner.__init__ = edited  # type: ignore[misc]


def _wrap_calls(program: Program, wrap: Callable[[Call], Call]) -> Undo:
    """Wrap the calls of the outermost models, with their hooks, as `nn.Module.compile` does."""
    undo = ExitStack()
    for model in program.outermost:
        call = model._compiled_call_impl or model._call_impl
        undo.callback(_put(model, _compiled_call_impl=wrap(call)))
    return undo.close


# Threads, and Python.


def _share(cpus: int | None) -> int:
    """The CPUs of this rank, if the ranks on this machine share them."""
    return max((cpus or 1) // (known(lambda: local_ranks() or 1) or 1), 1)


def _thread_counts(program: Program) -> Sequence[str]:
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    allowed = known(lambda: os.sched_getaffinity(0)) or ()
    cores = {known(Path(path.format(each)).read_text) for each in allowed} - {None}
    cpus = usable_cpus() or os.cpu_count() or 1
    most = _share(min(len(cores) or cpus, cpus))
    counts = {1, most // 2, most} - {0, torch.get_num_threads()}
    return [str(each) for each in sorted(counts) if program.device == "cpu"]


def _freeze(_: Program, __: str) -> Undo:
    """Freeze all objects and disable the collector; off, the next full collection is later.

    `gc.get_objects()`, and so `alive`, does not show frozen objects.
    """
    gc.collect()
    gc.freeze()
    gc.disable()

    def off() -> None:
        gc.unfreeze()
        gc.enable()

    return off


def _has_anomaly_mode(_: Program) -> Sequence[str]:
    """Whether anomaly detection is on, or was where the loss was computed, which is still there."""

    def is_marked(tensor: Any) -> bool:  # raises an error without a graph
        return "traceback_" in tensor.grad_fn.metadata

    tensors = [each for each in alive(torch.Tensor) if type(each) is torch.Tensor]
    was_on = any(known(partial(is_marked, each)) for each in tensors)
    return _once(torch.is_anomaly_enabled() or was_on)


def _no_anomaly(_: Program, __: str) -> Undo:
    """Disable the mode, and keep what the script sets for later."""
    wanted = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]

    def keep(enabled: bool, check_nan: bool = True) -> None:
        wanted[:] = enabled, check_nan

    undo = ExitStack()
    undo.callback(lambda: torch.set_anomaly_enabled(*wanted))
    torch.set_anomaly_enabled(False)
    undo.callback(_put(torch, set_anomaly_enabled=keep))
    return undo.close


# Optimizers.


def _able(name: str, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer of torch that can run its implementation "foreach" or "fused"."""
    groups = optimizer.param_groups
    is_able = (
        type(optimizer).__module__.startswith("torch.optim.")
        and all(name in group and not group.get("differentiable") for group in groups)
        and not any(isinstance(group["lr"], torch.Tensor) for group in groups)
        and all(
            type(each) in (torch.Tensor, nn.Parameter)
            and each.is_floating_point()
            and each.device.type in ("cpu", "cuda")
            and (each.grad is None or not each.grad.is_sparse)
            for group in groups
            for each in group["params"]
        )
    )
    return groups if is_able else []


def _updates(name: str) -> Fits:
    """`fits` of "foreach" and "fused"; where an optimizer has both, only fused, which is faster."""

    def fits(program: Program) -> Sequence[str]:
        some = [e for e in program.optimizers if name == "fused" or not _able("fused", e)]
        groups = [group for each in some for group in _able(name, each) if not group.get("fused")]
        by_default = name == "foreach" and program.device == "cuda"
        return _once(any(not (by_default if (g := e[name]) is None else g) for e in groups))

    return fits


def _choose(optimizer: Optimizer, group: dict[str, Any], given: dict[str, Any]) -> None:
    group.update(given)
    is_fused = bool(group.get("fused"))
    kind = (
        torch.float32 if is_fused else torch.promote_types(torch.get_default_dtype(), torch.float32)
    )
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        if isinstance(step := state.get("step"), torch.Tensor):
            on_device = is_fused or group.get("capturable")
            state["step"] = step.to(param.device if on_device else "cpu", kind)


def _implement(name: str) -> Callable[[Program, str], Undo]:
    """`on` of "foreach" and "fused": as with the argument, but the scaler of AMP still unscales."""

    def on(program: Program, _: str) -> Undo:
        undo = ExitStack()
        for each in program.optimizers:
            for group in _able(name, each):
                before: dict[str, Any] = {k: group[k] for k in ("foreach", "fused") if k in group}
                undo.callback(_choose, each, group, before)
                _choose(each, group, {key: key == name for key in before})
        return undo.close

    return on


# Data loaders.

_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
_loader_arguments = dict[str, Any]()


def _edit_loader(given: dict[str, Any]) -> None:
    """Change the arguments of a data loader to `_loader_arguments`."""
    if get_worker_info() is not None:  # a worker process can have no workers
        return
    wanted = dict(_loader_arguments)
    if isinstance(given["dataset"], IterableDataset):  # each worker would yield all of its items
        wanted.pop("num_workers", None)
    if wanted.get("num_workers"):
        wanted["persistent_workers"] = True
    given["self"]._draws_each_epoch = not given.get("persistent_workers")
    given.update(wanted)
    for name in () if given.get("num_workers") else _NEED_WORKERS:
        given.pop(name, None)


def _keep_order() -> None:
    """Let persistent workers draw a number at each epoch, as new ones do: the batches stay."""
    reset: Call = _MultiProcessingDataLoaderIter._reset

    @wraps(reset)
    def drawing(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter and getattr(loader, "_draws_each_epoch", False):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        reset(self, loader, first_iter)

    _put(_MultiProcessingDataLoaderIter, _reset=drawing)


def _load_with(argument: str) -> Callable[[str], None]:
    def prepare(value: str) -> None:
        if not _loader_arguments:
            _edit_arguments(DataLoader, _edit_loader)
            _keep_order()
        _loader_arguments[argument] = int(value) if value else True
        if argument == "pin_memory":
            _copy_without_waiting()

    return prepare


def _worker_counts(program: Program) -> Sequence[str]:
    loaders = [e for e in program.loaders if not isinstance(e.dataset, IterableDataset)]
    now, cpus = {each.num_workers for each in loaders}, _share(usable_cpus())
    wanted = {0, 1, min(cpus, 4), min(cpus, 16)} - (now if len(now) == 1 else set())
    return [str(each) for each in sorted(wanted) if loaders]


def _any_loader(applies: Callable[[DataLoader[Any]], object], device: str = "") -> Fits:
    return lambda its: _once(
        its.device in (device or its.device) and any(map(applies, its.loaders))
    )


def _copy_without_waiting() -> Undo:
    """Let `Tensor.to` and `Tensor.cuda` copy pinned tensors with `non_blocking=True`."""

    def changed(copy: Call) -> Call:
        @wraps(copy)
        def copied(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_given = "non_blocking" in kwargs or any(isinstance(each, bool) for each in args)
            if not is_given and self.device.type == "cpu" and self.is_pinned():
                kwargs["non_blocking"] = True
            return copy(self, *args, **kwargs)

        return copied

    return _put(torch.Tensor, to=changed(torch.Tensor.to), cuda=changed(torch.Tensor.cuda))


# Models.

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_compiled(program: Program) -> bool:
    return any(
        each._compiled_call_impl is not None
        or isinstance(each, torch.jit.ScriptModule)
        or type(each).__name__ == "OptimizedModule"
        or hasattr(each.forward, "_torchdynamo_orig_callable")
        for each in program.modules
    )


def _compile_modes(program: Program) -> Sequence[str]:
    if not program.outermost or _is_compiled(program):
        return ()
    if program.device == "cuda":
        return ("", "reduce-overhead") if find_spec("triton") else ()
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    return _once(program.device == "cpu" and compiler is not None)


# What was compiled, by mode: compiled once, though switched on again.
_compiled = list[tuple[str, Any, Call]]()


def _layers(call: Call) -> Any:
    """What a call of a model consists of; equal if other changes wrap it again in the same way."""
    return (call.func.__code__, _layers(call.args[0])) if isinstance(call, partial) else call


def _compile(program: Program, value: str) -> Undo:
    """Compile the outermost models; what cannot be compiled runs as before."""
    import torch._dynamo.config as dynamo

    undo = ExitStack()
    undo.callback(setattr, dynamo, "suppress_errors", dynamo.suppress_errors)
    dynamo.suppress_errors = True
    undo.callback(_put(Distribution, _validate_args=False))  # as Dynamo does

    def compiled(call: Call) -> Call:
        layers = _layers(call)
        for mode, known_layers, result in _compiled:
            if (mode, known_layers) == (value, layers):
                return result
        # Dynamo looks into no frame of torch, and all of nn.Sequential's are
        result = torch.compile(lambda *args, **kwargs: call(*args, **kwargs), mode=value or None)
        _compiled.append((value, layers, result))
        return result

    undo.callback(_wrap_calls(program, compiled))
    return undo.close


def _convolves(program: Program) -> bool:
    return any(isinstance(each, (nn.Conv2d, nn.Conv3d)) for each in program.modules)


def _has_other_layout(program: Program) -> Sequence[str]:
    """Whether filters are contiguous, and nothing keeps their memory or strides, as DDP does."""
    filters = [each for each in program.parameters if each.dim() in _LAYOUTS]
    is_plain = all(e.is_contiguous() and e.untyped_storage().nbytes() == e.nbytes for e in filters)
    is_kept = _is_compiled(program) or known(torch.distributed.is_initialized)
    return _once(_convolves(program) and is_plain and not is_kept)


def _use_channels_last(program: Program, _: str) -> Undo:
    """Convert filters, their gradients and states in place, and the inputs of the models."""

    def convert(layouts: Mapping[int, torch.memory_format]) -> None:
        for param in [each for each in program.parameters if each.dim() in layouts]:
            to = layouts[param.dim()]
            param.data = param.data.contiguous(memory_format=to)
            if param.grad is not None:
                param.grad = param.grad.contiguous(memory_format=to)
            for state in [each.state[param] for each in program.optimizers if param in each.state]:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape:
                        state[key] = value.contiguous(memory_format=to)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        to = _LAYOUTS.get(tensor.dim())
        return tensor if to is None else tensor.contiguous(memory_format=to)

    def run(call: Call, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, converted, (args, kwargs))
        return call(*args, **kwargs)

    undo = ExitStack()
    undo.callback(convert, dict.fromkeys(_LAYOUTS, torch.contiguous_format))
    convert(_LAYOUTS)
    undo.callback(_wrap_calls(program, lambda call: partial(run, call)))
    return undo.close


def _slow_types() -> set[torch.dtype]:
    """The 16-bit types for which this CPU has no instructions."""
    mkldnn: Any = torch.ops.mkldnn
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    bf16 = torch.cpu._is_avx512_bf16_supported if is_x86 else mkldnn._is_mkldnn_bf16_supported
    is_fast = {torch.float16: mkldnn._is_mkldnn_fp16_supported, torch.bfloat16: bf16}
    return {each for each, ask in is_fast.items() if not known(ask)}


def _could_use_bf16(program: Program) -> Sequence[str]:
    if program.device == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = program.device == "cpu" and torch.bfloat16 not in _slow_types()
    is_single = bool(program.outermost) and {e.dtype for e in program.parameters} == {torch.float32}
    is_mixed = program.autocast is not None or bool(alive(GradScaler))
    return _once(is_fast and is_single and not is_mixed)


def _use_bf16(program: Program, _: str) -> Undo:
    """Run the models in autocast; their results are float32 again, and the loss is as before."""
    device = program.device

    def single(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def run(call: Call, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(device):  # the script's own
            return call(*args, **kwargs)
        with torch.autocast(device, torch.bfloat16):
            result = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, single, result)

    return _wrap_calls(program, lambda call: partial(run, call))


_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "zeros_like"),
    *("ones_like", "empty_like", "full_like", "rand_like", "randn_like", "set_default_dtype"),
)


def _has_float16(program: Program) -> Sequence[str]:
    types = {program.autocast, *(each.dtype for each in program.parameters)}
    has_slow = not types.isdisjoint(_slow_types())
    scales = any(each.is_enabled() for each in alive(GradScaler))
    return _once(program.device == "cpu" and (has_slow or scales))


def _compute_in_float32(_: str) -> None:
    """Replace the types of `_slow_types` where the script names them; not those of numpy."""
    slow = _slow_types()

    def single(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in slow else value

    def change(function: Call) -> Call:
        @wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return function(*map(single, args), **{k: single(each) for k, each in kwargs.items()})

        return changed

    def no_autocast(given: dict[str, Any]) -> None:
        device = given["device_type"]
        if device == "cpu" and (given.get("dtype") or torch.get_autocast_dtype(device)) in slow:
            given["enabled"] = False

    _edit_arguments(torch.autocast, no_autocast)
    _put(torch, **{name: change(getattr(torch, name)) for name in _FACTORIES})
    _put(torch.Tensor, to=change(torch.Tensor.to), type=change(torch.Tensor.type))
    names = {torch.float16: "half", torch.bfloat16: "bfloat16"}
    _put(torch.Tensor, **{names[each]: torch.Tensor.float for each in slow})


def _distributed(program: Program) -> list[DistributedDataParallel]:
    parts = {id(each) for each in program.modules}  # models are known without their wrappers
    return [each for each in alive(DistributedDataParallel) if id(each.module) in parts]


def _finds_unused(program: Program) -> Sequence[str]:
    """Whether DDP searches for unused parameters, and has found none."""
    ddp = [e for e in _distributed(program) if e.find_unused_parameters and not e.static_graph]
    found = any(each._get_ddp_logging_data().get("unused_parameter_size") for each in ddp)
    return _once(bool(ddp) and not found)


def _build_ddp(option: str, value: bool = True) -> Callable[[str], None]:
    return lambda _: _edit_arguments(
        DistributedDataParallel, lambda its: its.update({option: value})
    )


def _lacks(option: str) -> Fits:
    return lambda its: _once(any(not getattr(each, option) for each in _distributed(its)))


# Devices, allocators and variables.


# Measured with glibc 2.36, one thread: tensors of 128 MB 222 -> 35 ms a step, a small convolutional
# network 90 -> 64 ms, tensors below 32 MB as before; the first held twice the memory.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
_SEGMENTS, _EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def _unset(device: str, *variables: str) -> Fits:
    return lambda its: _once(its.device == device and not {*variables} & os.environ.keys())


def _maps_memory(program: Program) -> Sequence[str]:
    is_glibc = platform.libc_ver()[0] == "glibc"
    is_glibc = is_glibc and "malloc" not in os.environ.get("LD_PRELOAD", "")
    unset = _unset("cpu", *_MALLOC, "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
    return unset(program) if is_glibc else ()


def _could_use_tf32(program: Program) -> Sequence[str]:
    if program.device != "cuda" or torch.version.cuda is None:
        return ()
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return _once(is_exact and torch.cuda.get_device_capability() >= (8, 0))


# fmt: off
_ROWS = (
    Change("threads", "Divides operators on the CPU among another number of threads.",
           "torch.set_num_threads({value})", "rounding", ("thread-oversubscription",),
           _thread_counts, _set(torch.get_num_threads, torch.set_num_threads, int), values=_NUMBER),
    Change("fused", "Updates all parameters in one kernel of the optimizer.",
           "Optimizer(..., fused=True)", "rounding", ("optimizer-not-fused",),
           _updates("fused"), _implement("fused")),
    Change("foreach", "Calls each operator of the optimizer once for all parameters; takes memory.",
           "Optimizer(..., foreach=True)", "rounding", ("optimizer-not-fused",),
           _updates("foreach"), _implement("foreach")),
    Change("gc-freeze", "Stops Python's garbage collector: cycles of objects stay in memory until "
           "the script calls gc.collect().", "gc.collect(); gc.freeze(); gc.disable()", "same",
           ("garbage-collection",),
           lambda _: _once(gc.isenabled() and not gc.get_freeze_count()), _freeze),
    Change("no-anomaly", "Stops anomaly detection: NaN in gradients raises no error.",
           "torch.autograd.set_detect_anomaly(False), without detect_anomaly()",
           "same", ("debug-modes",), _has_anomaly_mode, _no_anomaly),
    Change("no-deterministic", "Allows operators whose results differ from run to run.",
           "torch.use_deterministic_algorithms(False)", "rounding", (),
           lambda _: _once(torch.are_deterministic_algorithms_enabled()),
           _set(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
                lambda _: 0)),
    Change("no-validation", "Stops checks of distributions: wrong arguments raise no error.",
           "torch.distributions.Distribution.set_default_validate_args(False)", "same", (),
           lambda _: _once(Distribution._validate_args and bool(alive(Distribution))),
           lambda _, __: _put(Distribution, _validate_args=False)),
    Change("non-blocking", "Copies pinned batches without waiting; do not write into them then.",
           "batch.to(device, non_blocking=True)", "same", ("blocking-copies",),
           _any_loader(lambda its: its.pin_memory, "cuda"), lambda _, __: _copy_without_waiting()),
    Change("channels-last", "Stores images and filters with their channels last.",
           "model.to(memory_format=torch.channels_last), as well as the batches",
           "rounding", ("layout-and-casts:layout",), _has_other_layout, _use_channels_last),
    Change("tf32", "Multiplies float32 matrices with 10 bits of their mantissas.",
           'torch.set_float32_matmul_precision("high")', "precision",
           ("tensor-cores:multiply float32 without tensor cores",), _could_use_tf32,
           _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision,
                lambda _: "high")),
    Change("bf16", "Runs the models in bfloat16 autocast; their results are float32.",
           "with torch.autocast(device_type, torch.bfloat16): ...", "precision",
           ("tensor-cores:multiply float32 without tensor cores",), _could_use_bf16, _use_bf16),
    Change("compile", "Compiles the models, in minutes; dropout draws other random numbers.",
           'model = torch.compile(model, mode="{value}")', "rounding",
           ("in-pieces", "launch-bound"), _compile_modes, _compile, values="(reduce-overhead)?"),
    Change("workers", "Loads batches in persistent worker processes, or with 0 in the training "
           "process; random augmentations are others, and by hand, the order of later epochs.",
           "DataLoader(..., num_workers={value}, persistent_workers={value} > 0)", "same",
           ("loader-wait",), _worker_counts, prepare=_load_with("num_workers"),
           values=f"0|{_NUMBER}"),
    Change("persistent-workers", "Keeps the workers from epoch to epoch; random augmentations are "
           "others, and by hand, the order of later epochs.",
           "DataLoader(..., persistent_workers=True)", "same", ("worker-start",),
           _any_loader(lambda its: its.num_workers and not its.persistent_workers),
           prepare=_load_with("persistent_workers")),
    Change("pin-memory", "Pins the batches, and copies them to the device without waiting.",
           "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True)", "same",
           ("blocking-copies", "loader-wait"), _any_loader(lambda its: not its.pin_memory, "cuda"),
           prepare=_load_with("pin_memory")),
    Change("no-float16", "Uses float32 for 16-bit types that this CPU has no instructions for.",
           "model.float(), with inputs in float32, and without torch.autocast", "precision",
           ("float16",), _has_float16, prepare=_compute_in_float32),
    # no `on`: cuDNN would keep the algorithms that it has found
    Change("cudnn-benchmark", "Measures cuDNN's algorithms at each new shape; takes the fastest.",
           "torch.backends.cudnn.benchmark = True", "rounding", (),
           lambda its: _once(its.device == "cuda" and _convolves(its) and not cudnn.benchmark),
           prepare=lambda _: setattr(cudnn, "benchmark", True)),
    Change("no-find-unused", "Does not search for unused parameters; a step with some is an error.",
           "DistributedDataParallel(..., find_unused_parameters=False)", "same", (),
           _finds_unused, prepare=_build_ddp("find_unused_parameters", False)),
    Change("static-graph", "Searches for unused parameters once; every step must be alike.",
           "DistributedDataParallel(..., static_graph=True)", "same", (),
           _lacks("static_graph"), prepare=_build_ddp("static_graph")),
    Change("bucket-view", "Lets gradients be parts of the buckets that are sent: no copy.",
           "DistributedDataParallel(..., gradient_as_bucket_view=True)", "same", (),
           _lacks("gradient_as_bucket_view"), prepare=_build_ddp("gradient_as_bucket_view")),
    Change("malloc", "Keeps freed memory for later tensors; the process holds more memory.",
           " ".join(f"{name}={value}" for name, value in _MALLOC.items()) + " python ...",
           "same", (), _maps_memory, environment=lambda _: _MALLOC),
    Change("expandable-segments", "Lets the device's allocator extend its segments.",
           f"{_SEGMENTS}={_EXPANDABLE} python ...", "same", ("allocator-churn",),
           _unset("cuda", _SEGMENTS, "PYTORCH_ALLOC_CONF"),
           environment=lambda _: {_SEGMENTS: _EXPANDABLE}),
)
# fmt: on
#: The changes by their names; those that can be switched come first.
CHANGES: dict[str, Change] = {each.name: each for each in _ROWS}
