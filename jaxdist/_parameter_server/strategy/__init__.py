"""`ParameterServerStrategy`, of version 2 and of version 1."""

from jaxdist._parameter_server.strategy.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from jaxdist._parameter_server.strategy.server_optimizer import ServerOptimizer as ServerOptimizer
from jaxdist._parameter_server.strategy.version_1 import WorkerStrategy as WorkerStrategy
