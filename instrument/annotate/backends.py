"""Opens and closes one range, the cheapest way this torch has; for NVTX and ITT too.

`record_function` costs 11 µs and more per range, whether a profiler runs or not. The private pair probed for below
emits the same user annotation (so the device gets its `gpu_user_annotation` too) for about 3 µs, and ranges are opened
only while somebody wants them. `armed` is read by every annotation on every call; only `arm` and `disarm` write it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import reduce
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling  # noqa: F401 - generated wrappers read it here
from torch.profiler import itt, record_function

from instrument.errors import ConfigError
from instrument.range_names import to_trace


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


# torch writes a range's end into the recording that the range began in. Once that is gone, and another one is on, this
# overwrites memory that is somebody else's by now. So a range that outlives its recording is never closed: it is kept
# here until no recording is on.
_recording = 0
_outlived: list[Any] = []


def _torch() -> Backend:
    autograd = getattr(torch._C, "_autograd", None)
    torch_open = getattr(autograd, "_record_function_with_args_enter", None)
    torch_close = getattr(autograd, "_record_function_with_args_exit", None)
    if torch_open is None or torch_close is None:
        torch_open, torch_close = _open_publicly, _close_publicly

    def open_(name: str) -> tuple[int, Any]:
        return _recording, torch_open(name)

    def close(handle: tuple[int, Any]) -> None:
        recording, inner = handle
        if recording == _recording:
            torch_close(inner)
        else:
            _outlived.append(inner)

    return Backend(open_, close)


def end_recording() -> None:
    """Close no range in torch any more that is open now; called just before a recording stops."""
    global _recording
    _recording += 1


def release_outlived() -> None:
    """Let go of the ranges that were open when a recording stopped; called while no recording is on."""
    _outlived.clear()


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
        raise ConfigError(
            "profiler.emit names itt, but this torch was built without it: leave itt out."
        )
    return Backend(itt.range_push, lambda _: itt.range_pop(), itt.mark)


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": _torch, "nvtx": _nvtx, "itt": _itt}

#: Whether `INSTRUMENT_DISABLE` was set when this was imported: nothing is marked in this process, nothing ever armed.
disabled: bool = os.environ.get("INSTRUMENT_DISABLE", "0") not in ("", "0")

armed: bool = False
#: Kineto's own ranges, which the steps of a window always get.
torch_backend: Backend = _torch()
#: What annotations emit with. They take it once, so that the tool that opened a range also closes it.
backend: Backend = torch_backend
_arming: tuple[Backend, ...] = ()
#: Called after each change of `armed`.
on_arming: list[Callable[[], None]] = []
#: What was traced away: (range, region as torch names it) -> that region's id, and the code that Dynamo compiled.
compiled_ranges: dict[tuple[str, str], tuple[Any, ref[CodeType] | None]] = {}


def arm(emitting: Backend | None = None) -> None:
    """Let annotations open ranges with `emitting` until it is disarmed, beside what is armed already.

    None: with Kineto's. Arming a second time what is armed changes nothing.
    """
    emitting = emitting or torch_backend
    # the newest outermost: what times the whole run does not count what a window's tools cost
    _emit_with(_arming if emitting in _arming else (emitting, *_arming))


def disarm(emitting: Backend | None = None) -> None:
    """Take `emitting` away, or everything; a range that is open then is still closed by its owner.

    With nothing left, annotations do nothing again.
    """
    _emit_with(tuple(each for each in _arming if emitting is not None and each != emitting))


def _emit_with(arming: tuple[Backend, ...]) -> None:
    global armed, backend, _arming
    _arming = arming
    if arming:  # otherwise the last one stays: another thread may be about to use it
        backend = reduce(both, arming)
    armed = bool(arming) and not disabled
    for call in on_arming:
        call()


# A worker forked in the middle of a window has no profiler to speak to.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=disarm)


def mark(moment: str) -> None:
    """Note a moment in the tools that have such a thing; Kineto has none."""
    if backend.mark is not None:
        backend.mark(moment)


def backend_for(names: Sequence[str]) -> Backend:
    """What emits to the tools named: of `torch`, `nvtx` (Nsight Systems) and `itt` (VTune).

    Raises:
        ConfigError: this torch was built without the tool.
    """
    return reduce(both, [BACKENDS[name]() for name in dict.fromkeys(names)])


def both(outer: Backend, inner: Backend) -> Backend:
    """Each range in both, for 0.1 µs on top of theirs; a loop over any number of tools took 0.8 µs."""
    open_outer, close_outer, _ = outer
    open_inner, close_inner, _ = inner

    def open_both(name: str) -> tuple[Any, Any]:
        return open_outer(name), open_inner(name)

    def close_both(handles: tuple[Any, Any]) -> None:
        close_inner(handles[1])
        close_outer(handles[0])

    def mark_both(moment: str) -> None:
        for each in (outer, inner):
            if each.mark is not None:
                each.mark(moment)

    return Backend(open_both, close_both, mark_both)


def swallow(name: str) -> None:
    """Note that Dynamo traces a range away; it calls this once, while it compiles, and leaves the call out."""
    from torch._guards import CompileContext  # there already when Dynamo calls this

    region = CompileContext.current_compile_id()
    if region is not None:
        compiled_ranges[name, str(region)] = region, _code_compiled()


def _code_compiled() -> ref[CodeType] | None:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return ref(InstructionTranslator.current_tx().output.root_tx.f_code)
    except Exception:  # private to torch, and never worth a compilation
        return None


def still_compiled_ranges() -> list[dict[str, str]]:
    """Those of `compiled_ranges` that are compiled still, as `range` and `region`: `torch._dynamo.reset()` counts anew."""
    return [
        {"range": name, "region": said}
        for (name, said), (region, code) in compiled_ranges.items()
        if code is None or _is_compiled(region, code())
    ]


def _is_compiled(region: Any, code: CodeType | None) -> bool:
    look = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    if code is None or look is None:
        return code is not None
    return any(getattr(entry, "compile_id", region) is region for entry in look(code))


# All that torch.compiler.assume_constant_result does; but that one loads Dynamo, which takes two seconds.
swallow._dynamo_marked_constant = True  # type: ignore[attr-defined]


def labelled(template: str, values: dict[str, Any]) -> str:
    """A range's name from a format and the call's arguments; the format itself where that fails."""
    try:
        return to_trace(template.format(**values))
    except Exception:  # a name is never worth a training run
        return to_trace(template)


def labelled_by(function: Any, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As `labelled`, for arguments that have yet to be bound to the function's parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return to_trace(template)
    bound.apply_defaults()
    return labelled(template, bound.arguments)


def named_by(name: Callable[..., Any], fallback: str, *args: Any, **kwargs: Any) -> str:
    """A range's name from a function of the call's arguments; `fallback` where that fails."""
    try:
        return to_trace(str(name(*args, **kwargs)))
    except Exception:
        return to_trace(fallback)
