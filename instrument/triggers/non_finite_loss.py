"""A loss that is infinite or no number asks for a window."""

from __future__ import annotations

import math
from pathlib import Path

from instrument.triggers import Ask, Step, Trigger, TriggerCallbacks


class NonFiniteLoss(Trigger):
    """Fires when the loss given to `session.step(loss=…)` becomes infinite or no number, a step or more later."""

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks:  # noqa: ARG002
        """Begin as if the loss had been finite."""
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
