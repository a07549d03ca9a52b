"""What the processes of a job on two hosts do when one of them ends, stops or is cut off."""

import os
import signal
import socket
import time
from typing import Any

import jax
import numpy as np

import jaxdist
from jaxdist._processes.watching import observer, state
from jaxdist.errors import OtherProcessError

# Process 1 waits for the end of the test, unless the fault ends it.
_LONG = 300.0


def _use_a_machine_of_its_own() -> None:
    """Let the hosts differ as machines do: the process ids of one mean nothing on another."""
    machine = state.get_machine() + socket.gethostname()
    state.get_machine = observer.get_machine = lambda: machine


def wait(place: str, fault: str) -> dict[str, Any]:
    """Come to a call of all processes in process 0 only, and return the error."""
    _use_a_machine_of_its_own()
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    index = strategy.layout.process.index
    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones(1, "float32"))

    def step(x: jax.Array) -> Any:
        context = jaxdist.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", x)

    calls = {
        "a known program": lambda: strategy.run(step, (x,)),
        "reduce": lambda: strategy.reduce("sum", x, axis=None),
        "gather": lambda: strategy.gather(x, axis=0),
        "a new program": lambda: strategy.run(lambda x: step(x) + 1, (x,)),
    }
    for name in ("a known program", "reduce", "gather"):
        jax.block_until_ready(calls[name]())
    print("ready", flush=True)
    began = time.monotonic()
    if index == 1:
        if fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exit 0":
            os._exit(0)
        time.sleep(_LONG)
    try:
        jax.block_until_ready(calls[place]())
    except OtherProcessError as error:
        seconds = time.monotonic() - began
        return {"error": type(error).__name__, "processes": error.processes, "seconds": seconds}
    return {"error": None}
