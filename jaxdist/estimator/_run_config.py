"""`RunConfig`: how an estimator trains, saves and evaluates; `DistributeConfig`: where."""

import copy
import inspect
from typing import Any, NamedTuple

from jaxdist._buckets import as_address
from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._parameter_server import ParameterServerStrategy
from jaxdist._strategies import Strategy
from jaxdist._validate import as_integer, as_number, show
from jaxdist.cluster_resolver import ClusterSpec
from jaxdist.errors import ArgumentError, UnsupportedError
from jaxdist.estimator._own_task import read_own_task

_CALLER = "estimator.RunConfig"
_DEFAULT: Any = object()
_SECONDS = 600


class DistributeConfig(NamedTuple):
    """The strategies of a training and of its evaluation. A named tuple.

    Args:
        train_distribute: The strategy that trains.
        eval_distribute: The strategy that evaluates.
        remote_cluster: Must be None. In TensorFlow one client can run a whole cluster; here every
            task runs the script.

    Example:
        >>> jaxdist.estimator.RunConfig(
        ...     experimental_distribute=jaxdist.contrib.DistributeConfig(
        ...         train_distribute=MirroredStrategy())).train_distribute.num_replicas_in_sync
        8

    Source:
        `tf.contrib.distribute.DistributeConfig`.
    """

    train_distribute: Any = None
    eval_distribute: Any = None
    remote_cluster: Any = None


def read_strategies(
    train: Any, evaluation: Any, both: Any, *, has_cluster: bool
) -> tuple[Strategy | None, Strategy | None]:
    """Return the strategies that train and evaluate.

    Raises:
        ArgumentError: Strategies are passed in both ways, a strategy needs a coordinator, or
            there are two clusters.
        ArgumentTypeError: A value is not a strategy.
        UnsupportedError: `remote_cluster` is given.
    """
    if both is not None:
        if not isinstance(both, DistributeConfig):
            raise refuse_type(
                f"experimental_distribute={show(both)}.",
                "experimental_distribute is a DistributeConfig.",
                "Pass jaxdist.contrib.DistributeConfig(train_distribute=strategy).",
            )
        for name, value in (("train_distribute", train), ("eval_distribute", evaluation)):
            if value is not None:
                raise refuse(
                    f"{name} and experimental_distribute.",
                    "Each of them sets the strategies.",
                    f"Pass one of them, for instance {name}=strategy.",
                )
        train, evaluation = both.train_distribute, both.eval_distribute
        if both.remote_cluster is not None:
            call_as(
                "contrib.DistributeConfig",
                _refuse_remote,
                both.remote_cluster,
                has_cluster=has_cluster,
            )
        call_as("contrib.DistributeConfig", _check_strategies, train, evaluation)
    else:
        _check_strategies(train, evaluation)
    return train, evaluation


def _check_strategies(train: Any, evaluation: Any) -> None:
    for name, value in (("train_distribute", train), ("eval_distribute", evaluation)):
        if isinstance(value, ParameterServerStrategy):
            raise refuse(
                f"{name}=ParameterServerStrategy, the one of version 2.",
                "It needs a coordinator, which an Estimator does not have: each worker runs the "
                "script.",
                "Use jaxdist.compat.v1.experimental.ParameterServerStrategy().",
            )
        if value is not None and not isinstance(value, Strategy):
            raise refuse_type(
                f"{name}={show(value)}.",
                f"{name} is a strategy, or None.",
                f"Pass for instance {name}=jaxdist.MirroredStrategy().",
            )


def _refuse_remote(cluster: Any, *, has_cluster: bool) -> None:
    if has_cluster:
        raise refuse(
            f"remote_cluster={show(cluster)}, and TF_CONFIG has a cluster.",
            "A job has one cluster.",
            "Leave remote_cluster out.",
        )
    raise refuse(
        f"remote_cluster={show(cluster)}.",
        "One client cannot run a whole cluster: every task runs the script.",
        "Leave it out, and start the tasks: jaxdist launch --ps 1 --workers 2 script.py.",
        kind=UnsupportedError,
    )


class RunConfig:
    """How an estimator trains, saves and evaluates, and which task of the job this process is.

    The task is read from `TF_CONFIG`, which `jaxdist launch` sets.

    Args:
        model_dir: The folder of checkpoints, summaries and exports, also `gs://BUCKET/FOLDER` or
            `s3://BUCKET/FOLDER`; None for that of `TF_CONFIG`.
        tf_random_seed: The seed of the modules; None means 0, the same in all processes.
        save_summary_steps: How often a line is added to `summaries.jsonl`; None for never.
        save_checkpoints_steps: How often a checkpoint is saved, in steps.
        save_checkpoints_secs: How often a checkpoint is saved, in seconds; 600 if neither of the
            two is given. With None for both, only the end of a training is saved.
        keep_checkpoint_max: How many checkpoints to keep; None or 0 for all.
        keep_checkpoint_every_n_hours: One checkpoint in this many hours is kept forever.
        log_step_count_steps: How often steps/s and the loss are logged; None for never.
        train_distribute: The strategy that trains; None for one device.
        eval_distribute: The strategy that evaluates; None for one device.
        experimental_distribute: A `DistributeConfig`, instead of the last two.

    Attributes:
        cluster_spec: The tasks of the cluster; empty for an evaluator.
        task_type: The job of this process.
        task_id: Its number in the job.
        is_chief: Whether it saves checkpoints.
        master: Its address.
        evaluation_master: The address in `TF_CONFIG` of an evaluator.
        num_ps_replicas: How many parameter servers there are.
        num_worker_replicas: How many processes train.
        global_id_in_cluster: The number of this process among all; None for an evaluator.
        service: The object `service` of `TF_CONFIG`.

    Raises:
        ArgumentError: A number is out of range, both kinds of `save_checkpoints` are given, there
            are two model folders, or the strategy is `ParameterServerStrategy` of version 2.
        ArgumentTypeError: An argument is of the wrong type.
        ClusterError: `TF_CONFIG` is not valid.

    Example:
        >>> config = jaxdist.estimator.RunConfig("runs/a", save_checkpoints_steps=50)
        >>> config.save_checkpoints_secs, config.keep_checkpoint_max, config.is_chief
        (None, 5, True)
        >>> config.replace(save_checkpoints_secs=60).save_checkpoints_steps is None
        True

    Source:
        `tf.estimator.RunConfig`, `tensorflow_estimator` 1.15.
    """

    @called(_CALLER)
    def __init__(
        self,
        model_dir: Any = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | None = _DEFAULT,
        save_checkpoints_secs: float | None = _DEFAULT,
        *,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Strategy | None = None,
        eval_distribute: Strategy | None = None,
        experimental_distribute: Any = None,
    ) -> None:
        self._given: dict[str, Any] = {
            "model_dir": model_dir,
            "tf_random_seed": tf_random_seed,
            "save_summary_steps": save_summary_steps,
            "keep_checkpoint_max": keep_checkpoint_max,
            "keep_checkpoint_every_n_hours": keep_checkpoint_every_n_hours,
            "log_step_count_steps": log_step_count_steps,
            "train_distribute": train_distribute,
            "eval_distribute": eval_distribute,
            "experimental_distribute": experimental_distribute,
        }
        steps, seconds = _read_times(save_checkpoints_steps, save_checkpoints_secs)
        self._given |= {"save_checkpoints_steps": steps, "save_checkpoints_secs": seconds}
        for name in ("save_summary_steps", "save_checkpoints_steps", "log_step_count_steps"):
            if self._given[name] is not None:
                self._given[name] = as_integer(name, self._given[name], least=1)
        if seconds is not None and not as_number("save_checkpoints_secs", seconds) > 0:
            raise _make_range_error("save_checkpoints_secs", seconds)
        if keep_checkpoint_max is not None:
            as_integer("keep_checkpoint_max", keep_checkpoint_max, least=0)
        name = "keep_checkpoint_every_n_hours"
        if not as_number(name, keep_checkpoint_every_n_hours) > 0:
            raise _make_range_error(name, keep_checkpoint_every_n_hours)
        if tf_random_seed is not None:
            as_integer("tf_random_seed", tf_random_seed, least=0, most=(1 << 31) - 1)
        strategies = (train_distribute, eval_distribute, experimental_distribute)
        task = read_own_task(needs_chief=all(x is None for x in strategies))
        self.train_distribute, self.eval_distribute = read_strategies(
            train_distribute, eval_distribute, experimental_distribute, has_cluster=task.has_cluster
        )
        self.experimental_distribute = experimental_distribute
        self.model_dir = _read_folder(model_dir, task.model_dir)
        self.tf_random_seed = tf_random_seed
        self.save_summary_steps: int | None = self._given["save_summary_steps"]
        self.save_checkpoints_steps: int | None = self._given["save_checkpoints_steps"]
        self.save_checkpoints_secs: float | None = seconds
        self.keep_checkpoint_max = keep_checkpoint_max or None
        self.keep_checkpoint_every_n_hours = float(keep_checkpoint_every_n_hours)
        self.log_step_count_steps: int | None = self._given["log_step_count_steps"]
        self.cluster_spec: ClusterSpec = task.cluster
        self.task_type, self.task_id, self.is_chief = task.task_type, task.task_id, task.is_chief
        self.master, self.evaluation_master = task.master, task.evaluation_master
        self.num_ps_replicas, self.num_worker_replicas = task.num_ps, task.num_workers
        self.global_id_in_cluster, self.service = task.global_id, task.service
        self.has_cluster = task.has_cluster

    @called(f"{_CALLER}.replace")
    def replace(self, **kwargs: Any) -> "RunConfig":
        """Return a config with other values.

        Args:
            kwargs: Arguments of `RunConfig`. `save_checkpoints_steps` alone makes
                `save_checkpoints_secs` None, and the other way round.

        Raises:
            ArgumentError: A name is not an argument of `RunConfig`, or a value is out of range.

        Example:
            >>> jaxdist.estimator.RunConfig("a").replace(model_dir="b").model_dir
            'b'

        Source:
            `tf.estimator.RunConfig.replace`.
        """
        names = inspect.signature(RunConfig).parameters
        unknown = sorted(set(kwargs) - set(names))
        if unknown:
            raise refuse(
                f"{unknown[0]}={show(kwargs[unknown[0]])}.",
                f"It replaces {', '.join(names)}. The task comes from TF_CONFIG.",
                "Pass for instance model_dir='runs/b'.",
            )
        pair = ("save_checkpoints_steps", "save_checkpoints_secs")
        changes = dict(kwargs)
        for one, other in (pair, pair[::-1]):
            if kwargs.get(one) is not None and other not in kwargs:
                changes[other] = None
        return RunConfig(**{**self._given, **changes})

    def move_to(self, model_dir: str) -> "RunConfig":
        """Return a copy with the folder that an estimator chose."""
        made = copy.copy(self)
        made._given = {**self._given, "model_dir": model_dir}
        made.model_dir = model_dir
        return made

    def __repr__(self) -> str:
        return f"RunConfig(model_dir={self.model_dir!r}, task={self.task_type} {self.task_id})"


def _read_times(steps: Any, seconds: Any) -> tuple[Any, Any]:
    if steps is _DEFAULT and seconds is _DEFAULT:
        return None, _SECONDS
    steps = None if steps is _DEFAULT else steps
    seconds = None if seconds is _DEFAULT else seconds
    if steps is not None and seconds is not None:
        raise refuse(
            f"save_checkpoints_steps={show(steps)} and save_checkpoints_secs={show(seconds)}.",
            "A checkpoint is saved after a number of steps, or after some time.",
            "Pass one of the two.",
        )
    return steps, seconds


def _make_range_error(name: str, value: Any) -> ArgumentError:
    return refuse(
        f"{name}={value}.", f"{name} is a number above 0.", f"Pass for instance {name}=600."
    )


def _read_folder(given: Any, of_task: str | None) -> str | None:
    if of_task is not None:
        of_task = as_address("model_dir", of_task, "runs/a")
    if given is None:
        return of_task
    folder = as_address("model_dir", given, "runs/a")
    if of_task is not None and of_task != folder:
        raise refuse(
            f"model_dir={folder!r}, and TF_CONFIG has {of_task!r}.",
            "A model has one folder.",
            "Pass it in one of the two places.",
        )
    return folder
