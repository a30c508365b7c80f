"""Find biases of convolutions that have no effect, because a batch norm follows.

Batch norm subtracts the mean of each channel, including the bias. The check reads the shapes of
operators (`record_shapes`). It looks for a convolution whose third input, the bias, has a shape.
The first input of the next `aten::batch_norm` on the thread must have the shape of the
convolution's output. Between the two, only operators on tensors without dimensions may run, such as
the addition that counts batches.

The trace shows the cost of the bias only if the bias has operators of its own:

- With cuDNN, these are an addition in the forward, a sum in the backward, and the backward node
  that accumulates the sum.
- Some convolutions on the CPU have only the sum and the node. Such a convolution first fills its
  output with the bias instead of zeros, so it needs no addition.
- MKL-DNN adds and sums inside the convolution, so the trace shows no cost.

There is a finding if these operators take at least 1 % of the time of the steps, unless the
simulation without these operators saves less than 0.5 %.

The check does not find biases in compiled models, or before norms other than batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.analysis.places import common_place, input_shapes, is_shape
from instrument.analysis.views import Views
from instrument.findings.event_time import share_of
from instrument.findings.evidence import evidence
from instrument.findings.finding import (
    RECORD_SHAPES,
    Check,
    Evidence,
    Finding,
    NotRecorded,
    show_command,
)
from instrument.findings.saving import is_worth, scaled
from instrument.links.autograd import is_accumulation, is_backward
from instrument.links.groupby import isin
from instrument.trace.events import OPERATOR, Events, Flags, Ints, decoded
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.01
_LEAST_SAVING = 0.005
_CONVOLUTIONS = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d"})
_NORM = "aten::batch_norm"
# The forward adds the bias with one of `_ADDS`. The backward sums its gradient with `_SUM` inside
# `_BACKWARD`.
_ADDS = frozenset({"aten::add_", "aten::reshape"})
_BACKWARD = "aten::convolution_backward"
_SUM = "aten::sum"


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if biases before a batch norm take at least 1 % of the steps."""
    events = capture.events
    if not (events.shapes >= 0).any():
        raise NotRecorded("the trace has no input shapes", RECORD_SHAPES)
    convolutions = _before_norm(capture)
    work = _bias_work(capture, convolutions)
    share = share_of(capture, work)
    if share < _LEAST_SHARE:
        return
    saving = scaled(whatif, work)
    if not is_worth(saving, _LEAST_SAVING):
        return
    place, source = common_place(capture, convolutions)
    steps = capture.links.counted_steps
    count = int((steps.holds(events.start_ns[convolutions]) >= 0).sum()) / steps.count
    yield Finding(
        code=CHECK.code,
        title=f"{percent(share)} of the {steps.what} is spent on biases without effect: "
        f"{count:.0f} convolutions a {steps.what} add a bias before a batch norm",
        change="nn.Conv2d(…, bias=False) before nn.BatchNorm2d",
        verify=show_command(
            capture, "--ops --by input_shapes", "the third input of aten::conv2d is empty"
        ),
        share=share,
        saving=saving,
        range=place,
        source=source,
        evidence=(
            Evidence(
                events.names[events.name[convolutions[0]]],
                len(convolutions),
                detail="inputs " + events.texts[events.shapes[convolutions[0]]].decode(),
            ),
            *evidence(capture, work),
        ),
        coverage=("CPU time within finished steps",),
    )


def _before_norm(capture: Views) -> Ints:
    """The convolutions that have a bias and whose output is the input of the next batch norm."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    outer = ~np.append(is_operator, False)[tree.parent] & is_operator
    index = tree.index[outer & ~is_backward(events)[tree.index]]  # sorted by thread and start
    found = []
    waiting: tuple[int, list[int], int] | None = None  # a convolution, its output shape, its thread
    for event in index.tolist():
        name, thread = events.names[events.name[event]], int(events.thread[event])
        if waiting is None and name not in _CONVOLUTIONS:
            continue
        shapes = input_shapes(events, event)
        if waiting is not None and waiting[2] == thread and name == _NORM:
            if shapes and shapes[0] == waiting[1]:
                found.append(waiting[0])
            waiting = None
        elif name in _CONVOLUTIONS:
            output = _output(shapes, _values(events, event))
            waiting = None if output is None else (event, output, thread)
        elif not shapes or any(
            shape != [] for shape in shapes
        ):  # the operator has a tensor as input, perhaps the output of the convolution
            waiting = None
    return np.array(found, np.int64)


def _output(shapes: list[list[int] | None], values: list[Any]) -> list[int] | None:
    """The shape of a convolution's output; None if it is unknown, or if there is no bias."""
    try:
        (batch, _, *sizes), (channels, _, *kernel), bias = (shape or [] for shape in shapes[:3])
        stride, padding, dilation = map(_numbers, values[3:6])
    except ValueError:
        return None
    if bias != [channels] or not len(sizes) == len(kernel) == len(stride):
        return None
    if any(step < 1 for step in stride):
        return None
    return [
        batch,
        channels,
        *(
            (size + 2 * pad - wide * (width - 1) - 1) // step + 1
            for size, width, step, pad, wide in zip(sizes, kernel, stride, padding, dilation)
        ),
    ]


def _numbers(value: Any) -> list[int]:
    """Return the numbers in a list, or in a text such as "[1, 1]".

    Raises:
        ValueError: the value is anything else, such as "same".
    """
    if is_shape(value):
        return value
    return [int(number) for number in str(value).strip("[]").split(",")]


def _values(events: Events, event: int) -> list[Any]:
    """The recorded values of an operator's inputs, in order; empty if they were not recorded."""
    code = int(events.concrete[event])
    found = decoded(events.texts[code]) if code >= 0 else None
    return found if isinstance(found, list) else []


def _bias_work(capture: Views, convolutions: Ints) -> Ints:
    """Return the events that work on the biases of the given convolutions.

    An event adds a bias in the forward, sums the gradient of a bias in the backward, or accumulates
    this gradient. The sum runs inside the backward node of the convolution. This node is found by
    its sequence number, which is that of the convolution.
    """
    events, tree = capture.events, capture.links.call_tree

    def inside(around: Ints) -> Flags:
        return tree.at_or_inside(isin(tree.index, around))

    numbers = events.sequence[convolutions]
    nodes = is_backward(events) & (events.sequence >= 0)
    nodes &= np.isin(events.sequence, numbers[numbers >= 0])
    adds = inside(convolutions) & events.named(_ADDS.__contains__)[tree.index]
    in_backward = tree.at_or_inside(events.named(_BACKWARD.__eq__)[tree.index])
    sums = inside(np.flatnonzero(nodes)) & in_backward
    sums &= events.named(_SUM.__eq__)[tree.index]
    work = tree.index[tree.outermost(adds | sums)]
    return np.concatenate([work, _accumulations(capture, np.flatnonzero(nodes))])


def _accumulations(capture: Views, nodes: Ints) -> Ints:
    """The nodes that accumulate the gradient of a bias, right after the backward of a convolution.

    The gradient of a bias has one dimension. The gradient of a weight has more, so its node is left
    out.
    """
    events, tree = capture.events, capture.links.call_tree
    is_node = np.append(is_backward(events)[tree.index], False)
    outer = np.flatnonzero(is_node[:-1] & ~is_node[tree.parent])  # sorted by thread and start
    accumulates = is_accumulation(events, tree.index[outer])
    found = []
    for k in np.flatnonzero(np.isin(tree.index[outer], nodes) & ~accumulates).tolist():
        for following in range(k + 1, len(outer)):
            node = int(outer[following])
            if not accumulates[following] or tree.thread[node] != tree.thread[outer[k]]:
                break
            inside = tree.index[min(node + 1, len(tree) - 1)]  # the event with the shape
            shapes = input_shapes(events, inside)
            if shapes and shapes[0] is not None and len(shapes[0]) == 1:
                found.append(tree.index[node])
    return np.array(found, np.int64)


CHECK = Check("conv-bias-before-norm", find)
