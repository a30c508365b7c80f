"""Records a script that nobody edited: finds its steps, its models and its data loader.

A step ends when an optimizer has stepped; without an optimizer, when a backward has ended; in
inference, when a model was called. To see this, functions of torch are wrapped: `Optimizer.step`,
`torch.autograd.backward`, `nn.Module.__call__` and `DataLoader.__iter__`. As soon as it is known
what ends a step, the others are as before.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instrument.annotate import module_calls
from instrument.annotate.module_calls import skip_in_dynamo
from instrument.base.errors import reason_of, reraise_signal
from instrument.base.file_lock import is_held
from instrument.base.log import logger
from instrument.base.rank_info import rank_info
from instrument.config.schema import ProfilerConfig
from instrument.record import one_profiler
from instrument.record.session import Session

T = TypeVar("T")
StepKind: TypeAlias = Literal["forward", "backward", "optimizer"]

# The later kinds take over from the earlier: a program that infers at first may train afterwards.
KINDS: tuple[StepKind, ...] = ("forward", "backward", "optimizer")
# After these calls of models, the watch asks whether the program only infers.
_ASKED_AT = (4, 16, 64, 256)
# A search for models reads all objects of the process, 0.1 s for a million.
_MOST_SEARCHES = 4
_POLL_S = 0.1


class Cycle:
    """Finds which of the objects that a program calls in turn ends a step.

    It is the object before the first one that is called again: G if the optimizers step in the
    order D, G, D, G, and D if they step in the order D, D, D, G.
    """

    def __init__(self) -> None:
        self._called: dict[int, None] = {}  # since the end of the last step, in order
        self._last: int | None = None

    def ends_step(self, called: object) -> bool:
        """Whether a step ends with this call."""
        number = id(called)  # a new object may have the id of a dead one, and then stands for it
        if number in self._called:
            self._last = next(reversed(self._called))
            self._called.clear()
        self._called[number] = None
        if number != self._last:
            return False
        self._called.clear()
        return True


class _Depth(threading.local):
    """Whether this thread is in a call, so that a call inside it does not count."""

    inside = False


class Watch:
    """Watches a script that trains or infers, and records it with a session.

    The session starts at the end of the first step, because the models are not known before. So
    the first step is never recorded. A forked child is not watched.

    Attributes:
        session: the session that records; None before the end of the first step.
        gave_up: whether the watch ended before the script; the log says why.
    """

    def __init__(self, config: ProfilerConfig, kind: StepKind | None = None) -> None:
        self.session: Session | None = None
        self._config, self._given = config, kind
        self._kind: StepKind | None = None  # None until it is known what ends a step
        self._cycle = Cycle()
        self.gave_up = self._ended = self._starting = False
        self._count = dict.fromkeys(KINDS, 0)
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # not from other modules
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # their models are known
        self._searches = 0
        self._loader: Any = None  # over which the script iterates; None once the session knows it
        self._process = os.getpid()
        self._unwrap: dict[str, Callable[[], None]] = {}

    def begin(self) -> None:
        """Wrap functions of torch; call this once torch is loaded, before the script uses it."""
        one_profiler.watch_others()
        one_profiler.before_start.append(self._leave_to)
        self._wrap("loader", DataLoader, "__iter__", self._noticing_loader)
        module_calls.listen(partial(self._notice, "forward"))
        self._unwrap["forward"] = lambda: module_calls.listen(None)
        self._wrap("backward", torch.autograd, "backward", self._noticing_backward)
        # torch's own hook after a step runs while the range `Optimizer.step#…` is still open
        self._wrap("optimizer", Optimizer, "profile_hook_step", self._noticing_steps)

    def end(self, error: BaseException | None) -> None:
        """Stop the session, and unwrap; `error` has ended the script early, unless it is None."""
        self._ended = True
        for unwrap in self._unwrap.values():
            unwrap()
        if self.session is not None:
            self.session.__exit__(type(error) if error else None, error, None)

    def wait(self, longest_s: float, *, others: bool) -> Path | None:
        """Wait until the windows are finished; return the folder for captures if this rank has any.

        If `others` is true, also wait for the other ranks.
        """
        run = None if self.session is None else self.session.loop.run
        if self.session is None or run is None:
            return None
        folder, until = run.finisher.output_dir, time.monotonic() + longest_s
        several = others and rank_info().world_size > 1
        locks = folder.glob(".run-*.lock") if several else [run.finisher.lock.path]
        for lock in locks:
            while is_held(lock) and time.monotonic() < until:
                time.sleep(_POLL_S)
        return folder if self.session.captures else None

    # The functions of torch.

    def _wrap(self, key: str, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        before = inspect.getattr_static(owner, name)
        is_static = isinstance(before, staticmethod)
        function = before.__func__ if is_static else before
        wrapped = wraps(function)(wrap(function))
        skip_in_dynamo(wrapped)
        after = staticmethod(wrapped) if is_static else wrapped
        setattr(owner, name, after)

        def unwrap() -> None:
            if inspect.getattr_static(owner, name) is after:  # nobody else has wrapped it
                setattr(owner, name, before)

        self._unwrap[key] = unwrap

    def _noticing_steps(self, hook_step: Callable[..., Any]) -> Callable[..., Any]:
        depth = _Depth()

        def hook_noticed_step(step: Callable[..., Any]) -> Callable[..., Any]:
            hooked = hook_step(step)

            @wraps(hooked)
            def noticed(optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or depth.inside:
                    return hooked(optimizer, *args, **kwargs)
                try:
                    depth.inside = True
                    result = hooked(optimizer, *args, **kwargs)
                finally:
                    depth.inside = False
                self._notice("optimizer", optimizer)
                return result

            skip_in_dynamo(noticed)
            return noticed

        return hook_noticed_step

    def _noticing_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            self._notice("backward", None)
            return result

        return noticed

    def _noticing_loader(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(loader: Any) -> Any:
            self._loader = loader
            return iterate(loader)

        return noticed

    # The steps.

    def _notice(self, kind: StepKind, called: Any) -> None:
        """Take notice of a call that has ended. If this fails, the watch is over."""
        if self._ended or self.gave_up or os.getpid() != self._process:
            return
        try:
            if kind == "forward":
                self._called.add(called)
                if next(called.parameters(), None) is None:  # a loss or a transform
                    return
            if kind == self._kind:
                if kind == "optimizer" and called not in self._optimizers:
                    self._add_models(called)
                if self._cycle.ends_step(called) and self.session is not None:
                    self.session.step()
            elif self._decides(kind):
                self._begin_steps(kind, called)
        except Exception as error:
            reraise_signal(error)
            self.gave_up = True
            logger.warning("`instrument run` records no more steps: {}.", reason_of(error))

    def _decides(self, kind: StepKind) -> bool:
        """Whether a step ends with a call of this kind from now on."""
        if self._given is not None or kind == "optimizer":
            return kind == (self._given or kind)
        if self._kind is not None and KINDS.index(kind) < KINDS.index(self._kind):
            return False
        self._count[kind] = count = self._count[kind] + 1
        if kind == "backward":
            return count == 2 and not _alive(Optimizer)
        # programs that forget torch.no_grad() are asked later, because they may train
        infers = count in _ASKED_AT and (count > _ASKED_AT[0] or not torch.is_grad_enabled())
        return infers and not self._count["backward"] and not _alive(Optimizer)

    def _begin_steps(self, kind: StepKind, called: Any) -> None:
        """Start the session, because the first step has ended."""
        if self.session is not None:
            self.session.stop()
        self._kind, self._cycle = kind, Cycle()
        self._cycle.ends_step(called)
        for key, unwrap in self._unwrap.items():
            needed = key in KINDS[KINDS.index(kind) :] if self._given is None else key == kind
            if not needed:
                unwrap()
        self.session = Session(self._config)
        self.session.step_number = 1
        try:
            self._starting = True
            self.session.start(self._models())
        finally:
            self._starting = False
        self.session.loop.loaders.add(self._loader, "train")
        self._loader = None

    def _leave_to(self, other: str) -> None:
        """Record nothing more, because the script starts `other`, which also records."""
        if self._starting or self._ended or self.gave_up:
            return
        self.gave_up = True
        logger.warning(
            "`instrument run` records no more steps, because the script itself records with {}.",
            other,
        )
        owner = one_profiler.current_owner()
        if owner is not None:
            owner.end_window()

    # The models.

    def _add_models(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        if self.session is not None and self._searches < _MOST_SEARCHES:
            self.session.add_models(self._models())

    def _models(self) -> dict[str, nn.Module]:
        """The models that are trained or were called, by the prefixes of their ranges.

        These are modules that are in no other module. If only one of them has parameters, its
        prefix is empty; other prefixes are the variables that hold the models.
        """
        self._searches += 1
        self._optimizers.update(_alive(Optimizer))
        groups = (group for each in self._optimizers for group in each.param_groups)
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        modules = [each for each in _alive(nn.Module) if "_modules" in vars(each)]
        inner = {id(child) for each in modules for child in each.children()}
        found = [
            each
            for each in modules
            if id(each) not in inner
            and not isinstance(each, torch.fx.GraphModule)
            and (
                any(id(parameter) in trained for parameter in each.parameters())
                or any(part in self._called for part in each.modules())
            )
        ]
        with_parameters = [each for each in found if next(each.parameters(), None) is not None]
        names, models = _variables(), dict[str, nn.Module]()
        for each in found:
            model, name = each, names.get(id(each), type(each).__name__)
            while isinstance(model, DataParallel | DistributedDataParallel):
                model = model.module
            prefix = "" if with_parameters == [each] else name
            models[prefix if prefix not in models else f"{prefix}.{len(models)}"] = model
        return models


# Dynamo would compile all of this if a compiled function calls an optimizer
skip_in_dynamo(Watch._notice, and_all_within=True)


def _alive(kind: type[T]) -> list[T]:
    """The objects of a class in this process."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


# A function that uses one of these may keep its dict of locals.
_READS_LOCALS = {"locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe", "currentframe"}


def _variables() -> dict[int, str]:
    """The names of the variables in the functions that now run, by the id of what they hold.

    If several variables hold an object, the name is that of the outermost function.
    """
    names = dict[int, str]()
    frame = sys._getframe()
    while frame is not None:
        # Before Python 3.13, a function has one dict of locals. To read it would change the dict
        # that a function has kept from `locals()`; to leave it filled would keep tensors alive.
        is_one_dict = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if not is_one_dict or _READS_LOCALS.isdisjoint(frame.f_code.co_names):
            names |= {id(value): name for name, value in frame.f_locals.items()}
            if is_one_dict:
                frame.f_locals.clear()
        frame = frame.f_back  # type: ignore[assignment]
    return names
