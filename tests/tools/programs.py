"""Runs a program of a page, with lines after it; trains with batches of another library."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import fit
from tools.other_tools import find_programs

# 20 rows in batches of 8: 8, 8 and 4.
X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
Y = (X[:, :3].argmax(axis=1)).astype(np.int64)
SIZE = 8


def run_with(tool: str, number: int, lines: str, folder: pathlib.Path) -> Any:
    """Run a program of a tool in a folder, and return the JSON that the lines print last."""
    (folder / "program.py").write_text(find_programs(tool)[number].text + "\n" + lines)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_fit(*data: Any, **given: Any) -> None:
    """Check that a training on data of another library has the numbers of one on arrays."""
    found, wanted = _fit(*data, **given), _fit(X, Y, batch_size=SIZE, shuffle=False)
    assert len(wanted) == 3
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def _fit(*data: Any, **given: Any) -> list[float]:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(3)])
    with strategy.scope():
        model = fit.Model(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    model.compile("adam", optax.softmax_cross_entropy_with_integer_labels)
    return model.fit(*data, epochs=3, verbose=0, **given).history["loss"]


def read_step(dataset: Any) -> Any:
    """Return the first batch of a dataset as the arrays of two replicas."""
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def read_passes(dataset: Any, steps: int) -> list[list[int]]:
    """Return the rows of two passes of a number of steps."""
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(dataset)
    has_end = len(dataset) == steps
    iterator = iter(distributed)
    passes: list[list[int]] = []
    for _ in range(2):
        if has_end:
            iterator = iter(distributed)
        batches = [next(iterator) for _ in range(steps)]
        passes.append(
            [int(row) for batch in batches for v in batch.values for row in np.asarray(v)]
        )
    return passes
