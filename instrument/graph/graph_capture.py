"""Capture the graph of a model, by `torch.fx` tracing or else by `torch.export`, and check it."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from instrument.base.errors import GraphError
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.node_table import line_of

#: The positional and the keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class CapturedGraph(NamedTuple):
    """The graph of a model, captured from one call.

    Attributes:
        module: the graph, with the parameters of the model and copies of its other tensors.
        values: a function that makes the values of the placeholders from the inputs of a call.
        how: the tool that captured the graph, and the reason why another tool failed before.
    """

    module: fx.GraphModule
    values: Callable[[Inputs], list[Any]]
    how: str


def capture_graph(model: nn.Module, inputs: Inputs) -> CapturedGraph:
    """Capture the graph of a call of the model with these inputs; copies of the model run.

    `torch.fx` tracing is tried first, because its graph keeps modules and functions as the user
    wrote them; the nodes of a graph of `torch.export` are operators. A graph is taken only if it
    gives the results of the model, and writes the same values to buffers and inputs.

    Cost: the model runs once, and each graph once.

    Raises:
        GraphError: both tools fail, or the model has compiled code or cannot be copied. Errors of
            the model itself are not caught.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise GraphError(
                f"{type(model).__name__} has code compiled by torch.compile"
                f"{f' in {name}' if name else ''}, which a graph would leave out."
            )
    expected_model = model_copy(model)
    expected = _outcome(expected_model, expected_model, inputs)
    failures: list[str] = []
    ways = (("torch.fx.symbolic_trace", _by_tracing), ("torch.export", _by_export))
    for name, capture in ways:
        traced_model = model_copy(model)
        try:
            # stderr is redirected because torch.export prints the graph of a failed attempt. The
            # seed makes the random numbers differ from those of the run for `expected`. So if
            # tracing turns random numbers into constants, the comparison finds a difference.
            with redirect_stderr(io.StringIO()), rng_restored(model):
                torch.manual_seed(0)
                captured = capture(traced_model, inputs_copy(inputs))
        except Exception as error:  # tracing runs the user's code with proxies
            line = line_of(error)
            what = f"cannot follow {line}" if line else "failed"
            failures.append(f"{name} {what} ({type(error).__name__}: {first_sentence(error)})")
            continue
        interpreter = NodeInterpreter(captured.module)
        run = lambda *args, **kwargs: interpreter.run_timed(captured.values((args, kwargs)))  # noqa: B023, E731
        try:
            # A buffer that tracing itself changed is one that the graph does not change.
            assert_close([*traced_model.buffers()], [*model.buffers()], equal_nan=True)
            assert_close(_outcome(run, traced_model, inputs), expected, equal_nan=True)
        except Exception as error:
            failures.append(f"{name} gives other numbers than the model ({first_sentence(error)})")
        else:
            return captured._replace(how=", because ".join([name, *failures]))
    raise GraphError(
        f"{type(model).__name__} cannot be captured as a graph: {'; '.join(failures)}. Mark its "
        "submodules with instrument_model instead, or change the model's code."
    )


def model_copy(model: nn.Module) -> nn.Module:
    """Copy a model, so that a run leaves it as it is; copies share parameters with the model.

    Raises:
        GraphError: the model has an attribute that cannot be copied.
    """
    # Results of autograd in attributes are shared too, because torch cannot copy them.
    attributes = [value for module in model.modules() for value in vars(module).values()]
    shared = [*model.parameters(), *(each for each in attributes if isinstance(each, Tensor))]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    except Exception as error:
        raise GraphError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: "
            f"{first_sentence(error)}), and only copies run, so that the model stays as it is: "
            "leave out the attribute that cannot be copied."
        ) from error


def inputs_copy(inputs: Inputs) -> Inputs:
    """Copy the inputs, because a model may change them."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    made: Inputs = pytree.tree_map(copied, inputs)
    return made


def rng_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Restore torch's random number generators after a block."""
    return torch.random.fork_rng({each.get_device() for each in model.parameters() if each.is_cuda})


def first_sentence(error: Exception) -> str:
    """The first sentence of an error's message; for an empty message, the type of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0].rstrip(".:") if lines else type(error).__name__


def _outcome(run: Callable[..., Any], model: nn.Module, inputs: Inputs) -> list[Any]:
    """The numbers in the result of `run`, and the buffers and input tensors after it.

    `run` calls `model` or its graph.
    """
    args, kwargs = inputs_copy(inputs)
    given = _tensors((args, kwargs))
    with rng_restored(model):
        results = pytree.tree_leaves(run(*args, **kwargs))
    numbers = [leaf for leaf in results if isinstance(leaf, Tensor | int | float | complex)]
    return [numbers, [*model.buffers()], given]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _by_tracing(model: nn.Module, inputs: Inputs) -> CapturedGraph:
    graph = _Tracer(inputs).trace(model)
    return CapturedGraph(fx.GraphModule(model, graph), _tensors, "")


def _by_export(model: nn.Module, inputs: Inputs) -> CapturedGraph:
    args, kwargs = inputs
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    has_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(**({"check_guards": False} if has_guards else {}))
    return CapturedGraph(module, pytree.tree_leaves, "")


class _Tracer(fx.Tracer):
    """Traces one call. Input tensors become placeholders; other inputs keep their values.

    For example, if the caller passes no attention mask, `mask is None` is true in the model. With a
    proxy in the place of None, `mask is None` would be false.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.record_stack_traces = True
        self._inputs = inputs

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        parameters = [*inspect.signature(root_fn).parameters][1:]

        def taken(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # Such as `batch_images_0`, the first item of `batch["images"]`.
            where, first, *inner = (str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
            if where == "0":
                first = parameters[int(first)] if int(first) < len(parameters) else f"input_{first}"
            return self.create_proxy("placeholder", "_".join([first, *inner]), (), {})

        args, kwargs = pytree.tree_map_with_path(taken, self._inputs)
        return lambda *_: tuple(pytree.tree_leaves(root_fn(self.root, *args, **kwargs))), [
            self.root
        ]
