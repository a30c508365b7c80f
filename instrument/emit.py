"""Opens and closes one range, the cheapest way this torch has; for NVTX and ITT too.

`record_function` costs 11 µs and more per range, whether a profiler runs or not. The private pair probed for below
emits the same user annotation (so the device gets its `gpu_user_annotation` too) for about 3 µs, and ranges are opened
only while a window records. `armed` is read by every annotation on every call; only `arm` and `disarm` write it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import assume_constant_result, is_dynamo_compiling  # noqa: F401 - generated wrappers read it here
from torch.profiler import itt, record_function

from instrument.errors import ConfigError


class Backend(NamedTuple):
    """How one tool gets its ranges.

    Attributes:
        open: opens a range of this name on the calling thread and returns what `close` needs.
        close: ends a range on the thread that opened it; harmless when the tool has stopped in between.
        mark: notes a moment; None where the tool has no such thing.
    """

    open: Callable[[str], Any]
    close: Callable[[Any], None]
    mark: Callable[[str], Any] | None = None


def _open_publicly(name: str) -> Any:
    handle: Any = record_function(name)
    handle.__enter__()
    return handle


def _close_publicly(handle: Any) -> None:
    handle.__exit__(None, None, None)


def _torch() -> Backend:
    autograd = getattr(torch._C, "_autograd", None)
    private_open = getattr(autograd, "_record_function_with_args_enter", None)
    private_close = getattr(autograd, "_record_function_with_args_exit", None)
    if private_open is None or private_close is None:
        return Backend(_open_publicly, _close_publicly)
    return Backend(private_open, private_close)


def _nvtx() -> Backend:
    nvtx = torch.cuda.nvtx
    try:
        nvtx.mark("instrument")
    except RuntimeError:
        raise ConfigError(
            "profiler.emit names nvtx, but this torch was built without CUDA: install a CUDA build of torch, "
            "or leave nvtx out."
        ) from None
    return Backend(nvtx.range_push, lambda _: nvtx.range_pop(), nvtx.mark)


def _itt() -> Backend:
    if not itt.is_available():
        raise ConfigError("profiler.emit names itt, but this torch was built without it: leave itt out.")
    return Backend(itt.range_push, lambda _: itt.range_pop(), itt.mark)


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": _torch, "nvtx": _nvtx, "itt": _itt}

#: Whether `INSTRUMENT_DISABLE` was set when this was imported: nothing is marked in this process, nothing ever armed.
disabled: bool = os.environ.get("INSTRUMENT_DISABLE", "0") not in ("", "0")

armed: bool = False
#: Kineto's own ranges, which the steps of a window always get.
torch_backend: Backend = _torch()
#: What annotations emit with. They take it once, so that the tool that opened a range also closes it.
backend: Backend = torch_backend
#: What was traced away into a compiled region: (range, region as torch names it).
swallowed: dict[tuple[str, str], None] = {}


def arm() -> None:
    """Let annotations open ranges; called when a window starts to record."""
    global armed
    armed = not disabled


def disarm() -> None:
    """Make annotations do nothing again; a range that is open then is still closed by its owner."""
    global armed
    armed = False


# A worker forked in the middle of a window has no profiler to speak to.
os.register_at_fork(after_in_child=disarm)


def mark(moment: str) -> None:
    """Note a moment in the tools that have such a thing; Kineto has none."""
    if backend.mark is not None:
        backend.mark(moment)


def use(names: Sequence[str]) -> None:
    """Choose which tools see the ranges: of `torch`, `nvtx` (Nsight Systems) and `itt` (VTune).

    Raises:
        ConfigError: this torch was built without the tool.
    """
    global backend
    chosen = [BACKENDS[name]() for name in names]
    backend = chosen[0] if len(chosen) == 1 else _together(chosen)


def _together(backends: Sequence[Backend]) -> Backend:
    def open_all(name: str) -> list[Any]:
        return [each.open(name) for each in backends]

    def close_all(handles: list[Any]) -> None:
        for each, handle in zip(reversed(backends), reversed(handles)):
            each.close(handle)

    def mark_all(name: str) -> None:
        for each in backends:
            if each.mark is not None:
                each.mark(name)

    return Backend(open_all, close_all, mark_all)


@assume_constant_result  # type: ignore[untyped-decorator]
def swallow(name: str) -> None:
    """Note that Dynamo traces a range away; it calls this once, while it compiles, and leaves the call out."""
    from torch._guards import CompileContext  # loads Dynamo, which is there when this is called

    region = CompileContext.current_compile_id()
    if region is not None:
        swallowed[name, str(region)] = None


def labelled(template: str, values: dict[str, Any]) -> str:
    """A range's name from a format and the call's arguments; the format itself where that fails."""
    try:
        return template.format(**values)
    except Exception:  # a name is never worth a training run
        return template


def labelled_by(function: Any, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As `labelled`, for arguments that have yet to be bound to the function's parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return template
    bound.apply_defaults()
    return labelled(template, bound.arguments)


def named_by(name: Callable[..., Any], fallback: str, *args: Any, **kwargs: Any) -> str:
    """A range's name from a function of the call's arguments; `fallback` where that fails."""
    try:
        return str(name(*args, **kwargs))
    except Exception:
        return fallback
