"""Mistakes that a type checker finds in a session's options; mypy fails if it does not find one."""

from __future__ import annotations

from pathlib import Path

from instrument import ProfilerConfig, RequestedWindow, Session, profiled
from instrument.integrations.lightning import ProfilerCallback


def right(config: ProfilerConfig) -> RequestedWindow:
    Session(config, active=None, output_dir=Path("profile"), sinks=["table"], phases=["rollout"])
    ProfilerCallback("trace", max_window_memory="2GB", timings={"every": 5}, at_steps=(1, 9))
    with profiled(name="loss"), Session(None) as session:
        return session.request(steps=config.replace(active=3).active)


@profiled(name="doubled")
def doubled(x: int) -> int:
    return 2 * x


def wrong(config: ProfilerConfig) -> None:
    Session(activ=3)  # type: ignore[call-arg]
    Session(active="3")  # type: ignore[arg-type]
    ProfilerCallback(activ=3)  # type: ignore[call-arg]
    config.replace(activ=3)  # type: ignore[call-arg]
    config.active = 3  # type: ignore[misc]
    doubled("2")  # type: ignore[arg-type]
