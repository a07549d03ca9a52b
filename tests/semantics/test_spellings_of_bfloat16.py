"""`"bf16"` and `"bfloat16"` are accepted wherever one of them is."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import cost, partition
from jaxdist.jobs import load_job_config


def _compute(name: str, folder: pathlib.Path) -> Any:
    with jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = jaxdist.fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        model.compile("sgd", "mse", mixed_precision=name)
        x = np.linspace(0, 1, 8, dtype="float32").reshape(4, 2)
        return model.predict(x, verbose=0).tolist()


def _send(name: str, folder: pathlib.Path) -> Any:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    tx = jaxdist.compressed_update(optax.sgd(1.0), name, workers=2)
    with strategy.scope():
        state = tx.init(jnp.zeros(3))
    step = jnp.linspace(0.1, 1, 3)
    return strategy.run(lambda state: tx.update(step, state)[0], (state,)).tolist()


def _gather(name: str, folder: pathlib.Path) -> Any:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    p = partition.place(strategy, {"w": jnp.linspace(0, 1, 6)}, partition.fsdp(min_bytes=0))
    whole = strategy.run(lambda p: partition.gather(p, dtype=name)["w"], (p,))
    return str(whole.dtype), whole.tolist()


def _load(name: str, folder: pathlib.Path, section: str, entry: str) -> Any:
    file = folder / "job.toml"
    file.write_text(f'task = "topics_lm"\n[{section}]\n{entry} = "{name}"\n')
    by_file = load_job_config(file).values
    file.write_text('task = "topics_lm"\n')
    by_option = load_job_config(file, [f"{section}.{entry}={name}"]).values
    assert by_file == by_option
    return by_file


def _shard(name: str, folder: pathlib.Path) -> Any:
    split = jaxdist.experimental.partitioners.MaxSizePartitioner(64)
    return split([64, 4], name)


PLACES: dict[str, Callable[[str, pathlib.Path], Any]] = {
    "compile(mixed_precision)": _compute,
    "compressed_update": _send,
    "partition.gather": _gather,
    "Variable": lambda name, folder: str(jaxdist.Variable(0.1, dtype=name).dtype),
    "partitioner": _shard,
    "Chip.flops_of": lambda name, folder: cost.CHIPS["h100"].flops_of(name),
    "optimizer.compression": lambda name, folder: _load(name, folder, "optimizer", "compression"),
    "model.dtype": lambda name, folder: _load(name, folder, "model", "dtype"),
}


@pytest.mark.parametrize("place", PLACES)
def test_both_spellings_mean_the_same(place: str, tmp_path: pathlib.Path) -> None:
    short, long = (PLACES[place](name, tmp_path) for name in ("bf16", "bfloat16"))
    assert short == long


def test_the_peak_of_float32_has_the_names_of_hlo_and_numpy() -> None:
    h100 = cost.CHIPS["h100"]
    assert h100.flops_of("float32") == h100.flops_of("f32") != h100.flops_of("bf16")
    assert h100.flops_of("float8_e4m3fn") == h100.flops_of("f8e4m3fn") != h100.flops_of("bf16")
