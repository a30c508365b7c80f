"""`instrument --version`, and with `--verbose` what somebody who looks for a fault must know."""

from __future__ import annotations

import argparse
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from instrument import __version__
from instrument.base.printable import printable_lines
from instrument.cli.output import Written

_OF_DEVELOPERS = re.compile(r"extra == '(bench|dev|docs|soak|test)'")


def run(arguments: argparse.Namespace) -> str:
    """The version and the trace reader; with `--verbose` also Python, torch, packages, devices."""
    line = f"instrument {__version__}, {_reader()} trace reader"
    if not arguments.verbose:
        return line
    python = f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs"
    return Written(printable_lines(line, python, _torch(), *_packages()))


def _reader() -> str:
    try:
        import instrument.read.trace._scanner  # noqa: F401
    except ImportError:
        return "pure Python"
    return "compiled"


def _torch() -> str:
    """The version of torch and the devices that it finds, or why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation is what a report may be about
        return f"torch cannot be imported: {error!r}"
    built = [
        f"{name} {of}" for name in ("cuda", "hip") if (of := getattr(torch.version, name, None))
    ]
    devices = ["no device"]
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    elif torch.accelerator.is_available():
        devices = [str(torch.accelerator.current_accelerator())]
    return ", ".join([f"torch {torch.__version__}", *built, *devices])


def _packages() -> list[str]:
    """The versions of the packages that this one requires, or has extras for."""
    try:
        declared = requires("torch-instrument") or []
    except PackageNotFoundError:
        return ["torch-instrument is not installed: its packages are not known."]
    used = [each for each in declared if not _OF_DEVELOPERS.search(each)]
    names = dict.fromkeys(re.split(r"[^\w.-]", each)[0] for each in used)
    found = {name: _version(name) for name in sorted(names) if name != "torch"}
    missing = ", ".join(name for name, number in found.items() if not number)
    return [
        ", ".join(f"{name} {number}" for name, number in found.items() if number),
        f"not installed: {missing or 'none'}",
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
