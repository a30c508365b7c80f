"""Capture the graph of a model, by `torch.fx` tracing or else by `torch.export`."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from instrument.errors import GraphError
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.node_table import line_of
from instrument.fx.side_effects import (
    attributes_of,
    changed,
    plain_attributes,
    tensors_of,
    unchanged,
    written_tensors,
)
from instrument.fx.unsupported import unsupported

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Traced(NamedTuple):
    """The graph of a model, captured from one call.

    Attributes:
        graph: the nodes.
        constants: a module with the tensors that the graph uses and the model does not have.
        values: a function that makes the values of the placeholders from the inputs of a call.
        result: a function that makes the result of the model from the value of the output node.
        how: the tool that captured the graph, as text. If another tool failed before, the text
            gives the reason.
    """

    graph: fx.Graph
    constants: nn.Module
    values: Callable[[Inputs], list[Any]]
    result: Callable[[Any], Any]
    how: str

    def interpreter(
        self, model: nn.Module, kind: type[NodeInterpreter] = NodeInterpreter, **options: Any
    ) -> Any:
        """Make an interpreter that runs the graph with the parameters of this model."""
        return kind(model, self.graph, self.constants, **options)


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """Capture the graph of a call of the model with these inputs, and restore the model.

    `torch.fx` tracing is tried first, because its graph keeps modules and functions as the user
    wrote them. A graph must give the same results and gradients as the model, and change buffers
    and inputs in the same way. If tracing fails, or if the traced graph differs from the model,
    `torch.export` is tried. The nodes of an exported graph are operators.

    In both graphs, values that the forward pass reads from Python attributes are constants, and so
    are random numbers that do not come from torch's generators. See `side_effects.unchanged` for
    what is restored.

    Cost: the model runs once, and each graph once, with a backward pass if gradients are enabled.
    Hooks of modules and tensors see these runs.

    Raises:
        GraphError: both tools fail, or the call does something that a graph cannot represent (see
            `profile_graph`). Errors of the model itself are not caught.
    """
    expected = outcome(model, model, inputs, strict=True)
    failures: list[str] = []
    for name, capture in _WAYS.items():
        try:
            # stderr is redirected because torch.export prints the graph of a failed attempt. The
            # seed makes the random numbers differ from those of the run for `expected`. So if
            # tracing turns random numbers into constants, the comparison finds a difference.
            with redirect_stderr(io.StringIO()), unchanged(model, inputs, seed=0):
                traced = capture(model, _copied(inputs))
            why = _hooks_left_out(traced.graph, model) or mismatch(traced, model, inputs, expected)
        except (
            Exception
        ) as error:  # tracing runs the user's code with proxies, so any error is possible
            why = _failure(error)
        if why is None:
            return traced._replace(how=", because ".join([name, *failures]))
        failures.append(f"{name} {why}")
    raise GraphError(
        f"{type(model).__name__} cannot be captured as a graph: {'; '.join(failures)}. Mark its "
        "submodules with instrument_model instead, or change the model's code."
    )


class Outcome(NamedTuple):
    """The results and side effects of a call, to compare a graph with the model.

    Attributes:
        results: the leaves of the result.
        gradients: the gradients of the parameters and inputs. If the result does not depend on a
            tensor, the tensor's gradient is None. Gradients may differ slightly from run to run,
            because some kernels are not deterministic.
        left: the values of the buffers and inputs after the call.
        changed: the attributes of modules that the call changed. A key is the position of the
            module and the name of the attribute.
    """

    results: list[Any]
    gradients: list[Tensor | None]
    left: list[Tensor]
    changed: dict[tuple[int, str], Any]


def outcome(
    run: Callable[..., Any], model: nn.Module, inputs: Inputs, *, strict: bool = False
) -> Outcome:
    """Run a call and return its results and side effects; restore the model and the inputs.

    Raises:
        GraphError: `strict` is true, and the call does something that a graph cannot represent.
            Errors of `run` are not caught.
    """
    why = unsupported(model, inputs) if strict else None
    if why is not None:
        raise GraphError(f"{type(model).__name__} {why}.")
    args, kwargs = _copied(inputs)
    with unchanged(model, inputs):
        before, packing = attributes_of(model), _PackingObserver()
        with packing if strict else nullcontext():
            leaves = _leaves(run(*args, **kwargs))
        why = _changed_containers(inputs, (args, kwargs)) or _packed(leaves, packing)
        if strict and why is not None:
            raise GraphError(f"{type(model).__name__} {why}; a graph cannot represent such a call.")
        left = [tensor.detach().clone() for tensor in written_tensors(model, inputs)]
        gradients = _gradients(leaves, [*model.parameters(), *pytree.tree_leaves(inputs)])
        results = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Outcome(results, gradients, left, changed(model, before))


class _PackingObserver(TorchFunctionMode):
    """Finds out whether a call changes autograd's hooks for saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _saving_hooks()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_compiling():  # Dynamo traces this method and cannot trace `_saving_hooks`
            self.seen = self.seen or _saving_hooks() != self._before
        return func(*args, **(kwargs or {}))


def _saving_hooks() -> Any:
    """The innermost pair of autograd's hooks for saved tensors; None if there is no such pair."""
    # Some versions of torch do not have this function.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None


def _packed(leaves: Sequence[Any], packing: _PackingObserver) -> str | None:
    """Why a graph cannot represent a call that checkpoints or offloads activations.

    The text is the end of a sentence whose subject is the model. None if the call did neither. A
    run of the graph would neither checkpoint nor offload, so it would need another amount of memory
    than the model.

    Args:
        leaves: the leaves of the call's result.
        packing: the observer that was active during the call.
    """
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    reentrant = any(node.name() == "CheckpointFunctionBackward" for node in seen)
    if packing.seen or reentrant:
        return "packs tensors that autograd saves (checkpointing, offloading)"
    return None


def _changed_containers(inputs: Inputs, copies: Inputs) -> str | None:
    """The end of a sentence if a call changed dicts or lists of its inputs; else None.

    The call got `copies`. These are copies of `inputs` from before the call.
    """
    (leaves, spec), (others, other) = pytree.tree_flatten(inputs), pytree.tree_flatten(copies)
    same = spec == other and all(one is another for one, another in zip(leaves, others))
    return None if same else "changes the dicts or lists that it is given"


def mismatch(traced: Traced, model: nn.Module, inputs: Inputs, expected: Outcome) -> str | None:
    """Describe how the graph's outcome differs from the model's outcome; None if both agree.

    Results, buffers and inputs are compared by `torch.testing.assert_close`. The values of a
    gradient may differ by a hundredth of the gradient's largest absolute value.
    """
    interpreter = traced.interpreter(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        return traced.result(interpreter.run_timed(traced.values((args, kwargs))))

    try:
        return _difference(outcome(run, model, inputs), expected)
    except Exception as error:
        return f"gives a graph that fails where the model does not ({_first_line(error)})"


def signature(model: nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """A key for a call: two calls with the same key have the same graph.

    The key holds:

    - the shape, type, device and `requires_grad` of each input tensor, and the other inputs.
    - the modules, the number of their hooks, and their plain attributes, such as `training`.
    - the modes of autograd and autocast.

    Cost: about 6 µs for each module.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    described = tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf.name if isinstance(leaf, Enum) else repr(leaf))
        for leaf in leaves
    )
    modules = tuple((id(module), len([*_hooks(module)])) for module in model.modules())
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)
    return (str(spec), described, modules, plain_attributes(model), modes)


def _copied(inputs: Inputs) -> Inputs:
    """Copy the dicts and lists in the inputs, because a model may change them; copy no tensors."""
    copied: Inputs = pytree.tree_map(lambda leaf: leaf, inputs)
    return copied


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
    info = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    names = list(kwargs)

    def values(given: Inputs) -> list[Any]:
        return pytree.tree_leaves((given[0], {name: given[1][name] for name in names}))

    def result(output: Any) -> Any:
        return pytree.tree_unflatten(list(output), info.out_spec)

    return Traced(module.graph, module, values, result, "")


_WAYS = {"torch.fx.symbolic_trace": _by_tracing, "torch.export": _by_export}


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
        """The result of the model, made from the value of the output node."""
        return output if self._spec.is_leaf() else pytree.tree_unflatten(list(output), self._spec)


def _named(function: Any, inputs: Inputs) -> list[str]:
    """A name for each leaf of the inputs, made of the parameter's name, keys and indices.

    For example, `batch_images_0` is the first item of `batch["images"]`.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = []
    for path, _ in pytree.tree_flatten_with_path(inputs)[0]:
        where, first, *inner = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if where == "0":
            position = int(first)
            by_name = (
                position < len(parameters)
                and parameters[position].kind is not inspect.Parameter.VAR_POSITIONAL
            )
            first = parameters[position].name if by_name else f"{parameters[-1].name}_{position}"
        names.append("_".join([first, *inner]))
    return names


def _leaves(result: Any) -> list[Any]:
    """The leaves of a result. Unlike pytree, this looks into dataclasses too."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            found.append(leaf)
    return found


def _gradients(results: Sequence[Any], sources: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of the `sources` that require gradients.

    They are the gradients of a weighted sum of all elements of the results. The weights differ,
    because with equal weights, the gradients of a normalisation would cancel out.
    """
    outputs = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
    # A view of a parameter has `requires_grad` even if gradients are disabled.
    if not outputs or not inputs or not torch.is_grad_enabled():
        return [None for _ in inputs]
    weights = [
        torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device)
        .reshape(leaf.shape)
        .to(leaf.dtype)
        for leaf in outputs
    ]
    return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _hooks(module: nn.Module) -> Iterator[Any]:
    return chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS)


def _hooks_left_out(graph: fx.Graph, model: nn.Module) -> str | None:
    """If the graph leaves out a submodule's hooks, return the end of a sentence that says so."""
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        if name and name not in called and any(True for _ in _hooks(module)):
            return f"leaves out the hooks of {name}"
    return None


def _difference(given: Outcome, expected: Outcome) -> str | None:
    """Describe how two outcomes differ, as the end of a sentence; None if they agree."""
    if len(given.results) != len(expected.results):
        return f"gives {len(given.results)} values where the model gives {len(expected.results)}"
    differences = (
        _value_difference(one, other) for one, other in zip(given.results, expected.results)
    )
    found = next((difference for difference in differences if difference is not None), None)
    if found is not None:
        return found
    if not all(_agree(one, other) for one, other in zip(given.gradients, expected.gradients)):
        return "gives other gradients than the model"
    if len(given.left) != len(expected.left) or any(
        _value_difference(*pair) for pair in zip(given.left, expected.left)
    ):
        return "changes buffers or inputs differently than the model"
    if given.changed != expected.changed:
        _, name = next(key for key, _ in given.changed.items() ^ expected.changed.items())
        return f"does not change the module attribute {name} in the same way as the model"
    return None


def _value_difference(one: Any, other: Any) -> str | None:
    if isinstance(other, Tensor):
        try:
            assert_close(one, other, equal_nan=True)
        except (AssertionError, TypeError, ValueError) as error:
            return f"gives other numbers than the model ({_first_line(error)})"
        return None
    # NaN is not equal to itself, but agrees with NaN here.
    if type(one) is not type(other) or (one != other and not (one != one and other != other)):
        return f"gives {one!r} where the model gives {other!r}"
    return None


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = one.to_dense(), other.to_dense()
    finite = other[other.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0
    return torch.allclose(one, other, rtol=0, atol=0.01 * scale, equal_nan=True)


def _failure(error: Exception) -> str:
    """The error of a failed capture, and the line of the user's code where it failed."""
    line = line_of(error.__traceback__)
    what = f"cannot follow {line}" if line else "failed"
    return f"{what} ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    """The first sentence of an error's message; for an empty message, the type of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0].rstrip(".:") if lines else type(error).__name__
