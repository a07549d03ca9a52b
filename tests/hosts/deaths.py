"""What the processes of a job on two hosts do when one of them ends, stops or is cut off."""

import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist._processes.watching import observer
from jaxdist.errors import ClusterError, OtherProcessError
from jaxdist.experimental import PreemptionCheckpointHandler, TerminationConfig
from jaxdist.training import Checkpoints

# The process with the fault waits for the end of the test, unless the fault ends it.
_LONG = 300.0
_DIMS = jax.ShapeDtypeStruct((1,), "float32")

Result = dict[str, Any]


def wait(place: str, fault: str, folder: str) -> Result:
    """Come to a call of all processes, process 1 after its fault; return the error."""
    use_a_machine_of_its_own()
    me = int(socket.gethostname().removeprefix("host"))
    if place == "join":
        if me == 1:
            _meet(fault, pathlib.Path(folder))
        return _try(jaxdist.MultiWorkerMirroredStrategy)
    call = _prepare(place, pathlib.Path(folder))
    if me == 1:
        _meet(fault, pathlib.Path(folder))
    else:
        print("ready", flush=True)
    return _try(call)


def use_a_machine_of_its_own() -> None:
    """Let the hosts differ as machines do: the process ids of one mean nothing on another."""
    machine = observer.get_machine() + socket.gethostname()
    observer.get_machine = lambda: machine


def _meet(fault: str, folder: pathlib.Path) -> None:
    """Let the fault happen; where the test makes it, wait until it has."""
    print("ready", flush=True)
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit 0":
        os._exit(0)
    deadline = time.monotonic() + _LONG
    while not (folder / "cut").exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _try(call: Callable[[], Any]) -> Result:
    began = time.monotonic()
    result: Result = {"error": None, "processes": ()}
    try:
        jax.block_until_ready(call())
    except (ClusterError, OtherProcessError) as error:
        result = {
            "error": type(error).__name__,
            "processes": tuple(getattr(error, "processes", ())),
            "message": str(error),
        }
    result["seconds"] = time.monotonic() - began
    # For the process whose result is lost with it.
    print(result, file=sys.stderr, flush=True)
    return result


def _prepare(place: str, folder: pathlib.Path) -> Callable[[], Any]:
    """Join, and do what comes before the call in all processes."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones(1, "float32"))

    def step(x: jax.Array) -> Any:
        context = jaxdist.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", x)

    def make_variable() -> jax.Array:
        # All processes begin with the value of process 0.
        with strategy.scope():
            return jaxdist.Variable(np.ones(1, "float32")).value()

    checkpoints = Checkpoints(folder / "checkpoints")

    def save() -> None:
        checkpoints.save(2, {"w": jnp.ones(1)})
        checkpoints.wait_until_finished()

    calls: dict[str, Callable[[], Any]] = {
        "a known program": lambda: strategy.run(step, (x,)),
        "reduce": lambda: strategy.reduce("sum", x, axis=None),
        "gather": lambda: strategy.gather(x, axis=0),
        "a new program": lambda: strategy.run(lambda x: step(x) + 1, (x,)),
        "equal values": make_variable,
        "save": save,
        "restore": lambda: checkpoints.restore(1, like={"w": _DIMS}).state,
        "the end": lambda: None,
    }
    for name in ("a known program", "reduce", "gather", "equal values"):
        jax.block_until_ready(calls[name]())
    checkpoints.save(1, {"w": jnp.ones(1)})
    checkpoints.wait_until_finished()
    if place == "preemption":
        return _prepare_preemption(strategy, folder)
    return calls[place]


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.x = nnx.Param(jnp.zeros(()))


def _prepare_preemption(strategy: Any, folder: pathlib.Path) -> Callable[[], Any]:
    saved: list[int] = []
    config = TerminationConfig(
        lambda: (folder / f"notice-{socket.gethostname()}").exists(),
        lambda: saved.append(0),
        None,
        lambda: saved.append(1),
    )
    handler = PreemptionCheckpointHandler(
        strategy.cluster_resolver, _Model(), folder / "preempted", config
    )
    handler.run(lambda: None)

    def run() -> Any:
        (folder / f"notice-{socket.gethostname()}").touch()
        while not saved:
            handler.run(time.sleep, 0.01)
        return jnp.asarray(saved)

    return run
