"""The detail window: the steps after a window, recorded for what it lacks, and never for times.

Shapes, types and memory make steps slower, so a window of which times are wanted has none of them.
The window is saved and queued before the first step of its detail window, and the exporter leaves
it alone until the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from instrument.base import queue
from instrument.record.config.schedule import Window
from instrument.record.config.schema import ProfilerConfig
from instrument.record.observe import observe
from instrument.record.recorder import RecordedWindow

#: Returns what it has seen, as entries of `detail` in `capture.json`.
End: TypeAlias = Callable[[], Mapping[str, Any]]
#: Called when a detail window begins; what each returns is called when it ends. An operator that
#: they call must be in a range of its own, or else its like in the window gets no shapes.
observers: list[Callable[[], End]] = [observe]
# A detail window ends early if it lasts this many times as long as its steps, and at least this
# long: the program does something else.
_LONGEST_FACTOR, _LEAST_S = 10, 1.0
_NOT_AGAIN = ("memory_categories", "with_stack", "memory_snapshot", "execution_trace")


def detail_options(
    config: ProfilerConfig, activities: Sequence[str], step_ns: float, *, on_one_thread: bool
) -> ProfilerConfig | None:
    """The options of the detail window after a window with `config`; None if it would add nothing.

    `step_ns` is the duration of the longest step of the window. Memory is recorded of programs that
    use a device, and only with one thread, because torch loses it with all threads. For the CPU,
    torch would print a warning about memory of unknown size.
    """
    if not config.detail or config.record_shapes or config.max_stall_ms is not None:
        return None
    longest_s = max(_LEAST_S, _LONGEST_FACTOR * config.detail * step_ns / 1e9)
    options = dict.fromkeys(_NOT_AGAIN, False) | {"record_shapes": True, "max_window_s": longest_s}
    one = on_one_thread or not config.profile_all_threads
    one &= "profile_all_threads" not in config.experimental_config
    if one and not {"cpu"}.issuperset(activities):
        options |= {"profile_memory": True, "profile_all_threads": False}
    return config.model_copy(update=options)


@dataclass
class Detail:
    """The detail window of a window.

    Attributes:
        planned: its steps.
        config: its options.
        folder: the queued folder of the window.
        metadata: the content of the window's `capture.json`.
    """

    planned: Window
    config: ProfilerConfig
    folder: Path
    metadata: dict[str, Any]
    _ends: list[End] = field(default_factory=list)

    def begin(self, more: Iterable[Callable[[], End]] = ()) -> None:
        """Call the observers, and `more` of them."""
        self._ends += [each() for each in (*observers, *more)]

    def end(self) -> dict[str, Any]:
        """End what the observers began, and return what they have seen."""
        ends, self._ends = self._ends, []
        return {key: value for end in ends for key, value in end().items()}

    def save(self, recorded: RecordedWindow) -> int:
        """Write the trace into the folder of the window; return its size in bytes."""
        partial = self.folder / ".detail.tmp"  # removed if this process is killed meanwhile
        recorded.save(partial)
        return partial.rename(self.folder / queue.RAW_DETAIL).stat().st_size

    def describe(self, about: Mapping[str, Any]) -> None:
        """Add to the `capture.json` of the window what its detail window is."""
        queue.describe(self.folder, self.metadata | {"detail": dict(about)})
