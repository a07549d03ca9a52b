"""The script of all tasks of a job of version 1: `python version_1_script.py <steps> [wait]`."""

import json
import sys
import time

import jax
import numpy as np

import jaxdist
from jaxdist import VariableAggregation
from jaxdist.cluster_resolver import TFConfigClusterResolver


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


def main(steps: int, mode: str) -> None:
    """Train, and say what this worker has found."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type == "ps":
        spec = resolver.cluster_spec()
        jaxdist.Server(spec, "ps", resolver.task_id, snapshot_seconds=0.2).join()
        return
    strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy(resolver)
    # The chief's first value is the one that counts.
    first = 10.0 if strategy.extended.experimental_should_init else -1.0
    with strategy.scope():
        x = jaxdist.Variable(first, name="x", aggregation=VariableAggregation.SUM)
        z = jaxdist.Variable(30, name="z", aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        w = jaxdist.Variable(np.zeros((4, 2), np.float32), name="w")
    rng = np.random.default_rng(resolver.task_id)
    wanted = np.arange(8, dtype=np.float32).reshape(4, 2)

    def step(inputs: jax.Array) -> jax.Array:
        error = inputs @ w.value() - inputs @ wanted
        w.assign_sub(0.02 * inputs.T @ error / len(error))
        x.assign_add(inputs[0, 0] * 0 + 1)
        z.assign_add(1)
        return (error**2).mean()

    for number in range(steps):
        strategy.run(step, (rng.normal(size=(16, 4)).astype(np.float32),))
        if number == 0:
            say(event="first")
            if mode == "wait":
                sys.stdin.readline()
        if number % 200 == 199:
            say(event="progress", step=number)
    # Until the other workers have trained too.
    spec = resolver.cluster_spec()
    done = spec.num_tasks("worker") + spec.num_tasks("chief")
    deadline = time.monotonic() + 60
    while int(z) < 30 + done * steps and time.monotonic() < deadline and mode != "wait":
        time.sleep(0.02)
    error = float(np.abs(np.asarray(w.value()) - wanted).max())
    places = strategy.extended.parameter_devices
    say(event="end", x=float(x), z=int(z), error=error, parameter_devices=places)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
