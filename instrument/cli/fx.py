"""The part of `instrument graph` that needs torch: make model and inputs, and time the graph."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from instrument.base.errors import ConfigError
from instrument.cli.output import Parts, writing
from instrument.graph.outcome import first_sentence
from instrument.graph.profiler import profile_graph
from instrument.graph.result import SHOWN
from instrument.read.views.section import Section, is_every_column


def report(options: argparse.Namespace) -> Parts:
    """Return a table of the nodes of a model's torch.fx graph, and remarks below the table.

    The options choose the rows and columns.

    Raises:
        ConfigError: the model, an input, a column or the device does not exist, or a file cannot be
            written.
        GraphError: the model cannot be captured as a graph.
    """
    device = _device(options.device)
    model = named_model(options.model).to(device).train(options.train)
    args, kwargs = made_inputs(options.inputs, device)
    with nullcontext() if options.train else torch.no_grad():
        profile = profile_graph(model, *args, runs=options.runs, **kwargs)
    remarks = [*profile.foot]
    table, default = profile.nodes, SHOWN
    if options.by:
        table = profile.by(options.by, depth=options.depth)
        default = [*table.columns]
    elif options.roofline:
        table = profile.roofline()
        default = [*table.columns]
        remarks.append(profile.machine.note)
    try:
        table = table.sort(options.sort) if options.sort else table
        columns = table.columns if is_every_column(options.columns) else options.columns or default
        table = table.head(options.rows or len(table)).select(columns)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None
    if options.dot:
        with writing(options.dot):
            remarks.append(f"The graph for Graphviz is in {profile.save_dot(options.dot)}.")
    chosen = options.columns is not None
    section = Section(table, table.columns, chosen=chosen, key=options.sort, text_width=None)
    return [section, remarks]


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
        raise ConfigError(
            f"There is no model {name!r} ({error}): give it as package.module:name, and install "
            "the packages that it needs."
        ) from None
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(
                f"{name!r} cannot make a model without arguments ({error}): name a function that "
                "needs none."
            ) from error
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"{name!r} is or returns a {type(found).__name__}: "
            "give an nn.Module, its class, or a function that makes it."
        )
    return found


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
        made = _made(text, shape, device)
        if name:
            kwargs[name] = made
        else:
            args.append(made)
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
        raise ConfigError(
            f"--input {text} cannot be made ({first_sentence(error)}): choose another shape or "
            "type."
        ) from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name} cannot be used here ({first_sentence(error)}): leave out --device to "
            "use the CPU."
        ) from None
    return device
