"""Started by tests: one sum over all processes, and what this process was given."""

import os
import sys

import jax
import jax.numpy as jnp

import jaxdist


def add(one: jax.Array) -> jax.Array:
    """Add up one number of each replica."""
    context = jaxdist.get_replica_context()
    assert context is not None
    return context.all_reduce("sum", one)


def main() -> None:
    """Print the sum."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    if os.environ.get("JAXDIST_ATTEMPT") == "1" and "fails-once" in sys.argv:
        sys.exit(3)
    total = strategy.run(add, (jnp.ones(()),))
    name = type(strategy.cluster_resolver).__name__
    me = f"{jax.process_index()} of {jax.process_count()}"
    # One write, so that lines of several processes do not mix.
    sys.stdout.write(f"process {me} total {float(total)} by {name} {sys.argv[1:]}\n")


if __name__ == "__main__":
    main()
