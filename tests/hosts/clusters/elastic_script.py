"""Started by tests: steps that go on after the last one in a file, with one process that leaves.

Arguments: a folder, the number of steps, and what happens to the process on a host in the fifth
step of the first attempt. Process 0 writes a line for each complete step: attempt, step, sum.
"""

import os
import pathlib
import signal
import socket
import sys
import time

import jax
import jax.numpy as jnp

import jaxdist

HOST, LAST = "host2", 5


def leave(fault: str) -> None:
    """Let the fault happen; where the test makes it, wait for that."""
    print("reached", flush=True)
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit 0":
        sys.exit(0)
    time.sleep(300)


def main() -> None:
    """Run the steps."""
    folder, steps, fault = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    attempt = int(os.environ["JAXDIST_ATTEMPT"])
    strategy = jaxdist.MultiWorkerMirroredStrategy()

    def add(one: jax.Array) -> jax.Array:
        context = jaxdist.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", one)

    saved = folder / "step"
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, steps + 1):
        if attempt == 1 and socket.gethostname() == HOST and step == LAST:
            leave(fault)
        total = float(strategy.run(add, (jnp.ones(()),)))
        if jax.process_index() == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{attempt} {step} {total:.0f}\n")
            part = folder / "step.part"
            part.write_text(str(step))
            part.rename(saved)
    print("done", steps, "of", jax.process_count(), flush=True)


if __name__ == "__main__":
    main()
