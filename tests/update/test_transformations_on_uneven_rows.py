"""Every transformation of optax on uneven rows, in every layout, trains as one device does."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import partition
from jaxdist.errors import ReplicaValueError, ShardedArrayError
from tests.tables import sampled
from tests.update.test_every_transformation import NAMES, numbers, params_of, trained
from tests.update.transformations import OBJECTIVE, VALUE, VALUE_FN, made

STEPS = 2
ROWS = {"even": 12, "uneven": 10, "without rows": 5}
LAYOUTS = ("replicated", "sharded_update", "fsdp", "hsdp")
TABLE = [*itertools.product(NAMES, ROWS, LAYOUTS)]


def _loss(params: Any, batch: Any, rows: Any) -> jax.Array:
    """The sum over these rows, divided by all rows."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] + params["b"].reshape(1, -1))
    error = hidden @ params["v"] * params["s"].reshape(()) - y
    squares = jnp.sum(error**2) / 6 + jnp.sum(x**2) / 7 * jnp.sum(params["o"] ** 2)
    return squares / rows


def _extra(name: str, grads: Any, value: Any, batch: Any, rows: Any) -> dict[str, Any]:
    if name in VALUE_FN | OBJECTIVE:
        whole = jaxdist.get_replica_context().all_gather(batch, axis=0)

        def of_all(params: Any) -> Any:
            return _loss(params, whole, rows)

        if name in OBJECTIVE:
            return {"obj_fn": of_all}
        return {"value": value, "grad": grads, "value_fn": of_all}
    return {"value": value} if name in VALUE else {}


def _make_strategy(layout: str) -> Any:
    if layout == "one device":
        return jaxdist.MirroredStrategy(["cpu:0"])
    if layout != "hsdp":
        return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    mesh = jax.make_mesh((2, 2), ("slice", "data"), devices=jax.devices()[:4])
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("slice", "data"))


def _place(strategy: Any, layout: str, both: Any) -> Any:
    if layout not in ("fsdp", "hsdp"):
        return both
    axes = ("data",) if layout == "hsdp" else None
    cut = partition.Shard(0, axes=axes, pad=True)
    rules = partition.Rules([("**", cut)], must_match=False)
    return partition.place(strategy, both, rules)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, jaxdist.Sharded)


def train(name: str, num_rows: int, layout: str) -> Any:
    """Return parameters and state after some steps, whole, and the last loss."""
    strategy, tx = _make_strategy(layout), made(name)
    if layout == "sharded_update":
        tx = jaxdist.sharded_update(tx, reduce_op="sum", min_bytes=0)

    def step(params: Any, state: Any, batch: Any) -> Any:
        context = jaxdist.get_replica_context()
        rows = context.all_reduce("sum", batch[0].shape[0])
        own, grads = jax.value_and_grad(_loss)(trained(params), batch, rows)
        value = context.all_reduce("sum", own)
        if layout != "sharded_update":
            grads = context.all_reduce("sum", grads)
        updates, state = tx.update(grads, state, params, **_extra(name, grads, value, batch, rows))
        return optax.apply_updates(params, updates), state, value

    # optax leaves it to NumPy's rules to align ranks.
    with strategy.scope(), jax.numpy_rank_promotion("allow"):
        params = params_of(name)
        state = tx.init(params)
        params, state = _place(strategy, layout, (params, state))
    rng = np.random.default_rng(2)
    x, y = (rng.normal(size=(num_rows, n)).astype("float32") for n in (7, 6))
    [batch] = list(strategy.experimental_distribute_dataset([(x, y)]))
    value: Any = None
    for _ in range(STEPS):
        with jax.numpy_rank_promotion("allow"):
            params, state, value = strategy.run(step, (params, state, batch))
    return jax.tree.map(_to_host, (trained(params), state), is_leaf=_is_sharded), value


def _to_host(leaf: Any) -> np.ndarray:
    return numbers(leaf.whole() if _is_sharded(leaf) else leaf)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("row", sampled(TABLE, 8))
def test_a_transformation_trains_as_on_one_device(row: tuple[str, str, str]) -> None:
    name, rows, layout = row
    (wanted, wanted_state), value = train(name, ROWS[rows], "one device")
    try:
        (found, state), found_value = train(name, ROWS[rows], layout)
    except (ShardedArrayError, ReplicaValueError) as error:
        # Of arrays in pieces, and whatever the rows are.
        assert layout in ("fsdp", "hsdp")
        with pytest.raises(type(error)):
            train(name, ROWS["even"], layout)
        return
    assert float(found_value) == pytest.approx(float(value), rel=1e-5)
    for key, array in wanted.items():
        largest = float(np.abs(array).max())
        np.testing.assert_allclose(found[key], array, rtol=0, atol=2e-4 * largest, err_msg=key)
    # The state has the structure of that on one device, too.
    jax.tree.map(_assert_close, state, wanted_state)


def _assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    largest = float(np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * largest + 1e-6)
