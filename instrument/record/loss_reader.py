"""Brings losses to the CPU without ever making the training wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from loguru import logger


class LossReader:
    """Losses on their way to the triggers, each seen a step late.

    A tensor on a device is copied into pinned memory beside the work of the device, and read when that copy is done; as
    long as one is on its way, further ones are left out.
    """

    def __init__(self) -> None:
        self._known: tuple[float, int] | None = None
        self._arrives: Any = None  # the event after the copy; None: no copy is on its way
        self._arriving = 0  # the step whose loss it is
        self._pinned: torch.Tensor | None = None
        self._warned = False

    def seen_after(self, number: int, loss: Any) -> tuple[float | None, int | None]:
        """Take the loss of step `number`, and give the newest taken before that was not yet given, with its step."""
        seen, self._known = self._known, None
        try:
            if self._arrives is not None:
                seen = self._arrived()
            if loss is not None:
                self._take(number, loss)
        except Exception as error:
            self._warn(error)
        return seen or (None, None)

    def _take(self, number: int, loss: Any) -> None:
        if isinstance(loss, torch.Tensor) and not loss.is_cpu:
            if self._arrives is None:
                self._send(loss.detach().reshape(()))
                self._arriving = number
        else:
            self._known = float(loss), number

    def _send(self, loss: torch.Tensor) -> None:
        if self._pinned is None or self._pinned.dtype != loss.dtype:
            self._pinned = torch.empty((), dtype=loss.dtype, pin_memory=True)
        self._pinned.copy_(loss, non_blocking=True)
        self._arrives = torch.get_device_module(loss.device).Event()
        self._arrives.record()

    def _arrived(self) -> tuple[float, int] | None:
        if self._pinned is None or not self._arrives.query():
            return None
        self._arrives = None
        return float(self._pinned), self._arriving

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "session.step was given a loss that is no single number ({}): triggers see None.",
                error,
            )
