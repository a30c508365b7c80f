"""A loss that is infinite or NaN requests a window."""

from __future__ import annotations

import math
from pathlib import Path

from instrument.record.triggers.trigger import RequestWindow, Step, Trigger, TriggerCallbacks


class NonFiniteLoss(Trigger):
    """Fires when the loss in `session.step(loss=…)` becomes infinite or NaN.

    The trigger fires one or more steps after the step of this loss, because the loss is copied from
    the device asynchronously.
    """

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:  # noqa: ARG002
        """Create the state of one run. The trigger also fires if the first loss is not finite."""
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
