"""Compare a graph with its model: the results of a call, and what it writes to tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from instrument.base.errors import GraphError
from instrument.graph.side_effects import unchanged, written_tensors

#: The positional and the keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Outcome(NamedTuple):
    """The leaves of a call's result, and the values of the buffers and inputs after the call."""

    results: list[Any]
    written: list[Tensor]


def outcome(run: Callable[..., Any], model: nn.Module, inputs: Inputs) -> Outcome:
    """Run a call and return its outcome; restore the model and the inputs.

    Raises:
        GraphError: the call changes dicts or lists of its inputs. Errors of `run` are not caught.
    """
    args, kwargs = copied(inputs)
    with unchanged(model, inputs):
        leaves = _leaves(run(*args, **kwargs))
        (before, spec), (after, spec_after) = map(pytree.tree_flatten, (inputs, (args, kwargs)))
        if spec != spec_after or any(one is not other for one, other in zip(before, after)):
            raise GraphError(
                f"{type(model).__name__} changes the dicts or lists that it is given; a graph "
                "cannot represent such a call."
            )
        written = [tensor.detach().clone() for tensor in written_tensors(model, inputs)]
        results = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Outcome(results, written)


def copied(inputs: Inputs) -> Inputs:
    """Copy the dicts and lists in the inputs, because a model may change them; copy no tensors."""
    made: Inputs = pytree.tree_map(lambda leaf: leaf, inputs)
    return made


def _leaves(result: Any) -> list[Any]:
    """The leaves of a result. Unlike pytree, this looks into dataclasses too."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            found.append(leaf)
    return found


def difference(given: Outcome, expected: Outcome) -> str | None:
    """Describe how a graph differs from its model, as the end of a sentence; None if they agree.

    Tensors are compared by `torch.testing.assert_close`.
    """
    if len(given.results) != len(expected.results):
        return f"gives {len(given.results)} values where the model gives {len(expected.results)}"
    for one, other in zip(given.results, expected.results):
        if found := _value_difference(one, other):
            return found
    if any(map(_value_difference, given.written, expected.written)):
        return "changes buffers or inputs differently than the model"
    return None


def _value_difference(one: Any, other: Any) -> str | None:
    if isinstance(other, Tensor):
        try:
            assert_close(one, other, equal_nan=True)
        except (AssertionError, TypeError, ValueError) as error:
            return f"gives other numbers than the model ({first_sentence(error)})"
        return None
    # NaN is not equal to itself, but agrees with NaN here.
    if type(one) is not type(other) or (one != other and not (one != one and other != other)):
        return f"gives {one!r} where the model gives {other!r}"
    return None


def first_sentence(error: Exception) -> str:
    """The first sentence of an error's message; for an empty message, the type of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0].rstrip(".:") if lines else type(error).__name__
