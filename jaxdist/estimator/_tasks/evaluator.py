"""Runs the evaluator of a job: a process that follows the checkpoints."""

import logging
import pathlib
import time

from jaxdist._checkpoints import list_steps
from jaxdist.errors import CheckpointError
from jaxdist.estimator._estimator import Estimator
from jaxdist.estimator._specs import EvalSpec, TrainSpec
from jaxdist.estimator._tasks.evaluation import Evaluations
from jaxdist.estimator._tasks.job_end import find_end

_LOG = logging.getLogger("jaxdist")
_PAUSE = 0.2
_REPORT_SECONDS = 600.0


def run_evaluator(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Evaluate new checkpoints until training has ended and its last checkpoint is evaluated.

    A restarted evaluator begins with the newest checkpoint.
    """
    began = time.time()
    evaluations = Evaluations(estimator, eval_spec)
    folder = pathlib.Path(estimator.model_dir, "checkpoints")
    wait_until = time.monotonic() + eval_spec.start_delay_secs
    next_report = time.monotonic() + _REPORT_SECONDS
    done: int | None = None
    while True:
        end = find_end(estimator.model_dir, began)
        steps = list_steps(folder)
        latest = steps[-1] if steps else None
        is_last = latest is not None and (
            (end is not None and latest >= end)
            or (train_spec.max_steps is not None and latest >= train_spec.max_steps)
        )
        # Once training has ended, waiting helps nobody.
        is_due = is_last or time.monotonic() >= wait_until
        if latest is not None and latest not in (0, done) and is_due:
            wait_until = time.monotonic() + eval_spec.throttle_secs
            if evaluate_checkpoint(evaluations, folder, latest):
                done, next_report = latest, time.monotonic() + _REPORT_SECONDS
            continue
        if is_last and latest in (0, done):
            evaluations.finish()
            return
        if time.monotonic() > next_report:
            next_report = time.monotonic() + _REPORT_SECONDS
            _LOG.info("The evaluator waits for a checkpoint after step %s in %s.", done, folder)
        time.sleep(_PAUSE)


def evaluate_checkpoint(evaluations: Evaluations, folder: pathlib.Path, step: int) -> bool:
    """Evaluate a checkpoint; return whether it still existed."""
    try:
        evaluations.evaluate(str(folder / str(step)))
    except CheckpointError:
        # The chief deletes old checkpoints, even while they are read.
        if step in list_steps(folder):
            raise
        return False
    return True
