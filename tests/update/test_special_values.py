"""`sharded_update` keeps nan and infinity, at any position and in arrays of any size.

XLA on CPU leaves nan out of a maximum of many elements, and of one over devices; NumPy does not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist

COUNT = 3
# What an update may ask of all elements of a leaf, and of each row.
ASKED: dict[str, Callable[[Any, Any], Any]] = {
    "largest": lambda xp, x: xp.max(x),
    "smallest": lambda xp, x: xp.min(x),
    "largest of sizes": lambda xp, x: xp.max(xp.abs(x)),
    "smallest of sizes": lambda xp, x: xp.min(xp.abs(x)),
    "largest of rows": lambda xp, x: xp.max(xp.max(x, axis=0)),
    "smallest of rows": lambda xp, x: xp.min(xp.min(x, axis=1)),
    "sum": lambda xp, x: xp.sum(x),
    "mean": lambda xp, x: xp.mean(x),
    "norm": lambda xp, x: xp.sqrt(xp.sum(x * x)),
    "deviation": lambda xp, x: xp.std(x),
    "clipped": lambda xp, x: xp.sum(xp.clip(x, -0.5, 0.5)),
    "clipped from below": lambda xp, x: xp.max(xp.clip(x, -0.5, None)),
    "largest but nan": lambda xp, x: xp.nanmax(x),
    "smallest but nan": lambda xp, x: xp.nanmin(x),
    "all finite": lambda xp, x: 1.0 * xp.all(xp.isfinite(x)),
    "any nan": lambda xp, x: 1.0 * xp.any(xp.isnan(x)),
    "how many nan": lambda xp, x: 1.0 * xp.sum(xp.isnan(x)),
    "in the middle": lambda xp, x: xp.max(x[1:, :]) - xp.min(x[:, 1:]),
}
# Cut with padding and without, small and large; large and whole.
SHAPES = {
    "small": ((2, 7), 0),
    "small, whole": ((2, 7), None),
    "large": ((3, 20011), 0),
    "large, a row on each": ((3, 6000), 0),
    "large, whole": ((2, 9000), 10**9),
}


def asking() -> optax.GradientTransformation:
    """A transformation whose update of each row is one number of the gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        rows = [f(jnp, updates) for f in ASKED.values()]
        return updates, jnp.stack(rows)

    return optax.GradientTransformation(lambda params: jnp.zeros(len(ASKED)), update)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_asked_of_all_elements_is_what_numpy_says(name: str) -> None:
    shape, min_bytes = SHAPES[name]
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(COUNT)])
    tx = jaxdist.sharded_update(asking(), min_bytes=min_bytes)
    with strategy.scope():
        state = tx.init(jnp.zeros(shape))

    def step(x: Any, state: Any) -> Any:
        return tx.update(x, state)[1]

    last = np.prod(shape) - 1
    for value in (np.nan, np.inf, -np.inf, 7.0):
        for place in (0, last, last // 3, last // 2 + 1):
            x = np.linspace(-1, 1, last + 1).astype("float32")
            x[place] = value
            x = x.reshape(shape)
            found = np.asarray(strategy.run(step, (x, state)))
            with np.errstate(all="ignore"):
                wanted = np.array([f(np, x.astype("float64")) for f in ASKED.values()])
            np.testing.assert_allclose(
                found, wanted, rtol=1e-3, atol=1e-3, err_msg=f"{value} at {place}: {list(ASKED)}"
            )


def test_integers_and_numbers_of_half_width_have_their_extremes() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(COUNT)])
    x = np.linspace(-3, 3, 14).reshape(2, 7)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        made = [f(updates.astype(d)).astype("float32") for d in dtypes for f in (jnp.max, jnp.min)]
        return updates, jnp.stack(made)

    dtypes = [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.int8]
    tx = jaxdist.sharded_update(
        optax.GradientTransformation(lambda params: jnp.zeros(2 * len(dtypes)), update), min_bytes=0
    )
    with strategy.scope():
        state = tx.init(jnp.zeros((2, 7)))
    for gradient in (np.abs(x), np.where(x > 2, np.nan, np.abs(x))):
        found = strategy.run(lambda g, s: tx.update(g, s)[1], (gradient.astype("float32"), state))
        has_nan = bool(np.isnan(gradient).any())
        assert np.isnan(np.asarray(found)).tolist() == [has_nan] * 4 + [False] * 6
        if not has_nan:
            np.testing.assert_allclose(found, [3, 0.23] * 2 + [3, 0] * 3, atol=0.01)


@pytest.mark.parametrize("count", [2, 3])
def test_skipping_and_zeroing_see_nan_on_one_replica_and_next_to_padding(count: int) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    txs = {
        "zero": optax.zero_nans(),
        "skip": optax.apply_if_finite(optax.sgd(1.0), 3),
        "clip": optax.clip_by_global_norm(1.0),
        "steps": optax.MultiSteps(
            optax.sgd(1.0), 1, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
    }
    sharded = {n: jaxdist.sharded_update(tx, min_bytes=0) for n, tx in txs.items()}
    params = jnp.zeros((5, 7))
    with strategy.scope():
        plain_state = {n: tx.init(params) for n, tx in txs.items()}
        state = {n: tx.init(params) for n, tx in sharded.items()}

    def step(x: Any, plain: Any, state: Any) -> Any:
        own = x[0]
        whole = jaxdist.get_replica_context().all_reduce("mean", own)
        wanted = {n: tx.update(whole, plain[n], params)[0] for n, tx in txs.items()}
        return wanted, {n: tx.update(own, state[n], params)[0] for n, tx in sharded.items()}

    for value in (np.nan, np.inf, -np.inf):
        for place in (0, 6, 34, 17):
            x = np.ones((count, 35), "float32")
            x[count - 1, place] = value
            rows = jax.device_put(x.reshape(count, 5, 7), strategy.per_replica_sharding)
            wanted, found = strategy.run(step, (rows, plain_state, state))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


@pytest.mark.parametrize("ask", ["max", "min"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_padding_is_not_nan_in_a_dtype_without_infinities(dtype: str, ask: str) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(COUNT)])
    # Numbers of one sign, so that a neutral 0 would be found too.
    grads = jnp.full((65537, 2), -2.0 if ask == "max" else 2.0, dtype)
    fill = lambda g: jnp.zeros_like(g) + getattr(jnp, ask)(g)  # noqa: E731
    tx = optax.stateless(lambda g, _: jax.tree.map(fill, g))
    sharded = jaxdist.sharded_update(tx)
    step = lambda g: sharded.update(g, sharded.init(g), g)[0]  # noqa: E731
    found = strategy.run(step, (jax.device_put(grads, strategy.replicated_sharding),))
    np.testing.assert_array_equal(found.astype("float32"), grads.astype("float32"))
