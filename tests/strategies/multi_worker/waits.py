"""Waits for other processes outside of steps, with a time limit."""

import os
import signal
import time
from typing import Any

import numpy as np

import jaxdist
from jaxdist.data import AutoShardPolicy, InputOptions
from jaxdist.errors import OtherProcessError

LIMIT = 3.0


def wait(place: str, fault: str) -> dict[str, Any]:
    """Come to a wait in process 0 only, and return the error."""
    options = jaxdist.experimental.CommunicationOptions(timeout_seconds=LIMIT)
    strategy = jaxdist.MultiWorkerMirroredStrategy(communication_options=options)
    index = strategy.layout.process.index
    with strategy.scope():
        variable = jaxdist.Variable(
            np.float32(index + 1),
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )
    policy = AutoShardPolicy.OFF
    batches = (np.full((2, 3), i, "float32") for i in range(100))
    iterator = iter(
        strategy.experimental_distribute_dataset(batches, InputOptions(auto_shard_policy=policy))
    )
    calls = {"read": lambda: float(variable.read_value()), "next": lambda: next(iterator)}
    # All come once, so that nothing is compiled for the first time below.
    calls[place]()
    if fault == "slow":
        # Longer than the limit, while the threads that read ahead wait for each other. One process
        # comes later than the other, within the limit.
        time.sleep(1.5 * LIMIT + index)
        for _ in range(5):
            calls[place]()
        return {"error": None}
    if index == 1:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)
    began = time.monotonic()
    try:
        # Some batches were read ahead.
        for _ in range(50):
            calls[place]()
    except OtherProcessError as error:
        return {
            "error": type(error).__name__,
            "processes": error.processes,
            "seconds": time.monotonic() - began,
            "message": str(error),
        }
    return {"error": None}
