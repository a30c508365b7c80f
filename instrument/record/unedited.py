"""Records a script that nobody edited: finds its steps, its models and its data loader.

A step ends when an optimizer has stepped; without an optimizer, when a backward has ended; in
inference, when a model was called. To see this, functions of torch are wrapped: `Optimizer.step`,
`torch.autograd.backward`, `nn.Module.__call__` and `DataLoader.__iter__`. As soon as it is known
what ends a step, the others are as before; at the end, all are.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from itertools import count
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instrument.annotate import module_calls
from instrument.annotate.module_calls import (
    Depth,
    after_outermost,
    skip_in_dynamo,
    wrap_function,
)
from instrument.base.errors import ConfigError, reason_of
from instrument.base.file_lock import is_held
from instrument.base.files import WORK_VARIABLE
from instrument.base.log import logger
from instrument.base.rank_info import rank_info
from instrument.record import one_profiler, worker_lines
from instrument.record.config.schedule import next_window
from instrument.record.config.schema import ProfilerConfig, as_config
from instrument.record.facts import loader_settings
from instrument.record.long_steps import EXPORTING, MOST_KEPT, no_times
from instrument.record.own_modules import own_modules
from instrument.record.parameters import alive
from instrument.record.session import Session

StepKind: TypeAlias = Literal["forward", "backward", "optimizer"]

# The later kinds take over from the earlier: a program that infers at first may train afterwards.
KINDS: tuple[StepKind, ...] = ("forward", "backward", "optimizer")
#: The first step that can be recorded: what ends a step is known at the end of step 1.
FIRST_STEP = 2
# After these calls of models, the watch asks whether the program only infers.
_ASKED_AT = (4, 16, 64, 256)
# A search for models reads all objects of the process, 0.1 s for a million.
_MOST_SEARCHES = 4
_POLL_S = 0.1
# How many windows are planned in place of those that the script's own profiler prevented; it may
# record again and again.
_TRIES = 3
# The modules with the function that starts processes of `mp.spawn`.
_SPAWNING = ("torch.multiprocessing", "torch.multiprocessing.spawn")


class Cycle:
    """Finds which of the objects that a program calls in turn ends a step.

    It is the object before the first one that is called again: G if the optimizers step in the
    order D, G, D, G, and D if they step in the order D, D, D, G. If that object is not called any
    more before another one is called again, the other one ends a step: M in the order i1, M, i2, M,
    i3, M, where a program makes a new inner optimizer for each step.

    Attributes:
        ended: how many calls have ended a step.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._called: dict[weakref.ref[Any], None] = {}  # since the end of a step, in order
        self._last: weakref.ref[Any] | None = None
        self._seen = True  # whether `_last` was called since it was chosen

    def ends_step(self, called: object) -> bool:
        """Whether a step ends with this call."""
        its = weakref.ref(called)
        if its in self._called:
            self._last = next(reversed(self._called)) if self._seen else its
            self._seen = False
            self._called.clear()
        self._called[its] = None
        if its != self._last:
            return False
        self._seen = True
        self._called.clear()
        self.ended += 1
        return True


def with_later_window(
    config: ProfilerConfig, loader: Mapping[str, Any] | None
) -> ProfilerConfig | None:
    """The options with a second window, which replaces the first if it is complete, or None.

    At first, and after the pause in which the first window is saved, steps take batches that the
    workers of the loader have loaded before. The second window begins when these are used up.
    """
    queue = ((loader or {}).get("workers") or 0) * ((loader or {}).get("prefetch_factor") or 0)
    early = next_window(config, FIRST_STEP) if config.repeat == 1 and queue else None
    is_cycle = config.at_steps is None and config.every_n_steps is None
    if not is_cycle or early is None or early.last is None:
        return None
    begins = [early.first, early.last + 1 + max(queue, config.detail) + config.warmup]
    return as_config(config, at_steps=begins, wait=0, skip_first=0, keep=config.keep or 1)


class Watch:
    """Watches a script that trains or infers, and records it with a session.

    The session starts at the end of step 1, because what ends a step and the models are not known
    before. A process has one watch, and a forked child has none.

    Attributes:
        session: the session that records; None before the end of step 1.
        times: the durations of the session's first steps; see `no_times`.
        gave_up: whether the watch ended before the script; the log says why.
        spawns: whether other processes train, which have their own watch.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        kind: StepKind | None = None,
        *,
        may_move: bool = False,
        run_spawned: Callable[..., Any] | None = None,
        after_step: Callable[[Watch], object] | None = None,
    ) -> None:
        self.session: Session | None = None
        self.times = no_times()
        self._step_began_ns = self._ranks = 0
        self._run_spawned, self._after_step = run_spawned, after_step
        self._unwatch: Callable[[], None] = lambda: None
        self.gave_up = self.spawns = self._ended = False
        self._config, self._given, self._may_move = config, kind, may_move
        self._kind: StepKind | None = None  # None until it is known what ends a step
        self._cycles = {each: Cycle() for each in KINDS}
        self._has_backward = False
        # whether one of the modules that were called has parameters; None before the first call
        self._has_parameters: bool | None = None
        self.autocast: torch.dtype | None = None  # in which models were called
        # called not from other modules, and whether they have parameters
        self._called: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # their models are known
        self._searches = 0
        self._starting = Lock()  # held while a session starts
        # whether the script's own profiler was on since the last window was planned
        self._in_the_way, self._tries_left = False, _TRIES
        self._loader: Any = None  # over which the script iterates; None once the session knows it

    @property
    def found_no_step(self) -> bool:
        """Whether nothing is recorded, and nothing has said why."""
        return self.session is None and not self.gave_up and not self.spawns

    @property
    def calls_no_parameters(self) -> bool:
        """Whether the script calls modules, but none with parameters, and trains nothing."""
        return self._has_parameters is False and not self._has_backward

    def begin(self) -> None:
        """Wrap functions of torch; call this once torch is loaded, before the script uses it."""
        global _watch
        _watch = self
        if WORK_VARIABLE in os.environ:
            from instrument.record.work import observe_if_asked

            observe_if_asked()
        self._unwatch = one_profiler.watch_others()
        one_profiler.before_start[:] = [self._leave_to]
        _unwrap()  # what the parent of a forked child has wrapped
        if self._config.lines:
            worker_lines.begin()
        _wrap("loader", DataLoader, "__iter__", self._noticing_loader)
        module_calls.listen(partial(_notice, "forward"))
        _wrap("backward", torch.autograd, "backward", self._noticing_backward)
        # torch's own hook after a step runs while the range `Optimizer.step#…` is still open
        _wrap("optimizer", Optimizer, "profile_hook_step", self._noticing_steps)
        if self._run_spawned is not None:
            # torch.multiprocessing.spawn is a function, and the module has the same name
            for module in _SPAWNING:
                record = partial(self._recording_spawned, self._run_spawned)
                _wrap(module, import_module(module), "start_processes", record)

    def end(self, error: BaseException | None) -> None:
        """Stop the session, and unwrap; `error` has ended the script early, unless it is None."""
        self._ended = True
        _unwrap()
        self._unwatch()
        if self.session is not None:
            if self._may_move and self.session.saved:
                self.session.drop_window()  # an incomplete one must not replace the first
            self.session.__exit__(type(error) if error else None, error, None)
        if self._config.lines:
            worker_lines.end()

    def wait(self, longest_s: float, *, others: bool) -> list[Path]:
        """Wait until the windows are finished; return the captures of this rank, the newest last.

        If `others` is true, also wait for the other ranks.
        """
        if self.session is None or self.session.output_dir is None:
            return []
        until = time.monotonic() + longest_s
        self.session.wait(longest_s)
        several = others and self._ranks > 1
        for lock in self.session.output_dir.glob(".run-*.lock") if several else ():
            while is_held(lock) and time.monotonic() < until:
                time.sleep(_POLL_S)
        return [each.folder for each in self.session.captures if each.folder is not None]

    # The functions of torch.

    def _noticing_steps(self, hook_step: Callable[..., Any]) -> Callable[..., Any]:
        tell, depth = partial(_notice, "optimizer"), Depth()

        def hook_noticed_step(step: Callable[..., Any]) -> Callable[..., Any]:
            hooked = hook_step(step)
            return wraps(hooked)(after_outermost(hooked, tell, depth))

        return hook_noticed_step

    def _noticing_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            _notice("backward", self)
            return result

        return noticed

    def _noticing_loader(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(loader: Any) -> Any:
            self._loader = loader
            iterator = iterate(loader)
            # A loader without a name, `for batch in DataLoader(…)`, stays while it is read, because
            # `instrument try` looks for it. With persistent workers, this would be a circle.
            with suppress(AttributeError):
                if not loader.persistent_workers:
                    iterator._instrument_loader = loader
            return iterator

        return noticed

    def _recording_spawned(
        self, run_spawned: Callable[..., Any], start: Callable[..., Any]
    ) -> Callable[..., Any]:
        def recorded(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.spawns = True
            if self.session is not None:  # a child that is forked within a window cannot record
                self.session._loop.drop_detail()
            return start(partial(run_spawned, fn), *args, **kwargs)

        return recorded

    # The steps.

    def notice(self, kind: StepKind, called: Any) -> None:
        """Take notice of a call that has ended. If the session fails, the watch is over."""
        # while a session starts, it must not count steps of other threads
        if self._ended or self.gave_up or self._starting.locked():
            return
        # checkpointing calls modules, and backward, within a backward
        if kind != "optimizer" and torch._C._current_graph_task_id() != -1:
            return
        try:
            ends = self._ends_step(kind, called)
            is_new = kind == self._kind == "optimizer" and called not in self._optimizers
        except Exception:  # the object is odd
            return
        try:
            if is_new:
                self._add_models(called)
            if ends and kind == self._kind and self.session is not None:
                self._end_step(self.session)
                if self._tries_left and self._in_the_way:
                    self._try_again(self.session)
            elif ends and self._decides(kind) and self._starting.acquire(blocking=False):
                try:
                    if self.session is None or kind != self._kind:  # else another thread was first
                        with own_modules():
                            self._begin_steps(kind)
                        self._tell()
                finally:
                    self._starting.release()
        except Exception as error:
            self._give_up(reason_of(error))

    def _ends_step(self, kind: StepKind, called: Any) -> bool:
        self._has_backward |= kind == "backward"
        if kind == "forward":
            has_parameters = self._called.get(called)
            if has_parameters is None:
                first = next(called.parameters(), None)
                has_parameters = self._called[called] = first is not None
                if first is not None and torch.is_autocast_enabled(first.device.type):
                    self.autocast = torch.get_autocast_dtype(first.device.type)
            if has_parameters and not self._has_parameters:
                self._has_parameters, self._cycles[kind] = True, Cycle()
                if self._kind == kind:  # what was called before were transforms
                    self._kind = None
            elif self._has_parameters and not has_parameters:  # a loss or a transform
                return False
            self._has_parameters = bool(self._has_parameters)
        return self._cycles[kind].ends_step(called)

    def _decides(self, kind: StepKind) -> bool:
        """Whether a step ends with a call of this kind from now on."""
        if self._given is not None or kind == "optimizer":
            return kind == (self._given or kind)
        if self._kind is not None and KINDS.index(kind) < KINDS.index(self._kind):
            return False
        ended = self._cycles[kind].ended
        if kind == "backward":
            return ended == 1 and not alive(Optimizer)
        # programs that forget torch.no_grad() are asked later, because they may train; so are those
        # that have called no model with parameters yet, but maybe transforms
        asked_at = _ASKED_AT[torch.is_grad_enabled() :] if self._has_parameters else _ASKED_AT[2:]
        infers = ended in asked_at
        return infers and not self._has_backward and not alive(Optimizer)

    def _begin_steps(self, kind: StepKind) -> None:
        """Start the session, because a step has ended, and it is known what ends it."""
        if self.session is not None:
            self.session.stop()
        self.session, self._kind = None, kind
        needed = KINDS[KINDS.index(kind) :] if self._given is None else [kind]
        _unwrap([*needed, *_SPAWNING])
        if kind == "forward":  # a call within another call now costs nothing
            classes = {type(each) for each in self._called} if self._has_parameters else ()
            module_calls.listen(partial(_notice, kind), classes)
        config, later = self._config, None
        if self._may_move:
            later = with_later_window(config, loader_settings(self._loader))
        self._may_move = later is not None
        session = Session(later or config)
        # asked now, because the script may destroy its process group
        self.times, self._ranks = no_times(), rank_info().world_size
        session.start(self.models(), loaders={"train": self._loader}, steps_done=FIRST_STEP)
        self.session, self._loader = session, None
        self._step_began_ns = time.perf_counter_ns()

    def _end_step(self, session: Session) -> None:
        number, took_ns = session.step_number, time.perf_counter_ns() - self._step_began_ns
        recorded, window = session.recording, session.window
        is_timed = not session._loop.recording_detail
        # apart, because the export of a window may make the step slower
        exporting = EXPORTING if session.exporting else 0
        session.step()
        self._step_began_ns = time.perf_counter_ns()
        is_alone = recorded or window is None or number < window.warmup_from
        if number < MOST_KEPT and is_timed and is_alone:
            self.times[number] = -took_ns if recorded else took_ns | exporting
        self._tell()

    def _tell(self) -> None:
        if self._after_step is not None:
            self._after_step(self)
            self._step_began_ns = time.perf_counter_ns()

    def _try_again(self, session: Session) -> None:
        """Request a window, once the script's own profiler, which prevented one, has stopped."""
        if session.window is not None or one_profiler.program_records(or_warms_up=True):
            return
        self._in_the_way = False
        if not session.saved:
            self._tries_left -= 1
            session.request(why="the script's own profiler has stopped")

    def _leave_to(self, other: str) -> None:
        """Record nothing while the script's own profiler does, and nothing more with a session."""
        if self._starting.locked() or self._ended or self.gave_up:
            return
        if other == one_profiler.TORCHS:
            if self._tries_left == _TRIES and not self._in_the_way:
                logger.warning(
                    "`instrument run` records no window while the script itself records with {}.",
                    other,
                )
            self._in_the_way = True
            return
        self._give_up(f"the script itself records with {other}")
        owner = one_profiler.current_owner()
        if owner is not None:
            owner.end_window()

    def _give_up(self, why: str) -> None:
        self.gave_up = True
        what = "nothing" if self.session is None or not self.session.output_dir else "no more steps"
        logger.warning("`instrument run` records {}: {}.", what, why)

    # The models.

    def _add_models(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        if self.session is not None and self._searches < _MOST_SEARCHES:
            with suppress(ConfigError):  # the options name modules of other models
                self.session.add_models(self.models())

    def models(self) -> dict[str, nn.Module]:
        """The models that are trained or were called, by the prefixes of their ranges.

        These are modules that are in no other module. If only one of them has parameters, its
        prefix is empty; other prefixes are the script's global variables, or the models' classes.
        """
        self._searches += 1
        trained = set[int]()
        for optimizer in alive(Optimizer):
            with suppress(Exception):  # the object is odd
                self._optimizers.add(optimizer)
                groups = optimizer.param_groups
                trained.update(id(each) for group in groups for each in group["params"])
        modules = [each for each in alive(nn.Module) if "_modules" in vars(each)]
        inner = {id(child) for each in modules for child in vars(each)["_modules"].values()}
        called = {id(module): at for at, module in enumerate(self._called)}
        found, with_parameters = list[tuple[int, nn.Module]](), 0
        for each in modules:
            if id(each) in inner or isinstance(each, torch.fx.GraphModule):
                continue
            with suppress(Exception):  # the object is odd
                parameters = {id(parameter) for parameter in each.parameters()}
                first = min(called.get(id(part), len(called)) for part in each.modules())
                if parameters & trained or first < len(called):
                    found.append((first, each))
                    with_parameters += bool(parameters)
        found.sort(key=itemgetter(0))  # in the order of calls, because the collector has none
        variables = {id(value): name for name, value in [*vars(sys.modules["__main__"]).items()]}
        names = [variables.get(id(each), type(each).__name__) for _, each in found]
        numbers = {name: count() for name, times in Counter(names).items() if times > 1}
        models = dict[str, nn.Module]()
        for name, (_, model) in zip(names, found):
            if name in numbers:
                name = f"{next(numbers[name])}.{name}"
            if with_parameters == 1 and next(model.parameters(), None) is not None:
                name = ""
            while isinstance(model, DataParallel | DistributedDataParallel):
                model = model.module
            models[name] = model
        return models


_watch: Watch | None = None
_unwraps: dict[str, Callable[[], None]] = {}


def _notice(kind: StepKind, called: Any) -> None:
    if _watch is not None:
        _watch.notice(kind, called)


# Dynamo would compile all of this if a compiled function calls an optimizer
skip_in_dynamo(_notice, and_all_within=True)


def _wrap(key: str, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    _unwraps[key] = wrap_function(owner, name, wrap)


def _unwrap(keep: Collection[str] = ()) -> None:
    if "forward" not in keep:
        module_calls.listen(None)
    for key in _unwraps.keys() - keep:
        _unwraps.pop(key)()


def _leave_to_parent() -> None:
    global _watch
    _watch = None
    one_profiler.before_start.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
