"""`ParameterServerStrategy`, of version 2 and of version 1."""

from jaxdist._parameter_server.strategy.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from jaxdist._parameter_server.strategy.worker_strategy import WorkerStrategy as WorkerStrategy
