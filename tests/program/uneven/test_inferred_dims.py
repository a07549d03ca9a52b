"""A reshape with -1 has the same inferred dim on a replica without rows as on the others."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxdist
from jaxdist import PerReplica
from tests.tables import sampled

SHAPE = (4, 3, 2)  # of a row
X = np.arange(7 * 24, dtype=np.float32).reshape(7, *SHAPE)


def _strategy() -> Any:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def _parts(split: tuple[int, ...]) -> PerReplica:
    ends = np.cumsum([0, *split])
    return PerReplica([X[a:b] for a, b in itertools.pairwise(ends)])


def _by_two_factors(x: Any) -> Any:
    # One line, with other factors at each call.
    shapes = [lambda n, k=k: (n * k, -1) for k in (1, 4)]
    flat = [x.reshape(of(x.shape[0])) for of in shapes]
    return flat[0] + flat[1].reshape(x.shape[0], -1)


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return x.reshape((x.shape[0], -1))


# Each keeps dim 0 as the rows, times a factor.
RESHAPES: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.reshape(x.shape[0], -1),
    "method with a tuple": lambda x: x.reshape((x.shape[0], -1)),
    "with len": lambda x: x.reshape(len(x), -1),
    "jnp.reshape": lambda x: jnp.reshape(x, (x.shape[0], -1)),
    "jnp.reshape of a copy": lambda x: jnp.reshape(x, (x.shape[0], -1), copy=True),
    "Fortran order": lambda x: jnp.reshape(x, (x.shape[0], -1), order="F"),
    "a sized dim": lambda x: x.reshape(x.shape[0], -1, 2),
    "dims of the array": lambda x: x.reshape(*x.shape[:2], -1),
    "rows first": lambda x: x.reshape(-1, 24),
    "rows times a factor": lambda x: x.reshape(x.shape[0] * 4, -1),
    "rows times other factors": _by_two_factors,
    "the unknown before the rows": lambda x: x.reshape(-1, x.shape[0]).T,
    "ravel": lambda x: x.ravel(),
    "-1": lambda x: x.reshape(-1),
    "in jit": jax.jit(lambda x: x.reshape(x.shape[0] * 2, -1)),
    "in jit with static rows": lambda x: jax.jit(
        lambda v, n: v.reshape(n, -1), static_argnums=1
    )(x, x.shape[0] * 2),
    "in vmap": lambda x: jax.vmap(lambda v: v.reshape(v.shape[0], -1), 3, 2)(x[..., None]),
    "in remat": jax.checkpoint(lambda x: jnp.sin(x.reshape(x.shape[0] * 3, -1))),
    "in scan": lambda x: jax.lax.scan(
        lambda c, v: (c + v.reshape(v.shape[0] * 2, -1), None),
        jnp.zeros((x.shape[0] * 2, 3)), jnp.moveaxis(x, 1, 0),
    )[0],
    "in grad": jax.grad(lambda x: jnp.sum(jnp.sin(x.reshape(x.shape[0], -1)))),
    "in nnx": lambda x: nnx.Sequential(lambda v: v.reshape(v.shape[0], -1))(x),
    "in linen": lambda x: _Linen().apply({}, x),
    "after a product": lambda x: (x @ jnp.ones((2, 5))).reshape(x.shape[0], -1),
}  # fmt: skip


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize("split", [(3, 3, 1, 0), (0, 4, 0, 3), (7, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", sampled(list(RESHAPES), 5))
def test_the_inferred_dim_is_that_of_the_step_with_rows(
    name: str, split: tuple[int, ...], eagerly: bool
) -> None:
    def step(x: Any) -> Any:
        flat = RESHAPES[name](x)
        return flat, jaxdist.get_replica_context().all_reduce("sum", jnp.sum(jnp.sin(flat), 0))

    jaxdist.config.run_eagerly(eagerly)
    try:
        found, total = _strategy().run(step, (_parts(split),))
    finally:
        jaxdist.config.run_eagerly(False)
    if name == "the unknown before the rows":
        wanted = [X[:n].reshape(-1, n).T if n else X[:1].reshape(-1, 1).T[:0] for n in split]
        assert [v.shape for v in found.values] == [w.shape for w in wanted]
        return
    wanted = np.asarray(RESHAPES[name](jnp.asarray(X)))
    factor = wanted.shape[0] // 7
    assert [v.shape for v in found.values] == [(n * factor, *wanted.shape[1:]) for n in split]
    if name == "Fortran order":
        return
    np.testing.assert_allclose(np.concatenate([*found.values]), wanted, rtol=1e-6)
    np.testing.assert_allclose(total, np.sin(wanted).sum(0), atol=1e-4)


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_a_batch_without_any_row_can_be_flattened(eagerly: bool) -> None:
    jaxdist.config.run_eagerly(eagerly)
    try:
        whole = jnp.zeros((0, *SHAPE))
        found = _strategy().run(
            lambda x: x.reshape(x.shape[0], -1),
            (PerReplica([np.zeros((0, *SHAPE), np.float32)] * 4),),
        )
    finally:
        jaxdist.config.run_eagerly(False)
    assert whole.size == 0
    assert [v.shape for v in found.values] == [(0, 24)] * 4


def test_compiled_a_batch_without_any_row_has_the_dims_of_the_step_with_rows() -> None:
    x = PerReplica([np.zeros((0, *SHAPE), np.float32)] * 4)
    found = _strategy().run(lambda x: x.reshape(x.shape[0] * 4, -1), (x,))
    assert [v.shape for v in found.values] == [(0, 6)] * 4


def test_outside_of_steps_and_where_nothing_fits_the_error_is_that_of_jax() -> None:
    with pytest.raises(ZeroDivisionError):
        jnp.zeros((0, 3)).reshape(0, -1)

    def step(x: Any) -> Any:
        return x.reshape(x.shape[0], -1) if x.shape[0] else x.reshape(0, 0, -1)

    with pytest.raises(ZeroDivisionError) as error:
        _strategy().run(step, (_parts((3, 3, 1, 0)),))
    assert "They have no rows" in error.value.__notes__[-1]
    assert "balance_rows=True" in error.value.__notes__[-1]


class _Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv, self.out = nnx.Conv(2, 3, (3, 3), rngs=rngs), nnx.Linear(36, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.conv(x)).reshape(x.shape[0], -1))


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_a_network_that_flattens_has_the_weights_of_one_device(eagerly: bool) -> None:
    y = np.arange(7) % 3

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        context = jaxdist.get_replica_context()
        rows = context.all_reduce("sum", x.shape[0])
        loss = lambda m: (  # noqa: E731
            optax.softmax_cross_entropy_with_integer_labels(m(x), y).sum() / rows
        )
        optimizer.update(model, context.all_reduce("sum", nnx.grad(loss)(model)))

    def train(strategy: Any) -> np.ndarray:
        with strategy.scope():
            model = _Net()
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        data = jaxdist.data.batches((X / 100, y), 5)
        for x, labels in strategy.experimental_distribute_dataset(data):
            strategy.run(step, (model, optimizer, x, labels))
        return np.asarray(model.out.kernel[...])

    expected = train(jaxdist.OneDeviceStrategy("cpu:0"))
    jaxdist.config.run_eagerly(eagerly)
    try:
        np.testing.assert_allclose(train(_strategy()), expected, atol=1e-5)
    finally:
        jaxdist.config.run_eagerly(False)


def test_the_error_of_a_step_without_any_rows_is_that_of_the_step() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    nothing = jax.device_put(np.zeros((0, 3), np.float32), strategy.per_replica_sharding)
    with pytest.raises(TypeError, match="dot_general"):
        strategy.run(lambda x: x @ jnp.ones((4, 2)), (nothing,))
