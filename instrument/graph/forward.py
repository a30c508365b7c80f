"""`GraphForward`: a model's forward run node by node, while a window of a session warms up or records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from loguru import logger
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from instrument.annotate import Range
from instrument.config import ModulesConfig
from instrument.errors import GraphError
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.traced import Inputs, Traced, compiled_part, signature, trace
from instrument.modules import (
    ModuleRanges,
    forget,
    instrument_chosen,
    instrument_model,
    is_instrumented,
    stand_in,
)

_MOST_GRAPHS = 8  # one for each kind of inputs, as of a last batch that is smaller


def instrument_nodes(model: nn.Module | None, config: ModulesConfig) -> nn.Module | None:
    """Have a session's model run node by node in windows, unless its owner has chosen ranges; gives what it did.

    Where its graph cannot be captured, `config` says which submodules get a range, as without a graph.
    """
    if model is None or is_instrumented(model):
        why = (
            "instrument_model has chosen ranges: leave that out"
            if model is not None
            else "Session has no model: give it one"
        )
        logger.warning("profiler.graph=true does nothing, for {}.", why)
        return None
    instrument_model(model, depth=0)

    def choose_submodules() -> None:
        forget(model)
        instrument_chosen(model, config)

    stand_in(model, GraphForward(model, choose_submodules))
    return model


class GraphForward:
    """Stands in for a model's forward from `__enter__` to `__exit__`, with a range for each node of its graph.

    The graph is captured at the first call with inputs of its kind, in a range of its own; for that the model runs a
    few times more, all of which is put back. Where that fails, it is logged once, the model runs as it is, and
    `otherwise` is called to choose submodules that get ranges in place of nodes.
    """

    def __init__(self, model: nn.Module, otherwise: Callable[[], object]) -> None:
        self._model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._otherwise = otherwise
        self._graphs: dict[Any, tuple[Traced, NodeInterpreter] | None] = {}
        self._failed = False
        self._ranges: ModuleRanges | None = None
        self._own: Callable[..., Any] = self._model.forward
        self._replaced: Any = None  # a forward that its owner has put at the instance

    def __enter__(self) -> GraphForward:
        compiled = compiled_part(self._model)
        if compiled and not self._failed:
            self._give_up(GraphError(f"The graph of {type(self._model).__name__} {compiled}."))
        if not self._failed:
            self._replaced = vars(self._model).get("forward")
            self._own = self._model.forward
            self._model.forward = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()
        if not self._graphs and not self._failed:  # a trainer that calls the submodules by itself
            self._give_up(GraphError(f"The forward of {type(self._model).__name__} was not called in a window."))
        if self._ranges is not None:
            self._ranges.__exit__()
            self._ranges = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's graph for these inputs, or its own forward where there is none."""
        found = None if self._failed or is_compiling() else self._graph_for((args, kwargs))
        if found is None:
            return self._own(*args, **kwargs)
        traced, interpreter = found
        try:
            return traced.result(interpreter.run_timed(traced.values((args, kwargs))))
        except Exception as error:
            failure = error
        result = self._own(*args, **kwargs)  # which raises where the model itself fails
        self._put_back()
        self._give_up(failure)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._own,)  # a copy of the model has its own forward

    def _put_back(self) -> None:
        if vars(self._model).get("forward") is self:
            del self._model.forward
            if self._replaced is not None:
                self._model.forward = self._replaced

    def _graph_for(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter] | None:
        kind = signature(self._model, inputs)
        if kind not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            self._put_back()  # what captures it calls the model
            with Range("graph capture"):
                self._graphs[kind] = self._captured(inputs)
            if not self._failed:
                self.__enter__()
        return self._graphs.get(kind)

    def _captured(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter] | None:
        try:
            traced = trace(self._model, inputs, self._own)
        except Exception as error:  # also the model's own, which it raises again by itself
            self._give_up(error)
            return None
        logger.info("Ranges are the nodes of {}'s graph, captured by {}.", type(self._model).__name__, traced.how)
        return traced, traced.interpreter(self._model)

    def _give_up(self, error: Exception) -> None:
        """Go on with ranges for submodules, from the next call on."""
        self._failed = True
        said = str(error) if isinstance(error, GraphError) else f"The model's graph cannot be run: {error!r}."
        logger.warning("{} Its ranges are its submodules instead.", said)
        self._otherwise()
        self._ranges = ModuleRanges().__enter__()
