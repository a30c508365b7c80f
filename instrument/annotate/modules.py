"""`instrument_model`: a range for each submodule of a model that nobody edits."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from instrument.annotate import backends, module_calls
from instrument.annotate.module_calls import ModuleRange
from instrument.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Choice:
    """Which submodules of a model get a range; see `instrument_model`. Their names begin with `prefix`, if any."""

    depth: int | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    types: Sequence[str | type] = ()
    prefix: str = ""

    def takes(self, path: str, module: nn.Module) -> bool:
        """Whether the submodule of this qualified name gets a range."""
        depth, name = path.count(".") + 1 if path else 0, self.named(path)
        return (
            (self.depth is None or depth <= self.depth)
            and (not self.include or _matches(name, self.include))
            and not _matches(name, self.exclude)
            and (not self.types or any(_is_a(module, kind) for kind in self.types))
        )

    def named(self, path: str) -> str:
        """The qualified name with the prefix."""
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path


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

    Nothing is done to the model: while a window is open, `nn.Module.__call__` is wrapped, so that copies, saved files
    and TorchScript see the model as it is. The root bears its class name; a module shared under several names bears the
    first; a container that is never called, such as `nn.ModuleList`, shows no range. A second call replaces the first
    one's choice.

    Args:
        model: returned as it is.
        depth: how deep to go; 0 is the model itself, 1 its children; None: all the way.
        include: globs over qualified names (`layers.*.self_attn`); nothing: all of them.
        exclude: globs over qualified names that are left out.
        types: classes, or globs over class names (`*Attention`); nothing: all of them.

    Cost: none while no window is open; in a window about 4 µs per call of a submodule, and 0.4 µs per call
    of any other module of the process; with `profiler.timings.modules` so in the whole run. Lost: what runs inside
    a compiled region, and in the replicas of `nn.DataParallel`; the capture lists those submodules. With
    `INSTRUMENT_DISABLE=1` in the environment, nothing is done.

    Raises:
        ConfigError: the choice leaves no submodule at all, or a glob matches none; the nearest names are listed.
    """
    if not backends.disabled:
        _instrument({"": model}, Choice(depth, tuple(include), tuple(exclude), tuple(types)))
    return model


def is_instrumented(model: nn.Module) -> bool:
    """Whether `instrument_model` was called for it."""
    return model in _instrumented


def any_instrumented() -> bool:
    """Whether any model's submodules get ranges in windows."""
    return bool(_instrumented)


def named_models(given: Any) -> dict[str, nn.Module]:
    """A session's models by the prefix of their ranges' names, which is empty for a single one.

    Of a mapping these are its keys; in a list each model bears its index and class, as `0.Generator`.

    Raises:
        ConfigError: it is neither a module, nor a list, tuple or mapping of modules.
    """
    if given is None or isinstance(given, nn.Module):
        return {} if given is None else {"": given}
    if isinstance(given, Mapping):
        models = {str(name): model for name, model in given.items()}
    elif isinstance(given, list | tuple):
        models = {f"{index}.{type(model).__name__}": model for index, model in enumerate(given)}
    else:
        models = {"": given}
    for model in models.values():
        if not isinstance(model, nn.Module):
            held = "" if model is given else f"a {type(given).__name__} that holds "
            raise ConfigError(
                f"A session's model is {held}a {type(model).__name__}, but it must be an nn.Module, or a list, tuple "
                "or dict of them."
            )
    return models


def instrument_models(
    models: Mapping[str, nn.Module],
    *,
    depth: int | None,
    include: Sequence[str],
    exclude: Sequence[str],
    types: Sequence[str],
) -> list[nn.Module]:
    """Instrument models, named as by `named_models`, but for those whose owner has; gives those that it did.

    The choice is that of `instrument_model`, whose ConfigError this raises too.
    """
    models = {prefix: model for prefix, model in models.items() if not is_instrumented(model)}
    if not models or backends.disabled:
        return []
    _instrument(models, Choice(depth, tuple(include), tuple(exclude), tuple(types)))
    return list(models.values())


def _instrument(models: Mapping[str, nn.Module], choice: Choice) -> None:
    _check(models, choice)
    for prefix, model in models.items():
        _instrumented[model] = replace(choice, prefix=prefix)


def forget(model: nn.Module) -> None:
    """Take back what `instrument_model` did."""
    _instrumented.pop(model, None)


class ModuleRanges:
    """The ranges of all instrumented models, attached from `__enter__` to `__exit__`.

    A submodule whose range is attached already, by timings of the whole run, keeps that one.
    """

    def __init__(self) -> None:
        self._calls_before: dict[ModuleRange, int] = {}
        self._marks_before: dict[ModuleRange, int] = {}
        self._attached: list[nn.Module] = []

    def unseen(self, *, of_marks: bool = False) -> set[str]:
        """The names of those that were not opened yet: not called, or inside a compiled region; `of_marks` too."""
        before = self._calls_before | (self._marks_before if of_marks else {})
        names = {each.name for each in before}  # a compiled model and the one in it share theirs
        return names - {each.name for each, calls in before.items() if each.calls > calls}

    def types(self) -> dict[str, str]:
        """The class of each submodule whose range was opened, by its name; of several, all of them."""
        found: dict[str, set[str]] = {}
        for each, calls in self._calls_before.items():
            if each.calls > calls and each.type is not None:
                found.setdefault(each.name, set()).add(each.type)
        return {name: " or ".join(sorted(types)) for name, types in found.items()}

    def __enter__(self) -> ModuleRanges:
        for name, module in _chosen():
            own = module_calls.attached(module)
            if own is None:
                own = module_calls.attach(module, name)
                self._attached.append(module)
            self._calls_before[own] = own.calls
        self._marks_before = {each: each.calls for each in module_calls.marks()}
        return self

    def __exit__(self, *exception: object) -> None:
        module_calls.detach(self._attached)
        self._attached.clear()


def attach_ranges() -> ModuleRanges | None:
    """Open ranges around the calls of all instrumented models until `__exit__`; None where no module has a range."""
    return ModuleRanges().__enter__() if _instrumented or module_calls.marks() else None


def _chosen() -> Iterator[tuple[str, nn.Module]]:
    """The ranges' names and the modules they belong to, of all instrumented models."""
    for model, choice in list(_instrumented.items()):
        for path, module in model.named_modules():
            name = path.replace("_orig_mod.", "").removesuffix(
                "_orig_mod"
            )  # what torch.compile puts around a module
            if choice.takes(name, module) and _has_forward(module):
                yield (
                    choice.named(name) or type(getattr(module, "_orig_mod", module)).__name__,
                    module,
                )


def _has_forward(module: nn.Module) -> bool:
    """Whether it can have a range: containers are never called, and TorchScript runs its submodules by itself."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def _check(models: Mapping[str, nn.Module], choice: Choice) -> None:
    choices = [(replace(choice, prefix=prefix), model) for prefix, model in models.items()]
    names = [own.named(path) for own, model in choices for path, _ in model.named_modules()]
    for option in ("include", "exclude"):
        for glob in getattr(choice, option):
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[1:4]
                raise ConfigError(
                    f"instrument_model was given {option}={glob!r}, which matches no submodule; near it are "
                    f"{', '.join(near) or 'none, for the model has none'}."
                )
    if not any(
        own.takes(path, module) for own, model in choices for path, module in model.named_modules()
    ):
        raise ConfigError(
            "instrument_model was given a choice that leaves no submodule of "
            f"{' or '.join(type(model).__name__ for model in models.values())}: "
            f"depth={choice.depth}, include={list(choice.include)}, exclude={list(choice.exclude)}, "
            f"types={list(choice.types)}; widen it."
        )


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


def _is_a(module: nn.Module, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    return any(fnmatchcase(base.__name__, kind) for base in type(module).__mro__)
