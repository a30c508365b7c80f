"""Slow implementations of what torch has a fast one for: several operators, or shapes that no fused kernel takes."""

from __future__ import annotations

from functools import partial
from typing import Any

from builders import Event, call, in_steps, kernel, span

from findings.by_hand import Case

in_pieces = partial(Case, "in-pieces")


def chain(
    *operators: tuple[str, list[Any]], each_us: float = 90, times: int = 4, apart_us: float = 100
) -> list[Event]:
    """Three steps of 5 ms; in each, some operators with their shapes, several times, then a product."""
    calls = [
        span(name, 1000 * k + apart_us * n, each_us, Input_Dims=shapes)
        for k in range(times)
        for n, (name, shapes) in enumerate(operators)
    ]
    return in_steps(3, 5000, *calls, span("aten::mm", 4000, 900, Input_Dims=[[8, 8], [8, 8]]))


def without_shapes(events: list[Event]) -> list[Event]:
    return [{**event, "args": {}} for event in events]


MANY, PAIRS = [256, 128], [512, 512, 64]
CHECKED = ("aten::isnan", [MANY]), ("aten::any", [MANY]), ("aten::is_nonzero", [[]])
PAIRWISE = (
    ("aten::sub", [[512, 1, 64], [1, 512, 64], []]),
    ("aten::pow", [PAIRS, []]),
    ("aten::sum", [PAIRS, [], [], []]),
)
NORMALISED = (
    ("aten::mean", [MANY, []]),
    ("aten::sub", [MANY, [256, 1]]),
    ("aten::var", [MANY, []]),
    ("aten::add", [[256, 1], []]),
    ("aten::sqrt", [[256, 1]]),
    ("aten::div", [MANY, [256, 1]]),
)


# The kernels keep the device busy for the whole step, and the CPU waits for them.
BUSY = [
    each
    for k in range(3)
    for each in (
        call("cudaLaunchKernel", 5000 * k - 400, 2, k + 1),
        kernel("gemm", 5000 * k + 5, 4990, correlation=k + 1),
        call("cudaStreamSynchronize", 5000 * k + 4905, 92),
    )
]
FOUND = {
    "checks of values": in_pieces(chain(*CHECKED)),
    "checks of values, without shapes": in_pieces(without_shapes(chain(*CHECKED))),
    "the logarithm of a softmax": in_pieces(
        chain(("aten::softmax", [MANY]), ("aten::add", [MANY, []]), ("aten::log", [MANY]))
    ),
    "the entropy with a table of classes": in_pieces(
        chain(
            ("aten::log_softmax", [MANY]),
            ("aten::one_hot", [[256]]),
            ("aten::mul", [MANY, MANY]),
            ("aten::sum", [MANY]),
        )
    ),
    "the distances of all pairs": in_pieces(chain(*PAIRWISE)),
    "the products of all pairs": in_pieces(
        chain(("aten::mul", [[512, 1, 64], [1, 512, 64]]), ("aten::sum", [PAIRS, [], [], []]))
    ),
    "a normalisation": in_pieces(chain(*NORMALISED)),
}
NOT_FOUND = {
    "a check of values that is short": in_pieces(chain(*CHECKED, each_us=4, apart_us=5)),
    "a number of correct predictions": in_pieces(
        chain(("aten::eq", [MANY, MANY]), ("aten::sum", [MANY]), ("aten::item", [[]]))
    ),
    "a softmax, and the logarithm of another tensor": in_pieces(
        chain(("aten::softmax", [MANY]), ("aten::log", [[256, 64]]))
    ),
    "softmax that weighs the rows of a table": in_pieces(
        chain(("aten::softmax", [MANY]), ("aten::mul", [MANY, MANY]), ("aten::bmm", [MANY]))
    ),
    "the entropy of a softmax": in_pieces(
        chain(("aten::log_softmax", [MANY]), ("aten::mul", [MANY, MANY]), ("aten::sum", [MANY]))
    ),
    "a mask on a tensor": in_pieces(
        chain(("aten::mul", [PAIRS, [512, 512, 1]]), ("aten::sum", [PAIRS, [], [], []]))
    ),
    "features of all pairs": in_pieces(
        chain(*PAIRWISE[:1], ("aten::tanh", [PAIRS]), *PAIRWISE[2:])
    ),
    "few pairs": in_pieces(
        chain(("aten::sub", [[8, 1, 64], [1, 8, 64], []]), ("aten::sum", [[8, 8, 64], []]))
    ),
    "a root mean square": in_pieces(
        chain(
            ("aten::pow", [MANY, []]),
            ("aten::mean", [MANY, []]),
            ("aten::rsqrt", [[256, 1]]),
            ("aten::mul", [MANY, [256, 1]]),
        )
    ),
    "a normalisation, as far as its names say": in_pieces(without_shapes(chain(*NORMALISED))),
    "checks on a busy device": in_pieces([*chain(*CHECKED), *BUSY]),
}
