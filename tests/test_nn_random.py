"""Random keys by the number of the example in the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context, nn

COUNTS = (1, 2, 4, 8)


def _strategy(count: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def _key_data(key: Any, x: Any) -> Any:
    keys = nn.example_keys(key, x.shape[0])
    is_typed = jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(keys) if is_typed else keys


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
@pytest.mark.parametrize("count", COUNTS)
def test_keys_are_those_of_the_global_examples_on_any_number_of_replicas(
    count: int, make: Any
) -> None:
    strategy = _strategy(count)
    rows = jax.device_put(np.zeros(16, np.float32), strategy.per_replica_sharding)
    found = strategy.run(_key_data, (make(3), rows))
    found = strategy.gather(found, axis=0) if count > 1 else found
    wanted = [
        jax.random.key_data(jax.random.fold_in(jax.random.key(3), i)).tolist() for i in range(16)
    ]
    assert np.asarray(found).tolist() == wanted


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize("rows", [(3, 3, 2, 0), (1, 0, 4, 2)])
def test_keys_are_those_of_the_global_examples_where_replicas_have_other_numbers_of_rows(
    rows: tuple[int, ...], eagerly: bool
) -> None:
    x = jaxdist.PerReplica([np.zeros(n, np.float32) for n in rows])

    def step(key: Any, x: Any) -> Any:
        twice = jax.jit(_key_data)(key, x)
        # What is gathered after it has other rows of its own.
        every = get_replica_context().all_gather(x[:1], 0)
        return _key_data(key, x), twice, every.sum()

    with jaxdist.config.run_eagerly(eagerly):
        found, twice, _ = _strategy(4).run(step, (jax.random.key(3), x))
    wanted = [
        jax.random.key_data(jax.random.fold_in(jax.random.key(3), i)).tolist()
        for i in range(sum(rows))
    ]
    for one in (found, twice):
        assert np.concatenate([np.asarray(v) for v in one.values]).tolist() == wanted


def test_keys_outside_every_strategy_start_at_zero() -> None:
    keys = nn.example_keys(jax.random.key(1), 3)
    assert keys.shape == (3,)
    assert bool(keys[2] == jax.random.fold_in(jax.random.key(1), 2))
    assert nn.example_keys(jax.random.key(1), 0).shape == (0,)
    assert nn.example_keys(jax.random.PRNGKey(1), 0).shape == (0, 2)


def test_what_is_no_key_or_no_number_is_refused() -> None:
    with pytest.raises(jaxdist.errors.ArgumentTypeError, match="key=0, of type int"):
        nn.example_keys(0, 2)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(jaxdist.errors.ArgumentTypeError, match="a Python integer"):
        nn.example_keys(jax.random.key(0), jnp.float32(2))
    with pytest.raises(jaxdist.errors.ArgumentError, match="-1"):
        nn.example_keys(jax.random.key(0), -1)
    with pytest.raises(jaxdist.errors.ShapeError, match=r"shape \[2\]"):
        nn.example_keys(jax.random.split(jax.random.key(0)), 2)
    with pytest.raises(jaxdist.errors.ShapeError, match=r"(?s)uint32\[4\].*has 2 words"):
        nn.example_keys(jnp.zeros(4, jnp.uint32), 2)
    with (
        jaxdist.MirroredStrategy().scope(),
        pytest.raises(jaxdist.errors.ContextError, match="its scope"),
    ):
        nn.example_keys(jax.random.key(0), 2)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_numbers_depend_on_their_neighbours_are_refused(impl: str) -> None:
    key = jax.random.key(1, impl=impl)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(8))
    draw = jax.vmap(jax.random.bernoulli)
    # Why: the rows of two replicas are other ones than those of one.
    assert draw(keys).tolist() != [*draw(keys[:4]).tolist(), *draw(keys[4:]).tolist()]
    refused = pytest.raises(
        jaxdist.errors.ArgumentError, match=f"(?s)generator '{impl}'.*impl='threefry2x32'"
    )
    with refused:
        nn.example_keys(key, 8)
    with refused:
        _strategy(2).run(_key_data, (key, np.zeros(4, np.float32)))
    with jax.default_prng_impl(impl), refused:
        nn.example_keys(jax.random.PRNGKey(1), 8)
    with jax.default_prng_impl(impl):
        assert nn.example_keys(jax.random.key(1, impl="threefry2x32"), 8).shape == (8,)


class Net(nnx.Module):
    """A layer with dropout between two others."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.outer = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jnp.tanh(self.inner(x))
        return self.outer(self.dropout(hidden, rngs=nnx.Rngs(dropout=key)))


def _step(model: Any, optimizer: Any, key: Any, x: Any, y: Any) -> Any:
    keys = nn.example_keys(key, x.shape[0])

    def loss_of(model: Any) -> Any:
        rows = jax.vmap(model)(x, keys)
        return nn.compute_average_loss(((rows - y) ** 2).mean(axis=1))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    context = get_replica_context()
    optimizer.update(model, context.all_reduce("sum", grads))
    return context.all_reduce("sum", loss)


def _trained(count: int) -> list[Any]:
    strategy = _strategy(count)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)).astype(np.float32)
    y = rng.normal(size=(16, 2)).astype(np.float32)
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.2, momentum=0.9), wrt=nnx.Param)
    batch = jax.device_put((x, y), strategy.per_replica_sharding)
    losses = []
    for i in range(5):
        key = jax.random.fold_in(jax.random.key(0), i)
        losses.append(float(strategy.run(_step, (model, optimizer, key, *batch))))
    return [losses, *map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))]


def test_dropout_by_example_trains_to_the_same_numbers_on_1_2_4_and_8_replicas() -> None:
    one, *others = [_trained(count) for count in COUNTS]
    for other in others:
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_dropout_by_example_drops_something_else_in_every_step() -> None:
    model = Net()
    x = jnp.ones((8, 4))
    outs = [jax.vmap(model)(x, nn.example_keys(jax.random.key(i), 8)) for i in range(2)]
    assert not np.allclose(outs[0], outs[1])
    assert len(np.unique(np.asarray(outs[0]), axis=0)) > 1, "each example drops its own units"
