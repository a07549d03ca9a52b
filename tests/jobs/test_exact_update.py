"""The configured update is that of one device with all examples, whatever rows replicas have."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica
from jaxdist.jobs import DigitsConfig, Task, load_config
from jaxdist.jobs.digits import DigitsTask
from jaxdist.jobs.topics_lm import TopicsConfig, TopicsTask

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = (3, 2, 3, 0)


def _digits(update: str) -> tuple[Task[Any], Any]:
    chosen = ["model.channels=[4]", "model.hidden=8", f"optimizer.update={update}"]
    config = load_config(DigitsConfig, CONFIGS / "digits_mirrored.toml", chosen).values
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(8, 8, 8, 1)).astype(np.float32),
        "label": rng.integers(0, 10, 8).astype(np.int32),
    }
    return DigitsTask(config), batch


def _topics(update: str) -> tuple[Task[Any], Any]:
    chosen = ["model.layers=1", "model.width=16", "model.heads=2", "model.hidden=16"]
    chosen.append(f"optimizer.update={update}")
    config = load_config(TopicsConfig, CONFIGS / "topics_lm_data_parallel.toml", chosen).values
    tokens = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.uint8)
    batch = {"tokens": tokens}
    return TopicsTask(config), batch


def _split(x: np.ndarray) -> PerReplica:
    ends = np.cumsum((0, *ROWS))
    return PerReplica([x[a:b] for a, b in itertools.pairwise(ends)])


@pytest.mark.parametrize(
    ("make_task", "update"),
    [
        (_digits, "replicated"),
        (_digits, "sharded"),
        (_digits, "compressed"),
        (_topics, "replicated"),
    ],
)
def test_uneven_rows_train_as_on_one_device(make_task: Callable[..., Any], update: str) -> None:
    found: list[Any] = []
    for devices in (["cpu:0"], [f"cpu:{i}" for i in range(4)]):
        task, batch = make_task(update)
        strategy = jaxdist.MirroredStrategy(devices)
        model, optimizer = task.build(strategy)
        given = batch if len(devices) == 1 else jax.tree.map(_split, batch)
        losses = [float(strategy.run(task.train_step, (model, optimizer, given))) for _ in range(2)]
        found.append((losses, nnx.state(model, nnx.Param)))
    # In few bits gradients are rounded, and Adam makes steps of one size of them.
    rtol, atol = (0.05, 0.02) if update == "compressed" else (1e-4, 1e-5)
    for one, many in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(np.asarray(many), np.asarray(one), rtol=rtol, atol=atol)
