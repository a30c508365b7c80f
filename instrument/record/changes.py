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
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn, optim
from torch.amp import GradScaler
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.log import logger
from instrument.record.facts import local_ranks, usable_cpus
from instrument.record.parameters import alive
from instrument.record.torch_support import known

Undo: TypeAlias = Callable[[], None]
Call: TypeAlias = Callable[..., Any]


@dataclass
class Program:
    """What is known of a running script at the end of a step.

    Attributes:
        models: the models that it calls, by name.
        optimizers: those that are alive.
        loaders: those that are alive.
    """

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    loaders: Sequence[DataLoader[Any]]

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

    def uses(self, device: str) -> bool:
        """Whether there are parameters on a kind of device."""
        return any(each.device.type == device for each in self.parameters)


@dataclass(frozen=True, slots=True)
class Change:
    """A change that can be made to a script from outside; it has `on`, `prepare` or `environment`.

    Attributes:
        name: its name for `--with`.
        does: what it changes, in one line.
        by_hand: how to write it in the script; `{value}` stands for its value.
        numbers: what it may change in the results: nothing, their rounding, or their precision.
        findings: codes of the findings whose saving it realises, some with `:variant`.
        fits: the values worth trying on a program, "" for a change without value.
        on: switch it on between two steps; the result switches it off.
        prepare: call it once torch is loaded, before the script builds its objects.
        environment: the variables to set before the process starts.
        values: a regular expression of its values.
    """

    name: str
    does: str
    by_hand: str
    numbers: Literal["same", "rounding", "precision"]
    findings: tuple[str, ...]
    fits: Callable[[Program], Sequence[str]]
    on: Callable[[Program, str], Undo] | None = None
    prepare: Callable[[str], None] | None = None
    environment: Callable[[str], Mapping[str, str]] | None = None
    values: str = ""


def parse(text: str) -> list[tuple[str, str]]:
    """Split the text of `--with` into names and values: "fused,workers=2".

    Raises:
        ConfigError: a change is unknown or named twice, or its value is missing or wrong.
    """
    found = dict[str, str]()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        change = CHANGES.get(name)
        if change is None:
            raise ConfigError(f"There is no change {name!r}{did_you_mean(name, CHANGES)}")
        if name in found:
            raise ConfigError(f"The change {name!r} is named twice in {text!r}: name it once.")
        if not re.fullmatch(change.values, value):
            wrong = f"has the value {value!r}" if value else "has no value"
            write = f"write {name}={_example(change)}" if change.values else f"write {name}"
            raise ConfigError(f"The change {name!r} {wrong}: {write}.")
        found[name] = value
    return [*found.items()]


def _example(change: Change) -> str:
    return "2" if change.values == _NUMBER else change.values.strip("()?").replace("|", " or =")


def applicable(program: Program) -> list[dict[str, Any]]:
    """The changes worth trying on a program, with their values, as rows for JSON."""
    rows = []
    for name, change in CHANGES.items():
        try:
            values = change.fits(program)
        except Exception as error:  # an object of the script is odd
            logger.debug("Whether the change {} applies is not known: {!r}.", name, error)
            continue
        rows += [
            {
                "name": name,
                "value": value,
                "with": f"{name}={value}" if value else name,
                "does": change.does,
                "by_hand": change.by_hand.replace("{value}", value),
                "numbers": change.numbers,
                "findings": [*change.findings],
                "switchable": change.on is not None,
            }
            for value in values
        ]
    return rows


# Parts of the changes.

_NUMBER = "[1-9][0-9]{0,3}"


def _put(owner: Any, **values: Any) -> Undo:
    """Set attributes of an object or a class; the result restores them."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)

    def restore() -> None:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)

    return restore


def _once(applies: bool) -> tuple[str, ...]:
    """The values of a change that has none, if it applies."""
    return ("",) if applies else ()


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
    with ExitStack() as undo:
        for model in program.outermost:
            call: Call = model._compiled_call_impl or model._call_impl
            undo.callback(_put(model, _compiled_call_impl=wrap(call)))
        return undo.pop_all().close


# Threads.


def _ranks() -> int:
    """How many ranks share this machine; 1 if that is not known."""
    return known(lambda: local_ranks() or 1) or 1


def _cores() -> int:
    """How many physical cores this process may use, of those that the ranks here share."""
    cpus = usable_cpus() or os.cpu_count() or 1
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    allowed = known(lambda: os.sched_getaffinity(0)) or ()
    cores = {known(lambda: Path(path.format(each)).read_text()) for each in allowed} - {None}  # noqa: B023
    return max(min(len(cores) or cpus, cpus) // (_ranks()), 1)


def _thread_counts(program: Program) -> Sequence[str]:
    if program.uses("cuda"):
        return ()
    cores = _cores()
    return [str(each) for each in sorted({1, cores // 2, cores} - {0, torch.get_num_threads()})]


def _set_threads(_: Program, value: str) -> Undo:
    before = torch.get_num_threads()
    torch.set_num_threads(int(value))
    return lambda: torch.set_num_threads(before)


def _waits_in_openmp(program: Program) -> Sequence[str]:
    is_set = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    openmp = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
    is_used = openmp and torch.get_num_threads() > 1 and not program.uses("cuda")
    return ("active", "passive") if is_used and not is_set else ()


# Optimizers.

_TORCHS = (torch.Tensor, nn.Parameter)
_FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


def _implements(name: str, optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch can run its implementation "foreach" or "fused"."""
    params = [each for group in optimizer.param_groups for each in group["params"]]
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and (name != "fused" or type(optimizer) in _FUSED)
        and all(
            name in group
            and not group.get("differentiable")
            and (name == "fused" or not isinstance(group.get("lr"), torch.Tensor))
            for group in optimizer.param_groups
        )
        and all(
            type(each) in _TORCHS
            and each.is_floating_point()
            and each.device.type in ("cpu", "cuda")
            and (each.grad is None or not each.grad.is_sparse)
            for each in params
        )
    )


def _runs(name: str, optimizer: Optimizer) -> bool:
    """Whether an optimizer runs an implementation; by default, foreach on devices."""
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return name == "fused"
    on_device = all(each.is_cuda for group in groups for each in group["params"])
    by_default = on_device and name == "foreach"
    return all(by_default if (its := group.get(name)) is None else its for group in groups)


def _is_slower(name: str) -> Callable[[Program], Sequence[str]]:
    """`fits` of "foreach" and "fused"; where an optimizer has both, fused is faster."""

    def fits(program: Program) -> Sequence[str]:
        if any(getattr(each, "sparse", False) is True for each in program.modules):  # gradients
            return ()
        able = [each for each in program.optimizers if _implements(name, each)]
        if name == "foreach":
            able = [each for each in able if not _implements("fused", each)]
        return _once(any(not _runs("fused", each) and not _runs(name, each) for each in able))

    return fits


def _choose(optimizer: Optimizer, group: dict[str, Any], given: dict[str, Any]) -> None:
    group.update(given)
    is_fused = bool(group.get("fused"))
    double = torch.get_default_dtype() == torch.float64 and not is_fused
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        if isinstance(step := state.get("step"), torch.Tensor):
            device = param.device if is_fused or group.get("capturable") else "cpu"
            state["step"] = step.to(device, torch.float64 if double else torch.float32)


def _implement(name: str) -> Callable[[Program, str], Undo]:
    """`on` of "foreach" and "fused": as with the argument, but the scaler of AMP still unscales."""

    def on(program: Program, _: str) -> Undo:
        undo = ExitStack()
        for each in program.optimizers:
            for group in each.param_groups if _implements(name, each) else ():
                before: dict[str, Any] = {k: group[k] for k in ("foreach", "fused") if k in group}
                undo.callback(_choose, each, group, before)
                _choose(each, group, {key: key == name for key in before})
        return undo.close

    return on


# Data loaders.

_NEED_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
_LOADER_CHANGES = dict[str, str]()


def _edit_loader(given: dict[str, Any]) -> None:
    """Change the arguments of a data loader, as `_LOADER_CHANGES` say."""
    changes = _LOADER_CHANGES
    if get_worker_info() is not None:  # a worker process can have no workers
        return
    if "no-workers" in changes:
        for name in (*_NEED_WORKERS, "multiprocessing_context"):
            given.pop(name, None)
    # each worker would yield all items of an iterable data set
    elif "workers" in changes and not isinstance(given["dataset"], IterableDataset):
        given.update(num_workers=int(changes["workers"]), persistent_workers=True)
    if given.get("num_workers"):
        if "persistent-workers" in changes:
            given["persistent_workers"] = True
        if "prefetch" in changes:
            given["prefetch_factor"] = int(changes["prefetch"])
    if "pin-memory" in changes:
        given["pin_memory"] = True


def _change_loaders(name: str) -> Callable[[str], None]:
    def prepare(value: str) -> None:
        if not _LOADER_CHANGES:
            _edit_arguments(DataLoader, _edit_loader)
        _LOADER_CHANGES[name] = value
        if name == "pin-memory":
            _copy_without_waiting()

    return prepare


def _worker_counts(program: Program) -> Sequence[str]:
    loaders = [e for e in program.loaders if not isinstance(e.dataset, IterableDataset)]
    if not loaders:
        return ()
    cpus = max((usable_cpus() or 1) // (_ranks()), 1)
    now = {each.num_workers for each in loaders}
    wanted = {1, min(cpus, 4), min(cpus, 16)} - (now if len(now) == 1 else set())
    return [str(each) for each in sorted(wanted)]


def _prefetch_factors(program: Program) -> Sequence[str]:
    factors = [e.prefetch_factor or 2 for e in program.loaders if e.num_workers]
    return [str(2 * max(factors))] if factors else ()


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


# Python, autograd and checks.


def _freeze(_: Program, __: str) -> Undo:
    """Freeze all objects and disable the collector; off, the next full collection is later."""
    gc.collect()
    gc.freeze()
    gc.disable()

    def off() -> None:
        gc.unfreeze()
        gc.enable()

    return off


def _has_anomaly_mode(_: Program) -> Sequence[str]:
    """Whether anomaly detection is on, or was: `with detect_anomaly()` warns where it stands."""
    if torch.is_anomaly_enabled():
        return ("",)
    registries = [vars(each).get("__warningregistry__") for each in [*sys.modules.values()]]
    warned = (key[0] for each in registries for key in each or () if isinstance(key, tuple))
    return _once(any(str(text).startswith("Anomaly Detection has been") for text in warned))


def _no_anomaly(_: Program, __: str) -> Undo:
    """Disable the mode, and keep what the script sets for later."""
    wanted = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
    torch.set_anomaly_enabled(False)

    def keep(enabled: bool, check_nan: bool = True) -> None:
        wanted[:] = enabled, check_nan

    restore = _put(torch, set_anomaly_enabled=keep)

    def off() -> None:
        restore()
        torch.set_anomaly_enabled(*wanted)

    return off


def _no_deterministic(_: Program, __: str) -> Undo:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, cudnn_before = torch.backends.cudnn, torch.backends.cudnn.deterministic

    def off() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        cudnn.deterministic = cudnn_before

    torch.use_deterministic_algorithms(False)
    cudnn.deterministic = False
    return off


def _is_deterministic(program: Program) -> Sequence[str]:
    of_cudnn = program.uses("cuda") and torch.backends.cudnn.deterministic
    return _once(torch.are_deterministic_algorithms_enabled() or of_cudnn)


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
    if not any(each.requires_grad for each in program.parameters) or _is_compiled(program):
        return ()
    if program.uses("cuda"):
        return ("", "reduce-overhead") if find_spec("triton") else ()
    return _once(shutil.which(os.environ.get("CXX") or "g++") is not None)


def _compile(program: Program, value: str) -> Undo:
    """Compile the outermost models; what cannot be compiled runs as before."""
    import torch._dynamo.config as dynamo

    with ExitStack() as undo:
        undo.callback(setattr, dynamo, "suppress_errors", dynamo.suppress_errors)
        dynamo.suppress_errors = True
        undo.callback(_wrap_calls(program, lambda call: torch.compile(call, mode=value or None)))
        return undo.pop_all().close


def _convolves(program: Program) -> bool:
    return any(isinstance(each, (nn.Conv2d, nn.Conv3d)) for each in program.modules)


def _has_other_layout(program: Program) -> Sequence[str]:
    """Whether all filters are contiguous, and nothing has kept their strides, such as DDP."""
    filters = [each for each in program.parameters if each.dim() in _LAYOUTS]
    is_kept = _is_compiled(program) or bool(_distributed(program))
    return _once(_convolves(program) and not is_kept and all(e.is_contiguous() for e in filters))


def _use_channels_last(program: Program, _: str) -> Undo:
    """Convert filters, their gradients and states in place, and the inputs of the models."""

    def convert(to: Mapping[int, torch.memory_format]) -> None:
        for param in [each for each in program.parameters if each.dim() in to]:
            param.data = param.data.contiguous(memory_format=to[param.dim()])
            if param.grad is not None:
                param.grad = param.grad.contiguous(memory_format=to[param.dim()])
            for state in [each.state[param] for each in program.optimizers if param in each.state]:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape:
                        state[key] = value.contiguous(memory_format=to[param.dim()])

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        layout = _LAYOUTS.get(tensor.dim())
        return tensor if layout is None else tensor.contiguous(memory_format=layout)

    def wrap(call: Call) -> Call:
        def in_channels_last(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(torch.Tensor, converted, (args, kwargs))
            return call(*args, **kwargs)

        return in_channels_last

    with ExitStack() as undo:
        undo.callback(convert, dict.fromkeys(_LAYOUTS, torch.contiguous_format))
        convert(_LAYOUTS)
        undo.callback(_wrap_calls(program, wrap))
        return undo.pop_all().close


def _slow_types() -> set[torch.dtype]:
    """The 16-bit types for which this CPU has no instructions."""
    mkldnn: Any = torch.ops.mkldnn
    fast = {
        torch.float16: known(mkldnn._is_mkldnn_fp16_supported),
        torch.bfloat16: known(mkldnn._is_mkldnn_bf16_supported)
        and (known(torch.cpu._is_avx512_bf16_supported) or platform.machine() != "x86_64"),
    }
    return {each for each, is_fast in fast.items() if not is_fast}


def _could_use_bf16(program: Program) -> Sequence[str]:
    kind, params = "cuda" if program.uses("cuda") else "cpu", program.parameters
    if kind == "cuda":
        has_instructions = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_instructions = torch.bfloat16 not in _slow_types()
    return _once(
        has_instructions
        and bool(program.outermost)
        and {each.dtype for each in params} == {torch.float32}
        and not torch.is_autocast_enabled(kind)
        and not alive(GradScaler)
    )


def _use_bf16(program: Program, _: str) -> Undo:
    """Run the models in autocast; their results are float32 again, and the loss is as before."""
    kind = "cuda" if program.uses("cuda") else "cpu"

    def single(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def wrap(call: Call) -> Call:
        def in_bf16(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(kind):  # the script's own
                return call(*args, **kwargs)
            with torch.autocast(kind, torch.bfloat16):
                result = call(*args, **kwargs)
            return tree_map_only(torch.Tensor, single, result)

        return in_bf16

    return _wrap_calls(program, wrap)


def _has_float16(program: Program) -> Sequence[str]:
    scales = any(each.is_enabled() for each in alive(GradScaler))
    slow = {each.dtype for each in program.parameters} & _slow_types()
    return _once(not program.uses("cuda") and bool(slow or scales))


_FACTORIES = re.findall(
    r"\w+",
    "tensor as_tensor zeros ones empty full rand randn arange linspace zeros_like ones_like "
    "empty_like full_like rand_like randn_like set_default_dtype",
)


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
        kind = given["device_type"]
        if kind == "cpu" and (given.get("dtype") or torch.get_autocast_dtype(kind)) in slow:
            given["enabled"] = False

    _edit_arguments(torch.autocast, no_autocast)
    _put(torch.Tensor, to=change(torch.Tensor.to), type=change(torch.Tensor.type))
    _put(torch, **{name: change(getattr(torch, name)) for name in _FACTORIES})
    names = {torch.float16: "half", torch.bfloat16: "bfloat16"}
    _put(torch.Tensor, **{names[each]: torch.Tensor.float for each in slow})


def _distributed(program: Program) -> list[DistributedDataParallel]:
    return [each for each in program.modules if isinstance(each, DistributedDataParallel)]


def _finds_unused(program: Program) -> Sequence[str]:
    """Whether DDP searches for unused parameters, and has found none."""
    searching = [
        e for e in _distributed(program) if e.find_unused_parameters and not e.static_graph
    ]
    found = [each._get_ddp_logging_data().get("unused_parameter_size") for each in searching]
    return _once(bool(searching) and not any(found))


def _build_ddp(**given: bool) -> Callable[[str], None]:
    return lambda _: _edit_arguments(DistributedDataParallel, lambda its: its.update(given))


# Devices and allocators.

_SDPA = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}


def _attends(program: Program) -> Sequence[str]:
    if not any("attention" in type(each).__name__.lower() for each in program.modules):
        return ()
    return ("flash", "efficient", "cudnn") if program.uses("cuda") else ("math",)


def _use_sdpa(_: Program, value: str) -> Undo:
    """Enable one kernel; the others stay off, but for plain operators where it cannot run."""
    cuda = torch.backends.cuda
    before = {each: getattr(cuda, f"{each}_sdp_enabled")() for each in _SDPA.values()}

    def enable(kernels: Mapping[str, bool]) -> None:
        for name, enabled in kernels.items():
            getattr(cuda, f"enable_{name}_sdp")(enabled)

    enable({each: each in (_SDPA[value], "math") for each in before})
    return lambda: enable(before)


def _could_use_tf32(program: Program) -> Sequence[str]:
    if not program.uses("cuda") or torch.version.cuda is None:
        return ()
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return _once(is_exact and torch.cuda.get_device_capability() >= (8, 0))


def _use_tf32(_: Program, __: str) -> Undo:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    return lambda: torch.set_float32_matmul_precision(before)


def _is_set(*variables: str) -> bool:
    return any(os.environ.get(each, "").strip("0") for each in variables)


# Measured with glibc 2.36, one thread: tensors of 128 MB 222 -> 35 ms a step, a small convolutional
# network 90 -> 64 ms, tensors below 32 MB as before; the first held twice the memory.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "0",
    "HIP_LAUNCH_BLOCKING": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "PYTHONDEVMODE": "",
    "PYTHONMALLOC": "",
    "MALLOC_PERTURB_": "0",
}
_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"


def _maps_memory(program: Program) -> Sequence[str]:
    is_glibc = platform.libc_ver()[0] == "glibc" and "malloc" not in os.environ.get(
        "LD_PRELOAD", ""
    )
    is_tuned = any(each in os.environ for each in (*_MALLOC, "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"))
    return _once(is_glibc and not is_tuned and not program.uses("cuda"))


def _has_small_pages(program: Program) -> Sequence[str]:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_asked = "[madvise]" in (known(path.read_text) or "")
    return _once(is_asked and not program.uses("cuda") and not _is_set("THP_MEM_ALLOC_ENABLE"))


def _expand_segments(_: str) -> Mapping[str, str]:
    before = os.environ.get(_SEGMENTS)
    return {_SEGMENTS: ",".join([*([before] if before else []), "expandable_segments:True"])}


def _has_fixed_segments(program: Program) -> Sequence[str]:
    given = os.environ.get(_SEGMENTS, "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return _once(program.uses("cuda") and "expandable_segments" not in given)


_ROWS = (
    Change(
        "threads",
        "Divides operators on the CPU among another number of threads.",
        "torch.set_num_threads({value})",
        "rounding",
        ("thread-oversubscription",),
        _thread_counts,
        on=_set_threads,
        values=_NUMBER,
    ),
    Change(
        "fused",
        "Updates all parameters in one kernel of the optimizer.",
        "torch.optim.AdamW(..., fused=True), as also Adam, SGD and Adagrad have it",
        "rounding",
        ("optimizer-not-fused",),
        _is_slower("fused"),
        on=_implement("fused"),
    ),
    Change(
        "foreach",
        "Calls each operator of the optimizer once for all parameters; needs more memory.",
        "foreach=True as an argument of the optimizer",
        "rounding",
        ("optimizer-not-fused",),
        _is_slower("foreach"),
        on=_implement("foreach"),
    ),
    Change(
        "gc-freeze",
        "Stops Python's garbage collector; memory in cycles of objects is no longer freed.",
        "gc.collect(); gc.freeze(); gc.disable()  # after the set-up, and gc.collect() every few "
        "hundred steps",
        "same",
        ("garbage-collection",),
        lambda _: _once(gc.isenabled() and not gc.get_freeze_count()),
        on=_freeze,
    ),
    Change(
        "no-anomaly",
        "Stops anomaly detection; gradients are no longer searched for NaN.",
        "torch.autograd.set_detect_anomaly(False), without torch.autograd.detect_anomaly()",
        "same",
        ("debug-modes",),
        _has_anomaly_mode,
        on=_no_anomaly,
    ),
    Change(
        "no-deterministic",
        "Allows operators whose results differ from run to run.",
        "torch.use_deterministic_algorithms(False); torch.backends.cudnn.deterministic = False",
        "rounding",
        (),
        _is_deterministic,
        on=_no_deterministic,
    ),
    Change(
        "no-validation",
        "Stops the checks of the arguments of distributions; invalid ones raise no error.",
        "torch.distributions.Distribution.set_default_validate_args(False)",
        "same",
        (),
        lambda _: _once(Distribution._validate_args and bool(alive(Distribution))),
        on=lambda _, __: _put(Distribution, _validate_args=False),
    ),
    Change(
        "non-blocking",
        "Copies pinned batches to the device without waiting; pinned memory must not be reused.",
        "batch.to(device, non_blocking=True)",
        "same",
        ("blocking-copies",),
        lambda its: _once(its.uses("cuda") and any(each.pin_memory for each in its.loaders)),
        on=lambda _, __: _copy_without_waiting(),
    ),
    Change(
        "channels-last",
        "Stores images and filters of convolutions with the channels last.",
        "model = model.to(memory_format=torch.channels_last); "
        "batch = batch.to(memory_format=torch.channels_last)",
        "rounding",
        ("layout-and-casts:layout",),
        _has_other_layout,
        on=_use_channels_last,
    ),
    Change(
        "sdpa",
        "Computes scaled_dot_product_attention with one kernel, where it can.",
        'with torch.nn.attention.sdpa_kernel("{value}"): around the model; see SDPBackend',
        "rounding",
        (),
        _attends,
        on=_use_sdpa,
        values="flash|efficient|cudnn|math",
    ),
    Change(
        "tf32",
        "Multiplies float32 matrices on tensor cores, with 10 bits of their mantissas.",
        'torch.set_float32_matmul_precision("high")',
        "precision",
        ("tensor-cores:multiply float32 without tensor cores",),
        _could_use_tf32,
        on=_use_tf32,
    ),
    Change(
        "bf16",
        "Runs the models in bfloat16 autocast; their results are float32.",
        'with torch.autocast("cuda" or "cpu", torch.bfloat16): around the model',
        "precision",
        ("tensor-cores:multiply float32 without tensor cores",),
        _could_use_bf16,
        on=_use_bf16,
    ),
    Change(
        "compile",
        "Compiles the models, which takes minutes; dropout draws other random numbers.",
        'model.compile(mode="{value}" or None)',
        "rounding",
        ("in-pieces", "launch-bound"),
        _compile_modes,
        on=_compile,
        values="(reduce-overhead)?",
    ),
    Change(
        "workers",
        "Loads batches in worker processes, which stay from epoch to epoch; the order of later "
        "epochs and random augmentations are others.",
        "DataLoader(..., num_workers={value}, persistent_workers=True)",
        "same",
        ("loader-wait", "worker-start"),
        _worker_counts,
        prepare=_change_loaders("workers"),
        values=_NUMBER,
    ),
    Change(
        "no-workers",
        "Loads batches in the training process; random augmentations are others.",
        "DataLoader(..., num_workers=0)",
        "same",
        ("loader-wait",),
        lambda its: _once(any(each.num_workers for each in its.loaders)),
        prepare=_change_loaders("no-workers"),
    ),
    Change(
        "persistent-workers",
        "Keeps loader workers from epoch to epoch; the order of later epochs is another.",
        "DataLoader(..., persistent_workers=True)",
        "same",
        ("worker-start",),
        lambda its: _once(
            any(each.num_workers and not each.persistent_workers for each in its.loaders)
        ),
        prepare=_change_loaders("persistent-workers"),
    ),
    Change(
        "prefetch",
        "Lets each worker of the loader keep more batches ready; needs more memory.",
        "DataLoader(..., prefetch_factor={value})",
        "same",
        ("loader-wait",),
        _prefetch_factors,
        prepare=_change_loaders("prefetch"),
        values=_NUMBER,
    ),
    Change(
        "pin-memory",
        "Pins the batches, and copies them to the device without waiting.",
        "DataLoader(..., pin_memory=True); batch.to(device, non_blocking=True)",
        "same",
        ("blocking-copies", "loader-wait"),
        lambda its: _once(its.uses("cuda") and any(not each.pin_memory for each in its.loaders)),
        prepare=_change_loaders("pin-memory"),
    ),
    Change(
        "no-float16",
        "Computes in float32 what a CPU without instructions for it computes in a 16-bit type.",
        "model.float(), inputs in float32, and no torch.autocast",
        "precision",
        ("float16",),
        _has_float16,
        prepare=_compute_in_float32,
    ),
    Change(
        "cudnn-benchmark",
        "Measures the algorithms of cuDNN at each new shape, and takes the fastest.",
        "torch.backends.cudnn.benchmark = True",
        "rounding",
        (),
        lambda its: _once(
            its.uses("cuda") and _convolves(its) and not torch.backends.cudnn.benchmark
        ),
        # no `on`: cuDNN would still take the algorithms when it is off again
        prepare=lambda _: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    Change(
        "no-find-unused",
        "Does not search for unused parameters; raises an error if a later step has some.",
        "DistributedDataParallel(..., find_unused_parameters=False)",
        "same",
        (),
        _finds_unused,
        prepare=_build_ddp(find_unused_parameters=False),
    ),
    Change(
        "static-graph",
        "Searches for unused parameters once; wrong if the graph changes from step to step.",
        "DistributedDataParallel(..., static_graph=True)",
        "same",
        (),
        lambda its: _once(any(not each.static_graph for each in _distributed(its))),
        prepare=_build_ddp(static_graph=True),
    ),
    Change(
        "bucket-view",
        "Lets gradients be parts of the buckets that are sent, which saves a copy.",
        "DistributedDataParallel(..., gradient_as_bucket_view=True)",
        "same",
        (),
        lambda its: _once(any(not each.gradient_as_bucket_view for each in _distributed(its))),
        prepare=_build_ddp(gradient_as_bucket_view=True),
    ),
    Change(
        "malloc",
        "Keeps large freed memory for the next tensors, instead of giving it back to the system.",
        " ".join(f"{name}={value}" for name, value in _MALLOC.items()) + " python ...",
        "same",
        (),
        _maps_memory,
        environment=lambda _: _MALLOC,
    ),
    Change(
        "huge-pages",
        "Stores large tensors on the CPU in pages of 2 MiB.",
        "THP_MEM_ALLOC_ENABLE=1 python ...",
        "same",
        (),
        _has_small_pages,
        environment=lambda _: {"THP_MEM_ALLOC_ENABLE": "1"},
    ),
    Change(
        "omp-wait",
        "Lets idle threads of operators spin (active), or sleep at once (passive).",
        "OMP_WAIT_POLICY={value} python ...",
        "same",
        ("thread-oversubscription",),
        _waits_in_openmp,
        environment=lambda value: {"OMP_WAIT_POLICY": value},
        values="active|passive",
    ),
    Change(
        "no-debug",
        "Unsets variables for debugging, such as CUDA_LAUNCH_BLOCKING.",
        f"unset {' '.join(_DEBUGGING)}",
        "same",
        ("debug-modes",),
        lambda _: _once(any(os.environ.get(each, off) != off for each, off in _DEBUGGING.items())),
        environment=lambda _: _DEBUGGING,
    ),
    Change(
        "expandable-segments",
        "Lets the allocator of the device extend its segments.",
        f"{_SEGMENTS}=expandable_segments:True python ...",
        "same",
        ("allocator-churn",),
        _has_fixed_segments,
        environment=_expand_segments,
    ),
)
#: The changes by their names; those that can be switched come first.
CHANGES: dict[str, Change] = {each.name: each for each in _ROWS}
