"""Started by tests: steps that add up over all processes, until one of them leaves.

Arguments: the number of steps, which process leaves after the third step, and how.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp

import jaxdist


def add(step: jax.Array) -> jax.Array:
    """Add up one number of each replica."""
    context = jaxdist.get_replica_context()
    assert context is not None
    return context.all_reduce("sum", step * jnp.ones(()))


def main() -> None:
    """Run the steps."""
    steps, leaver, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    print("pid", os.getpid(), flush=True)
    total = None
    for number in range(steps):
        total = strategy.run(add, (jnp.float32(number),))
        jax.block_until_ready(total)
        if number == 2 and jax.process_index() == leaver:
            leave(how)
    print("total", total, "of", jax.device_count(), flush=True)


def leave(how: str) -> None:
    """Leave the job before its end."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("planted")
    if how == "leaves":
        sys.exit(0)


if __name__ == "__main__":
    main()
