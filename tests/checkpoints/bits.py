"""Arrays with every bit pattern of each dtype that JAX has, for checkpoints in all places."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.training import Checkpoints
from tests.checkpoints.rows import put_rows

# Not those of which XLA makes no arrays: int1, uint1, float6_e2m3fn, float6_e3m2fn.
DTYPES = (
    "int2",
    "uint2",
    "int4",
    "uint4",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "bool",
    "int8",
    "uint16",
)
ROWS = 8


def make_patterns(name: str) -> np.ndarray:
    """Return rows of an array of NumPy with every bit pattern: nan, -0.0, the largest number."""
    dtype = jnp.dtype(name)
    if name == "bool":
        return np.arange(64).reshape(ROWS, -1) % 3 == 0
    info = jnp.iinfo if jnp.issubdtype(dtype, np.integer) else jnp.finfo
    count = 1 << info(dtype).bits
    raw = np.arange(max(count, 8 * ROWS)) % count
    return raw.astype(f"uint{8 * dtype.itemsize}").view(dtype).reshape(ROWS, -1)


def make_state(sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Return the patterns of each dtype with a sharding."""
    return {name: put_rows(make_patterns(name), sharding) for name in DTYPES}


def make_empty(sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Return arrays like those of `make_state`, with zeros."""
    rows = {name: make_patterns(name) for name in DTYPES}
    return {name: put_rows(np.zeros_like(x), sharding) for name, x in rows.items()}


def assert_equal_bits(name: str, found: Any) -> None:
    """Check that the shards of this process have the patterns of a dtype."""
    wanted = make_patterns(name)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if not isinstance(found, jax.Array):
        assert found.tobytes() == wanted.tobytes(), name
        return
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), name


def save_and_restore(folder: str) -> list[str]:
    """Save rows in a process of a job, and restore them as columns and as whole arrays."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    rows = strategy.per_replica_sharding
    columns = jax.NamedSharding(rows.mesh, jax.P(None, *rows.spec))
    state = {"rows": make_state(rows), "host": {n: make_patterns(n) for n in DTYPES}}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        for layout in (rows, columns, strategy.replicated_sharding):
            like = {"rows": make_empty(layout), "host": state["host"]}
            restored = checkpoints.restore(like)
            assert restored is not None
            for name in DTYPES:
                assert restored.state["rows"][name].sharding == layout
                assert_equal_bits(name, restored.state["rows"][name])
                assert_equal_bits(name, restored.state["host"][name])
    return list(DTYPES)
