"""Laws of strategies on random structures, shapes, dtypes and numbers of replicas."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Strategy
from tests.strategies.oracle import each, is_plain
from tests.tables import examples

few = settings(max_examples=examples(25), deadline=None, derandomize=True, print_blob=False)

DTYPES = [
    np.dtype(d) for d in ("bool", "int8", "uint16", "int32", "float16", "float32", "complex64")
] + [np.dtype(ml_dtypes.bfloat16)]
FLOATS = [np.dtype(np.float32)]


def _strategies() -> st.SearchStrategy[Strategy]:
    """A strategy with its own programs; some with two logical devices for each replica."""

    def make(count: int, logical: int) -> Strategy:
        devices = np.asarray(jax.devices()[: count * logical], dtype=object)
        if logical == 1:
            return MirroredStrategy(list(devices))
        mesh = jax.sharding.Mesh(devices.reshape(count, logical), ("data", "model"))
        return MirroredStrategy(mesh=mesh, replica_axes="data")

    return st.builds(make, st.integers(1, 4), st.sampled_from([1, 1, 2]))


def _shapes(min_dims: int = 0, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return hnp.array_shapes(
        min_dims=max(min_dims, 1), max_dims=3, min_side=min_side, max_side=3
    ) | (st.just(()) if min_dims == 0 else st.nothing())


@st.composite
def _locals(
    draw: st.DrawFn,
    count: int,
    dtypes: list[np.dtype[Any]],
    shape: tuple[int, ...] | None = None,
    **limits: int,
) -> list[np.ndarray]:
    """One array of small whole numbers for each replica: every sum of them is exact."""
    dtype = draw(st.sampled_from(dtypes))
    if shape is None:
        shape = draw(_shapes(**limits))
    seed = draw(st.integers(0, 1 << 16))
    numbers = np.random.default_rng(seed).integers(0, 4, size=(count, *shape))
    return [np.asarray(n, dtype) for n in numbers]


def _trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
        ),
        max_leaves=4,
    )


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (PerReplica, str)) or x is None


def _same(have: Any, want: np.ndarray, rtol: float = 0) -> None:
    assert have.shape == want.shape
    assert have.dtype == want.dtype
    np.testing.assert_allclose(
        np.asarray(have).astype(np.complex64), want.astype(np.complex64), rtol=rtol
    )


@few
@given(st.data())
def test_the_identity_gives_back_what_it_was_given(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    own = _locals(count, DTYPES, min_side=1).map(PerReplica)
    mirrored = _locals(1, DTYPES).map(lambda v: v[0])
    tree = data.draw(_trees(own | mirrored | st.sampled_from(["text", None, True])))
    got = strategy.run(lambda x: x, (tree,))
    before, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    after, same_structure = jax.tree.flatten(got, is_leaf=_is_leaf)
    assert same_structure == structure
    for have, want in zip(after, before, strict=True):
        if isinstance(want, PerReplica):
            assert isinstance(have, PerReplica) is (count > 1)
            values = have.values if isinstance(have, PerReplica) else [have]
            for h, w in zip(values, want.values, strict=True):
                _same(h, w)
        elif isinstance(want, np.ndarray):
            assert is_plain(have)
            _same(have, want)
        else:
            assert have is want


def _held_or_placed(strategy: Strategy, values: list[np.ndarray], is_placed: bool) -> Any:
    value = PerReplica(values)
    return strategy.run(lambda x: x, (value,)) if is_placed and len(values) > 1 else value


def _dtype_of(op: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_exact = dtype.kind in "biu"
    if op == "MEAN" and is_exact:
        return np.dtype(np.float32)
    return np.dtype(np.int32) if dtype == np.bool_ else dtype


def _wide(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.complex128)


@few
@given(st.data())
def test_reduce_is_numpys_sum_or_mean(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    values = data.draw(_locals(strategy.num_replicas_in_sync, DTYPES, min_side=1))
    rank = values[0].ndim
    axes = st.sets(st.integers(0, rank - 1), min_size=1).map(tuple) if rank else st.nothing()
    axis = data.draw(st.none() | axes | (st.integers(-rank, rank - 1) if rank else st.nothing()))
    op = data.draw(st.sampled_from(["SUM", "MEAN"]))
    value = _held_or_placed(strategy, values, data.draw(st.booleans()))
    over = (0,) if axis is None else (0, *(a % rank + 1 for a in np.atleast_1d(axis)))
    stacked = _wide(values)
    want = stacked.sum(over) if op == "SUM" else stacked.mean(over)
    got = strategy.reduce(op, {"x": [value]}, axis)["x"][0]
    assert got.dtype == _dtype_of(op, values[0].dtype)
    assert got.shape == want.shape
    np.testing.assert_allclose(_wide(got), want, rtol=1e-2)


@few
@given(st.data())
def test_reduce_of_uneven_rows_is_numpys_over_all_rows(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    sizes = [data.draw(st.integers(0, 4)) for _ in range(strategy.num_replicas_in_sync)]
    columns = data.draw(st.integers(1, 2))
    rows = [np.arange(n * columns, dtype=np.float32).reshape(n, columns) + n for n in sizes]
    together = np.concatenate(rows)
    total = strategy.reduce("SUM", PerReplica(rows), axis=0)
    np.testing.assert_allclose(total, together.sum(0))
    mean = strategy.reduce("MEAN", PerReplica(rows), axis=0)
    if len(together):
        np.testing.assert_allclose(mean, together.mean(0), rtol=1e-6)
    else:
        assert np.isnan(mean).all()
    np.testing.assert_array_equal(strategy.gather(PerReplica(rows), axis=0), together)


@few
@given(st.data())
def test_gather_is_numpys_concatenation(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    values = data.draw(_locals(strategy.num_replicas_in_sync, DTYPES, min_dims=1, min_side=1))
    axis = data.draw(st.integers(-values[0].ndim, values[0].ndim - 1))
    value = _held_or_placed(strategy, values, data.draw(st.booleans()))
    _same(strategy.gather([value], axis)[0], np.concatenate(values, axis))


@few
@given(st.data())
def test_all_reduce_is_numpys_sum_and_mean_of_every_leaf(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    tree = data.draw(_trees(_locals(count, DTYPES).map(PerReplica)))
    op = data.draw(st.sampled_from(["SUM", "MEAN"]))
    got = strategy.run(lambda x: jaxdist.get_replica_context().all_reduce(op, x), (tree,))
    before, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    after, same_structure = jax.tree.flatten(got)
    assert same_structure == structure
    for have, want in zip(after, before, strict=True):
        assert is_plain(have)
        stacked = _wide(want.values)
        expected = stacked.sum(0) if op == "SUM" else stacked.sum(0) / count
        assert have.dtype == _dtype_of(op, want.values[0].dtype)
        assert have.shape == expected.shape
        np.testing.assert_allclose(_wide(have), expected, rtol=1e-2)


@few
@given(st.data())
def test_all_gather_is_numpys_concatenation_of_every_leaf(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    tree = data.draw(_trees(_locals(count, DTYPES, min_dims=2).map(PerReplica)))
    axis = data.draw(st.integers(-2, 1))
    got = strategy.run(lambda x: jaxdist.get_replica_context().all_gather(x, axis), (tree,))
    after = jax.tree.leaves(got)
    for have, want in zip(after, jax.tree.leaves(tree, is_leaf=_is_leaf), strict=True):
        assert is_plain(have)
        _same(have, np.concatenate(want.values, axis))


@few
@given(st.data())
def test_gradients_of_all_reduce_are_the_reduced_gradients_of_all_replicas(
    data: st.DataObject,
) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    values = data.draw(_locals(count, FLOATS))
    weights = data.draw(_locals(count, FLOATS, shape=values[0].shape))
    op = data.draw(st.sampled_from(["SUM", "MEAN"]))
    wrap: Callable[..., Any] = data.draw(st.sampled_from([lambda f: f, jax.jit, jax.checkpoint]))

    def step(x: Any, w: Any) -> Any:
        def loss(x: Any) -> Any:
            return (w * jaxdist.get_replica_context().all_reduce(op, {"x": x**3})["x"]).sum()

        return jax.grad(wrap(loss))(x)

    got = strategy.run(step, (PerReplica(values), PerReplica(weights)))
    upstream = np.sum(weights, axis=0) / (1 if op == "SUM" else count)
    for have, x in zip(each(strategy, got), values, strict=True):
        np.testing.assert_allclose(have, 3 * x**2 * upstream, rtol=1e-5)


@few
@given(st.data())
def test_gradients_of_all_gather_are_the_summed_slices(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    values = data.draw(_locals(count, FLOATS, min_dims=1))
    axis = data.draw(st.integers(0, values[0].ndim - 1))
    whole = np.concatenate(values, axis).shape
    weights = data.draw(_locals(count, FLOATS, shape=whole))

    def step(x: Any, w: Any) -> Any:
        def loss(x: Any) -> Any:
            return (w * jaxdist.get_replica_context().all_gather(x**2, axis)).sum()

        return jax.grad(loss)(x)

    got = strategy.run(step, (PerReplica(values), PerReplica(weights)))
    upstream = np.split(np.sum(weights, axis=0), count, axis)
    for have, x, u in zip(each(strategy, got), values, upstream, strict=True):
        np.testing.assert_allclose(have, 2 * x * u, rtol=1e-5)


@few
@given(st.data())
def test_a_step_is_the_function_on_each_replicas_own_values(data: st.DataObject) -> None:
    strategy = data.draw(_strategies())
    count = strategy.num_replicas_in_sync
    values = data.draw(_locals(count, FLOATS, min_side=1))
    scale = data.draw(_locals(1, FLOATS, shape=values[0].shape))[0]

    def step(x: Any, scale: Any) -> Any:
        replica = jaxdist.get_replica_context().replica_id_in_sync_group
        return {"own": jnp.sin(x) * scale + replica, "same": scale.sum()}

    got = strategy.run(step, (PerReplica(values),), {"scale": scale})
    for r, (have, x) in enumerate(zip(each(strategy, got["own"]), values, strict=True)):
        np.testing.assert_allclose(have, np.sin(x) * scale + r, rtol=1e-5, atol=1e-6)
    assert is_plain(got["same"])
    np.testing.assert_allclose(got["same"], scale.sum(), rtol=1e-6)


@few
@given(st.data())
def test_local_results_are_the_values_of_each_replica_in_every_structure(
    data: st.DataObject,
) -> None:
    strategy = data.draw(_strategies().filter(lambda s: s.num_replicas_in_sync > 1))
    count = strategy.num_replicas_in_sync
    leaf = _locals(count, DTYPES).map(PerReplica) | st.sampled_from(["text", 3])
    tree = data.draw(st.tuples(_trees(leaf)))
    got = strategy.experimental_local_results(tree)
    want = [
        jax.tree.map(
            lambda x, r=r: x.values[r] if isinstance(x, PerReplica) else x, tree, is_leaf=_is_leaf
        )
        for r in range(count)
    ]
    assert len(got) == count
    for have, expected in zip(got, want, strict=True):
        assert jax.tree.structure(have) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(expected), strict=True):
            assert a is b


@pytest.mark.parametrize("seed", range(3))
def test_training_on_any_number_of_replicas_is_training_on_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 4)).astype(np.float32)
    y = rng.normal(size=(12,)).astype(np.float32)

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            x, y = batch
            return ((jnp.tanh(x @ w) - y) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        value, grad = jaxdist.get_replica_context().all_reduce("MEAN", (value, grad))
        return w - 0.1 * grad, value

    def train(count: int) -> list[float]:
        strategy = MirroredStrategy(jax.devices()[:count])
        w: Any = np.zeros(4, np.float32)
        batch = tuple(jax.device_put(v, strategy.per_replica_sharding) for v in (x, y))
        losses = []
        for _ in range(10):
            w, value = strategy.run(step, (w, batch))
            losses.append(float(value))
        return losses

    one = train(1)
    for count in (2, 3, 4, 6):
        np.testing.assert_allclose(train(count), one, rtol=1e-4)
