"""Capture the graph of a model, by `torch.fx` tracing or else by `torch.export`."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from instrument.base.errors import GraphError
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.node_table import line_of
from instrument.graph.outcome import Inputs, Outcome, copied, difference, first_sentence, outcome
from instrument.graph.side_effects import tensors_of, unchanged

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Inputs of these types are constants of a graph.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Traced(NamedTuple):
    """The graph of a model, captured from one call.

    Attributes:
        graph: the nodes.
        constants: a module with the tensors that the graph uses and the model does not have.
        values: a function that makes the values of the placeholders from the inputs of a call.
        result: a function that makes the result of the model from the value of the output node.
        how: the tool that captured the graph, and the reason why another tool failed before.
    """

    graph: fx.Graph
    constants: nn.Module
    values: Callable[[Inputs], list[Any]]
    result: Callable[[Any], Any]
    how: str


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """Capture the graph of a call of the model with these inputs, and restore the model.

    `torch.fx` tracing is tried first, because its graph keeps modules and functions as the user
    wrote them; the nodes of a graph of `torch.export` are operators. A graph is taken only if it
    agrees with the model; see `outcome.difference`.

    Cost: the model runs once, and each graph once.

    Raises:
        GraphError: both tools fail, or no graph can represent the call. Errors of the model itself
            are not caught.
    """
    if why := _unsupported(model, inputs):
        raise GraphError(f"{type(model).__name__} {why}.")
    expected = outcome(model, model, inputs)
    failures: list[str] = []
    ways = (("torch.fx.symbolic_trace", _by_tracing), ("torch.export", _by_export))
    for name, capture in ways:
        try:
            # stderr is redirected because torch.export prints the graph of a failed attempt. The
            # seed makes the random numbers differ from those of the run for `expected`. So if
            # tracing turns random numbers into constants, the comparison finds a difference.
            with redirect_stderr(io.StringIO()), unchanged(model, inputs, seed=0):
                traced = capture(model, copied(inputs))
            failure = _hooks_left_out(traced.graph, model) or _mismatch(
                traced, model, inputs, expected
            )
        except Exception as error:  # tracing runs the user's code with proxies
            line = line_of(error.__traceback__)
            what = f"cannot follow {line}" if line else "failed"
            failure = f"{what} ({type(error).__name__}: {first_sentence(error)})"
        if failure is None:
            return traced._replace(how=", because ".join([name, *failures]))
        failures.append(f"{name} {failure}")
    raise GraphError(
        f"{type(model).__name__} cannot be captured as a graph: {'; '.join(failures)}. Mark its "
        "submodules with instrument_model instead, or change the model's code."
    )


def _mismatch(traced: Traced, model: nn.Module, inputs: Inputs, expected: Outcome) -> str | None:
    interpreter = NodeInterpreter(model, traced.graph, traced.constants)

    def run(*args: Any, **kwargs: Any) -> Any:
        return traced.result(interpreter.run_timed(traced.values((args, kwargs))))

    try:
        return difference(outcome(run, model, inputs), expected)
    except Exception as error:
        return f"gives a graph that fails where the model does not ({first_sentence(error)})"


def _unsupported(model: nn.Module, inputs: Inputs) -> str | None:
    """The end of a sentence that says why no graph can represent a call; None if one may."""
    for leaf in pytree.tree_leaves(inputs):
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            return (
                f"takes a {type(leaf).__name__}, and a graph cannot read its content: "
                "pass tensors, numbers, dicts or lists"
            )
    if isinstance(model, torch.jit.ScriptModule):
        return "is TorchScript, which has its own graph"
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        return "has lazy parameters, which the first call creates: call the model once first"
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            where = f" in {name}" if name else ""
            return f"has code compiled by torch.compile{where}, which a graph would leave out"
    return None


def _by_tracing(model: nn.Module, inputs: Inputs) -> Traced:
    tracer = _Tracer(inputs)
    before = set(vars(model))
    try:
        graph = tracer.trace(model)
        constants = fx.GraphModule(model, graph)
    finally:
        for name in set(vars(model)) - before:  # the tracer stores constants in the model
            delattr(model, name)
    return Traced(graph, constants, tensors_of, tracer.result, "")


def _by_export(model: nn.Module, inputs: Inputs) -> Traced:
    args, kwargs = inputs
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    has_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(**({"check_guards": False} if has_guards else {}))
    out_spec = module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]

    def result(output: Any) -> Any:
        return pytree.tree_unflatten(list(output), out_spec)

    return Traced(module.graph, module, pytree.tree_leaves, result, "")


class _Tracer(fx.Tracer):
    """Traces one call. Input tensors become placeholders; other inputs keep their values.

    For example, if the caller passes no attention mask, `mask is None` is true in the model. With a
    proxy in the place of None, `mask is None` would be false.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.record_stack_traces = True
        self._inputs = inputs
        self._spec: Any = None

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        flat, spec = pytree.tree_flatten(self._inputs)
        taken = [
            self.create_proxy("placeholder", name, (), {}) if isinstance(leaf, Tensor) else leaf
            for name, leaf in zip(_names(root_fn, self._inputs), flat)
        ]
        args, kwargs = pytree.tree_unflatten(taken, spec)

        def call(*_: Any) -> Any:
            leaves, self._spec = pytree.tree_flatten(root_fn(self.root, *args, **kwargs))
            return leaves[0] if self._spec.is_leaf() else tuple(leaves)

        return call, [self.root]

    def result(self, output: Any) -> Any:
        """The result of the model, made from the value of the output node."""
        return output if self._spec.is_leaf() else pytree.tree_unflatten(list(output), self._spec)


def _names(function: Any, inputs: Inputs) -> list[str]:
    """A name for each leaf of the inputs, made of the parameter's name, keys and indices.

    For example, `batch_images_0` is the first item of `batch["images"]`.
    """
    parameters = [*inspect.signature(function).parameters][1:]
    names = []
    for path, _ in pytree.tree_flatten_with_path(inputs)[0]:
        where, first, *inner = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if where == "0":
            first = parameters[int(first)] if int(first) < len(parameters) else f"input_{first}"
        names.append("_".join([first, *inner]))
    return names


def _hooks(module: nn.Module) -> int:
    return sum(len(getattr(module, kind)) for kind in _HOOKS)


def _hooks_left_out(graph: fx.Graph, model: nn.Module) -> str | None:
    """If the graph leaves out a submodule's hooks, return the end of a sentence that says so."""
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        if name and name not in called and _hooks(module):
            return f"leaves out the hooks of {name}"
    return None
