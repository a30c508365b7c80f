"""Windows in MLflow: scalars as metrics, captures as artifacts."""

from __future__ import annotations

import os
import posixpath
import re
import time
from typing import Any, ClassVar

from pydantic import PrivateAttr

from instrument.errors import need_package
from instrument.sinks.tracker import Sent, Tracker

# What MLflow refuses in a metric's name, how long that may be, and how many metrics it takes at once.
_REFUSED, _LONGEST, _MOST = re.compile(r"[^\w.\- :/]"), 250, 1000


class MLflow(Tracker):
    """Logs each window into the run that is active where training goes on, or else into one of its own.

    A metric's step is the window's last training step. The files of a capture lie in the artifact folder
    `profile/<capture>`. A run that is active is never ended; one of its own ends with the session.

    Lost: characters of a range's name that MLflow refuses become `_`, and what is longer than 250 of them is cut.

    Raises:
        MissingPackage: the package `mlflow` is not installed; when the sink is built.
    """

    sink_name: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    """Where the runs are; None: as `mlflow.set_tracking_uri` or MLFLOW_TRACKING_URI says."""

    run_id: str | None = None
    """The run to log into; None: the active one of the thread that trains, or MLFLOW_RUN_ID."""

    experiment: str | None = None
    """Of a run of its own, made where it is missing; None: MLFLOW_EXPERIMENT_NAME, or MLflow's default."""

    name: str | None = None
    """Of a run of its own; None: MLflow makes one up."""

    _active: str | None = PrivateAttr(None)
    _own: str | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        """Look for the package now, before the first step."""
        super().model_post_init(context)
        need_package("The mlflow sink", "mlflow", "mlflow")

    def notice(self) -> None:
        """Remember the active run, which no other thread can ask for."""
        import mlflow  # takes seconds: before the first step

        run = mlflow.active_run()
        if run is not None and self.tracking_uri in (None, mlflow.get_tracking_uri()):
            self._active = run.info.run_id

    def send(self, sent: Sent) -> None:
        """Log the metrics and the files, by requests that wait for their answers."""
        from mlflow.entities import Metric

        client = self._client()
        run_id = self.run_id or self._active or os.environ.get("MLFLOW_RUN_ID")
        run_id = run_id or (None if sent.rank else self._begun(client))
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
            inner = file.relative_to(sent.folder).parent
            client.log_artifact(
                run_id, str(file), f"profile/{sent.name}/{inner.as_posix()}".removesuffix("/.")
            )

    def end(self) -> None:
        """End the run of its own, and forget the program's."""
        run, self._own, self._active = self._own, None, None
        if run is not None:
            self._client().set_terminated(run)

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    def _begun(self, client: Any) -> str:
        if self._own is None:
            name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            self._own = client.create_run(experiment, run_name=self.name).info.run_id
        return self._own
