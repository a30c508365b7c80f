"""A callback that logs captures to Weights & Biases: scalars as curves, captures as artifacts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from instrument.integrations.tracker import Sent, Tracker

_STEP = "profile/step"


class WandB(Tracker):
    """Logs each window into the wandb run that is active in the program, or into a new run.

    The x axis of the curves is `profile/step`, the window's last training step. Each capture is a
    version of the artifact `profile-<run id>` of type `profile`; the version's alias is the name of
    the capture.

    In a run that the program started, this does not advance wandb's own step. So wandb accepts
    every `wandb.log(…, step=…)` of the program. But if several windows end between two calls of
    `wandb.log`, wandb keeps only the scalars of the last window. With `commit=true`, wandb keeps
    all scalars, but each window advances wandb's step.

    At the end of the session, a run that was started for the captures is finished.

    Raises:
        MissingPackage: the package `wandb` is not installed.
    """

    tracker_name: ClassVar[str] = "wandb"

    project: str | None = None
    """The project of a new run; None: WANDB_PROJECT or wandb's default."""

    name: str | None = None
    """The name of a new run; None: wandb chooses one."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """The mode of a new run; None: WANDB_MODE, or `online` if it is not set."""

    commit: bool = False
    """Whether each window is its own row, which advances wandb's step."""

    _active: Any = PrivateAttr(None)  # the program's run
    _own: Any = PrivateAttr(None)

    def begin(self) -> None:
        """Remember the active run, because none may be active when a capture is complete."""
        import wandb  # the import takes seconds, so it is done before the first step

        self._active = wandb.run or self._active

    def send(self, sent: Sent) -> None:
        """Log the scalars and the artifact; wandb uploads both in a separate process."""
        import wandb

        run = self._active or wandb.run or (None if sent.rank else self._new_run())
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
            run.log_artifact(artifact, aliases=["latest", sent.folder.name])

    def end(self) -> None:
        """Finish the wandb run if this object started it, and forget the run of the program."""
        run, self._own, self._active = self._own, None, None
        if run is not None:
            run.finish()

    def _new_run(self) -> Any:
        import wandb

        if self._own is None:
            settings = wandb.Settings()
            if "finish_timeout" in wandb.Settings.model_fields:  # older versions wait without limit
                settings = wandb.Settings(finish_timeout=self.timeout_s)
            self._own = wandb.init(
                project=self.project,
                name=self.name,
                mode=self.mode,
                settings=settings,
                reinit="create_new",
            )
        return self._own
