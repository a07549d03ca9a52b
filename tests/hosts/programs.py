"""What the processes of a job on several hosts do."""

import socket
from typing import Any

import jax

import jaxdist
from jaxdist._compat import get_gloo_addresses
from jaxdist._processes.own_address import Machine
from jaxdist.errors import JaxdistError


def sum_indices() -> dict[str, Any]:
    """Sum over the processes, and say over which address; or return the error."""
    try:
        strategy = jaxdist.MultiWorkerMirroredStrategy()
    except JaxdistError as error:
        return {"error": type(error).__name__, "message": str(error)}

    def step() -> jax.Array:
        context = jaxdist.get_replica_context()
        return context.all_reduce("sum", context.replica_id_in_sync_group + 1.0)

    total = strategy.run(step)
    return {
        "host": socket.gethostname(),
        "sum": float(strategy.experimental_local_results(total)[0]),
        "gloo": [bytes(value) for value in get_gloo_addresses()],
        "interfaces": [Machine().find_interface(a) for a in ("127.0.0.1", "10.77.0.1")],
    }
