"""The processes of a job: which one this is, and how they connect.

The only room that uses `jax.distributed`, and that asks JAX for the number of this process.
"""

from jaxdist._processes.connection import connect as connect
from jaxdist._processes.connection import is_connected as is_connected
from jaxdist._processes.process import Process as Process
from jaxdist._processes.process import get_current_process as get_current_process
