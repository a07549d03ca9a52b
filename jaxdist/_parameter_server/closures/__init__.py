"""Closures: functions that are traced once, and run on workers."""

from jaxdist._parameter_server.closures.optimizer import UpdateOfShape as UpdateOfShape
from jaxdist._parameter_server.closures.optimizer import VariableUpdate as VariableUpdate
from jaxdist._parameter_server.closures.optimizer import cut_update as cut_update
from jaxdist._parameter_server.closures.server_optimizer import ServerOptimizer as ServerOptimizer
