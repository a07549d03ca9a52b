"""Steps of a job in which one process does something wrong."""

import ctypes
import os
import signal
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.errors import OtherProcessError

STEPS_BEFORE = 3


def train(fault: str, culprit: int, timeout: float | None = None) -> dict[str, Any]:
    """Train, and fail in one process; return what the process saw."""
    options = jaxdist.experimental.CommunicationOptions(timeout_seconds=timeout)
    strategy = jaxdist.MultiWorkerMirroredStrategy(communication_options=options)
    index = strategy.layout.process.index
    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.full((2, 3), c.replica_id_in_sync_group, "float32")
    )

    def step(w: Any, x: Any) -> Any:
        context = jaxdist.get_replica_context()
        assert context is not None
        return w + context.all_reduce("sum", x.sum())

    def other_step(w: Any, x: Any) -> Any:
        context = jaxdist.get_replica_context()
        assert context is not None
        return w - context.all_reduce("sum", x.sum() * 2)

    w: Any = jnp.zeros(())
    began = time.monotonic()
    try:
        for number in range(200):
            fn, value = step, x
            if number == STEPS_BEFORE:
                began = time.monotonic()
                if index == culprit:
                    fn, value = _fail(fault, strategy, step, other_step, x)
                elif fault in ("other_program", "other_shape"):
                    # All processes make a new program, and one makes another one.
                    fn, value = (lambda w, x: step(w, x)), x
            w = strategy.run(fn, (w, value))
            total = strategy.reduce("sum", x, axis=None)
            print("step", number, float(w), float(total[0, 0]), flush=True)
    except OtherProcessError as error:
        seconds = time.monotonic() - began
        # The device is free, and JAX can be used.
        local = float(jnp.arange(5.0).sum())
        return {
            "error": type(error).__name__,
            "processes": error.processes,
            "message": str(error),
            "seconds": seconds,
            "local": local,
        }
    return {"error": None, "w": float(w)}


def _fail(fault: str, strategy: Any, step: Any, other_step: Any, x: Any) -> Any:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise ValueError("this process has a problem")
    if fault == "exit":
        sys.exit(0)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if fault == "sleep":
        try:
            raise ValueError("caught")
        except ValueError:
            time.sleep(60)
    if fault == "loop":
        while True:
            pass
    if fault == "gil":
        ctypes.PyDLL(None).sleep(60)
    if fault == "other_program":
        return other_step, x
    if fault == "other_shape":
        return step, strategy.experimental_local_results(x)[0][:1]
    if fault == "abort":
        os.abort()
    return step, x


def train_from_environment() -> dict[str, Any]:
    """Read the arguments from the environment."""
    limit = os.environ.get("LIMIT")
    return train(
        os.environ["FAULT"], int(os.environ["CULPRIT"]), None if not limit else float(limit)
    )
