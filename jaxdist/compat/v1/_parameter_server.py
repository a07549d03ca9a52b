"""`ParameterServerStrategy` of version 1."""

from typing import final

from jaxdist._called import called
from jaxdist._parameter_server import WorkerStrategy
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.compat.v1._strategies import Strategy


@final
class ParameterServerStrategy(Strategy, WorkerStrategy):
    """Variables on parameter servers; workers run the same script, and are not in step.

    A worker's step reads variables, computes on the devices of the worker, and sends changes, which
    the servers apply at once. The replicas of one worker are in step with each other. Work of only
    the first replica (`VariableAggregation.ONLY_FIRST_REPLICA`) is done once by every worker.

    Variables are placed on the servers in turn, in the order in which the script makes them, which
    must be the same in all workers. The initial values come from the chief (the task of the job
    `chief`, or worker 0 without one): other workers wait until it has made the variable.

    A step whose server does not answer waits for it (`JAXDIST_SERVER_SECONDS`), and counts once.

    Without a cluster, the variables are on the device of the replica if there is only one, else on
    the first CPU device. The same holds for an evaluator, which restores them from checkpoints.

    Cost:
        A step is one exchange with each server whose variables it changes.

    Args:
        cluster_resolver: The cluster, and which task this process is; None reads `TF_CONFIG`. With
            `rpc_layer="local"` the servers are in this process, and each of its threads may be a
            worker. `num_accelerators` is the number of replicas of a worker; by default, one for
            each of its accelerators, or one on the CPU.

    Raises:
        ClusterError: The cluster has no servers, or has other jobs, or this process is not one of
            its tasks.
        ArgumentTypeError: `cluster_resolver` is not a resolver.
        DeviceError: There are fewer devices than replicas.

    Example:
        >>> cluster = jaxdist.cluster_resolver.ClusterSpec(
        ...     {"ps": ["ps.example:0"], "worker": ["worker.example:0"]})
        >>> resolver = jaxdist.cluster_resolver.SimpleClusterResolver(
        ...     cluster, task_type="worker", task_id=0, rpc_layer="local")
        >>> strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy(resolver)
        >>> with strategy.scope():
        ...     v = Variable(1.0)
        >>> strategy.run(lambda x: v.assign_add(x), (2.0,))
        Array(3., dtype=float32)
        >>> strategy.extended.parameter_devices
        ('/job:ps/task:0',)

    Source:
        `tf.compat.v1.distribute.experimental.ParameterServerStrategy`.
    """

    @called("v1.experimental.ParameterServerStrategy")
    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        self._set_up_worker(cluster_resolver)
