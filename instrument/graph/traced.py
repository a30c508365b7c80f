"""A model captured as a graph: by `torch.fx` tracing, or else by `torch.export`."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from instrument.annotate import Range
from instrument.errors import GraphError
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.labels import line_of
from instrument.graph.state import unchanged

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Traced(NamedTuple):
    """A model's graph for calls like the one it was captured with.

    Attributes:
        graph: its nodes.
        constants: holds the tensors that the graph needs and the model does not have.
        values: what the placeholders get, of a call's inputs.
        result: the model's result, of the output node's.
        how: what captured it, and why not the other.
    """

    graph: fx.Graph
    constants: nn.Module
    values: Callable[[Inputs], list[Any]]
    result: Callable[[Any], Any]
    how: str

    def interpreter(self, model: nn.Module, kind: type[NodeInterpreter] = NodeInterpreter, **options: Any) -> Any:
        """What runs the graph with this model's parameters."""
        return kind(model, self.graph, self.constants, **options)


def trace(model: nn.Module, inputs: Inputs, run: Callable[..., Any] | None = None) -> Traced:
    """Capture the graph that a call of the model with these inputs runs; the model stays as it is.

    `torch.fx` tracing comes first, for it keeps modules and functions as the user wrote them; where it fails, or its
    graph gives other results or gradients than the model, `torch.export` follows, whose nodes are operators.

    `run` is what the graph must be equal to: the model itself, hooks and all, or its forward. What a forward reads from
    Python attributes, and draws from generators that are not torch's, is fixed in the graph.

    Cost: the model runs once, and each graph once, with a backward where gradients are asked for.

    Raises:
        GraphError: neither can. The model's own errors pass.
    """
    run = run or model
    expected = outcome(run, model, inputs)
    failures: list[str] = []
    for name, capture in _WAYS.items():
        try:
            # torch.export prints a graph that it has given up; and a draw that tracing fixes is not the one expected
            with redirect_stderr(io.StringIO()), unchanged(model, inputs, seed=0):
                traced = capture(model, inputs)
            why = compiled_part(model) or _hooks_left_out(traced.graph, model)
            why = why or misfit(traced, model, inputs, expected)
        except Exception as error:  # tracing runs the user's code with what is no tensor
            why = _said(error)
        if why is None:
            return traced._replace(how=", because ".join([name, *failures]))
        failures.append(f"{name} {why}")
    raise GraphError(
        f"{type(model).__name__} cannot be captured as a graph: {'; '.join(failures)}. Mark its submodules by "
        "instrument_model instead, or rewrite that line."
    )


def outcome(run: Callable[..., Any], model: nn.Module, inputs: Inputs) -> list[Any]:
    """All that a call's result holds, and the gradients that follow from it, for graphs to be compared with."""
    args, kwargs = inputs
    with unchanged(model, inputs):
        leaves = _leaves(run(*args, **kwargs))
        gradients = _gradients(leaves, [*model.parameters(), *pytree.tree_leaves(inputs)])
        return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves] + gradients


def misfit(traced: Traced, model: nn.Module, inputs: Inputs, expected: list[Any]) -> str | None:
    """How the graph's outcome differs from the expected one; None where it does not.

    Values are compared as `torch.testing.assert_close` does, gradients within a hundredth of the largest.
    """
    interpreter = traced.interpreter(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        return traced.result(interpreter.run_timed(traced.values((args, kwargs))))

    try:
        return _difference(outcome(run, model, inputs), expected)
    except Exception as error:
        return f"gives a graph that fails where the model does not ({_first_line(error)})"


def signature(model: nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """What must stay the same for a graph to stay the model's: shapes, types, modes, and what is no tensor."""
    leaves, spec = pytree.tree_flatten(inputs)
    described = ((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    modes = tuple(module.training for module in model.modules())
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return (str(spec), *described, modes, torch.is_grad_enabled(), *autocast)


def _by_tracing(model: nn.Module, inputs: Inputs) -> Traced:
    tracer = _Tracer(inputs)
    before = set(vars(model))
    try:
        graph = tracer.trace(model)
        constants = fx.GraphModule(model, graph)
    finally:
        for name in set(vars(model)) - before:  # the tracer keeps a constant at the model itself
            delattr(model, name)
    return Traced(graph, constants, _tensors, tracer.result, "")


def _by_export(model: nn.Module, inputs: Inputs) -> Traced:
    args, kwargs = inputs
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    guards = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
    module = program.module(**guards)
    info = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    names = list(kwargs)

    def values(given: Inputs) -> list[Any]:
        return pytree.tree_leaves((given[0], {name: given[1][name] for name in names}))

    def result(output: Any) -> Any:
        return pytree.tree_unflatten(list(output), info.out_spec)

    return Traced(module.graph, module, values, result, "")


_WAYS = {"torch.fx.symbolic_trace": _by_tracing, "torch.export": _by_export}


class _Tracer(fx.Tracer):
    """Traces one call: each tensor among its inputs is a placeholder, all else counts as it is.

    So a mask that was left out is None to the model's code, and not a value that is never None.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.record_stack_traces = True
        self._inputs = inputs
        self._spec: Any = None

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        named = _named(root_fn, self._inputs)
        flat, spec = pytree.tree_flatten(self._inputs)
        taken = [
            self.create_proxy("placeholder", name, (), {}) if isinstance(leaf, Tensor) else leaf
            for name, leaf in zip(named, flat)
        ]
        args, kwargs = pytree.tree_unflatten(taken, spec)

        def call(*_: Any) -> Any:
            leaves, self._spec = pytree.tree_flatten(root_fn(self.root, *args, **kwargs))
            return leaves[0] if self._spec.is_leaf() else tuple(leaves)

        return call, [self.root]

    def result(self, output: Any) -> Any:
        """The model's result, of the output node's."""
        return output if self._spec.is_leaf() else pytree.tree_unflatten(list(output), self._spec)


def _named(function: Any, inputs: Inputs) -> list[str]:
    """A name for each leaf of a call's inputs: its parameter's, and the keys and places inside that."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = []
    for path, _ in pytree.tree_flatten_with_path(inputs)[0]:
        where, first, *inner = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if where == "0":
            place = int(first)
            by_name = place < len(parameters) and parameters[place].kind is not inspect.Parameter.VAR_POSITIONAL
            first = parameters[place].name if by_name else f"{parameters[-1].name}_{place}"
        names.append("_".join([first, *inner]))
    return names


def _tensors(inputs: Inputs) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _leaves(result: Any) -> list[Any]:
    """What a result holds, also inside dataclasses that pytree does not know."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            found.append(leaf)
    return found


class _Gradient(NamedTuple):
    """A gradient, which kernels need not compute the same way each time; None where nothing depends on the tensor."""

    values: Tensor | None


def _gradients(results: Sequence[Any], sources: Sequence[Any]) -> list[_Gradient]:
    """Of each source, from results weighted unevenly, so that a norm's do not cancel out."""
    graded = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not graded or not wanted or not torch.is_grad_enabled():  # without, a view of a parameter says it has one
        return [_Gradient(None) for _ in wanted]
    weights = [torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device).reshape(leaf.shape) for leaf in graded]
    found = torch.autograd.grad(
        graded, wanted, [w.to(leaf.dtype) for w, leaf in zip(weights, graded)], allow_unused=True
    )
    return [_Gradient(gradient) for gradient in found]


def compiled_part(model: nn.Module) -> str | None:
    """What of the model `torch.compile` has made, which no node can show; None for nothing."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"leaves out what torch.compile has made of {name or 'it'}"
    return None


def _hooks_left_out(graph: fx.Graph, model: nn.Module) -> str | None:
    """What others have hooked to a submodule that the graph does not call; None for nothing."""
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        others = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), Range)]
        if name and name not in called and others:
            return f"leaves out the hooks of {name}"
    return None


def _difference(given: Sequence[Any], expected: Sequence[Any]) -> str | None:
    if len(given) != len(expected):
        return f"gives {len(given)} values where the model gives {len(expected)}"
    for one, other in zip(given, expected):
        if isinstance(other, _Gradient):
            if not _agree(one.values, other.values):
                return "gives other gradients than the model"
        elif isinstance(other, Tensor):
            try:
                assert_close(one, other, equal_nan=True)
            except (AssertionError, TypeError, ValueError) as error:
                return f"gives other numbers than the model ({_first_line(error)})"
        elif type(one) is not type(other) or one != other:
            return f"gives {one!r} where the model gives {other!r}"
    return None


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    scale = other.abs().max().item() if other.numel() else 0
    return torch.allclose(one, other, rtol=0, atol=0.01 * scale, equal_nan=True)


def _said(error: Exception) -> str:
    """Why a way of capturing failed, and where in the user's code."""
    line = line_of(error.__traceback__)
    at = f"cannot follow {line}" if line else "failed"
    return f"{at} ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    """The first sentence of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0].rstrip(".:") if lines else type(error).__name__
