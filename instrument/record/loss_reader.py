"""Copies losses to the CPU without making training wait for the device."""

from __future__ import annotations

from typing import Any

import torch

from instrument.base.errors import reason_of
from instrument.base.log import logger
from instrument.base.signals import raised_by_handler


class LossReader:
    """Reads losses for triggers; a loss is delivered one or more steps after its own step.

    From a device, a loss is copied asynchronously into pinned memory; further losses are skipped
    until the copy is complete.
    """

    def __init__(self) -> None:
        self._known: tuple[float, int] | None = None
        self._copied: Any = None  # the event after the copy; None while no copy is in progress
        self._copied_step = 0  # the step of the loss that is copied
        self._pinned: torch.Tensor | None = None
        self._warned = False

    def after_step(self, number: int, loss: Any) -> tuple[float | None, int | None]:
        """Take the loss of step `number`; return the newest loss that is ready, and its step.

        Each loss is returned once. If no new loss is ready, the result is (None, None).
        """
        known, self._known = self._known, None
        try:
            if self._copied is not None:
                known = self._read_copy()
            if loss is None:
                return known or (None, None)
            if isinstance(loss, torch.Tensor):
                loss = loss.detach()  # torch warns of the conversion of a tensor with a gradient
            if not isinstance(loss, torch.Tensor) or loss.is_cpu:
                self._known = float(loss), number
            elif self._copied is None:
                self._begin_copy(loss.reshape(()))
                self._copied_step = number
        except Exception as error:
            if raised_by_handler(error):
                raise
            if not self._warned:
                self._warned = True
                logger.warning(
                    "session.step was given a loss that is not a single number ({}): triggers get "
                    "no loss.",
                    reason_of(error),
                )
        return known or (None, None)

    def _begin_copy(self, loss: torch.Tensor) -> None:
        if self._pinned is None or self._pinned.dtype != loss.dtype:
            self._pinned = torch.empty((), dtype=loss.dtype, pin_memory=True)
        self._pinned.copy_(loss, non_blocking=True)
        device = torch.get_device_module(loss.device)
        # that of the copy, whichever device is the current one; mps has one device, and no streams
        streams = [device.current_stream(loss.device)] if hasattr(device, "current_stream") else []
        self._copied = device.Event()
        self._copied.record(*streams)

    def _read_copy(self) -> tuple[float, int] | None:
        if self._pinned is None or not self._copied.query():
            return None
        self._copied = None
        return float(self._pinned), self._copied_step
