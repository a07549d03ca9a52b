"""`DistributeConfig`: the strategies of a training and of its evaluation."""

from typing import Any, NamedTuple

from jaxdist._called import call_as, refuse, refuse_type
from jaxdist._parameter_server import ParameterServerStrategy
from jaxdist._strategies import Strategy
from jaxdist._validate import show
from jaxdist.errors import UnsupportedError


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
                    "Both have the strategies.",
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
                f"{name}=ParameterServerStrategy, that of version 2.",
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
            "There is one cluster.",
            "Leave remote_cluster out.",
        )
    raise refuse(
        f"remote_cluster={show(cluster)}.",
        "One client cannot run a whole cluster: every task runs the script.",
        "Leave it out, and start the tasks: jaxdist launch --ps 1 --workers 2 script.py.",
        kind=UnsupportedError,
    )
