"""Every transformation that optax ships gives in pieces what it gives on all-reduced gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from tests.tables import sampled
from tests.update.transformations import (
    CASES,
    MATRICES,
    OBJECTIVE,
    VALUE,
    VALUE_FN,
    covered,
    made,
    parts,
    shipped,
)

STEPS = 3
PER_PROGRAM = 8
NAMES = sorted(set(CASES) - parts())
GROUPS = [tuple(NAMES[i : i + PER_PROGRAM]) for i in range(0, len(NAMES), PER_PROGRAM)]


def params_of(name: str) -> Any:
    """Leaves that two of three replicas divide, that none divides, too short to cut, a scalar."""
    rng = np.random.default_rng(1)
    params = {
        "w": rng.normal(0, 0.3, (7, 10)).astype("float32"),
        "v": rng.normal(0, 0.3, (10, 6)).astype("float32"),
        "b": rng.normal(0, 0.3, (10,)).astype("float32"),
        "o": rng.normal(0, 0.3, (2, 2)).astype("float32"),
        "s": np.float32(0.9),
    }
    if name in MATRICES:
        params = {k: np.atleast_2d(v) for k, v in params.items()}
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


def trained(params: Any) -> Any:
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] + params["b"].reshape(1, -1))
    error = hidden @ params["v"] * params["s"].reshape(()) - y
    return jnp.mean(error**2) + jnp.mean(x**2) * jnp.sum(params["o"] ** 2)


def batch() -> Any:
    rng = np.random.default_rng(2)
    return rng.normal(size=(12, 7)).astype("float32"), rng.normal(size=(12, 6)).astype("float32")


def extra(name: str, grads: Any, value: Any, rows: Any) -> dict[str, Any]:
    """The extra arguments; what they say is of all replicas."""
    if name in VALUE_FN | OBJECTIVE:
        whole = jaxdist.get_replica_context().all_gather(rows, axis=0)

        def of_all(params: Any) -> Any:
            return loss(params, whole)

        if name in OBJECTIVE:
            return {"obj_fn": of_all}
        return {"value": value, "grad": grads, "value_fn": of_all}
    return {"value": value} if name in VALUE else {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "names", sampled(GROUPS, 5, name=lambda names: f"{names[0]} to {names[-1]}")
)
def test_sharded_update_trains_as_the_replicated_one(names: tuple[str, ...]) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    plain = {n: made(n) for n in names}
    sharded = {n: jaxdist.sharded_update(tx, min_bytes=0) for n, tx in plain.items()}

    def update(held: Any, rows: Any, txs: Any) -> Any:
        after, losses = {}, {}
        for name, (params, state) in held.items():
            context = jaxdist.get_replica_context()
            own, grads = jax.value_and_grad(loss)(trained(params), rows)
            value = context.all_reduce("mean", own)
            if txs is plain:
                grads = context.all_reduce("mean", grads)
            more = extra(name, grads, value, rows)
            updates, state = txs[name].update(grads, state, params, **more)
            after[name] = (optax.apply_updates(params, updates), state)
            losses[name] = value
        return after, losses

    def step(one: Any, other: Any, rows: Any) -> Any:
        return update(one, rows, plain), update(other, rows, sharded)

    with strategy.scope(), jax.numpy_rank_promotion("allow"):
        one, other = (
            {n: (params_of(n), tx.init(params_of(n))) for n, tx in txs.items()}
            for txs in (plain, sharded)
        )
    rows = jax.device_put(batch(), strategy.per_replica_sharding)
    for _ in range(STEPS):
        # optax leaves it to NumPy's rules to align ranks.
        with jax.numpy_rank_promotion("allow"):
            (one, wanted), (other, found) = strategy.run(step, (one, other, rows))
        for name in names:
            assert float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-5), name
    for name in names:
        same_values(name, one[name], other[name])


def same_values(name: str, wanted: Any, found: Any) -> None:
    """Parameters and state, whole, are the same up to the order of sums."""
    whole = jax.tree.map(
        lambda x: x.whole() if isinstance(x, jaxdist.Sharded) else x,
        found,
        is_leaf=lambda x: isinstance(x, jaxdist.Sharded),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            numbers(a), numbers(b), rtol=2e-3, atol=1e-4, err_msg=name
        ),
        wanted,
        whole,
    )


def numbers(leaf: Any) -> np.ndarray:
    """A leaf as NumPy has it; random keys by their data."""
    if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf, "float32")


def test_every_name_of_optax_is_covered() -> None:
    assert set(shipped()) - covered() == set()
