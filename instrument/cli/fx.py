"""The part of `instrument graph` that needs torch: make model and inputs, and time the graph."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instrument.analysis.section import Section, is_every_column
from instrument.cli.output import Parts, writing
from instrument.errors import ConfigError
from instrument.fx.machine import Machine
from instrument.fx.profiler import profile_graph
from instrument.fx.result import SHOWN, GraphProfile


def report(options: argparse.Namespace) -> Parts:
    """Return a table of the nodes of a model's torch.fx graph, and remarks below the table.

    The options choose the rows and columns.

    Raises:
        ConfigError: the model, an input, a column or the device does not exist, or the page of
            --html cannot be written.
        GraphError: the model cannot be captured as a graph.
    """
    device = _device(options.device)
    model = named_model(options.model).to(device).train(options.train)
    args, kwargs = made_inputs(options.inputs, device)
    with nullcontext() if options.train else torch.no_grad():
        profile = profile_graph(model, *args, runs=options.runs, **kwargs)
    machine = profile.machine if options.roofline or options.html else None
    table = profile.nodes.by(options.by, depth=options.depth) if options.by else profile.nodes
    table = profile.roofline(machine) if options.roofline else table
    try:
        table = table.sort(options.sort) if options.sort else table
        default = table.columns if options.by or options.roofline else SHOWN
        columns = table.columns if is_every_column(options.columns) else options.columns or default
        table = table.head(options.rows or len(table)).select(columns)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None
    remarks = [*profile.foot]
    if options.roofline:
        remarks.append(f"The bounds are computed from the rates of {machine}.")
    remarks += (
        [f"The picture is in {_written(profile, options.html, machine)}."] if options.html else []
    )
    chosen = options.columns is not None
    return [
        Section(table, table.columns, chosen=chosen, key=options.sort, text_width=None),
        remarks,
    ]


def _written(profile: GraphProfile, path: Path, machine: Machine | None) -> Path:
    with writing(path):
        return profile.save_html(path, machine)


def named_model(name: str) -> nn.Module:
    """Return the model that `module:name` names, or the result of the named class or function.

    Raises:
        ConfigError: the model does not exist, or cannot be made.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ImportError) and not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{module} cannot be imported ({error}): install the missing package, or correct "
                "the module."
            ) from None
        raise ConfigError(
            f"There is no model {name!r} ({error}): give it as package.module:name."
        ) from None
    made = found if isinstance(found, nn.Module) or not callable(found) else _called(name, found)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{name!r} is or returns a {type(made).__name__}: "
            "give an nn.Module, its class, or a function that makes it."
        )
    return made


def _called(name: str, found: Callable[..., Any]) -> Any:
    try:
        signature(found).bind()
    except TypeError as error:
        why = (
            f"{name!r} cannot be called without arguments ({error}): "
            "name a function that makes the model without arguments."
        )
        raise ConfigError(why) from None
    except ValueError:  # some built-ins have no signature
        pass
    return found()


def made_inputs(given: Sequence[str], device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    """Return positional and keyword arguments for inputs such as `input_ids=8,128:int64`.

    Floats are random. Integers are 0, which is a valid index of every embedding. Booleans are true.

    Raises:
        ConfigError: an input has another form, or cannot be made.
    """
    args: list[Tensor] = []
    kwargs: dict[str, Any] = {}
    for text in given:
        name, _, shape = text.rpartition("=")
        if name:
            kwargs[name] = _made(text, shape, device)
        else:
            args.append(_made(text, shape, device))
    return args, kwargs


def _made(text: str, spec: str, device: torch.device) -> Tensor:
    sizes, _, kind = spec.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size]
    except ValueError:
        dtype = None
    if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
        raise ConfigError(
            f"--input {text} is not a shape: write a shape such as 1,3,224,224, or a name, a shape "
            "and a type, such as input_ids=8,128:int64."
        )
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype, device=device)
        return torch.full(shape, dtype is torch.bool, dtype=dtype, device=device)
    # torch may have no random numbers of this type, or the memory may be too small.
    except (RuntimeError, TypeError) as error:
        why = f"--input {text} cannot be made ({_first_line(error)}): choose another shape or type."
        raise ConfigError(why) from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = (
            f"--device {name} cannot be used here ({_first_line(error)}): leave out --device to "
            "use the CPU."
        )
        raise ConfigError(why) from None
    return device


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
