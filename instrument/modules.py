"""`instrument_model`: a range for each submodule of a model that nobody edits."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from instrument import emit
from instrument.annotate import Range
from instrument.errors import ConfigError

if TYPE_CHECKING:  # so that a model file that calls `instrument_model` loads no pydantic
    from instrument.config import ModulesConfig

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Choice:
    """Which submodules of a model get a range; see `instrument_model`."""

    depth: int | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    types: Sequence[str | type] = ()

    def takes(self, path: str, module: nn.Module) -> bool:
        """Whether the submodule of this qualified name gets a range."""
        depth = path.count(".") + 1 if path else 0
        return (
            (self.depth is None or depth <= self.depth)
            and (not self.include or _matches(path, self.include))
            and not _matches(path, self.exclude)
            and (not self.types or any(_is_a(module, kind) for kind in self.types))
        )


_instrumented: weakref.WeakKeyDictionary[nn.Module, Choice] = weakref.WeakKeyDictionary()


def instrument_model(
    model: M,
    depth: int | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    types: Sequence[str | type] = (),
) -> M:
    """Give the submodules of `model` a range each, under their qualified names, in every window that is recorded.

    Nothing is done to the model until a window warms up; the forward hooks that make the ranges are removed when it
    ends, also after an exception. The root bears its class name; a module shared under several names bears the first; a
    container that is never called, such as `nn.ModuleList`, shows no range. A second call replaces the first one's
    choice.

    Args:
        model: returned as it is.
        depth: how deep to go; 0 is the model itself, 1 its children; None: all the way.
        include: globs over qualified names (`layers.*.self_attn`); nothing: all of them.
        exclude: globs over qualified names that are left out.
        types: classes, or globs over class names (`*Attention`); nothing: all of them.

    Cost: none while no window is open; two hooks per submodule and call, about 6 µs, in a window; with
    `profiler.timings.modules` they are there in the whole run. Lost: what runs
    inside a compiled region; the capture lists those submodules. With `INSTRUMENT_DISABLE=1` in the environment,
    nothing is done.

    Raises:
        ConfigError: the choice leaves no submodule at all, or a glob matches none; the nearest names are listed.
    """
    if not emit.disabled:
        choice = Choice(depth, tuple(include), tuple(exclude), tuple(types))
        _check(model, choice)
        _instrumented[model] = choice
    return model


def is_instrumented(model: nn.Module) -> bool:
    """Whether `instrument_model` was called for it."""
    return model in _instrumented


def instrument_chosen(model: nn.Module | None, config: ModulesConfig) -> nn.Module | None:
    """Instrument a session's model as its config says, unless the owner has done so already; gives what it did."""
    if model is None or not config.enabled or is_instrumented(model):
        return None
    chosen = {name: getattr(config, name) for name in ("include", "exclude", "types")}
    return instrument_model(model, config.depth, **chosen)


def forget(model: nn.Module) -> None:
    """Take back what `instrument_model` and `stand_in` did."""
    _instrumented.pop(model, None)
    _stand_ins.pop(model, None)


_stand_ins: weakref.WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = weakref.WeakKeyDictionary()


def stand_in(model: nn.Module, forward: AbstractContextManager[Any]) -> None:
    """Have `forward` entered while a window warms up or records, to stand in for the model's own."""
    if not emit.disabled:
        _stand_ins[model] = forward


class ModuleRanges:
    """The ranges of all instrumented models, attached from `__enter__` to `__exit__`.

    A submodule whose range is attached already, by timings of the whole run, keeps that one. With `stand_ins`, what
    stands in for the models' forwards does so meanwhile.
    """

    def __init__(self, *, stand_ins: bool = False) -> None:
        self._stand_ins: list[AbstractContextManager[Any]] = list(_stand_ins.values()) if stand_ins else []
        self._calls_before: dict[_ModuleRange, int] = {}
        self._attached: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def unseen(self) -> set[str]:
        """The names of those that were not opened yet: not called, or inside a compiled region."""
        names = {each.name for each in self._calls_before}  # a compiled model and the one in it share theirs
        return names - {each.name for each, before in self._calls_before.items() if each.calls > before}

    def __enter__(self) -> ModuleRanges:
        for name, module in _chosen():
            if module not in _ranges:
                _ranges[module] = _ModuleRange(name)
                self._attached.append(module)
                self._hooks += _ranges[module].hook(module)
            self._calls_before[_ranges[module]] = _ranges[module].calls
        for each in self._stand_ins:
            each.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._stand_ins:
            each.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        for module in self._attached:
            _ranges.pop(module, None)
        self.close_left_open()

    def close_left_open(self) -> None:
        """Close ranges whose forward ended without its hook being called, which KeyboardInterrupt does."""
        for each in reversed(self._calls_before):
            each.close_all()


def _chosen() -> Iterator[tuple[str, nn.Module]]:
    """The ranges' names and the modules they belong to, of all instrumented models."""
    for model, choice in list(_instrumented.items()):
        for path, module in model.named_modules():
            name = path.replace("_orig_mod.", "").removesuffix("_orig_mod")  # what torch.compile puts around a module
            if choice.takes(name, module) and _has_forward(module):
                yield name or type(getattr(module, "_orig_mod", module)).__name__, module


def _has_forward(module: nn.Module) -> bool:
    """Whether hooks on it can fire: containers are never called, and TorchScript takes no Python hooks."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


class _ModuleRange(Range):
    """The range of one submodule, which counts its calls while annotations are armed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls = 0

    def before_forward(self, *_: Any) -> None:
        # Dynamo traces through hooks that are there when it compiles; asked first, so that it never guards on the flag.
        if not is_dynamo_compiling() and emit.armed:
            self.calls += 1
        self.__enter__()

    def __reduce__(self) -> tuple[type[_ModuleRange], tuple[str]]:
        return _ModuleRange, (self.name,)  # of a model that is copied within a window


_ranges: weakref.WeakKeyDictionary[nn.Module, _ModuleRange] = weakref.WeakKeyDictionary()  # those attached now


def _check(model: nn.Module, choice: Choice) -> None:
    names = [path for path, _ in model.named_modules()]
    for option in ("include", "exclude"):
        for glob in getattr(choice, option):
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[1:4]
                raise ConfigError(
                    f"instrument_model was given {option}={glob!r}, which matches no submodule; near it are "
                    f"{', '.join(near) or 'none, for the model has none'}."
                )
    if not any(choice.takes(path, module) for path, module in model.named_modules()):
        raise ConfigError(
            f"instrument_model was given a choice that leaves no submodule of {type(model).__name__}: "
            f"depth={choice.depth}, include={list(choice.include)}, exclude={list(choice.exclude)}, "
            f"types={list(choice.types)}; widen it."
        )


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


def _is_a(module: nn.Module, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    return any(fnmatchcase(base.__name__, kind) for base in type(module).__mro__)
