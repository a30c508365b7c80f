"""Find hooks on modules and tensors that take time in each step, such as those of a debugging tool.

The check finds hooks by their Python frames in the trace, because torch calls hooks from known
places:

- The function `inner` in torch/nn/modules/module.py calls a module's forward and its hooks.
- torch/utils/hooks.py calls the hooks of a module's backward.
- The autograd engine calls the hooks of a tensor directly.

The time of a hook is the time of its frame, with everything that the hook calls, and with the
device work that the hook launches. Hooks of torch itself, such as those of FSDP, do not count.

`hooks` in `capture.json` is the number of hooks. If it is 0, the check finds nothing, and needs no
Python frames.

There is a finding if hooks take at least 2 % of the time of the steps. The check cannot see hooks
in a backward on the engine's own threads, because torch records no frames there. It cannot see
hooks of modules whose `forward` was replaced by a function of another name. It leaves out torch's
own calls around hooks, which take a few µs each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.places import common_place, users_source
from instrument.analysis.views import Views
from instrument.findings.event_time import share_of
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Finding, NotRecorded, show_command
from instrument.findings.saving import scaled
from instrument.trace.events import Flags, Ints
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.02
_FORWARD = "): forward"
# In this function, a module with hooks runs its hooks and its forward.
_WITH_HOOKS = re.compile(r"(.*[/\\])?torch[/\\]nn[/\\]modules[/\\]module\.py\(\d+\): inner")
_BACKWARD = re.compile(
    r"(.*[/\\])?torch[/\\]utils[/\\]hooks\.py\(\d+\): .*|<built-in method run_backward of .*"
)


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if hooks take at least 2 % of the steps."""
    count = _count(capture)
    if count == 0:
        return
    if not len(capture.links.frames):
        hooks = "how long hooks of modules and tensors take"
        if count is not None:
            hooks = f"how long the {count} hooks of modules and tensors take"
        raise NotRecorded(
            f"the capture does not show {hooks}", "record with profiler.with_stack=true"
        )
    time = capture.links.counted_steps
    calls = _calls(capture)
    calls = calls[time.holds(capture.events.start_ns[calls]) >= 0]
    share = share_of(capture, calls)
    if share < _LEAST_SHARE:
        return
    place, source = common_place(capture, calls)
    yield Finding(
        code=CHECK.code,
        title=f"Hooks of modules and tensors take {percent(share)} of the {time.what}: "
        f"{len(calls) / time.count:,.0f} calls a {time.what}",
        change="Call remove() on the handles that register_forward_hook, register_hook and similar "
        "methods return (wandb.unwatch() after wandb.watch()), or register hooks only for the "
        "steps that need them.",
        verify=show_command(capture, "--steps"),
        share=share,
        saving=scaled(whatif, _with_operators(capture, calls)),
        range=place,
        source=source,
        evidence=evidence(capture, calls),
    )


def _count(capture: Views) -> int | None:
    """The number of all hooks, on modules and on parameters.

    If the number on modules is not known, the result is None. If only the number on parameters is
    not known, it counts as 0.
    """
    environment = capture.about.environment
    hooks = None if environment is None else environment.hooks
    if hooks is None or hooks.every_module is None or hooks.modules is None:
        return None
    return hooks.every_module + hooks.modules + (hooks.parameters or 0)


def _calls(capture: Views) -> Ints:
    """The Python frames of hooks. The frame of a hook that another hook calls is left out."""
    events, frames = capture.events, capture.links.frames
    is_forward = events.named(lambda name: name.endswith(_FORWARD))[frames.index]
    has_forward = np.zeros(len(frames) + 1, np.bool_)
    has_forward[frames.parent[is_forward]] = True
    caller = events.named(lambda name: _WITH_HOOKS.fullmatch(name) is not None)[frames.index]
    caller = caller & has_forward[:-1]
    caller |= events.named(lambda name: _BACKWARD.fullmatch(name) is not None)[frames.index]
    others = events.named(lambda name: users_source(name) is not None)[frames.index]
    called: Flags = others & ~is_forward & np.append(caller, False)[frames.parent]
    found: Ints = frames.index[frames.outermost(called)]
    return found


def _with_operators(capture: Views, calls: Ints) -> Ints:
    """The given frames, with the operators and calls inside them."""
    frames, tree = capture.links.frames, capture.links.call_tree
    node = frames.node_at(tree.thread, tree.start_ns)
    inside = frames.nearest(np.isin(frames.index, calls), node) >= 0
    return np.concatenate([calls, tree.index[inside]])


CHECK = Check("hooks", find)
