"""A training script in which one process does something wrong, at one moment; run by the launcher.

What each process has seen goes to a file of its own, which the test reads.
"""

import ctypes
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.errors import JaxdistError

# Pytest imports the file to look for doctests, without these variables.
OUT = pathlib.Path(os.environ.get("FAULT_OUT", "."))
FAULT, MOMENT = os.environ.get("FAULT", ""), os.environ.get("FAULT_MOMENT", "")
INDEX = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
IS_CULPRIT = int(os.environ.get("FAULT_PROCESS", "0")) == INDEX
LIMIT = float(os.environ.get("FAULT_LIMIT", "3"))
STEPS = 6


def note(**what: Any) -> None:
    """Write what this process has seen, whole."""
    temporary = OUT / f"{INDEX}.part"
    temporary.write_text(json.dumps({"pid": os.getpid(), **what}))
    temporary.rename(OUT / f"{INDEX}.json")


def is_time(moment: str) -> bool:
    """Whether this process does something wrong now."""
    return IS_CULPRIT and moment == MOMENT


def do_wrong(moment: str) -> None:
    """Do what is wrong, if it is time; kinds that change a call do nothing here."""
    if not is_time(moment):
        return
    note(began=True)
    acts = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "raise": raise_error,
        "exit": lambda: sys.exit(0),
        "sleep": catch_and_sleep,
        "loop": loop,
        "gil": lambda: ctypes.PyDLL(None).sleep(120),
    }
    acts.get(FAULT, lambda: None)()


def raise_error() -> NoReturn:
    """Raise an error that nobody catches."""
    raise ValueError("this process has a problem")


def catch_and_sleep() -> None:
    """Catch an error, and go on too late."""
    try:
        raise_error()
    except ValueError:
        time.sleep(120)


def loop() -> NoReturn:
    """Do not end."""
    while True:
        pass


def step(w: Any, x: Any) -> Any:
    """One step."""
    context = jaxdist.get_replica_context()
    assert context is not None
    return w + context.all_reduce("mean", x.sum())


def make_step() -> Callable[[Any, Any], Any]:
    """Another function, with a program of its own; one process makes another program."""
    sign = -1.0 if is_time("compile") and FAULT == "program" else 1.0

    def other(w: Any, x: Any) -> Any:
        return step(w * sign, x)

    return other


def train() -> dict[str, Any]:
    """Train."""
    do_wrong("start")
    options = jaxdist.experimental.CommunicationOptions(timeout_seconds=LIMIT)
    strategy = jaxdist.MultiWorkerMirroredStrategy(communication_options=options)
    checkpoints = jaxdist.training.Checkpoints(OUT / "checkpoints", timeout_seconds=LIMIT)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.full((2, 3), 1 + c.replica_id_in_sync_group, "float32")
    )
    w: Any = jnp.zeros(())
    w = strategy.run(step, (w, x))
    do_wrong("compile")
    if is_time("compile") and FAULT == "shape":
        w = jnp.zeros((2,))
    fn = make_step()
    for number in range(STEPS):
        if number == 2:
            do_wrong("step")
            if is_time("step") and FAULT == "data":
                break
        w = strategy.run(fn, (w, x))
        if number == 3:
            do_wrong("reduce")
            if is_time("reduce") and FAULT == "program":
                strategy.gather(x, axis=0)
            elif is_time("reduce") and FAULT == "shape":
                strategy.reduce("sum", {"a": x, "b": x}, axis=None)
            else:
                strategy.reduce("sum", x, axis=None)
        if number == 4:
            do_wrong("checkpoint")
            checkpoints.save(number, {"w": w})
    do_wrong("shutdown")
    return {"w": float(w)}


if __name__ == "__main__":
    began = time.monotonic()
    try:
        note(**train())
    except JaxdistError as error:
        note(
            error=type(error).__name__,
            processes=getattr(error, "processes", None),
            message=str(error),
            seconds=time.monotonic() - began,
            # The process lives, and its device is free.
            local=float(jnp.arange(5.0).sum()),
        )
        raise
