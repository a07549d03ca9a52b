"""`ParameterServerStrategy` of version 1: each worker runs the same script and has its own."""

from jaxdist._parameter_server.strategy.version_1.worker_strategy import (
    WorkerStrategy as WorkerStrategy,
)
