"""What `capture.json` says: what was recorded, when, under what config, on what machine, with which versions."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch

FORMAT = 1


def describe(
    name: str, window: Mapping[str, Any], started_at: float, activities: list[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `capture.json`. `started_at` is in seconds since the epoch, when the window's recording began."""
    return {
        "format": FORMAT,
        "name": name,
        "window": dict(window),
        "started_at": datetime.fromtimestamp(started_at, timezone.utc).isoformat(),
        "rank": rank(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "activities": activities,
        "devices": devices(activities),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "processor": platform.processor()},
        "versions": {
            "instrument": version("torch-instrument"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": sys.argv,
        "config": dict(config),
    }


def rank() -> int:
    """This process's rank: torchrun's, and 0 where there is none."""
    return int(os.environ.get("RANK", "0"))


def devices(activities: list[str]) -> list[str]:
    """The names of the devices that were recorded; empty on a host alone."""
    return [
        str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count()) if "cuda" in activities
    ]
