"""`instrument graph`: time each node of a model's torch.fx graph."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instrument.base.errors import ConfigError
from instrument.cli.arguments import column_names, positive, row_count
from instrument.cli.output import Parts, writing
from instrument.graph import GROUPINGS

HELP = "time each node of a model's torch.fx graph"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Run a model's torch.fx graph node by node on generated inputs, and print the time and "
        "FLOPs of each node."
    )
    add, alone = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add(
        "model",
        metavar="MODULE:NAME",
        help="an nn.Module, its class, or a function that makes it: my_package.models:build",
    )
    shape = (
        "an input: its shape (1,3,224,224), shape and type (8,128:int64), or name, shape and type "
        "(input_ids=8,128:int64); repeat --input for each input"
    )
    add("--input", metavar="SHAPE", dest="inputs", action="append", default=[], help=shape)
    runs = "number of timed runs (default: %(default)s)"
    add("--runs", metavar="N", type=positive, default=10, help=runs)
    train = "run in training mode, with gradients (default: inference)"
    add("--train", action="store_true", help=train)
    device = "the device that runs the model (default: %(default)s)"
    add("--device", metavar="NAME", default="cpu", help=device)
    sort = "column to sort by, such as mean_ns (default: in the order of the graph)"
    add("--sort", metavar="KEY", help=sort)
    add("--rows", metavar="N", type=row_count, help="rows to show (default: all)")
    alone("--by", choices=GROUPINGS, help="group nodes by this property")
    roofline = (
        "show for each node of the graph whether compute or memory bandwidth limits it on this "
        "machine, and the time that the node would take at this limit"
    )
    alone("--roofline", action="store_true", help=roofline)
    depth = "with --by module_path: nodes of deeper modules count for the module at this depth"
    add("--depth", metavar="N", type=positive, help=depth)
    columns = "columns to show (default: the main columns); all: every column"
    add("--columns", metavar="A,B", type=column_names, help=columns)
    drawn = "also write the graph for Graphviz: dot -Tsvg FILE > graph.svg"
    add("--dot", metavar="FILE", type=Path, help=drawn)


def run(arguments: argparse.Namespace) -> Parts:
    """Return a table of the nodes of the model's torch.fx graph, and remarks below the table.

    Raises:
        ConfigError: the model, an input, a column or the device does not exist, or a file cannot be
            written.
        GraphError: the model cannot be captured as a graph.
    """
    import torch

    from instrument.graph.command_model import made_inputs, named_model
    from instrument.graph.graph_capture import first_sentence
    from instrument.graph.graph_profile import SHOWN, profile_graph
    from instrument.read.views.section import Section, is_every_column

    sys.path.insert(0, str(Path.cwd()))  # finds a model in the current folder, as python -m does
    model = named_model(arguments.model).train(arguments.train)
    try:
        model = model.to(arguments.device)
        args, kwargs = made_inputs(arguments.inputs, arguments.device)
    except (RuntimeError, AssertionError) as error:  # no such device, not enough memory
        raise ConfigError(
            f"The model or an input cannot be put on {arguments.device} ({first_sentence(error)}): "
            "choose another --device, --input or type."
        ) from None
    with torch.set_grad_enabled(arguments.train):
        profile = profile_graph(model, *args, runs=arguments.runs, **kwargs)
    table, default, remarks = profile.nodes, SHOWN, [*profile.foot]
    if arguments.by:
        table = profile.by(arguments.by, depth=arguments.depth)
        default = [*table.columns]
    elif arguments.roofline:
        table = profile.roofline()
        default = [*table.columns]
        remarks.append(f"The bounds are computed from the rates of {profile.machine}.")
    try:
        table = table.sort(arguments.sort) if arguments.sort else table
        columns = table.columns if is_every_column(arguments.columns) else arguments.columns
        table = table.head(arguments.rows or len(table)).select(columns or default)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None
    if arguments.dot:
        with writing(arguments.dot):
            remarks.append(f"The graph for Graphviz is in {profile.save_dot(arguments.dot)}.")
    chosen = arguments.columns is not None
    return [Section(table, table.columns, chosen=chosen, key=arguments.sort), remarks]
