"""A callback that logs captures to MLflow: scalars as metrics, their files as artifacts."""

from __future__ import annotations

import os
import posixpath
import re
import time
from typing import Any, ClassVar

from pydantic import PrivateAttr

from instrument.integrations.tracker import Sent, Tracker

# MLflow's limits: the characters that a metric's name must not have, the maximum length of a name,
# and the maximum number of metrics in a request.
_REFUSED, _LONGEST, _MOST = re.compile(r"[^\w.\- :/]"), 250, 1000


class MLflow(Tracker):
    """Logs each window into the MLflow run that is active in the program, or into a new run.

    A metric's step is the window's last training step. The files of a capture go into the artifact
    folder `profile/<capture>`. A run that was started for the captures ends with the session.

    In the names of metrics, `_` replaces characters that MLflow refuses. Names are cut after 250
    characters.

    Raises:
        MissingPackage: the package `mlflow` is not installed.
    """

    tracker_name: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    """The server's URI; None: `mlflow.set_tracking_uri` or MLFLOW_TRACKING_URI."""

    run_id: str | None = None
    """The run to log into; None: the training thread's, or MLFLOW_RUN_ID."""

    experiment: str | None = None
    """The experiment of a new run; None: MLFLOW_EXPERIMENT_NAME or the default."""

    name: str | None = None
    """The name of a new run; None: MLflow chooses one."""

    _active: str | None = PrivateAttr(None)
    _own: str | None = PrivateAttr(None)

    def begin(self) -> None:
        """Remember the active run, which only the training thread can read."""
        import mlflow  # the import takes seconds, so it is done before the first step

        run = mlflow.active_run()
        if run is not None and self.tracking_uri in (None, mlflow.get_tracking_uri()):
            self._active = run.info.run_id

    def send(self, sent: Sent) -> None:
        """Log the metrics and the files; wait for the response to each request."""
        from mlflow.entities import Metric

        client = self._client()
        run_id = self.run_id or self._active or os.environ.get("MLFLOW_RUN_ID")
        run_id = run_id or (None if sent.rank else self._new_run(client))
        if run_id is None:
            return
        now_ms = time.time_ns() // 1_000_000
        named = {
            posixpath.normpath(_REFUSED.sub("_", tag)[:_LONGEST]): value
            for tag, value in sent.values.items()
        }
        metrics = [Metric(tag, value, now_ms, sent.step) for tag, value in named.items()]
        for start in range(0, len(metrics), _MOST):
            client.log_batch(run_id, metrics[start : start + _MOST])
        for file in sent.files:
            parent = file.relative_to(sent.folder).parent.as_posix()
            client.log_artifact(
                run_id, str(file), f"profile/{sent.folder.name}/{parent}".removesuffix("/.")
            )

    def end(self) -> None:
        """End the MLflow run if this object started it; log into no run of the program any more."""
        run, self._own, self._active = self._own, None, None
        if run is not None:
            self._client().set_terminated(run)

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    def _new_run(self, client: Any) -> str:
        if self._own is None:
            name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            self._own = client.create_run(experiment, run_name=self.name).info.run_id
        return self._own
