"""Opens and closes ranges in torch, NVTX and ITT.

torch's `record_function` costs 11 µs or more per range, with or without a profiler. So this module
uses two private functions of torch instead, which cost about 3 µs per range. They record the same
events as `record_function`: a user annotation, and a `gpu_user_annotation` for the device.

Annotations open ranges only while a window is open or timings of the whole run are on: each call
reads the flag `armed`, which only `arm` and `disarm` change.
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

from instrument.base.errors import ConfigError
from instrument.base.range_names import to_trace


class Backend(NamedTuple):
    """The functions with which one tool records ranges.

    Attributes:
        open: opens a range with a given name on the calling thread; returns the handle for `close`.
        close: ends a range; call it on the thread that opened the range. A range may also be closed
            after the tool has stopped recording.
        mark: records a moment (a named point in time); None if the tool cannot record moments.
    """

    open: Callable[[str], Any]
    close: Callable[[Any], None]
    mark: Callable[[str], Any] | None = None


def _public_open(name: str) -> Any:
    handle: Any = record_function(name)
    handle.__enter__()
    return handle


def _public_close(handle: Any) -> None:
    handle.__exit__(None, None, None)


# torch writes the end of a range into the recording in which the range began. If that recording has
# ended and another recording is on, the write corrupts memory. So a range that is open when its
# recording stops is never closed in torch: `_outlived` keeps its handle until no recording is on.
_recording = 0  # how many recordings have ended
_outlived: list[Any] = []


def _torch() -> Backend:
    autograd = getattr(torch._C, "_autograd", None)
    torch_open = getattr(autograd, "_record_function_with_args_enter", None)
    torch_close = getattr(autograd, "_record_function_with_args_exit", None)
    if torch_open is None or torch_close is None:
        torch_open, torch_close = _public_open, _public_close

    def open_(name: str) -> tuple[int, Any]:
        return _recording, torch_open(name)

    def close(handle: tuple[int, Any]) -> None:
        recording, torch_handle = handle
        if recording == _recording:
            torch_close(torch_handle)
        else:
            _outlived.append(torch_handle)

    return Backend(open_, close)


def end_recording() -> None:
    """Call this when a recording stops, so that ranges still open are never closed in torch."""
    global _recording
    _recording += 1


def release_outlived() -> None:
    """Free the ranges that were open when a recording stopped; call this while nothing records."""
    _outlived.clear()


def _nvtx() -> Backend:
    nvtx = torch.cuda.nvtx
    try:
        nvtx.mark("instrument")
    except RuntimeError:
        raise ConfigError(
            "profiler.emit names nvtx, but this torch was built without CUDA: install a CUDA build "
            "of torch, or leave nvtx out."
        ) from None
    return Backend(nvtx.range_push, lambda _: nvtx.range_pop(), nvtx.mark)


def _itt() -> Backend:
    if not itt.is_available():
        raise ConfigError(
            "profiler.emit names itt, but this torch was built without ITT: leave itt out."
        )
    return Backend(itt.range_push, lambda _: itt.range_pop(), itt.mark)


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": _torch, "nvtx": _nvtx, "itt": _itt}

#: Whether `INSTRUMENT_DISABLE` was set at import; annotations then do nothing in this process.
disabled: bool = os.environ.get("INSTRUMENT_DISABLE", "0") not in ("", "0")

armed: bool = False
#: Opens torch's own ranges. The steps of a window are always ranges of this backend.
torch_backend: Backend = _torch()
#: Opens the ranges of annotations. An annotation reads this variable once per range, so the backend
#: that opens a range also closes it.
backend: Backend = torch_backend
_arming: tuple[Backend, ...] = ()
#: Functions that `arm` and `disarm` call at their end.
on_arming: list[Callable[[], None]] = []
#: Ranges that Dynamo traced into a compiled region. A key is the name of the range and the name of
#: the region; the value is the id and the code of the region.
compiled_ranges: dict[tuple[str, str], tuple[Any, ref[CodeType] | None]] = {}


def arm(emitting: Backend | None = None) -> None:
    """From now on, annotations open their ranges in this backend too; `disarm` ends this.

    None means torch's backend. A backend that annotations already use is not added again.
    """
    emitting = emitting or torch_backend
    # The newest backend opens a range first and closes it last. The timings of the run are armed
    # before a window, so they exclude the cost of the window's tools.
    _emit_with(_arming if emitting in _arming else (emitting, *_arming))


def disarm(emitting: Backend | None = None) -> None:
    """Open no more ranges in `emitting` (None: in any backend); open ones are still closed."""
    others = [] if emitting is None else list(_arming)
    if emitting in others:
        others.remove(emitting)
    _emit_with(tuple(others))


def _emit_with(arming: tuple[Backend, ...]) -> None:
    global armed, backend, _arming
    _arming = arming
    if arming:  # otherwise keep the last backend, because another thread may be about to use it
        backend = reduce(both, arming)
    armed = bool(arming) and not disabled
    for call in on_arming:
        call()


def mark(moment: str) -> None:
    """Record a moment in each tool that is on, except those that cannot, such as torch."""
    if backend.mark is not None:
        backend.mark(moment)


def backend_for(names: Sequence[str]) -> Backend:
    """The backend of the named tools: `torch`, `nvtx` (Nsight Systems) and `itt` (VTune).

    Raises:
        ConfigError: this torch was built without one of the tools.
    """
    return reduce(both, [BACKENDS[name]() for name in dict.fromkeys(names)])


def both(outer: Backend, inner: Backend) -> Backend:
    """Open each range in both backends; costs 0.1 µs per range, where a loop would cost 0.8 µs."""
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


def note_compiled(name: str) -> None:
    """Remember a compiled range: Dynamo calls this when it compiles, the compiled code does not."""
    from torch._guards import CompileContext  # already imported when Dynamo calls this

    region = CompileContext.current_compile_id()
    if region is not None:
        compiled_ranges[name, str(region)] = region, _compiled_code()


def _compiled_code() -> ref[CodeType] | None:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return ref(InstructionTranslator.current_tx().output.root_tx.f_code)
    except Exception:  # torch may change these private functions; the compilation must not fail
        return None


def current_compiled_ranges() -> list[dict[str, str]]:
    """List the ranges in `compiled_ranges` whose compiled code Dynamo still holds."""
    return [
        {"range": name, "region": region_name}
        for (name, region_name), (region, code) in compiled_ranges.items()
        if code is None or _is_compiled(region, code())
    ]


def _is_compiled(region: Any, code: CodeType | None) -> bool:
    entries = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    if code is None or entries is None:
        return code is not None
    return any(getattr(entry, "compile_id", region) is region for entry in entries(code))


# torch.compiler.assume_constant_result does the same, but loads Dynamo, which takes two seconds.
note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def format_label(template: str, values: dict[str, Any]) -> str:
    """Fill the format of a range's name with a call's arguments; on an error, return the format."""
    try:
        return to_trace(template.format(**values))
    except Exception as error:  # a name must not end a training run
        from instrument.base.signals import raised_by_handler

        if raised_by_handler(error):
            raise
        return to_trace(template)


def bind_and_format_label(
    function: Any, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Like `format_label`, for arguments that are not bound to the function's parameters yet."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return to_trace(template)
    bound.apply_defaults()
    return format_label(template, bound.arguments)
