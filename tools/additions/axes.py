"""A schedule of pipelines, and a kind of attention."""

from tools.additions.addition import Addition

SCHEDULE = Addition(
    "a schedule",
    {},
    {
        "_pipeline/schedules.py": (
            (
                "SCHEDULES: Mapping[str,",
                '''def one_by_one(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the table in which a micro-batch begins after the one before has ended."""
    _check(stages, micro_batches, chunks)
    pieces = [(p % stages, p // stages) for p in range(stages * chunks)]
    groups = tuple(
        tuple(_as_tick({stage: Op(kind, chunk, m)}, stages) for stage, chunk in order)
        for m in range(micro_batches)
        for kind, order in (("F", pieces), ("B", pieces[::-1]))
    )
    return Table("one_by_one", stages, micro_batches, chunks, groups)


''',
            ),
            ('    "1f1b": one_f_one_b,\n', '    "one_by_one": one_by_one,\n'),
        )
    },
    """
import jax
import jax.numpy as jnp
import numpy as np
import jaxdist
from jaxdist import nn, partition
mesh = jax.make_mesh((2, 4), ("data", "stage"), (jax.sharding.AxisType.Auto,) * 2)
strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
rng = np.random.default_rng(0)
params = {"e": rng.normal(size=(3, 3)), "layers": rng.normal(size=(8, 3, 3)) / 3}
params = {name: w.astype(np.float32) for name, w in params.items()}
rows = rng.normal(size=(12, 3)).astype(np.float32)
def grads(params, rows):
    def loss(params):
        parts = params["e"], params["layers"], params["e"]
        return nn.pipeline_loss(
            lambda e, x: x @ e,
            lambda w, x: x + jnp.tanh(x @ w),
            lambda e, x, _: jnp.mean((x @ e) ** 2),
            parts, rows, micro_batches=3, schedule="one_by_one")
    return jax.value_and_grad(loss)(params)
def step(params, rows):
    return jaxdist.get_replica_context().all_reduce("mean", grads(params, rows))
rules = partition.replicated().on_stages("layers")
placed = partition.place(strategy, params, rules)
batch = jax.device_put(rows, strategy.per_replica_sharding)
found = strategy.run(step, (placed, batch))
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads(params, rows)), strict=True):
    assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-5
""",
    "schedule='one_by_one'",
)

ATTENTION = Addition(
    "a kind of attention",
    {
        "nn/_attention/scored.py": '''"""Attention with the scores of all keys at once."""

import jax
import jax.numpy as jnp

from jaxdist.nn._attention.division import Division, Kind, count_bytes_of_keys


def _attend(
    division: Division, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    length, axis = q.shape[1], division.axis
    rows = division.rows_of(jax.lax.axis_index(axis), length, segments).numbers
    keys = division.all_rows(length, segments).numbers
    k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
    mask = rows[:, None] >= keys[None] if division.plan.causal else None
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=division.plan.scale)


def _count_bytes(q: jax.Array, k: jax.Array, devices: int) -> tuple[int, int]:
    sent = (devices - 1) * count_bytes_of_keys(k, devices)
    return sent, sent


SCORED = Kind("scored", _attend, _count_bytes)
'''
    },
    {
        "nn/_attention/attention.py": (
            (
                "from jaxdist.nn._attention.step_order import",
                "from jaxdist.nn._attention.scored import SCORED\n",
            ),
            ("ULYSSES, GATHER, RING)}", "SCORED, "),
        )
    },
    """
import jax
import jax.numpy as jnp
import numpy as np
import jaxdist
from jaxdist import nn
mesh = jax.make_mesh((2, 4), ("data", "positions"), (jax.sharding.AxisType.Auto,) * 2)
strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
x = np.random.default_rng(0).normal(size=(2, 16, 2, 8)).astype(np.float32)
def step(x):
    x = nn.split_positions(x, order="zigzag")
    return nn.attention(x, x, x, causal=True, kind="scored", order="zigzag")
found = strategy.run(step, (jax.device_put(x, strategy.per_replica_sharding),))
wanted = jax.nn.dot_product_attention(x, x, x, is_causal=True)
found = np.asarray(found.array)
order = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
assert np.abs(found - np.asarray(wanted)[:, order]).max() < 1e-5
""",
    "kind='scored'",
)
