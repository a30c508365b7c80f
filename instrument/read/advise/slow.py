"""Slow implementations of what torch has a fast one for, on a CPU and on devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import counted
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import device_kind
from instrument.read.advise.regions import LONGEST_GAP_NS, bodies, region
from instrument.read.facts.groupby import group_rows
from instrument.read.facts.places import common_place
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

_OPTIMIZER = re.compile(rf"{OPTIMIZER_STEP}(\w+)\.step")
# Options of torch's optimizers (2.13): `fused` updates all parameters in one kernel on CPUs and
# devices, `foreach` calls each operator once for all of them.
_OPTIONS = {
    **dict.fromkeys(("Adam", "AdamW", "SGD", "Adagrad"), "fused"),
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"), "foreach"
    ),
}
# Measured on a CPU, one thread, 8 to 80 parameters of 32 to 2 million numbers. With k operators for
# a parameter (AdamW 10, Adagrad 6, SGD with momentum 3), the fused kernel needs 1/k to 3/k of the
# time of the loop. foreach needs 0.51 to 0.74 of it for small parameters, more for large ones, and
# always more for ASGD; fused needs a third of the time of foreach.
_FUSED, _FOREACH, _FUSED_OF_FOREACH = (2.0, 3.0, 1.0), (0.6, 1.0, 0.5), (0.35, 0.7, 0.2)
_LEAST_PARAMETERS, _LEAST_OPERATORS = 8, 2.5


def optimizer_not_fused(capture: Views) -> Iterator[Problem]:
    """Find optimizers that call several operators for each parameter, or foreach where fused is.

    The number of parameters is how often the typical operator of the optimizer runs in a step.
    """
    events, links, on_cpu = capture.events, capture.links, device_kind(capture) == "cpu"
    tree, steps = links.call_tree, links.counted_steps
    operators, ranges = bodies(capture)
    names = [each and each[1] for each in map(_OPTIMIZER.fullmatch, events.names)]
    is_step = np.append(np.array([*map(bool, names)])[events.name[tree.index]] & ranges, False)
    # Within the closure of a step, gradients are recorded.
    calls = np.flatnonzero(operators & is_step[tree.parent] & ~links.scopes.recording)
    of = group_rows(events.name[tree.index[tree.parent[calls]]])
    for nodes in (calls[rows] for rows in of.rows()):
        name = names[events.name[tree.index[tree.parent[nodes[0]]]]] or ""
        kinds, counts = np.unique(events.name[tree.index[nodes]], return_counts=True)
        called, is_tiny = [events.names[kind] for kind in kinds], True
        parameters, option = np.median(counts) / steps.count, _OPTIONS.get(name)
        if any("_fused_" in each for each in called):
            continue
        each = len(nodes) / steps.count / parameters
        is_foreach = any("_foreach_" in each for each in called)
        what = f"{name} runs {counted(round(len(nodes) / steps.count), 'operator')} a {steps.what}"
        if is_foreach:
            left = _FUSED_OF_FOREACH
            if option != "fused" or not on_cpu:
                continue
        elif parameters < _LEAST_PARAMETERS or each < _LEAST_OPERATORS:
            continue
        else:
            what += f", {each:,.0f} for each of {parameters:,.0f} parameters"
            is_tiny = bool(np.median(tree.total_ns[nodes]) <= LONGEST_GAP_NS)
            left = (_FUSED[0] / each, min(_FUSED[1] / each, 1), _FUSED[2] / each)
        if option == "foreach" and on_cpu:
            left = _FOREACH
            if not is_tiny or name == "ASGD":
                continue
        if option is None:
            left = (left[0], 1.0, left[2])
        around = region(capture, nodes, tree.parent[nodes], np.zeros(0, np.int64))
        yield Problem(
            what,
            tree.index[nodes],
            steps.share(around.elapsed_ns),
            edit=around.scaled(capture, left[0], left[1:]),
            place=common_place(capture, tree.index[nodes]),
            change=f"torch.optim.{name}(params, ..., {option}=True) updates all parameters at once."
            if option
            else f"Use an optimizer of torch with fused=True instead of {name}, or "
            "torch._foreach_* operators in its step.",
        )


OPTIMIZER_NOT_FUSED = Check(
    "optimizer-not-fused",
    optimizer_not_fused,
    title="{share} of the {step}: {what}",
    verify="--ops --by range",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)
