"""The script of all tasks of a job: `python job_script.py MODEL_DIR MAX_STEPS SECONDS [NOTES]`."""

import json
import os
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import estimator as est

tf: Any = jaxdist.compat.v1  # As the page writes it.
WANTED = np.array([1.0, -2.0, 3.0, 0.5], np.float32)


def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
    """Return a linear model."""
    model = est.get_module(lambda rngs: nnx.Linear(4, 1, rngs=rngs))
    predictions = model(features)[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions)
    errors = (predictions - labels) ** 2
    metrics = {"largest": jnp.abs(predictions - labels)}
    return est.EstimatorSpec(
        mode, loss=jnp.mean(errors), train_op=optax.adam(0.05), eval_metric_ops=metrics
    )


def read_rows(input_context: Any) -> Any:
    """Return batches without end, other ones for each worker."""
    rng = np.random.default_rng(input_context.input_pipeline_id)
    while True:
        features = rng.normal(size=(8, 4)).astype(np.float32)
        yield features, features @ WANTED


def read_test_rows() -> Any:
    """Return two batches."""
    features = np.random.default_rng(99).normal(size=(10, 4)).astype(np.float32)
    return [(features[:7], features[:7] @ WANTED), (features[7:], features[7:] @ WANTED)]


class Tell(est.SessionRunHook):
    """Says which steps this process has taken, takes its time, and waits for a test."""

    def __init__(self, folder: pathlib.Path, name: str, seconds: float) -> None:
        self._folder, self._name, self._seconds = folder, name, seconds

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Say that this process has begun."""
        say(event="begun", name=self._name, step=session.global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Say that a step was taken."""
        step = int(run_values.results["global_step"])
        with (self._folder / f"steps_{self._name}").open("a") as file:
            file.write(f"{step}\n")
        time.sleep(self._seconds)

    def end(self, session: Any) -> None:
        """Say that this process has ended."""
        say(event="end", name=self._name, step=session.global_step)


class Slow(est.SessionRunHook):
    """Makes an evaluation take as long as a file is there."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def begin(self) -> None:
        """Say that an evaluation has begun."""
        (self._folder / "evaluating").touch()

    def before_run(self, run_context: Any) -> None:
        """Wait."""
        end = time.monotonic() + 120
        while (self._folder / "hold_evaluation").exists() and time.monotonic() < end:
            time.sleep(0.02)

    def end(self, session: Any) -> None:
        """Say that it has ended."""
        (self._folder / "evaluating").unlink(missing_ok=True)


def say(**found: object) -> None:
    """Tell the test."""
    os.write(1, f"{json.dumps({**found, 'pid': os.getpid()})}\n".encode())


def main(model_dir: str, max_steps: int, seconds: float, notes: str | None = None) -> None:
    """Run this task, as the page on `ParameterServerStrategy` does."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    name = f"{task['type']} {task['index']}"
    say(event="start", name=name)
    strategy = tf.experimental.ParameterServerStrategy()
    run_config = est.RunConfig(
        model_dir=model_dir,
        save_checkpoints_steps=20,
        experimental_distribute=jaxdist.contrib.DistributeConfig(train_distribute=strategy),
    )
    estimator = est.Estimator(model_fn, config=run_config)
    folder = pathlib.Path(model_dir).parent if notes is None else pathlib.Path(notes)
    est.train_and_evaluate(
        estimator,
        est.TrainSpec(read_rows, max_steps=max_steps, hooks=[Tell(folder, name, seconds)]),
        est.EvalSpec(
            read_test_rows,
            hooks=[Slow(folder)],
            exporters=est.FinalExporter("final", lambda: np.zeros((1, 4), np.float32)),
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )
    say(event="done", name=name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
