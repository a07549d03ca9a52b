"""Masked arrays, and numbers in another byte order: an error wherever a call takes arrays.

`np.asarray` drops a mask without a warning, and the numbers below it would count.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import ArgumentTypeError
from jaxdist.training import Checkpoints, export_weights

ROWS = np.arange(8, dtype=np.float32)[:, None]
MASKED = np.ma.masked_array(ROWS, ROWS < 2)


def _strategy() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _make_model() -> Any:
    return jaxdist.fit.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), _strategy())


def _fit(x: Any, y: Any, weight: Any = None) -> None:
    model = _make_model()
    model.compile(optax.sgd(0.1), "mse")
    model.fit(x, y, batch_size=8, verbose=0, sample_weight=weight)


def _save(array: Any, folder: Path) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"w": array})


def _make_server_variable() -> Any:
    cluster = ClusterSpec({"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1"]})
    resolver = SimpleClusterResolver(cluster, rpc_layer="local", task_type="chief", task_id=0)
    with jaxdist.ParameterServerStrategy(resolver).scope():
        return jaxdist.Variable(ROWS)


IDS = MASKED[:, 0].astype(np.int32)
CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "batches": (lambda _: jaxdist.data.batches({"x": MASKED}, 4), r"arrays\['x'\]"),
    "numpy": (lambda _: _strategy().experimental_make_numpy_dataset(MASKED), "numpy_input"),
    "dataset": (
        lambda _: list(_strategy().experimental_distribute_dataset([{"x": MASKED}])),
        r"batch\['x'\] is a MaskedArray of dtype float32.*x.filled\(0\)",
    ),
    "a later element": (
        lambda _: list(_strategy().experimental_distribute_dataset([ROWS, MASKED])),
        "element 1 of the dataset.*batch is a MaskedArray",
    ),
    "dataset of a function": (
        lambda _: list(_strategy().distribute_datasets_from_function(lambda _: [MASKED])),
        "batch is a MaskedArray",
    ),
    "ids of an array": (lambda _: jaxdist.nn.embedding_lookup(ROWS, IDS), "ids, a masked array"),
    "ids of a variable": (
        lambda _: jaxdist.nn.embedding_lookup(jaxdist.Variable(ROWS), IDS),
        "ids, a masked array",
    ),
    "assign": (lambda _: jaxdist.Variable(ROWS).assign(MASKED), "assign was given value, a masked"),
    "assign on servers": (lambda _: _make_server_variable().assign_add(MASKED), "delta, a masked"),
    "first value": (lambda _: jaxdist.Variable(MASKED), "initial_value, a masked array"),
    "elements": (lambda _: jaxdist.Variable(ROWS)[0].assign(MASKED[3]), "value, a masked array"),
    "values of replicas": (
        lambda _: _strategy().run(lambda x: x, (jaxdist.PerReplica([MASKED, ROWS]),)),
        r"run was given args\[0\].values\[0\], a masked array",
    ),
    "values of a function": (
        lambda _: _strategy().experimental_distribute_values_from_function(lambda _: MASKED),
        "value on replica 0, a masked array",
    ),
    "parameters": (
        lambda _: jaxdist.partition.place(_strategy(), {"w": MASKED}, jaxdist.partition.fsdp()),
        "partition.place was given w, a masked array",
    ),
    "losses": (
        lambda _: jaxdist.nn.compute_average_loss(MASKED[:, 0]),
        "per_example_loss, a masked array",
    ),
    "weights of a model": (
        lambda _: _make_model().set_weights([MASKED[:1, 0], ROWS[:1]]),
        r"fit.Model.set_weights was given weights\[0\], a masked array",
    ),
    "indices": (lambda _: jaxdist.IndexedSlices(ROWS, IDS), "indices, a masked array"),
    "rows": (lambda _: jaxdist.IndexedSlices(MASKED, np.arange(8)), "values, a masked array"),
    "x of fit": (lambda _: _fit(MASKED, ROWS), "x, a masked array"),
    "y of fit": (lambda _: _fit(ROWS, MASKED), "y, a masked array"),
    "weights of fit": (lambda _: _fit(ROWS, ROWS, MASKED[:, 0]), "sample_weight, a masked array"),
    "checkpoint": (lambda folder: _save(MASKED, folder), r"state\['w'\], a masked array"),
    "weights": (
        lambda folder: export_weights({"w": MASKED}, folder / "w.safetensors"),
        "model at w, a masked array",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_masked_array_is_an_error_that_names_it(call: str, tmp_path: Path) -> None:
    run, found = CALLS[call]
    with pytest.raises(ArgumentTypeError, match=rf"(?s){found}"):
        run(tmp_path)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_batches_in_another_byte_order_are_named_with_the_conversion(dtype: str) -> None:
    strategy = _strategy()
    found = rf"(?s)batch\['x'\] is a ndarray of dtype {dtype}.*x.dtype.newbyteorder\('='\)"
    for dataset in (
        [{"x": ROWS.astype(dtype)}],
        jaxdist.data.batches({"x": ROWS.astype(dtype)}, 4),
    ):
        with pytest.raises(ArgumentTypeError, match=found):
            list(strategy.experimental_distribute_dataset(dataset))
