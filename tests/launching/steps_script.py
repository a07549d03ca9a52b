"""Started by tests: steps that add up over all processes, until one of them leaves.

Arguments: the number of steps, which process leaves after the second step, and how.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp

import jaxdist

strategy = jaxdist.MultiWorkerMirroredStrategy()
steps, leaver, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("pid", os.getpid(), flush=True)


def add(step: jax.Array) -> jax.Array:
    """Add up one number of each replica."""
    context = jaxdist.get_replica_context()
    assert context is not None
    return context.all_reduce("sum", step * jnp.ones(()))


for number in range(steps):
    total = strategy.run(add, (jnp.float32(number),))
    jax.block_until_ready(total)
    if number == 2 and jax.process_index() == leaver:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("planted")
        if how == "leaves":
            sys.exit(0)
print("total", total, "of", jax.device_count(), flush=True)
