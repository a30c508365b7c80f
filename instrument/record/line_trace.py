"""Note each line of the user's code that a thread runs in a detail window; no time of it counts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

from instrument.annotate.module_calls import skip_in_dynamo

#: The Unix time in ns at which a line begins, its code and its number; None for an unknown one.
NotedLine: TypeAlias = tuple[int, CodeType | None, int]
# So many lines of the user and calls of any function take about 0.1 s; then the rest is unknown.
_MOST_LINES, _MOST_CALLS = 50_000, 200_000


def trace_lines(
    noted: list[NotedLine], is_users: Callable[[str], bool]
) -> Callable[[], None] | None:
    """Note the lines of this thread from now on, until the returned function is called.

    `is_users` says of a file whether it is the user's. After a call has returned, the line that
    called is noted again. Returns None, and notes nothing, where a debugger or a measurement of
    coverage traces the thread, or where torch.compile has compiled code, because it might do so
    again.
    """
    compiler = sys.modules.get("torch._dynamo.utils")
    if sys.gettrace() is not None or getattr(compiler, "counters", {}).get("frames"):
        return None
    calls, is_over, thread = 0, False, get_ident()

    def end() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            noted.append((time.time_ns(), None, 0))
            for each in traced:
                if each.f_trace is note:  # not of a debugger that has begun meanwhile
                    each.f_trace = None
        if get_ident() == thread and sys.gettrace() is enter:
            sys.settrace(None)

    def users(frame: FrameType | None) -> FrameType | None:
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if is_over or len(noted) >= _MOST_LINES:
            return end()
        at = users(frame.f_back) if event == "return" else frame if event == "line" else None
        if at is not None:
            noted.append((time.time_ns(), at.f_code, at.f_lineno))
        return note

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        nonlocal calls
        calls += 1
        if is_over or calls > _MOST_CALLS:
            return end()
        return note if is_users(frame.f_code.co_filename) else None

    for each in (note, enter, users, end, is_users):
        skip_in_dynamo(each, and_all_within=True)  # they run inside what it compiles
    traced, frame = list[FrameType](), users(sys._getframe(1))
    while frame is not None:
        frame.f_trace = note
        traced.append(frame)
        frame = users(frame.f_back)
    sys.settrace(enter)
    return end
