"""`ProfilerOptions`: the keyword options of `Session`, for type checkers and completion.

Written by docs/generate.py: change the code, then run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from instrument.record.config.schema import MetricsConfig, ModulesConfig, TimingsConfig


class ProfilerOptions(TypedDict, total=False):
    """The options of `ProfilerConfig`, with the types that a caller may pass."""

    enabled: bool
    wait: int
    warmup: int
    active: int | None
    repeat: int
    skip_first: int
    at_steps: Sequence[int] | None
    every_n_steps: int | None
    total_steps: int | None
    phases: Sequence[str]
    max_window_s: float | None
    max_window_memory: int | str | None
    max_stall_ms: float | None
    activities: Sequence[Any] | None
    record_shapes: bool
    profile_memory: bool
    memory_categories: bool
    with_stack: bool
    with_flops: bool
    profile_all_threads: bool
    with_modules: bool
    communication: Sequence[str]
    peak_flops: float | Mapping[str, float] | None
    memory_snapshot: bool
    execution_trace: bool
    experimental_config: Mapping[str, Any]
    emit: Sequence[Literal["torch", "nvtx", "itt"]]
    modules: ModulesConfig | Mapping[str, Any]
    timings: TimingsConfig | Mapping[str, Any] | None
    detail: int
    lines: bool
    metrics: MetricsConfig | Mapping[str, Any] | None
    metadata: Mapping[str, Any]
    output_dir: str | Path | None
    ranks: Literal["all", "first_per_node", "one_per_role"] | Sequence[int]
    export: Literal["process", "inline"]
    export_timeout_s: float
    keep: int | None
    disk_budget: int | str | None
    upload_to: str | None
    upload_options: Mapping[str, Any]
    preemption_grace_s: float | None
    sinks: Mapping[str, Any] | Sequence[str]
    on_capture: Callable[[Path, dict[str, float]], object] | Mapping[str, Any] | Sequence[str]
    triggers: Mapping[str, Any] | Sequence[str]
