"""A loss that is infinite or NaN requests a window."""

from __future__ import annotations

import math
from pathlib import Path

from instrument.triggers import RequestWindow, Step, Trigger, TriggerCallbacks


class NonFiniteLoss(Trigger):
    """Fires one or more steps after the loss in `session.step(loss=…)` becomes infinite or NaN."""

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:  # noqa: ARG002
        """Start the run as if the previous loss was finite."""
        was_finite = True

        def fires(step: Step) -> str | None:
            nonlocal was_finite
            loss = step.loss
            if loss is None:
                return None
            before, was_finite = was_finite, math.isfinite(loss)
            return (
                f"the loss of step {step.loss_step} is {loss}"
                if before and not was_finite
                else None
            )

        return TriggerCallbacks(fires)
