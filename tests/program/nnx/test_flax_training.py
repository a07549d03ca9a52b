"""NNX models of many makes train on 8 replicas as plain NNX does on one batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context

pytestmark = pytest.mark.both_executors

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(16, 4)).astype(np.float32)
Y = _RNG.normal(size=(16, 4)).astype(np.float32)


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(self.norm(x)))


class Nested(nnx.Module):
    """Blocks in lists in dicts, one of them by two names."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stages = nnx.Dict(
            one=nnx.List([Block(rngs), Block(rngs)]), two=nnx.List([Block(rngs)])
        )
        self.again = self.stages.one[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in (*self.stages.one, *self.stages.two, self.again):
            x = block(x)
        return x


class TiedWeights(nnx.Module):
    """One variable that two layers hold."""

    def __init__(self) -> None:
        self.down = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1))
        self.up.kernel = self.down.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(jnp.tanh(self.down(x)))


def _stacked() -> Any:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    return make(nnx.Rngs(0))


class Scanned(nnx.Module):
    """Three blocks with stacked variables, run by one scan."""

    def __init__(self, *, remat: bool) -> None:
        self.blocks = _stacked()
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def apply(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        body = nnx.remat(apply) if self.remat else apply
        scanned = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        result: jax.Array = scanned(x, self.blocks)
        return result


class Rematerialised(nnx.Module):
    """Blocks whose activations are computed twice."""

    def __init__(self) -> None:
        self.blocks = nnx.List([Block(nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


def _grads(model: Any, x: Any, y: Any, wrt: Any = nnx.Param) -> Any:
    def loss_of(model: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    return nnx.grad(loss_of, argnums=nnx.DiffState(0, wrt))(model)


def _trained_on_replicas(model: Any, wrt: Any, step_count: int = 2) -> Any:
    strategy = jaxdist.MirroredStrategy()
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=wrt)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        grads = get_replica_context().all_reduce("mean", _grads(model, x, y, wrt))
        optimizer.update(model, grads)

    batch = jax.device_put((X, Y), strategy.per_replica_sharding)
    for _ in range(step_count):
        strategy.run(step, (model, optimizer, *batch))
    return model


def _trained_plainly(model: Any, wrt: Any, step_count: int = 2) -> Any:
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=wrt)
    for _ in range(step_count):
        optimizer.update(model, _grads(model, X, Y, wrt))
    return model


def _values(model: Any, kind: Any = nnx.Variable) -> dict[Any, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {path: np.array(variable[...]) for path, variable in flat}


def _assert_alike(ours: Any, theirs: Any, kind: Any = nnx.Param) -> None:
    a, b = _values(ours, kind), _values(theirs, kind)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_allclose(a[path], b[path], rtol=1e-3, atol=1e-5, err_msg=str(path))


@pytest.mark.parametrize(
    "make",
    [
        Nested,
        TiedWeights,
        lambda: Scanned(remat=False),
        lambda: Scanned(remat=True),
        Rematerialised,
    ],
    ids=["nested", "tied_weights", "scan", "scan_with_remat", "remat"],
)
def test_a_model_trains_on_8_replicas_as_plain_nnx_does(make: Callable[[], Any]) -> None:
    ours = _trained_on_replicas(make(), nnx.Param)
    _assert_alike(ours, _trained_plainly(make(), nnx.Param))
    start = _values(make(), nnx.Param)
    assert any(not np.allclose(start[p], v) for p, v in _values(ours, nnx.Param).items())


def test_shared_modules_and_variables_stay_shared() -> None:
    nested: Any = _trained_on_replicas(Nested(), nnx.Param, 2)
    assert nested.again is nested.stages.one[0]
    tied: Any = _trained_on_replicas(TiedWeights(), nnx.Param, 2)
    assert tied.up.kernel is tied.down.kernel


class Adapted(nnx.Module):
    """A trained layer with a low-rank addition, and a layer that has one of its own."""

    def __init__(self) -> None:
        self.base = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.added = nnx.LoRA(4, 2, 4, base_module=self.base, rngs=nnx.Rngs(1))
        self.own = nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.own(jnp.tanh(self.added(x)))


def test_only_the_low_rank_parameters_train_with_wrt_lora() -> None:
    is_frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    ours = _trained_on_replicas(Adapted(), nnx.LoRAParam)
    _assert_alike(ours, _trained_plainly(Adapted(), nnx.LoRAParam), nnx.LoRAParam)
    before, after = _values(Adapted(), is_frozen), _values(ours, is_frozen)
    for path in before:
        np.testing.assert_array_equal(before[path], after[path])
    low, high = _values(Adapted(), nnx.LoRAParam), _values(ours, nnx.LoRAParam)
    assert len(low) == 4
    assert all(not np.allclose(low[p], high[p]) for p in low)


def test_frozen_parameters_that_differ_are_no_concern_of_the_optimizer_but_of_the_error() -> None:
    strategy = jaxdist.MirroredStrategy()
    model = Adapted()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.update(model, _grads(model, x, y, nnx.LoRAParam))

    batch = jax.device_put((X, Y), strategy.per_replica_sharding)
    with pytest.raises(jaxdist.errors.StateDivergenceError, match="lora_a") as error:
        strategy.run(step, (model, optimizer, *batch))
    assert "args[0].base.kernel" not in str(error.value)


class Growing(nnx.Module):
    """A model that gets more layers between steps."""

    def __init__(self) -> None:
        self.blocks = nnx.List([Block(nnx.Rngs(0))])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.compiled
def test_a_layer_added_between_steps_is_trained_from_then_on() -> None:
    strategy = jaxdist.MirroredStrategy()
    traces = []

    def step(model: Any, x: Any, y: Any) -> None:
        traces.append(1)
        grads = get_replica_context().all_reduce("mean", _grads(model, x, y))
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    def plainly(model: Any) -> None:
        grads, params = _grads(model, X, Y), nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    ours, theirs = Growing(), Growing()
    batch = jax.device_put((X, Y), strategy.per_replica_sharding)
    for i in range(3):
        for _ in range(3):
            strategy.run(step, (ours, *batch))
            plainly(theirs)
        _assert_alike(ours, theirs)
        assert len(traces) == i + 1, "one trace for each graph"
        for model in (ours, theirs):
            model.blocks.append(Block(nnx.Rngs(i + 1)))


def test_dropout_and_batch_norm_in_a_scan_have_a_stream_and_statistics_for_each_layer() -> None:
    strategy = jaxdist.MirroredStrategy()

    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(x))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Noisy:
        return Noisy(rngs)

    model: Any = make(nnx.Rngs(0))

    def step(model: Any, x: Any) -> Any:
        def apply(x: Any, layer: Any) -> Any:
            x = layer(x)
            return x, x == 0

        return nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, model)[1][None]

    x = jax.device_put(X, strategy.per_replica_sharding)
    first = np.asarray(strategy.run(step, (model, x)).array)  # [replica, layer, row, feature]
    second = np.asarray(strategy.run(step, (model, x)).array)
    assert first.shape == (8, 3, 2, 4)
    masks = {m.tobytes() for m in (*first[:, 0], *second[:, 0])}
    assert len(masks) > 8, "replicas and steps draw numbers of their own"
    assert (first[:, 0] != first[:, 1]).any(), "and so do layers"
    # The mean over two steps of the same rows, with momentum 0.5 from 0.
    np.testing.assert_allclose(model.norm.mean[0], 0.75 * X.mean(axis=0), atol=1e-6)
    assert model.norm.mean[...].shape == (3, 4)
