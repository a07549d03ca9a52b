"""The example of the page on `ParameterServerStrategy`, as each task of a job runs it.

Changes: `jaxdist` for `tf`, `compat.v1.experimental` for `experimental`, where version 2 of the
class is (the page is about version 1), `DistributeConfig` for the slip in the keyword of
`RunConfig`, and a `model_fn`, specs and input functions, which the page leaves out.
"""

import json
import os
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    """Return a linear model."""
    model = jaxdist.estimator.get_module(lambda rngs: nnx.Linear(3, 1, rngs=rngs))
    loss = jnp.mean((model(features)[:, 0] - labels) ** 2)
    return jaxdist.estimator.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))


def input_fn(input_context: Any) -> Any:
    """Return batches without end."""
    rng = np.random.default_rng(input_context.input_pipeline_id)
    while True:
        x = rng.normal(size=(8, 3)).astype("float32")
        yield x, x.sum(axis=1)


def test_fn() -> Any:
    """Return one batch."""
    return [(np.eye(3, dtype="float32"), np.ones(3, "float32"))]


def train(model_dir: str, steps: int) -> dict[str, Any] | None:
    """Run the example; return the evaluation of a process that trains alone."""
    strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
    run_config = jaxdist.estimator.RunConfig(
        model_dir=model_dir,
        experimental_distribute=jaxdist.contrib.DistributeConfig(train_distribute=strategy),
    )
    estimator = jaxdist.estimator.Estimator(model_fn, config=run_config)
    result, _ = jaxdist.estimator.train_and_evaluate(
        estimator,
        jaxdist.estimator.TrainSpec(input_fn, max_steps=steps),
        jaxdist.estimator.EvalSpec(test_fn, start_delay_secs=0, throttle_secs=0),
    )
    return result


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    os.write(1, f"{task['type']} {task['index']} has ended\n".encode())
