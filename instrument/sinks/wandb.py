"""Windows in Weights & Biases: scalars as curves, captures as artifacts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from instrument.errors import need_package
from instrument.sinks.tracker import Sent, Tracker

_STEP = "profile/step"


class WandB(Tracker):
    """Logs each window into the run that is live where training goes on, or else into one of its own.

    The curves' axis is `profile/step`, the window's last training step; the run's own step is left alone, so that no
    `wandb.log(…, step=…)` of the program's is refused. Each capture is a version of the artifact `profile-<run id>`, of
    type `profile`, with its name as alias.

    A run that is live is never finished. One of its own, in `mode` or as WANDB_MODE says, is finished with the session.

    Lost: of windows that end between two logs of the program's, the scalars of all but the last, unless `commit`.

    Raises:
        MissingPackage: the package `wandb` is not installed; when the sink is built.
    """

    sink_name: ClassVar[str] = "wandb"

    project: str | None = None
    """Of a run of its own; None: WANDB_PROJECT, or wandb's default."""

    name: str | None = None
    """Of a run of its own; None: wandb makes one up."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """Of a run of its own; None: WANDB_MODE, or online."""

    commit: bool = False
    """Whether each window is a row of the live run's history by itself, which moves that run's step on by one."""

    _live: Any = PrivateAttr(None)  # the program's own run
    _own: Any = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        """Look for the package now, before the first step."""
        super().model_post_init(context)
        need_package("The wandb sink", "wandb", "wandb")

    def notice(self) -> None:
        """Remember the live run: should it be finished before the last window is sent, no other takes its place."""
        import wandb  # takes seconds: before the first step

        self._live = wandb.run or self._live

    def send(self, sent: Sent) -> None:
        """Log the scalars and the artifact; wandb uploads both in a process of its own."""
        import wandb

        run = self._live or wandb.run or (None if sent.rank else self._begun())
        if run is None:
            return
        if sent.values:
            run.define_metric(_STEP, hidden=True)
            run.define_metric("profile/*", step_metric=_STEP)
            run.log({**sent.values, _STEP: sent.step}, commit=self.commit or run is self._own)
        if sent.files:
            artifact = wandb.Artifact(
                f"profile-{run.id}", type="profile", metadata={"step": sent.step}
            )
            for file in sent.files:
                artifact.add_file(str(file), name=file.relative_to(sent.folder).as_posix())
            run.log_artifact(artifact, aliases=["latest", sent.name])

    def end(self) -> None:
        """Finish the run of its own, and forget the program's."""
        run, self._own, self._live = self._own, None, None
        if run is not None:
            run.finish()

    def _begun(self) -> Any:
        import wandb

        if self._own is None:
            bounded: dict[str, Any] = (
                {"finish_timeout": self.timeout_s}
                if "finish_timeout" in wandb.Settings.model_fields
                else {}
            )
            settings = wandb.Settings(**bounded)  # older ones wait at exit for as long as it takes
            self._own = wandb.init(
                project=self.project,
                name=self.name,
                mode=self.mode,
                settings=settings,
                reinit="create_new",
            )
        return self._own
