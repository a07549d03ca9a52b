"""Closures: functions that are traced once, and run on workers."""

from jaxdist._parameter_server.closures.cut import VariableUpdate as VariableUpdate
from jaxdist._parameter_server.closures.cut import cut_update as cut_update
from jaxdist._parameter_server.closures.server_optimizer import (
    ServerOptimizer as ServerOptimizer,
)
from jaxdist._parameter_server.closures.server_optimizer import apply_updates as apply_updates
