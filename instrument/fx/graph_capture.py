"""A model captured as a graph: by `torch.fx` tracing, or else by `torch.export`."""

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

    def interpreter(
        self, model: nn.Module, kind: type[NodeInterpreter] = NodeInterpreter, **options: Any
    ) -> Any:
        """What runs the graph with this model's parameters."""
        return kind(model, self.graph, self.constants, **options)


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """Capture the graph that a call of the model with these inputs runs; the model stays as `unchanged` keeps it.

    `torch.fx` tracing comes first, for it keeps modules and functions as the user wrote them; where it fails, or its
    graph gives other results, gradients, buffers or inputs than the model, `torch.export` follows, whose nodes are
    operators.

    What a forward reads from Python attributes, and draws from generators that are not torch's, is fixed in the graph.

    Cost: the model runs once, and each graph once, with a backward where gradients are asked for. Hooks of modules and
    tensors see these runs.

    Raises:
        GraphError: neither can, or the call is of a kind that no graph stands for. The model's own errors pass.
    """
    expected = outcome(model, model, inputs, strict=True)
    failures: list[str] = []
    for name, capture in _WAYS.items():
        try:
            # torch.export prints a graph that it has given up; and a draw that tracing fixes is not the one expected
            with redirect_stderr(io.StringIO()), unchanged(model, inputs, seed=0):
                traced = capture(model, _copied(inputs))
            why = _hooks_left_out(traced.graph, model) or misfit(traced, model, inputs, expected)
        except Exception as error:  # tracing runs the user's code with what is no tensor
            why = _said(error)
        if why is None:
            return traced._replace(how=", because ".join([name, *failures]))
        failures.append(f"{name} {why}")
    raise GraphError(
        f"{type(model).__name__} cannot be captured as a graph: {'; '.join(failures)}. Mark its submodules by "
        "instrument_model instead, or rewrite that line."
    )


class Outcome(NamedTuple):
    """What a call gives and leaves, for graphs to be compared with.

    Attributes:
        results: all that its result holds.
        gradients: those that follow from it, which kernels need not compute the same way each time; None where nothing
            depends on the tensor.
        left: what buffers and inputs then hold.
        changed: the attributes of modules that are others then, by the module's place and their name.
    """

    results: list[Any]
    gradients: list[Tensor | None]
    left: list[Tensor]
    changed: dict[tuple[int, str], Any]


def outcome(
    run: Callable[..., Any], model: nn.Module, inputs: Inputs, *, strict: bool = False
) -> Outcome:
    """What a call gives and leaves; all of that is put back.

    Raises:
        GraphError: `strict`, and the call is of a kind that no graph stands for, known before it or seen in it. Errors
            of `run` pass.
    """
    why = unsupported(model, inputs) if strict else None
    if why is not None:
        raise GraphError(f"{type(model).__name__} {why}.")
    args, kwargs = _copied(inputs)
    with unchanged(model, inputs):
        before, watch = attributes_of(model), _Packing()
        with watch if strict else nullcontext():
            leaves = _leaves(run(*args, **kwargs))
        why = _taken_out(inputs, (args, kwargs)) or _packed(leaves, watch)
        if strict and why is not None:
            raise GraphError(f"{type(model).__name__} {why}, which no graph does.")
        left = [tensor.detach().clone() for tensor in written_tensors(model, inputs)]
        gradients = _gradients(leaves, [*model.parameters(), *pytree.tree_leaves(inputs)])
        results = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Outcome(results, gradients, left, changed(model, before))


class _Packing(TorchFunctionMode):
    """Notes whether anything runs where saved tensors are packed in another way than around the call."""

    def __init__(self) -> None:
        super().__init__()
        self._around = _saving_hooks()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_compiling():  # which follows this code, but not what asks for the hooks
            self.seen = self.seen or _saving_hooks() != self._around
        return func(*args, **(kwargs or {}))


def _saving_hooks() -> Any:
    """The innermost pair of functions that packs what autograd saves now; None for none."""
    top = getattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks", None
    )  # not in every torch
    return top(False) if top is not None else None


def _packed(leaves: Sequence[Any], watch: _Packing) -> str | None:
    """Whether a call checkpoints activations, or packs them elsewhere, so that its memory is not a graph's."""
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    reentrant = any(node.name() == "CheckpointFunctionBackward" for node in seen)
    return (
        "packs what autograd saves (checkpointing, offloading)" if watch.seen or reentrant else None
    )


def _taken_out(inputs: Inputs, given: Inputs) -> str | None:
    """Whether a call has changed the dicts and lists that it was given a copy of."""
    (ours, spec), (theirs, other) = pytree.tree_flatten(inputs), pytree.tree_flatten(given)
    same = spec == other and all(one is another for one, another in zip(ours, theirs))
    return None if same else "changes the dicts or lists that it is given"


def misfit(traced: Traced, model: nn.Module, inputs: Inputs, expected: Outcome) -> str | None:
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
    """What must stay the same for a graph to stay the model's.

    Of tensors shapes, types and whether they need gradients; what is no tensor; the modules, their hooks and plain
    attributes, modes included; and the modes of autograd and autocast. Cost: some 6 µs a module.
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
    """The same leaves in containers of their own, for code that takes out of them what it reads."""
    copied: Inputs = pytree.tree_map(lambda leaf: leaf, inputs)
    return copied


def _by_tracing(model: nn.Module, inputs: Inputs) -> Traced:
    tracer = _Tracer(inputs)
    before = set(vars(model))
    try:
        graph = tracer.trace(model)
        constants = fx.GraphModule(model, graph)
    finally:
        for name in set(vars(model)) - before:  # the tracer keeps a constant at the model itself
            delattr(model, name)
    return Traced(graph, constants, tensors_of, tracer.result, "")


def _by_export(model: nn.Module, inputs: Inputs) -> Traced:
    args, kwargs = inputs
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    guards = (
        {"check_guards": False}
        if "check_guards" in inspect.signature(program.module).parameters
        else {}
    )
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
            by_name = (
                place < len(parameters)
                and parameters[place].kind is not inspect.Parameter.VAR_POSITIONAL
            )
            first = parameters[place].name if by_name else f"{parameters[-1].name}_{place}"
        names.append("_".join([first, *inner]))
    return names


def _leaves(result: Any) -> list[Any]:
    """What a result holds, also inside dataclasses that pytree does not know."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            found.append(leaf)
    return found


def _gradients(results: Sequence[Any], sources: Sequence[Any]) -> list[Tensor | None]:
    """Of each source, from results weighted unevenly, so that a norm's do not cancel out."""
    graded = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
    if (
        not graded or not wanted or not torch.is_grad_enabled()
    ):  # without, a view of a parameter says it has one
        return [None for _ in wanted]
    weights = [
        torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device).reshape(leaf.shape)
        for leaf in graded
    ]
    found = torch.autograd.grad(
        graded, wanted, [w.to(leaf.dtype) for w, leaf in zip(weights, graded)], allow_unused=True
    )
    return list(found)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """What is hooked to a module."""
    return chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS)


def _hooks_left_out(graph: fx.Graph, model: nn.Module) -> str | None:
    """What others have hooked to a submodule that the graph does not call; None for nothing."""
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        if name and name not in called and any(True for _ in _hooks(module)):
            return f"leaves out the hooks of {name}"
    return None


def _difference(given: Outcome, expected: Outcome) -> str | None:
    if len(given.results) != len(expected.results):
        return f"gives {len(given.results)} values where the model gives {len(expected.results)}"
    differences = (_differing(one, other) for one, other in zip(given.results, expected.results))
    found = next((difference for difference in differences if difference is not None), None)
    if found is not None:
        return found
    if not all(_agree(one, other) for one, other in zip(given.gradients, expected.gradients)):
        return "gives other gradients than the model"
    if len(given.left) != len(expected.left) or any(
        _differing(*pair) for pair in zip(given.left, expected.left)
    ):
        return "leaves other buffers or inputs than the model"
    if given.changed != expected.changed:
        _, name = next(key for key, _ in given.changed.items() ^ expected.changed.items())
        return f"leaves another {name} in a module than the model"
    return None


def _differing(one: Any, other: Any) -> str | None:
    if isinstance(other, Tensor):
        try:
            assert_close(one, other, equal_nan=True)
        except (AssertionError, TypeError, ValueError) as error:
            return f"gives other numbers than the model ({_first_line(error)})"
    elif type(one) is not type(other) or (
        one != other and not (one != one and other != other)
    ):  # NaN is like NaN
        return f"gives {one!r} where the model gives {other!r}"
    return None


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = one.to_dense(), other.to_dense()
    finite = other[other.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0
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
