"""`instrument_model` gives each submodule of a model a range, without changes in the model."""

from __future__ import annotations

import difflib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from instrument.annotate import backends, module_calls
from instrument.annotate.module_calls import ModuleRange
from instrument.base.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


@dataclass(frozen=True)
class ModuleFilter:
    """Which submodules of a model get a range, and with which prefix; see `instrument_model`."""

    depth: int | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    types: Sequence[str | type] = ()
    prefix: str = ""

    def matches(self, path: str, module: nn.Module) -> bool:
        """Whether the submodule with this qualified name gets a range."""
        depth, name = path.count(".") + 1 if path else 0, self.range_name(path)
        return (
            (self.depth is None or depth <= self.depth)
            and (not self.include or _matches_any(name, self.include))
            and not _matches_any(name, self.exclude)
            and (not self.types or any(_is_a(module, kind) for kind in self.types))
        )

    def range_name(self, path: str) -> str:
        """The name of a submodule's range: the prefix, if any, and the qualified name."""
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path


_instrumented: weakref.WeakKeyDictionary[nn.Module, ModuleFilter] = weakref.WeakKeyDictionary()


def instrument_model(
    model: M,
    depth: int | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    types: Sequence[str | type] = (),
) -> M:
    """Give each submodule of `model` a range in every recorded window.

    The name of a range is the qualified name of the submodule.

    While a window is open, `nn.Module.__call__` is wrapped. The model itself does not change, so
    it can be copied, saved and scripted as usual. The range of the model itself has the name of the
    model's class. A module with several names has a range with the first name. A container that is
    never called, such as `nn.ModuleList`, has no range. A second call for the same model replaces
    the selection of the first call.

    Args:
        model: returned as it is.
        depth: how many levels of submodules get ranges. 0 means only the model itself, 1 means also
            its children, None means all levels.
        include: globs over qualified names (`layers.*.self_attn`). If empty, all names match.
        exclude: globs over the qualified names of submodules that get no range.
        types: classes, or globs over class names (`*Attention`). If empty, all classes match.

    Cost: none while no window is open. In a window, about 4 µs per call of a submodule, and 0.4 µs
    per call of any other module in the process. With `profiler.timings.modules`, these costs apply
    to the whole run. Submodules inside a compiled region or in the replicas of
    `nn.DataParallel` get no ranges; the capture lists them. With `INSTRUMENT_DISABLE=1` in the
    environment, this function does nothing.

    Raises:
        ConfigError: the options select no submodule, or a glob in `include` or `exclude` matches no
            submodule.
    """
    if not backends.disabled:
        module_filter = ModuleFilter(depth, include, exclude, types)
        _check({"": model}, module_filter)
        _instrumented[model] = module_filter
    return model


def instrumented_models() -> list[nn.Module]:
    """The models whose submodules get ranges."""
    return list(_instrumented)


def named_models(given: Any) -> dict[str, nn.Module]:
    """A session's models, by the prefix of their ranges' names.

    The prefix of a single model is empty. In a mapping, the prefix of a model is its key. In a
    list, the prefix is the model's index and class, such as `0.Generator`.

    Raises:
        ConfigError: `given` is neither a module nor a list, tuple or mapping of modules.
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
            held = "is" if model is given else f"is a {type(given).__name__} that holds a value"
            raise ConfigError(
                f"A session's model {held} of type {type(model).__name__}, but it must be an "
                "nn.Module, or a list, tuple or dict of such modules."
            )
    return models


def instrument_models(
    models: Mapping[str, nn.Module], module_filter: ModuleFilter
) -> list[nn.Module]:
    """Instrument those models (see `named_models`) that are not instrumented yet; return these."""
    models = {prefix: model for prefix, model in models.items() if model not in _instrumented}
    if not models or backends.disabled:
        return []
    _check(models, module_filter)
    for prefix, model in models.items():
        _instrumented[model] = replace(module_filter, prefix=prefix)
    return list(models.values())


def forget(model: nn.Module) -> None:
    """Undo `instrument_model` for a model: its submodules get no more ranges."""
    _instrumented.pop(model, None)


class ModuleRanges:
    """The ranges of all instrumented models, attached from `__enter__` to `__exit__`.

    A submodule that already has a range, of `profiler.timings.modules`, keeps it.
    """

    def __init__(self) -> None:
        self._calls_before: dict[ModuleRange, int] = {}
        self._eval_calls_before: dict[ModuleRange, int] = {}
        self._marked_calls_before: dict[ModuleRange, int] = {}
        self._attached: list[nn.Module] = []

    def unseen(self, *, with_marked: bool = False) -> set[str]:
        """The names of submodules not called since `__enter__`, or called in a compiled region.

        `with_marked` includes modules that the user marked with `profiled`.
        """
        before = self._calls_before | (self._marked_calls_before if with_marked else {})
        # names, because a compiled model and the original model inside it share names
        names = {each.name for each in before}
        return names - {each.name for each, calls in before.items() if each.calls > calls}

    def types(self) -> dict[str, str]:
        """The classes of the submodules whose ranges opened, by the name of the range.

        If submodules of several classes share a name, the text is like "Conv2d or Linear".
        """
        found: dict[str, set[str]] = {}
        for each, calls in self._calls_before.items():
            if each.calls > calls and each.type is not None:
                found.setdefault(each.name, set()).add(each.type)
        return {name: " or ".join(sorted(types)) for name, types in found.items()}

    def eval_calls(self) -> dict[str, int]:
        """How often submodules were called in eval mode, if they were called in both modes."""
        calls, in_eval = Counter[str](), Counter[str]()
        for each, before in self._calls_before.items():
            calls[each.name] += each.calls - before
            in_eval[each.name] += each.eval_calls - self._eval_calls_before[each]
        return {name: number for name, number in in_eval.items() if 0 < number < calls[name]}

    def repeated_calls(self) -> dict[str, int]:
        """How often models were called with the same inputs as in the call before."""
        return {each.name: each.repeated for each in self._calls_before if each.repeated}

    def differentiating(self) -> set[str]:
        """The submodules of which an input required gradients, or is of an unknown kind."""
        return {each.name for each in self._calls_before if each.differentiates}

    def __enter__(self) -> ModuleRanges:
        for name, module in selected_modules():
            own = module_calls.attached(module)
            if own is None:
                own = module_calls.attach(module, name)
                self._attached.append(module)
            self._calls_before[own], self._eval_calls_before[own] = own.calls, own.eval_calls
            own.is_model, own.inputs = module in _instrumented, []
            own.repeated, own.differentiates = 0, False
        self._marked_calls_before = {each: each.calls for each in module_calls.marks()}
        return self

    def __exit__(self, *exception: object) -> None:
        module_calls.detach(self._attached)
        self._attached.clear()


def attach_ranges() -> ModuleRanges | None:
    """Attach the ranges of all instrumented models; return None if no module gets a range."""
    return ModuleRanges().__enter__() if _instrumented or module_calls.marks() else None


def selected_modules() -> Iterator[tuple[str, nn.Module]]:
    """The submodules that get ranges, with the names of their ranges."""
    for model, module_filter in list(_instrumented.items()):
        for path, module in model.named_modules():
            # a compiled module holds the original module as `_orig_mod`
            name = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
            if module_filter.matches(name, module) and _has_forward(module):
                kind = type(getattr(module, "_orig_mod", module)).__name__
                yield module_filter.range_name(name) or kind, module


def _has_forward(module: nn.Module) -> bool:
    """Whether Python calls the module's `forward`; false for containers and TorchScript modules."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def _check(models: Mapping[str, nn.Module], module_filter: ModuleFilter) -> None:
    filters = [(replace(module_filter, prefix=prefix), model) for prefix, model in models.items()]
    names = [each.range_name(path) for each, model in filters for path, _ in model.named_modules()]
    for option in ("include", "exclude"):
        for glob in getattr(module_filter, option):
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[1:4]
                raise ConfigError(
                    f"instrument_model was given {option}={glob!r}, which matches no submodule; "
                    f"similar names: {', '.join(near) or 'none, the model has no submodules'}."
                )
    if not any(
        each.matches(path, module)
        for each, model in filters
        for path, module in model.named_modules()
    ):
        raise ConfigError(
            "instrument_model was given options that select no submodule of "
            f"{' or '.join(type(model).__name__ for model in models.values())}: "
            f"depth={module_filter.depth}, include={list(module_filter.include)}, "
            f"exclude={list(module_filter.exclude)}, types={list(module_filter.types)}; "
            "change them."
        )


def _matches_any(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


def _is_a(module: nn.Module, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    return any(fnmatchcase(base.__name__, kind) for base in type(module).__mro__)
