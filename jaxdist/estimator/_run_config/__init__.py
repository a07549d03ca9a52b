"""Settings of a training: checkpoints, logs, strategies, and which task this process is."""

from jaxdist.estimator._run_config.distribute import DistributeConfig as DistributeConfig
from jaxdist.estimator._run_config.run_config import RunConfig as RunConfig
from jaxdist.estimator._run_config.task import TaskType as TaskType
