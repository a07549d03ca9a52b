"""Evaluates a checkpoint in `train_and_evaluate`, and calls the exporters."""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from jaxdist.estimator._estimator import Estimator
from jaxdist.estimator._hooks import CheckpointSaverListener, Session
from jaxdist.estimator._specs import EvalSpec


class Evaluations:
    """Evaluates checkpoints, and calls exporters.

    Args:
        estimator: The estimator.
        spec: The settings of the evaluation.
    """

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self.result: dict[str, Any] | None = None
        self.exported: Sequence[str | None] = ()
        self._path: str | None = None

    def evaluate(self, checkpoint_path: str) -> dict[str, Any]:
        """Evaluate a checkpoint, and call the exporters."""
        spec = self._spec
        self.result = self._estimator.evaluate(
            spec.input_fn,
            steps=spec.steps,
            hooks=spec.hooks,
            checkpoint_path=checkpoint_path,
            name=spec.name,
        )
        self._path = checkpoint_path
        self._export(is_final=False)
        return self.result

    def finish(self) -> None:
        """Call the exporters for the last evaluation."""
        self._export(is_final=True)

    def _export(self, *, is_final: bool) -> None:
        result, path = self.result, self._path
        if result is None or path is None:
            return
        base = pathlib.Path(self._estimator.model_dir, "export")
        found = []
        for exporter in self._spec.exporters:
            exported = exporter.export(
                self._estimator, str(base / exporter.name), path, result, is_final
            )
            found.append(exported)
        self.exported = tuple(found)


class EvaluatingListener(CheckpointSaverListener):
    """Evaluates each checkpoint of a training in this process, at most once per throttle_secs.

    Args:
        estimator: The estimator.
        evaluations: The evaluations that it runs.
        seconds: The time between the starts of two evaluations.
    """

    def __init__(self, estimator: Estimator, evaluations: Evaluations, seconds: float) -> None:
        self._estimator, self._evaluations, self._seconds = estimator, evaluations, seconds
        self._began: float | None = None
        self._step: int | None = None

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluate, unless at step 0 or too soon after the last evaluation."""
        # Training saves a model before its first step, with its initial values.
        if global_step_value == 0:
            return
        now = time.monotonic()
        if self._began is None or now - self._began >= self._seconds:
            self._evaluate(global_step_value)

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluate the last step, unless it was evaluated."""
        if self._step != global_step_value:
            self._evaluate(global_step_value)
        self._evaluations.finish()

    def _evaluate(self, step: int) -> None:
        self._began, self._step = time.monotonic(), step
        path = pathlib.Path(self._estimator.model_dir, "checkpoints", str(step))
        self._evaluations.evaluate(str(path))
