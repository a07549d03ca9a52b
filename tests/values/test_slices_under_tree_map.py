"""`jax.tree.map` and optax on `IndexedSlices`: what the dense array gives, or a named error."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdist
from jaxdist import IndexedSlices, PerReplica, get_replica_context
from jaxdist.errors import ArgumentTypeError, JaxdistError, UnsupportedError
from tests.parameter_server.strategy.making import make_strategy
from tests.program.run.files_of_calls import files_of_calls
from tests.tables import sampled

# No value is 0, 1 or an index, so that another row or another number shows.
_VALUES = np.array([[0.5], [-3.0], [7.25]], "float32")
_INDICES = np.array([4, 1, 2])
_SHAPE = (6, 1)


def _slices(indices: Any = _INDICES) -> IndexedSlices:
    return IndexedSlices(jnp.asarray(_VALUES), jnp.asarray(indices), _SHAPE)


# Functions that a user maps over the leaves. Each has a result for every dtype of numbers.
_MAPPED: dict[str, Callable[[Any], Any]] = {
    "times": lambda x: x * 2,
    "times from the left": lambda x: np.float32(2) * x,
    "divided": lambda x: x / 2,
    "plus": lambda x: x + 1,
    "minus": lambda x: -x,
    "power": lambda x: x**2,
    "absolute": abs,
    "compared": lambda x: x > 1,
    "method": lambda x: x.clip(0, 1),
    "sum": lambda x: x.sum(),
    "astype": lambda x: x.astype("float32"),
    "set": lambda x: x.at[0].set(0),
    "jnp.square": jnp.square,
    "jnp.stack": lambda x: jnp.stack([x, x]).sum(0),
    "jnp.clip": lambda x: jnp.clip(x, 0, 1),
    "jnp.where": lambda x: jnp.where(x > 1, x, 0),
    "jnp.sum": jnp.sum,
    "jnp.sort": jnp.sort,
    "jnp.isfinite": jnp.isfinite,
    "jnp.round": jnp.round,
    "jnp.mean": jnp.mean,
    "jnp.cumsum": jnp.cumsum,
    "jnp.vdot": lambda x: jnp.vdot(x, x),
    "jnp.ones_like": jnp.ones_like,
    "jnp.full_like": lambda x: jnp.full_like(x, 3),
    "jnp.full_like of an array": lambda x: jnp.full_like(x, jnp.asarray(3)),
    "jnp.zeros_like": jnp.zeros_like,
    "jax.nn.relu": jax.nn.relu,
    "jax.lax.stop_gradient": lax.stop_gradient,
    "equal": lambda x: x == x,
    "noise": lambda x: jax.random.normal(jax.random.key(0), x.shape),
}
_SCALED = {
    "scale": optax.scale(2.0),
    "clip": optax.clip(0.5),
    "clip_by_global_norm": optax.clip_by_global_norm(0.5),
    "clip_by_block_rms": optax.clip_by_block_rms(0.5),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.5),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "add_noise": optax.add_noise(0.1, 0.9, 0),
    "apply_every": optax.apply_every(2),
    "centralize": optax.centralize(),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_rms": optax.scale_by_rms(),
    "scale_by_rss": optax.scale_by_rss(),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_lion": optax.scale_by_lion(),
    "scale_by_novograd": optax.scale_by_novograd(),
    "scale_by_sm3": optax.scale_by_sm3(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "scale_by_learning_rate": optax.scale_by_learning_rate(0.1),
    "scale_by_schedule": optax.scale_by_schedule(lambda n: 2.0),
    "set_to_zero": optax.set_to_zero(),
    "zero_nans": optax.zero_nans(),
    "identity": optax.identity(),
    "apply_if_finite": optax.apply_if_finite(optax.scale(2.0), 3),
    "sgd": optax.sgd(0.1),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1),
    "adagrad": optax.adagrad(0.1),
    "lamb": optax.lamb(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
    "sign_sgd": optax.sign_sgd(0.1),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2),
}


def _mapped(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: jax.tree.map(fn, tree)


def _updated(tx: Any) -> Callable[[Any], Any]:
    return lambda tree: tx.update(tree, tx.init(tree), tree)[0]


_WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"tree.map {name}": _mapped(fn) for name, fn in _MAPPED.items()},
    **{f"optax.{name}": _updated(tx) for name, tx in _SCALED.items()},
    "optax.apply_updates": lambda tree: optax.apply_updates(tree, tree),
    "optax.incremental_update": lambda tree: optax.incremental_update(tree, tree, 0.1),
    "optax.tree.norm": optax.tree.norm,
    "optax.tree.scale": lambda tree: optax.tree.scale(2.0, tree),
    "optax.tree.add": lambda tree: optax.tree.add(tree, tree),
    "optax.tree.ones_like": optax.tree.ones_like,
    "optax.tree.cast": lambda tree: optax.tree.cast(tree, jnp.bfloat16),
}


def _dense(found: Any) -> Any:
    return found.to_dense() if isinstance(found, IndexedSlices) else found


def _outside(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    return _dense(way(slices))


def _in_jit(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    return jax.jit(lambda s: _dense(way(s)))(slices)


def _in_function(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    return jaxdist.function(lambda s: _dense(way(s)))(slices)


def _in_step(way: Callable[[Any], Any], slices: IndexedSlices, **options: Any) -> Any:
    devices = ["cpu:0"] if options else ["cpu:0", "cpu:1"]
    two = jaxdist.MirroredStrategy(devices, **options)
    return two.run(lambda s: _dense(way(s)), (slices,))


def _op_by_op(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    with jaxdist.config.run_eagerly(True):
        return _in_step(way, slices)


def _virtual(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    return _in_step(way, slices, deterministic=2)


def _made_in_step(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = slices.values, slices.indices
    return two.run(lambda v, i: _dense(way(IndexedSlices(v, i, _SHAPE))), parts)


def _closed_over(way: Callable[[Any], Any], slices: IndexedSlices) -> Any:
    return jaxdist.OneDeviceStrategy("cpu:1").run(lambda: _dense(way(slices)))


_WHERE = {
    "outside": _outside,
    "in jit": _in_jit,
    "in a function": _in_function,
    "in a step": _in_step,
    "made in a step": _made_in_step,
    "closed over": _closed_over,
    "op by op": _op_by_op,
    "virtual": _virtual,
}
_TABLE = [(way, where) for way in _WAYS for where in _WHERE]


@pytest.mark.parametrize("row", sampled(_TABLE, 60, name=" | ".join))
def test_slices_give_what_the_dense_array_gives_or_a_named_error(row: tuple[str, str]) -> None:
    way, where = _WAYS[row[0]], row[1]
    expected = way(jnp.asarray(_slices().to_dense()))
    try:
        found = _WHERE[where](way, _slices())
    except (TypeError, ValueError, AssertionError, JaxdistError) as error:
        text, is_named = str(error), isinstance(error, JaxdistError)
    else:
        np.testing.assert_allclose(np.asarray(found, "float32"), np.asarray(expected, "float32"))
        return
    if is_named:
        assert "IndexedSlices" in text
        assert "fn(slices.values)" in text, "the remedy"
    else:
        # JAX's own refusal, where nothing of jaxdist runs around the function.
        assert where in ("in jit", "outside")
        assert "row numbers of IndexedSlices" in text


@pytest.mark.parametrize(
    "way",
    [
        _mapped(lambda x: x * 2),
        _mapped(lambda x: -x),
        _mapped(lambda x: np.multiply(x, 2)),
        _mapped(jnp.square),
        _mapped(lambda x: jnp.stack([x, x])),
        _mapped(jnp.ones_like),
        _mapped(lambda x: x.real),
        _updated(optax.scale(2.0)),
        _updated(optax.clip(0.5)),
        optax.tree.norm,
    ],
)
def test_outside_of_a_trace_the_error_says_how_to_compute(way: Callable[[Any], Any]) -> None:
    for slices in (_slices(), _slices(np.array([4, 1, 2], "uint8")), _of_replicas()):
        with pytest.raises(UnsupportedError, match=r"slices\.with_parts\(fn\(slices\.values\)"):
            way(slices)


def test_indices_are_no_random_keys() -> None:
    leaf = jax.tree.leaves(_slices())[1]
    for way in (jax.random.split, jax.random.bits, lambda key: jax.random.fold_in(key, 1)):
        with pytest.raises(UnsupportedError, match=r"jax\.random was used on the indices"):
            way(leaf[0])


def _own_rows(x: Any) -> IndexedSlices:
    return IndexedSlices(x * _VALUES, _INDICES - get_replica_context().replica_id_in_sync_group)


def _of_replicas() -> Any:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    return two.run(_own_rows, (PerReplica([np.float32(1), np.float32(2)]),))


@pytest.mark.both_executors
@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_collectives_over_the_leaves_are_refused(name: str) -> None:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(slices: Any) -> Any:
        return getattr(lax, name)(slices, "replica").values

    with pytest.raises(UnsupportedError, match="indices of IndexedSlices"):
        two.run(step, (_slices(),))


_MOVES: dict[str, Callable[[IndexedSlices], Any]] = {
    "jit": jax.jit(lambda s: s),
    "scan": lambda s: lax.scan(
        lambda c, _: (c.with_parts(c.values + 0, c.indices), None), s, None, length=2
    )[0],
    "while": lambda s: lax.fori_loop(0, 2, lambda _, c: c, s),
    "cond": jax.jit(lambda s: lax.cond(s.values[0, 0] > 0, lambda a: a, lambda a: a, s)),
    "vmap": lambda s: jax.tree.map(
        lambda x: x[1], jax.vmap(lambda _: s, axis_size=2, in_axes=None)(0)
    ),
    "device_put": lambda s: jax.device_put(s, jax.devices("cpu")[1]),
    "donated": lambda s: jax.jit(lambda x: x, donate_argnums=0)(jax.tree.map(lambda x: x, s)),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "pickle of a rebuilt one": lambda s: pickle.loads(pickle.dumps(jax.tree.map(lambda x: x, s))),
    "pickle of leaves": lambda s: IndexedSlices.with_parts(
        s, *pickle.loads(pickle.dumps(jax.tree.leaves(s)))
    ),
    "deepcopy": copy.deepcopy,
    "eager step": lambda s: jaxdist.OneDeviceStrategy("cpu:1").run(lambda x: x, (s,)),
    "closed over": lambda s: jax.jit(lambda: jax.tree.map(lambda x: x, s))(),
    "checkpoint": jax.jit(jax.checkpoint(lambda s: s)),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("name", _MOVES)
def test_indices_pass_through_transformations_as_integers(name: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    indices = np.array([info.min, info.max, 1], dtype)
    found = _MOVES[name](_slices(indices))
    assert isinstance(found, IndexedSlices)
    assert found.indices.dtype == dtype
    assert found.indices.tolist() == indices.tolist()
    np.testing.assert_array_equal(found.values, _VALUES)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_indices_of_64_bits_keep_them(dtype: str) -> None:
    with jax.enable_x64(True):
        indices = np.array([2**40 + 5, np.iinfo(dtype).max, 1], dtype)
        for name in ("jit", "vmap", "pickle"):
            found = _MOVES[name](_slices(indices)).indices
            assert found.dtype == dtype
            assert found.tolist() == indices.tolist()


def test_shapes_of_slices_have_integer_indices() -> None:
    found = jax.eval_shape(lambda s: s.with_parts(s.values * 2, s.indices), _slices())
    assert (found.indices.shape, found.indices.dtype) == ((3,), np.int32)


@pytest.mark.parametrize(
    "way",
    [
        lambda s: jax.grad(lambda x: x.values.sum(), allow_int=True)(s),
        lambda s: s.with_parts(s.values, jnp.isnan(s.values[:, 0])),
    ],
)
def test_slices_without_indices_do_not_become_dense(way: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentTypeError, match="something else in their place"):
        way(_slices()).to_dense()


def test_steps_and_collectives_take_slices_of_every_replica() -> None:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    context = get_replica_context

    def step(x: Any, rows: Any) -> Any:
        gathered = lax.all_gather(rows, "replica", tiled=True)
        moved = lax.ppermute(rows, "replica", [(0, 1), (1, 0)])
        return context().all_reduce("sum", _own_rows(x)), gathered, moved.indices

    x = PerReplica([np.float32(1), np.float32(2)])
    for is_eager in (False, True):
        with jaxdist.config.run_eagerly(is_eager):
            total, gathered, moved = two.run(step, (x, _of_replicas()))
        for rows in (total, gathered):
            np.testing.assert_array_equal(rows.values, np.concatenate([_VALUES, 2 * _VALUES]))
            assert rows.indices.tolist() == [4, 1, 2, 3, 0, 1]
        assert [np.asarray(m).tolist() for m in moved.values] == [[3, 0, 1], [4, 1, 2]]


def test_calls_with_slices_stay_on_the_fast_path() -> None:
    double = jax.jit(lambda s: s.with_parts(s.values * 2, s.indices))
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(s: Any) -> Any:
        return s.with_parts(s.values * 2, s.indices)

    for call in (double, lambda s: two.run(step, (s,))):
        slices = _slices()
        for _ in range(3):
            slices = call(slices)
        with files_of_calls() as files:
            slices = call(slices)
        np.testing.assert_array_equal(slices.values, _VALUES * 16)
        python = ("pjit.py", "pxla.py", "stages.py", "run/step.py")
        assert {name for name in files if name.endswith(python)} == set()
        assert files, "the calls were counted"


def test_scheduled_functions_and_checkpoints_take_and_give_slices(tmp_path: Any) -> None:
    coordinator = jaxdist.coordinator.ClusterCoordinator(make_strategy())
    same = jaxdist.function(lambda s: (s, IndexedSlices(s.values, s.indices + 1, _SHAPE)))
    first, second = coordinator.schedule(same, (_slices(),)).fetch()
    assert (first.indices.tolist(), second.indices.tolist()) == ([4, 1, 2], [5, 2, 3])
    np.testing.assert_array_equal(first.values, _VALUES)

    with jaxdist.training.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"rows": _slices()})
        zeros = _slices(np.zeros(3, int))
        restored = checkpoints.restore({"rows": zeros})
    assert restored is not None
    found = restored.state["rows"]
    assert found.indices.tolist() == [4, 1, 2]
    np.testing.assert_array_equal(found.to_dense(), _slices().to_dense())
