"""Means over replicas with different numbers of rows are warned of, compiled and op by op alike."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxdist
from jaxdist import partition
from jaxdist.errors import UnevenMeanWarning
from tests.tables import sampled

_AXIS = "replica"


def _ctx() -> Any:
    return jaxdist.get_replica_context()


def _rows(x: Any) -> Any:
    return _ctx().all_reduce("sum", x.shape[0])


@jax.jit
def _mean_in_a_function(x: Any) -> Any:
    return _ctx().all_reduce("mean", x.mean())


def _mean_in_a_loop(x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        return total + _ctx().all_reduce("mean", x.sum() + row), None

    return jax.lax.scan(body, jnp.float32(0), jnp.arange(2.0))[0]


def _sum_over_count(x: Any) -> Any:
    return _ctx().all_reduce("sum", x.mean()) / _ctx().num_replicas_in_sync


def _terms_over_count(x: Any) -> Any:
    return _ctx().all_reduce("sum", x.mean() / _ctx().num_replicas_in_sync)


def _average_of_own_rows(x: Any) -> Any:
    losses = (x**2).reshape(x.shape[0], x[0:1].size).sum(1)
    return _ctx().all_reduce("sum", jaxdist.nn.compute_average_loss(losses))


WARNED: dict[str, Callable[[Any], Any]] = {
    "all_reduce mean": lambda x: _ctx().all_reduce("mean", x.mean()),
    "mean of a tree": lambda x: _ctx().all_reduce("mean", {"a": x.sum(), "b": x.mean(0)}),
    "in a jitted function": _mean_in_a_function,
    "in a loop": _mean_in_a_loop,
    "pmean": lambda x: jax.lax.pmean(x.mean(), _AXIS),
    "sum over the count": _sum_over_count,
    "terms over the count": _terms_over_count,
    "average of own rows": _average_of_own_rows,
    "complex": lambda x: _ctx().all_reduce("mean", jax.lax.complex(x.mean(), x.sum())),
    "bfloat16": lambda x: _ctx().all_reduce("mean", x.astype(jnp.bfloat16).mean()),
}
SILENT: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: _ctx().all_reduce("sum", x.sum()) / _rows(x),
    "mean of rows": lambda x: _ctx().all_reduce("mean", float(x.shape[0])),
    "mean of an equal value": lambda x: _ctx().all_reduce("mean", _rows(x) * 1.0),
    "mean over a dim, then all rows": lambda x: (
        _ctx().all_reduce("sum", x.mean(-1).sum()) / _rows(x)
    ),
    "mean of the sum over a dim": lambda x: _ctx().all_reduce("sum", x.sum(0)).mean(),
    "mean of noise": lambda x: _ctx().all_reduce(
        "mean", _ctx().replica_id_in_sync_group.astype(float)
    ),
    "largest": lambda x: jax.lax.pmax(x.mean(), _AXIS),
}


def _warned(step: Any, args: tuple[Any, ...], *, eagerly: bool, strategy: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as seen, jaxdist.config.run_eagerly(eagerly):
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(step, args)
    return [w for w in seen if w.category is UnevenMeanWarning]


def _strategy(num_replicas: int) -> Any:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def _batch(strategy: Any, num_rows: int, *dims: int) -> Any:
    x = np.arange(num_rows * int(np.prod(dims)), dtype=np.float32).reshape(num_rows, *dims)
    [batch] = list(strategy.experimental_distribute_dataset([x]))
    return batch


_ROWS = list(itertools.product([*WARNED, *SILENT], [2, 3, 4], [False, True]))


@pytest.mark.parametrize("row", sampled(_ROWS, 24))
def test_a_mean_over_unequal_rows_is_warned_of_once_by_both_executors(row: Any) -> None:
    name, num_replicas, eagerly = row
    strategy = _strategy(num_replicas)
    step = (WARNED | SILENT)[name]
    # A dim has as many elements as there are replicas.
    batch = _batch(strategy, 2 * num_replicas - 1, num_replicas)
    seen = _warned(lambda x: step(x), (batch,), eagerly=eagerly, strategy=strategy)
    assert len(seen) == (name in WARNED)
    for one in seen:
        assert str([2] * (num_replicas - 1) + [1]) in str(one.message)
        assert __file__ in str(one.message)
        assert one.filename == __file__


def test_the_warning_of_both_executors_has_the_same_text() -> None:
    strategy = _strategy(3)
    batch = _batch(strategy, 5, 3)

    def step(x: Any) -> Any:
        return _ctx().all_reduce("mean", x.mean())

    compiled, eager = (
        _warned(step, (batch,), eagerly=eagerly, strategy=strategy) for eagerly in (False, True)
    )
    assert [str(w.message) for w in compiled] == [str(w.message) for w in eager]


def test_a_warning_that_is_an_error_leaves_variables_as_they_are() -> None:
    strategy = _strategy(2)
    with strategy.scope():
        variable = jaxdist.Variable(jnp.float32(1))

    def step(x: Any) -> None:
        variable.assign(_ctx().all_reduce("mean", x.mean()))

    batch = _batch(strategy, 3, 2)
    for eagerly in (False, True):
        # Warnings are errors in tests.
        with jaxdist.config.run_eagerly(eagerly), pytest.raises(UnevenMeanWarning):
            strategy.run(step, (batch,))
        assert float(variable.value()) == 1


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("dim", [4, 5])
def test_means_over_dims_of_parameters_are_not_warned_of(dim: int, eagerly: bool) -> None:
    strategy, params = _strategy(4), {"w": jnp.full((dim, 6), 0.1)}
    transformation = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    tx = jaxdist.sharded_update(transformation, reduce_op="sum", min_bytes=0)
    with strategy.scope():
        state = tx.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        rows = _rows(x)
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).sum() / rows)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (params, state, _batch(strategy, 7, dim))
    assert _warned(step, args, eagerly=eagerly, strategy=strategy) == []


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("num_replicas", [3, 4])
def test_a_mean_of_gradients_in_pieces_is_warned_of(num_replicas: int, eagerly: bool) -> None:
    strategy, params = _strategy(num_replicas), {"w": jnp.full((12, 6), 0.1)}
    tx = jaxdist.sharded_update(optax.sgd(0.1), reduce_op="mean", min_bytes=0)
    with strategy.scope():
        state = tx.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (params, state, _batch(strategy, 2 * num_replicas - 1, 12))
    assert len(_warned(step, args, eagerly=eagerly, strategy=strategy)) == 1


def _sum_of_replicas(grads: Any) -> Any:
    return _ctx().all_reduce("sum", grads)


# What a step does with the gradient of arrays in pieces, which is the mean over the replicas.
_OF_PIECES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda grads: grads, 1),
    "mean": (lambda grads: _ctx().all_reduce("mean", grads), 1),
    "a part": (lambda grads: jax.tree.map(lambda g: g / 7, grads), 1),
    "norm": (lambda grads: optax.global_norm(jaxdist.partition.gather(grads)), 1),
    "sum": (_sum_of_replicas, 0),
    "a part of the sum": (lambda grads: _sum_of_replicas(jax.tree.map(lambda g: g / 7, grads)), 0),
    "sum of two": (lambda grads: _sum_of_replicas(jax.tree.map(lambda g: g + 2 * g, grads)), 0),
    "norm of the sum": (
        lambda grads: optax.global_norm(jaxdist.partition.gather(_sum_of_replicas(grads))),
        0,
    ),
    "whether it is finite": (
        lambda grads: jnp.isfinite(jaxdist.partition.gather(grads)["w"]).all(),
        0,
    ),
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
@pytest.mark.parametrize("use", _OF_PIECES)
def test_the_mean_that_fsdp_takes_of_gradients_is_warned_of_where_it_is_used(
    use: str, layout: str, eagerly: bool
) -> None:
    call, count = _OF_PIECES[use]
    rules: Any = partition.fsdp(min_bytes=0)
    if layout == "hsdp":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("outer", "inner"))
        strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("outer", "inner"))
        rules = partition.fsdp(min_bytes=0, axes=("inner",))
    else:
        strategy = _strategy(4)
    params = partition.place(strategy, {"w": jnp.full((12, 6), 0.1)}, rules)

    def step(params: Any, x: Any) -> Any:
        return call(jax.grad(lambda p: ((x @ p["w"]) ** 2).sum() / 7)(params))

    args = (params, _batch(strategy, 7, 12))
    assert len(_warned(step, args, eagerly=eagerly, strategy=strategy)) == count


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.BatchNorm(use_running_average=False, axis_name=_AXIS)(x)


@pytest.mark.parametrize("eagerly", [False, True])
def test_of_a_batch_norm_the_warning_speaks_of_the_statistics(eagerly: bool) -> None:
    strategy = _strategy(4)
    with strategy.scope():
        layer = nnx.BatchNorm(2, axis_name=_AXIS, rngs=nnx.Rngs(0))
    variables = _Linen().init(jax.random.key(0), jnp.ones((1, 2)))
    batch = _batch(strategy, 7, 2)

    def of_nnx(layer: Any, x: Any) -> Any:
        return _ctx().all_reduce("sum", layer(x).sum())

    def of_linen(variables: Any, x: Any) -> Any:
        y, _ = _Linen().apply(variables, x, mutable=["batch_stats"])
        return _ctx().all_reduce("sum", y.sum())

    def with_a_mean(layer: Any, x: Any) -> Any:
        return _ctx().all_reduce("mean", layer(x).mean())

    for step, args in [(of_nnx, (layer, batch)), (of_linen, (variables, batch))]:
        [seen] = _warned(step, args, eagerly=eagerly, strategy=strategy)
        text = str(seen.message)
        assert "statistics of normalization layers" in text
        assert "drop_remainder=True" in text
        assert "compute_average_loss" not in text
        assert __file__ in text
    [seen] = _warned(with_a_mean, (layer, batch), eagerly=eagerly, strategy=strategy)
    text = str(seen.message)
    assert "compute_average_loss" in text
    assert "statistics of normalization layers" in text
