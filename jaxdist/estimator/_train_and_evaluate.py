"""`train_and_evaluate`: trains and evaluates a model, each process by its task."""

from typing import Any

from jaxdist._called import called
from jaxdist._parameter_server import Server, WorkerStrategy
from jaxdist._strategies import MultiWorkerMirroredStrategy
from jaxdist._validate import check_instance
from jaxdist.errors import ArgumentError, ClusterError
from jaxdist.estimator._estimator import Estimator
from jaxdist.estimator._evaluator import (
    EvaluatingListener,
    Evaluations,
    run_evaluator,
    tell_end,
    tell_launcher,
)
from jaxdist.estimator._own_task import TaskType
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._specs import EvalSpec, TrainSpec

_CALLER = "estimator.train_and_evaluate"


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
        _check_evaluator(config)
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


def _check_evaluator(config: RunConfig) -> None:
    if config.task_id != 0:
        raise ClusterError(
            f"{_CALLER} was called in evaluator {config.task_id}.\n\n"
            "A job has one evaluator, with the number 0.\n\nStart one evaluator."
        )


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
            "The tasks of a cluster train one model by a strategy: that with parameter servers "
            "where there are some, else MultiWorkerMirroredStrategy.\n\n"
            "Pass RunConfig(train_distribute="
            "jaxdist.compat.v1.experimental.ParameterServerStrategy())."
        )
    if config.num_worker_replicas > 1 and not is_shared:
        if not isinstance(strategy, MultiWorkerMirroredStrategy):
            raise ArgumentError(
                f"{_CALLER} was called in {config.task_type} {config.task_id} of "
                f"{config.num_worker_replicas}, and config.train_distribute is "
                f"{type(strategy).__name__}.\n\n"
                "It has the devices of this process only, so each process would train a model of "
                "its own in one folder.\n\n"
                "Use MultiWorkerMirroredStrategy, or the ParameterServerStrategy of compat.v1."
            )
