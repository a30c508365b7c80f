"""The model and the inputs that the command `instrument graph` names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from instrument.base.errors import ConfigError


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


def made_inputs(given: Sequence[str], device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return positional and keyword arguments for inputs such as `input_ids=8,128:int64`.

    Floats are random. Integers are 0, which is a valid index of every embedding. Booleans are true.

    Raises:
        ConfigError: an input has another form.
        RuntimeError: torch cannot make an input.
    """
    made = [(text.rpartition("=")[0], _made(text, device)) for text in given]
    return [tensor for name, tensor in made if not name], {name: t for name, t in made if name}


def _made(text: str, device: str) -> Tensor:
    sizes, _, kind = text.rpartition("=")[2].partition(":")
    dtype = getattr(torch, kind or "float32", None)
    shape = [int(size) for size in sizes.split(",") if size.isdecimal()]
    if not isinstance(dtype, torch.dtype) or ",".join(map(str, shape)) != sizes.strip(","):
        raise ConfigError(
            f"--input {text} is not a shape: write a shape such as 1,3,224,224, or a name, a shape "
            "and a type, such as input_ids=8,128:int64."
        )
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.full(shape, dtype is torch.bool, dtype=dtype, device=device)
