"""`train_and_evaluate`: trains and evaluates a model, each process by its task."""

import json
import logging
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from jaxdist._buckets import BucketPath, Place, as_place
from jaxdist._called import called
from jaxdist._checkpoints import list_steps, read_dict, replace_file
from jaxdist._launching import FINISHED, LAUNCH_ID
from jaxdist._parameter_server import Server, WorkerStrategy
from jaxdist._strategies import MultiWorkerMirroredStrategy
from jaxdist._validate import check_instance
from jaxdist.errors import ArgumentError, CheckpointError, ClusterError
from jaxdist.estimator._estimator import Estimator
from jaxdist.estimator._hooks import CheckpointSaverListener, Session
from jaxdist.estimator._own_task import TaskType
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._specs import EvalSpec, TrainSpec

_CALLER = "estimator.train_and_evaluate"

_LOG = logging.getLogger("jaxdist")

_NAME = "training_end.json"
_LAUNCHER = "JAXDIST_LAUNCHER"


def tell_end(model_dir: str, step: int) -> None:
    """Write a file that says that training has ended, at which step, and in which job."""
    content = {"step": step, "job": os.environ.get(LAUNCH_ID), "time": time.time()}
    replace_file(_place(model_dir) / _NAME, json.dumps(content).encode())


def _place(model_dir: str) -> Place:
    return as_place("model_dir", model_dir, "runs/a")


def find_end(model_dir: str, since: float) -> int | None:
    """Return the last step of the training of this job; None while it runs.

    Args:
        model_dir: The folder of the model.
        since: When this process began. Without a launcher, an older end is of another job.
    """
    found = read_dict(_place(model_dir) / _NAME)
    try:
        if found is None:
            return None
        own = os.environ.get(LAUNCH_ID)
        is_own = found["job"] == own if own else found["time"] >= since
        return int(found["step"]) if is_own else None
    except (LookupError, TypeError, ValueError):
        return None


def tell_launcher() -> None:
    """Report to `jaxdist launch` that this worker has done its part and may end."""
    folder = os.environ.get(_LAUNCHER)
    if folder:
        pathlib.Path(folder, FINISHED).touch()


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
        base = _place(self._estimator.model_dir) / "export"
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
        path = _place(self._estimator.model_dir) / "checkpoints" / str(step)
        self._evaluations.evaluate(str(path))


_PAUSE, _BUCKET_PAUSE = 0.2, 2.0
_REPORT_SECONDS = 600.0


def run_evaluator(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Evaluate new checkpoints until training has ended and its last checkpoint is evaluated.

    A restarted evaluator begins with the newest checkpoint.
    """
    began = time.time()
    evaluations = Evaluations(estimator, eval_spec)
    folder = _place(estimator.model_dir) / "checkpoints"
    pause = _PAUSE
    if isinstance(folder, BucketPath):
        # Otherwise it would wait for a checkpoint in a bucket that does not exist.
        folder.check_bucket()
        pause = _BUCKET_PAUSE  # each look takes requests, which cost money
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
        time.sleep(pause)


def evaluate_checkpoint(evaluations: Evaluations, folder: Place, step: int) -> bool:
    """Evaluate a checkpoint; return whether it still existed."""
    try:
        evaluations.evaluate(str(folder / str(step)))
    except CheckpointError:
        # The chief deletes old checkpoints, even while they are read.
        if step in list_steps(folder):
            raise
        return False
    return True


@called(_CALLER)
def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[str | None]]:
    """Train and evaluate, each task of the job in its own way.

    Without a cluster, this process trains. It evaluates each checkpoint, at most once per
    `throttle_secs`, and the last one. In a cluster, `TF_CONFIG` says which task this process is:

    - `ps`: holds variables until the job ends. This call does not return.
    - `chief`, or worker 0 if there is no chief: trains, and saves checkpoints.
    - `worker`: trains.
    - `evaluator`: evaluates new checkpoints until the last one.

    Args:
        estimator: The estimator.
        train_spec: The settings of the training.
        eval_spec: The settings of the evaluation.

    Returns:
        Without a cluster, the last evaluation and the last result of each exporter; else None and
        an empty list.

    Raises:
        ArgumentError: No strategy spans the processes of the job, or a task that trains requests
            what only an evaluator does.
        ArgumentTypeError: An argument is of the wrong type.
        ClusterError: An evaluator is not number 0.

    Example:
        >>> import tempfile
        >>> estimator = jaxdist.estimator.Estimator(
        ...     nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp(),
        ...     loss=lambda y, wanted: ((y - wanted) ** 2)[:, 0], optimizer=optax.sgd(0.1))
        >>> x = np.ones((4, 2), "float32")
        >>> def input_fn():
        ...     return [(x, x[:, :1])] * 20
        >>> result, exports = jaxdist.estimator.train_and_evaluate(
        ...     estimator, jaxdist.estimator.TrainSpec(input_fn, max_steps=10),
        ...     jaxdist.estimator.EvalSpec(input_fn, throttle_secs=0))
        >>> result["global_step"], exports
        (10, [])

    Source:
        `tf.estimator.train_and_evaluate`.
    """
    for name, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        example = f"Pass jaxdist.estimator.{kind.__name__}(...)."
        check_instance(name, value, kind, f"an estimator.{kind.__name__}", example)
    config = estimator.config
    if not config.has_cluster:
        return _run_local(estimator, train_spec, eval_spec)
    if config.task_type == TaskType.EVALUATOR:
        if config.task_id != 0:
            raise ClusterError(
                f"{_CALLER} was called in evaluator {config.task_id}.\n\n"
                "A job has one evaluator, with the number 0.\n\nStart one evaluator."
            )
        run_evaluator(estimator, train_spec, eval_spec)
        return None, []
    _check_strategy(config)
    if config.task_type == TaskType.PS:
        Server(config.cluster_spec, TaskType.PS, config.task_id).join()
        return None, []
    _train(estimator, train_spec)
    return None, []


def _run_local(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[str | None]]:
    evaluations = Evaluations(estimator, eval_spec)
    listener = EvaluatingListener(estimator, evaluations, eval_spec.throttle_secs)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*(train_spec.saving_listeners or ()), listener],
    )
    latest = estimator.latest_checkpoint()
    if evaluations.result is None and latest is not None:
        # An earlier call took all steps.
        evaluations.evaluate(latest)
        evaluations.finish()
    return evaluations.result, list(evaluations.exported)


def _train(estimator: Estimator, train_spec: TrainSpec) -> None:
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
    )
    if estimator.config.is_chief:
        latest = estimator.latest_checkpoint()
        if latest is not None:
            tell_end(estimator.model_dir, int(latest.rpartition("/")[2]))
    else:
        tell_launcher()


def _check_strategy(config: RunConfig) -> None:
    """Check that the tasks of a cluster train one model together.

    Raises:
        ArgumentError: Each task would train its own model.
    """
    strategy = config.train_distribute
    is_shared = isinstance(strategy, WorkerStrategy)
    if strategy is None or (config.task_type == TaskType.PS and not is_shared):
        raise ArgumentError(
            f"{_CALLER} was called in {config.task_type} {config.task_id} of a cluster, and "
            f"config.train_distribute is {type(strategy).__name__}.\n\n"
            "The tasks of a cluster train one model by a strategy: the one with parameter "
            "servers if the cluster has them, else MultiWorkerMirroredStrategy.\n\n"
            "Pass RunConfig(train_distribute="
            "jaxdist.compat.v1.experimental.ParameterServerStrategy())."
        )
    if config.num_worker_replicas > 1 and not is_shared:
        if not isinstance(strategy, MultiWorkerMirroredStrategy):
            raise ArgumentError(
                f"{_CALLER} was called in {config.task_type} {config.task_id} of "
                f"{config.num_worker_replicas}, and config.train_distribute is "
                f"{type(strategy).__name__}.\n\n"
                "It uses only the devices of this process, so each process would train a model of "
                "its own in one folder.\n\n"
                "Use MultiWorkerMirroredStrategy, or the ParameterServerStrategy of compat.v1."
            )
