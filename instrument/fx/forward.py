"""`GraphForward`: a model's forward run node by node, while a window of a session warms up or records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy as copy_of
from threading import get_ident
from typing import Any

from loguru import logger
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from instrument.annotate.modules import (
    ModuleRanges,
    forget,
    instrument_chosen,
    is_instrumented,
    stand_in,
)
from instrument.annotate.profiled import Range
from instrument.config.schema import ModulesConfig
from instrument.errors import GraphError
from instrument.fx.graph_capture import Inputs, Traced, signature, trace
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.refusals import unfit_in_training, unfit_now

_MOST_GRAPHS = 8  # one for each kind of inputs, as of a last batch that is smaller


def instrument_nodes(models: Mapping[str, nn.Module], config: ModulesConfig) -> list[nn.Module]:
    """Have a session's models run node by node in windows, unless their owner has chosen ranges; gives those it did.

    Where its graph cannot be captured, `config` says which submodules get a range, as without a graph.
    """
    chosen = {prefix: model for prefix, model in models.items() if not is_instrumented(model)}
    if len(chosen) < len(models) or not models:
        none = "the session has no model: give it one, as in Session(config, model=model)"
        why = "instrument_model has chosen ranges: leave that out" if models else none
        logger.warning("profiler.graph=true does nothing, for {}.", why)
    for prefix, model in chosen.items():
        _instrument_nodes(prefix, model, config)
    return list(chosen.values())


def _instrument_nodes(prefix: str, model: nn.Module, config: ModulesConfig) -> None:
    instrument_chosen({prefix: model}, ModulesConfig(depth=0))

    def choose_submodules() -> None:
        forget(model)
        instrument_chosen({prefix: model}, config)

    stand_in(model, GraphForward(model, choose_submodules))


class GraphForward:
    """Stands in for a model's forward from `__enter__` to `__exit__`, with a range for each node of its graph.

    The graph is captured at the first call in each window with inputs of its kind, in a range of its own; for that the
    model runs a few times more, all of which `unchanged` puts back. Where a call must not be repeated, as `refusals`
    tells before, or where capturing fails, that is logged once, the model runs as it is, and `otherwise` is called to
    choose submodules that get ranges in place of nodes. Calls by other threads than the first are the model's own, and
    copies of the model have their own forward. Cost of each call, besides its nodes' ranges: some 6 µs a module, to
    see that the model is still the one of the graph.
    """

    def __init__(self, model: nn.Module, otherwise: Callable[[], object]) -> None:
        self._model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._otherwise = otherwise
        self._graphs: dict[Any, tuple[Traced, NodeInterpreter] | None] = {}
        self._thread: int | None = None
        self._failed = False
        self._ranges: ModuleRanges | None = None
        self._own: Callable[..., Any] = self._model.forward
        self._replaced: dict[str, Any] = {}  # what its owner has put at the instance
        self._at_instance = {
            "forward": self,
            "__getstate__": self._state,
            "_replicate_for_data_parallel": self._replica,
        }

    def __enter__(self) -> GraphForward:
        if not self._failed:
            self._refuse(unfit_in_training(self._model))
        self._stand_in()
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()
        if not self._graphs and not self._failed:  # a trainer that calls the submodules by itself
            self._give_up(
                GraphError(
                    f"The forward of {type(self._model).__name__} was not called in a window: for its graph, give the "
                    "session, or the trainer's callback, the module that is called, as model=…."
                )
            )
        self._graphs.clear()  # until the next window the model may change, and memory is not ours
        self._thread = None
        if self._ranges is not None:
            self._ranges.__exit__()
            self._ranges = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's graph for these inputs, or its own forward where there is none."""
        found = self._graph_for((args, kwargs)) if self._may_run() else None
        if found is None:
            return self._own(*args, **kwargs)
        traced, interpreter = found
        try:
            return traced.result(interpreter.run_timed(traced.values((args, kwargs))))
        except Exception as error:
            if interpreter.calling is not None:  # the model's own, which has had its effects
                raise
            failure = error
        result = self._own(*args, **kwargs)
        self._put_back()
        self._give_up(failure)
        return result

    def _may_run(self) -> bool:
        if self._failed or is_compiling():
            return False
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

    def _stand_in(self) -> None:
        if not self._failed:
            held = vars(self._model)
            self._replaced = {name: held[name] for name in self._at_instance if name in held}
            self._own = self._model.forward
            held.update(self._at_instance)

    def _put_back(self) -> None:
        held = vars(self._model)
        if held.get("forward") is self:
            for name in self._at_instance:
                del held[name]
            held.update(self._replaced)

    def _state(self) -> Any:
        """What copying and pickling take of the model."""
        return self._meanwhile_its_own(lambda: copy_of(self._model.__reduce_ex__(2)[2]))

    def _replica(self) -> Any:
        return self._meanwhile_its_own(lambda: self._model._replicate_for_data_parallel())

    def _meanwhile_its_own(self, act: Callable[[], Any]) -> Any:
        self._put_back()
        try:
            return act()
        finally:
            self._stand_in()

    def _graph_for(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter] | None:
        try:
            self._refuse(unfit_now(self._model, inputs))
            kind = None if self._failed else signature(self._model, inputs)
        except Exception as error:
            self._put_back()
            self._give_up(error)
        if self._failed:
            return None
        if kind not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            self._graphs[kind] = self._meanwhile_its_own(lambda: self._captured(inputs))
        return self._graphs.get(kind)

    def _captured(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter] | None:
        self._refuse(unfit_in_training(self._model))  # again: hooks and process groups come while a window is open
        if self._failed:
            return None
        try:
            with Range("graph capture"):
                traced = trace(self._model, inputs, self._own)
        except Exception as error:  # also the model's own, which it raises again by itself
            self._give_up(error)
            return None
        logger.info("Ranges are the nodes of {}'s graph, captured by {}.", type(self._model).__name__, traced.how)
        return traced, traced.interpreter(self._model)

    def _refuse(self, why: str | None) -> None:
        if why is not None:
            self._put_back()
            self._give_up(GraphError(f"{type(self._model).__name__} {why}: no graph is captured."))

    def _give_up(self, error: Exception) -> None:
        """Go on with ranges for submodules, from the next call on."""
        self._failed = True
        said = str(error) if isinstance(error, GraphError) else f"The model's graph cannot be run: {error!r}."
        logger.warning("{} Its ranges are its submodules instead.", said)
        self._otherwise()
        self._ranges = ModuleRanges().__enter__()
