"""Examples of the pages that several processes run."""

import json
import os
import time
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdist


def find_own_task() -> dict[str, Any]:
    """Run the example of the property `cluster_resolver`; return which branch was taken."""
    warnings.simplefilter("ignore", DeprecationWarning)
    # This implicitly uses TF_CONFIG for the cluster and current task info.
    strategy = jaxdist.experimental.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    assert resolver is not None
    branch = "none"
    if resolver.task_type == "worker":
        branch = "worker"
    elif resolver.task_type == "ps":
        branch = "ps"
    return {
        "branch": branch,
        "task": resolver.task_id,
        "replicas": strategy.num_replicas_in_sync,
        "cluster": resolver.cluster_spec().as_dict(),
    }


def make_tf_config(ports: list[int], index: int) -> dict[str, str | None]:
    """Return the environment of the example: two workers, and a parameter server."""
    first, second, server = (f"localhost:{port}" for port in ports)
    cluster = {"worker": [first, second], "ps": [server]}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def reduce_with_a_limit(seconds: float) -> str:
    """Run the example of `timeout_seconds` in a job whose last process does not take part."""
    warnings.simplefilter("ignore", DeprecationWarning)
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    assert resolver is not None
    hints = jaxdist.experimental.CollectiveHints(timeout_seconds=seconds)
    v = strategy.experimental_distribute_values_from_function(lambda ctx: np.ones(3, "float32"))
    assert float(strategy.reduce("sum", v, axis=None, experimental_hints=hints)[0]) == 2
    if resolver.task_id == 1:
        print("does not take part", os.getpid(), flush=True)
        # The test kills it.
        time.sleep(100)
    try:
        strategy.reduce("sum", v, axis=None, experimental_hints=hints)
    except jaxdist.errors.DeadlineExceededError:
        return "did something"
    return "reduced"


def count_packs(bytes_per_pack: int) -> tuple[list[int], list[float]]:
    """Return the operands of each all-reduce of a step, and what it computes."""
    warnings.simplefilter("ignore", DeprecationWarning)
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    hints = jaxdist.experimental.CollectiveHints(bytes_per_pack=bytes_per_pack)

    def step(x: Any) -> Any:
        grads = [x * n for n in range(1, 7)]
        replica = jaxdist.get_replica_context()
        return replica.all_reduce("sum", grads, experimental_hints=hints)

    x = strategy.experimental_distribute_values_from_function(lambda ctx: jnp.ones(8, "float32"))
    compiled = strategy.lower(step, (x,)).compile()
    found = [c.operands for c in compiled.collectives if c.kind == "all-reduce"]
    return found, [float(total[0]) for total in strategy.run(step, (x,))]
