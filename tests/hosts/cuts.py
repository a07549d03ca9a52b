"""What the processes of a job on two hosts do while the network between them is cut for a while."""

import pathlib
import time
from typing import Any

import jax

import jaxdist
from jaxdist.errors import OtherProcessError
from tests.hosts.deaths import use_a_machine_of_its_own

_LONG = 200.0


def add_before_and_after(folder: str) -> dict[str, Any]:
    """Sum over the processes, wait until the test has mended the network, and sum again."""
    use_a_machine_of_its_own()
    strategy = jaxdist.MultiWorkerMirroredStrategy()

    def step() -> jax.Array:
        context = jaxdist.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", context.replica_id_in_sync_group + 1.0)

    sums = [float(strategy.run(step))]
    print("ready", flush=True)
    deadline = time.monotonic() + _LONG
    while not (pathlib.Path(folder) / "mended").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody mended the network")
        time.sleep(0.01)
    try:
        sums.append(float(strategy.run(step)))
    except OtherProcessError as error:
        return {"sums": sums, "error": type(error).__name__, "processes": error.processes}
    return {"sums": sums, "error": None, "processes": ()}
