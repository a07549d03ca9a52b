"""Started by tests: steps that add up over all processes, and go on after the last one in a file.

Arguments: a folder, the number of steps, and which process kills itself in which step of the first
attempt. Process 0 writes a line for each complete step: attempt, step, processes, time.
"""

import os
import pathlib
import signal
import sys
import time

BEGAN = time.time()


def main() -> None:
    """Run the steps."""
    folder, steps, victim, last = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
    attempt = int(os.environ["JAXDIST_ATTEMPT"])

    import jax
    import jax.numpy as jnp

    import jaxdist

    def add(one: jax.Array) -> jax.Array:
        context = jaxdist.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", one)

    strategy = jaxdist.MultiWorkerMirroredStrategy()
    me, count = jax.process_index(), jax.process_count()
    print("pid", os.getpid(), flush=True)
    (folder / f"began-{attempt}-{me}").write_text(str(BEGAN))
    saved = folder / "step"
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, steps + 1):
        if attempt == 1 and me == victim and step == last:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        total = float(strategy.run(add, (jnp.ones(()),)))
        if me == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{attempt} {step} {total:.0f} {time.time()}\n")
            part = folder / "step.part"
            part.write_text(str(step))
            part.rename(saved)
    print("done", steps, "of", count, flush=True)


if __name__ == "__main__":
    main()
