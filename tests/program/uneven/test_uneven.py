"""Steps whose replicas have different numbers of rows: one program, the results of NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist.errors import DivergentCollectiveError, ShapeError, StateDivergenceError
from tests.program.run.counting import compilations
from tests.tables import examples

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
W = np.array([0.3, -0.2, 0.5], np.float32)
SPLITS = [(3, 3, 3, 1), (3, 3, 3, 0), (1, 1, 1, 0), (4, 0, 2, 1), (1, 2, 3, 4), (0, 0, 0, 5)]


def _strategy(count: int = 4) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def _parts(rows: np.ndarray, split: Sequence[int]) -> PerReplica:
    ends = np.cumsum(split)
    return PerReplica([rows[e - n : e] for e, n in zip(ends, split, strict=True)])


def _each(value: Any) -> list[np.ndarray]:
    assert isinstance(value, PerReplica)
    return [np.asarray(v) for v in value.values]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_replica_computes_on_its_own_rows(split: Sequence[int]) -> None:
    rows = X[: sum(split)]
    out = _strategy().run(lambda x: {"y": x * 2, "n": x.sum()}, (_parts(rows, split),))
    for have, want in zip(_each(out["y"]), _parts(rows, split).values, strict=True):
        np.testing.assert_array_equal(have, want * 2)
    wanted = [p.sum() for p in _parts(rows, split).values]
    np.testing.assert_allclose(np.stack(_each(out["n"])), wanted, atol=1e-5)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_training_step_is_that_of_one_device_on_all_rows(split: Sequence[int]) -> None:
    rows = X[: sum(split)]

    def update(w: Any, x: Any, summed: Callable[[Any], Any]) -> Any:
        loss, grads = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w) - 1) ** 2).sum() / 10)(w)
        return w - 0.1 * summed(grads), summed(loss)

    def step(w: Any, x: Any) -> Any:
        return update(w, x, lambda v: get_replica_context().all_reduce("sum", v))

    w, loss = _strategy().run(step, (W, _parts(rows, split)))
    expected_w, expected_loss = update(W, rows, lambda v: v)
    assert isinstance(w, jax.Array)
    np.testing.assert_allclose(w, expected_w, rtol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


def test_equal_results_are_one_array_with_the_same_bits_on_all_replicas() -> None:
    def step(w: Any, x: Any) -> Any:
        total = get_replica_context().all_reduce("sum", jnp.sin(x).sum(0))
        return jnp.tanh(w * total) / 3

    out = _strategy().run(step, (W, _parts(X, (3, 3, 3, 1))))
    jaxdist.check_replicas(out)
    assert out.is_fully_replicated


def test_equal_values_are_found_among_other_operations_of_each_group() -> None:
    # Without rows, a look-up is other operations, so those after it have other positions.
    def step(w: Any, x: Any) -> Any:
        replica = get_replica_context()
        rows = replica.all_reduce("sum", x.shape[0])

        def loss(k: Any) -> Any:
            return ((x * k[None]) @ replica.all_gather(x * k[None], 0).T).sum()

        total = replica.all_reduce("sum", jax.grad(loss)(w))
        return x[:, jnp.array([2, 0, 1, 1])], total, rows

    _, total, rows = _strategy().run(step, (W, _parts(X[:6], (3, 2, 1, 0))))
    assert isinstance(total, jax.Array)
    assert isinstance(rows, jax.Array)
    np.testing.assert_allclose(total, 2 * W * X[:6].sum(0) ** 2, rtol=1e-5)


def test_what_is_made_of_a_local_shape_differs() -> None:
    def step(x: Any) -> Any:
        return jnp.float32(x.shape[0]), x.shape[0], "same", x.shape[1]

    size, count, text, width = _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))
    assert [float(v) for v in _each(size)] == [3, 3, 3, 1]
    assert count.values == (3, 3, 3, 1)
    assert (text, width) == ("same", 3)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_all_gather_brings_all_rows_to_every_replica(split: Sequence[int]) -> None:
    rows = X[: sum(split)]

    def step(x: Any) -> Any:
        whole = get_replica_context().all_gather(x, axis=0)
        twice = get_replica_context().all_gather(whole[: x.shape[0]] * 2, axis=0)
        return whole, get_replica_context().all_gather(x.T, axis=-1), twice

    whole, turned, twice = _strategy().run(step, (_parts(rows, split),))
    np.testing.assert_array_equal(whole, rows)
    np.testing.assert_array_equal(turned, rows.T)
    np.testing.assert_array_equal(twice, np.concatenate([rows[:n] * 2 for n in split]))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"]
)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_gradients_of_a_gather_are_summed_and_cut(split: Sequence[int], wrap: Any) -> None:
    rows = X[: sum(split)]

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return (get_replica_context().all_gather(jnp.sin(x), axis=0) ** 2).sum()

        return jax.grad(wrap(loss))(x)

    out = _strategy().run(step, (_parts(rows, split),))
    # Every replica adds the gradient of its own loss, and all losses are equal.
    wanted = np.split(4 * 2 * np.sin(rows) * np.cos(rows), np.cumsum(split)[:-1])
    for have, want in zip(_each(out), wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_a_jitted_helper_with_a_gather_is_traced_for_every_split() -> None:
    @jax.jit
    def helper(x: Any) -> Any:
        return get_replica_context().all_gather(x, axis=0)

    def step(x: Any) -> Any:
        return helper(x), helper(x * 2)

    strategy = _strategy()
    for split in ((3, 3, 3, 1), (1, 3, 3, 3), (2, 2, 1, 1)):
        rows = X[: sum(split)]
        whole, doubled = strategy.run(step, (_parts(rows, split),))
        np.testing.assert_array_equal(whole, rows)
        np.testing.assert_array_equal(doubled, rows * 2)


_LOOPS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "scan": lambda fn, x: lax.scan(lambda c, row: (fn(c + row), None), x, jnp.stack([x, -x]))[0],
    "while": lambda fn, x: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, fn(s[1])), (0, x)
    )[1],
    "cond": lambda fn, x: lax.cond(x.shape[0] > 1, fn, lambda v: v, x),
}


@pytest.mark.parametrize("loop", list(_LOOPS))
@pytest.mark.parametrize("split", [(0, 2), (2, 0), (1, 3), (0, 3, 2)], ids=str)
def test_what_a_loop_closes_over_may_be_other_on_some_replicas(
    split: Sequence[int], loop: str
) -> None:
    weights, shifts = np.array([0.5, 0.25], np.float32), np.array([1.0, -1.0], np.float32)

    def own(v: Any, rows: Any) -> Any:
        if rows.shape[0] > 2:
            return v * jnp.asarray(weights) + jnp.asarray(shifts) + rows.sum()
        return v + rows[:, :2].sum(0) if rows.shape[0] else v * jnp.asarray(weights)

    def step(x: Any, rows: Any) -> Any:
        return _LOOPS[loop](lambda v: get_replica_context().all_reduce("sum", own(v, rows)), x)

    x = np.array([0.5, -1.5], np.float32)
    found = _strategy(len(split)).run(step, (x, _parts(X[: sum(split)], split)))
    # One device does what all replicas do together.
    parts = [jnp.asarray(p) for p in _parts(X[: sum(split)], split).values]
    wanted = _LOOPS[loop](lambda v: sum(own(v, p) for p in parts), jnp.asarray(x))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_loops_in_other_directions_and_with_other_carries_are_refused() -> None:
    def other_direction(x: Any) -> Any:
        def turn(carry: Any, v: Any) -> Any:
            return get_replica_context().all_reduce("sum", carry * 0.5 + v), None

        values = jnp.array([1.0, 2.0, 4.0])
        return lax.scan(turn, 0.0, values, reverse=x.shape[0] > 2)[0]

    def other_carry(x: Any) -> Any:
        def total(v: Any) -> Any:
            return get_replica_context().all_reduce("sum", v)

        if x.shape[0] > 2:
            return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, total(s[1])), (0, 1.0))[
                1
            ]
        return lax.while_loop(lambda s: s < 2.0, total, 1.0)

    for step, found in ((other_direction, "backwards"), (other_carry, "2 values carried")):
        with pytest.raises(DivergentCollectiveError, match=found):
            _strategy(2).run(step, (_parts(X[:5], (2, 3)),))


def test_gathers_on_other_dims_are_refused() -> None:
    def step(x: Any) -> Any:
        square = jnp.ones((2, 2)) * x.sum()
        whole = get_replica_context().all_gather(square, axis=int(x.shape[0] > 2))
        return whole.sum()

    with pytest.raises((ShapeError, DivergentCollectiveError)):
        _strategy(2).run(step, (_parts(X[:5], (2, 3)),))


def test_a_gather_under_vmap_is_that_of_every_column() -> None:
    def step(x: Any) -> Any:
        return jax.vmap(lambda c: get_replica_context().all_gather(c, axis=0), in_axes=1)(x)

    out = _strategy().run(step, (_parts(X, (4, 0, 2, 4)),))
    np.testing.assert_array_equal(out, X.T)


NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda x, total: jax.jit(lambda v: total(jnp.sin(v).sum()))(x),
    "remat": lambda x, total: jax.checkpoint(lambda v: total(v.sum()) * 2)(x),
    "jit in jit": lambda x, total: jax.jit(lambda v: jax.jit(lambda u: total(u.sum()))(v * 2))(x),
    "vmap": lambda x, total: jax.vmap(lambda c: total(c.sum()), in_axes=1)(x),
    "scan": lambda x, total: lax.scan(
        lambda c, i: (c + total((x * i).sum()), total((x + c).sum())), 0.0, jnp.arange(3.0)
    ),
    "scan that carries rows": lambda x, total: total(
        lax.scan(lambda c, _: (c * 0.5 + total(c.sum()), None), x, length=3)[0].sum()
    ),
    "scan that stacks rows": lambda x, total: total(
        lax.scan(lambda c, _: (c + total(c.sum()), c), x, length=2)[1].sum()
    ),
    "cond": lambda x, total: lax.cond(
        total(x.sum()) > 0, lambda: total((x**2).sum()), lambda: total(-x.sum())
    ),
    "fori_loop": lambda x, total: lax.fori_loop(
        0, 3, lambda _, c: c * 0.1 + total((x * c).sum()), 1.0
    ),
    "while_loop": lambda x, total: lax.while_loop(
        lambda c: total(jnp.ones(x.shape[0]).sum()) + c < 40, lambda c: c + 7, 0.0
    ),
    "while_loop that carries rows": lambda x, total: total(
        lax.while_loop(lambda c: total(c.sum()) < 300, lambda c: c * 2 + 1, jnp.abs(x)).sum()
    ),
    "custom_jvp": lambda x, total: total(jax.grad(lambda s: total(jax.nn.relu(x * s).sum()))(1.5)),
}


@pytest.mark.parametrize("split", [(3, 3, 3, 1), (4, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("name", list(NESTED))
def test_collectives_work_inside_control_flow(name: str, split: Sequence[int]) -> None:
    rows = X[: sum(split)]

    def step(x: Any) -> Any:
        return NESTED[name](x, lambda v: get_replica_context().all_reduce("sum", v))

    out = _strategy().run(step, (_parts(rows, split),))
    scale = 4.0 if name == "custom_jvp" else 1.0  # the gradient of a sum is summed as well
    expected = jax.tree.map(lambda v: v * scale, NESTED[name](rows, lambda v: v))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), out, expected)


def test_replicas_with_one_row_may_be_traced_into_other_operations() -> None:
    # With one row a broadcast is left out of the trace.
    def step(x: Any) -> Any:
        hot = (x[:, :1] > jnp.arange(5)[None]) * x[:, 1:2]
        picked = jnp.where(x[:, :1, None] > 0, hot.sum(1, keepdims=True)[:, :, None], 2.0)
        return get_replica_context().all_reduce("sum", picked.sum()), picked

    split = (3, 3, 3, 1)
    total, picked = _strategy().run(step, (_parts(X, split),))
    one, whole = jaxdist.OneDeviceStrategy("cpu:0").run(step, (X,))
    np.testing.assert_allclose(total, one, rtol=1e-5)
    for have, want in zip(_each(picked), np.split(whole, np.cumsum(split)[:-1]), strict=True):
        np.testing.assert_allclose(have, want)


def test_flax_state_is_updated_in_place() -> None:
    strategy = _strategy()
    model: Any = nnx.Sequential(
        nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1))
    )
    twin = nnx.clone(model)

    def step(model: Any, optimizer: Any, metric: Any, x: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).sum() / 10)(model)
        metric.update(values=jnp.full(x.shape[0], loss))
        optimizer.update(model, get_replica_context().all_reduce("sum", grads))

    one = jaxdist.OneDeviceStrategy("cpu:0")
    for chosen, net, batch in ((strategy, model, _parts(X, (3, 3, 3, 1))), (one, twin, X)):
        optimizer: Any = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
        metric: Any = nnx.metrics.Average()
        for _ in range(3):
            chosen.run(step, (net, optimizer, metric, batch))
        assert int(optimizer.step[...]) == 3
        assert int(metric.count[...]) == 30
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(twin)), strict=True)
    for have, want in pairs:
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_even_and_uneven_batches_take_turns_and_each_is_compiled_once() -> None:
    strategy = _strategy()
    traces = []

    def step(w: Any, x: Any) -> Any:
        traces.append(1)
        return w + get_replica_context().all_reduce("sum", x.sum(0))

    even = jax.device_put(X[:8], strategy.per_replica_sharding)
    uneven = _parts(X, (3, 3, 3, 1))
    w = jax.device_put(np.zeros(3, np.float32), strategy.replicated_sharding)
    with compilations() as compiled:
        for _ in range(4):
            w = strategy.run(step, (w, even))
            w = strategy.run(step, (w, uneven))
        jax.block_until_ready(w)
    np.testing.assert_allclose(w, 4 * (X[:8].sum(0) + X.sum(0)), rtol=1e-5)
    # Once for even rows, once for each of the two shapes.
    assert len(traces) == 3
    assert [c.kind for c in strategy.lower(step, (w, uneven)).traced_collectives] == ["psum"]
    assert compiled.number <= 2 + 8  # and what pads the rows and cuts them


def test_the_program_has_the_collectives_of_the_even_one() -> None:
    strategy = _strategy()

    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return w - get_replica_context().all_reduce("sum", grads)

    found = [
        [(c.kind, c.operands) for c in strategy.lower(step, (W, x)).compile().collectives]
        for x in (PerReplica(np.split(X[:8], 4)), _parts(X, (3, 3, 3, 1)), _parts(X, (4, 3, 2, 1)))
    ]
    assert found == [[("all-reduce", 1)]] * 3


def test_only_the_replicas_own_branch_has_effects() -> None:
    seen: list[int] = []

    def step(x: Any) -> Any:
        jax.debug.callback(lambda n: seen.append(int(n)), x.shape[0])
        return x

    jax.block_until_ready(_strategy().run(step, (_parts(X, (4, 3, 2, 1)),)).values)
    jax.effects_barrier()
    assert sorted(seen) == [1, 2, 3, 4]


def test_a_merge_call_sees_the_values_of_all() -> None:
    def step(x: Any) -> Any:
        return get_replica_context().merge_call(
            lambda s, v: s.reduce("SUM", v, axis=None), args=(x.sum(),)
        )

    out = _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))
    np.testing.assert_allclose(out, X.sum(), rtol=1e-5)


def test_arrays_on_devices_and_other_arguments_beside_them() -> None:
    strategy = _strategy()
    parts = [
        jax.device_put(p, d)
        for p, d in zip(_parts(X, (3, 3, 3, 1)).values, jax.devices()[:4], strict=True)
    ]
    ids = PerReplica([10, 20, 30, 40])
    rows = jax.device_put(np.arange(8.0, dtype=np.float32), strategy.per_replica_sharding)

    def step(given: Any, ids: Any, rows: Any, *, mode: str) -> Any:
        return given["x"].sum() + ids + rows.sum() + (1 if mode == "one" else 0)

    out = strategy.run(step, ({"x": PerReplica(parts)}, ids, rows), {"mode": "one"})
    local = [p.sum() for p in _parts(X, (3, 3, 3, 1)).values]
    wanted = [s + 10 * (r + 1) + 4 * r + 1 + 1 for r, s in enumerate(local)]
    np.testing.assert_allclose(np.stack(_each(out)), wanted, rtol=1e-5)


def test_two_replica_axes_work_as_one() -> None:
    devices = np.asarray(jax.devices()[:4], dtype=object).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("a", "b"))

    def step(x: Any) -> Any:
        context = get_replica_context()
        return context.all_reduce("sum", x.sum()), lax.psum(x.sum(), "b"), context.all_gather(x, 0)

    total, of_pair, whole = strategy.run(step, (_parts(X, (3, 3, 3, 1)),))
    np.testing.assert_allclose(total, X.sum(), rtol=1e-5)
    pairs = [X[:6].sum()] * 2 + [X[6:].sum()] * 2
    np.testing.assert_allclose(np.stack(_each(of_pair)), pairs, rtol=1e-5)
    np.testing.assert_array_equal(whole, X)


# Errors


def test_shapes_that_cannot_be_combined_are_named_by_replica() -> None:
    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("sum", x)

    with pytest.raises(ShapeError) as error:
        _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))
    parts = (
        "replicas [0, 1, 2]: float32[3, 3], replicas [3]: float32[1, 3]",
        "(a sum and a count)",
    )
    for part in ("ReplicaContext.all_reduce at", __file__, *parts):
        assert part in str(error.value)


def test_shapes_that_a_psum_of_the_users_own_cannot_combine_are_named_by_replica() -> None:
    with pytest.raises(ShapeError) as error:
        _strategy().run(lambda x: lax.psum(x, "replica"), (_parts(X, (3, 3, 3, 1)),))
    for part in ("psum", __file__, "replicas [0, 1, 2]: float32[3, 3]", "replicas [3]", "[1, 3]"):
        assert part in str(error.value)


def test_a_collective_that_some_shapes_do_not_reach_is_refused() -> None:
    def step(x: Any) -> Any:
        total = x.sum()
        return get_replica_context().all_reduce("sum", total) if x.shape[0] > 1 else total

    with pytest.raises(DivergentCollectiveError) as error:
        _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))
    assert "replicas [3]: nothing more" in str(error.value)
    assert "replicas [0, 1, 2]: psum" in str(error.value)


def test_other_structures_on_other_replicas_are_refused() -> None:
    def step(x: Any) -> Any:
        return (x, x) if x.shape[0] > 1 else x

    with pytest.raises(StateDivergenceError, match=r"Replicas \[3\]"):
        _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))


def test_state_that_differs_is_refused_as_it_is_for_even_rows() -> None:
    model: Any = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def step(model: Any, x: Any) -> None:
        model.bias[...] = model.bias[...] + x.sum()

    with pytest.raises(StateDivergenceError, match="bias"):
        _strategy().run(step, (model, _parts(X, (3, 3, 3, 1))))
    assert float(model.bias[0]) == 0


def test_an_exception_says_for_which_replicas_it_was_raised() -> None:
    def step(x: Any) -> Any:
        if x.shape[0] == 1:
            raise RuntimeError("one row")
        return x

    with pytest.raises(RuntimeError, match="one row") as error:
        _strategy().run(step, (_parts(X, (3, 3, 3, 1)),))
    assert "Raised for replicas [3]." in error.value.__notes__


def test_a_step_that_cannot_have_no_rows_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match="zero-size") as error:
        _strategy().run(lambda x: jnp.max(x, axis=0), (_parts(X, (3, 3, 3, 0)),))
    assert "Raised for replicas [3]. They have no rows" in error.value.__notes__[-1]


def test_other_ranks_dtypes_and_counts_are_refused_by_name() -> None:
    for values in (
        [np.ones((2, 2)), np.ones(2), np.ones(2), np.ones(2)],
        [np.ones(2, np.int32), np.ones(3), np.ones(2), np.ones(2)],
    ):
        with pytest.raises(ShapeError, match=r"args\[0\]\['x'\]"):
            _strategy().run(lambda v: v, ({"x": PerReplica(values)},))


def test_inside_jit_and_over_logical_devices_rows_have_to_be_even() -> None:
    uneven = _parts(X, (3, 3, 3, 1))
    strategy = _strategy()
    with pytest.raises(ShapeError, match="jit"):
        jax.jit(lambda v: strategy.run(lambda x: x.sum(), (v,)))(uneven)
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    logical = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    with pytest.raises(ShapeError, match="several devices"):
        logical.run(lambda x: x.sum(), (uneven,))


DTYPES = [np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16, np.complex64]


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_any_rows_any_dtype_any_number_of_replicas(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([2, 3, 4]))
    split = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from(DTYPES))
    width = data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    rows = rng.integers(0, 2, (sum(split), width)).astype(dtype)
    strategy = _strategy(count)

    def step(x: Any) -> Any:
        context = get_replica_context()
        return x, context.all_gather(x, axis=0), context.all_reduce("sum", x.sum(0))

    own, whole, total = strategy.run(step, (_parts(rows, split),))
    for have, want in zip(own.values, _parts(rows, split).values, strict=True):
        assert have.dtype == dtype
        np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(whole, rows)
    np.testing.assert_array_equal(strategy.gather(own, axis=0), rows)
    np.testing.assert_array_equal(np.asarray(total, np.complex64), rows.astype(np.complex64).sum(0))


@pytest.mark.parametrize("ops", [None, jaxdist.NcclAllReduce()], ids=["default", "nccl"])
def test_collectives_of_values_that_differ_name_all_of_them_and_the_line(ops: Any) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(3)], ops)
    a = PerReplica([np.ones(n, np.float32) for n in (2, 2, 3)])
    b = PerReplica([np.ones((n, 2), np.float32) for n in (2, 2, 3)])

    def reduced(a: Any, b: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", {"a": a, "b": b, "n": a.sum()})

    def gathered(a: Any, b: Any) -> Any:
        return jaxdist.get_replica_context().all_gather({"a": a[:2], "b": b.T}, axis=0)

    kinds = "value['a']: replicas [0, 1]: float32[2], replicas [2]: float32[3]"
    with pytest.raises(ShapeError) as error:
        strategy.run(reduced, (a, b))
    for part in ("ReplicaContext.all_reduce at", ".reduced)", "2 values", kinds, "value['b']"):
        assert part in str(error.value)
    with pytest.raises(ShapeError) as error:
        strategy.run(gathered, (a, b))
    for part in ("all_gather at", ".gathered)", "1 value ", "value['b']", "but for dim 0"):
        assert part in str(error.value)


def test_a_gather_may_meet_an_array_of_all_rows() -> None:
    """Which has the right shape only when the rows of all replicas are known."""
    parts = [np.full((r % 3 + 1, 2), r, np.float32) for r in range(8)]
    rows = np.concatenate(parts)
    weights = np.linspace(0, 1, len(rows), dtype=np.float32)[:, None]

    def step(x: Any, w: Any) -> Any:
        replica = get_replica_context()
        whole = replica.all_gather(x, axis=0) * w
        return whole, replica.all_gather(whole[: x.shape[0]], axis=0) + w

    strategy = jaxdist.MirroredStrategy()
    whole, again = strategy.run(step, (PerReplica(parts), weights))
    np.testing.assert_allclose(whole, rows * weights, rtol=1e-6)
    first = np.concatenate([(rows * weights)[: len(p)] for p in parts])
    np.testing.assert_allclose(again, first + weights, rtol=1e-6)
    with pytest.raises(TypeError, match="incompatible shapes"):
        strategy.run(step, (PerReplica(parts), weights[1:]))


def test_a_switch_with_a_collective_has_as_many_branches_everywhere() -> None:
    parts = [np.ones((r % 2 + 1, 2), np.float32) for r in range(8)]

    def step(x: Any, communicates: bool) -> Any:
        def branch(n: int) -> Any:
            return lambda v: lax.psum(v, "replica") * n if communicates else v * n

        branches = [branch(n) for n in range(x.shape[0] + 1)]
        return lax.switch(jnp.int32(1), branches, x.sum(0))

    strategy = jaxdist.MirroredStrategy()
    result = strategy.run(step, (PerReplica(parts), False))
    assert [v.tolist() for v in result.values] == [[len(p)] * 2 for p in parts]
    with pytest.raises(DivergentCollectiveError, match="numbers of branches") as told:
        strategy.run(step, (PerReplica(parts), True))
    assert "[1, 3, 5, 7]: 3 branches" in str(told.value)


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_random_keys_of_rows_go_in_and_out_across_collectives_and_through_gathers(
    eagerly: bool,
) -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    ends = np.cumsum((3, 0, 1, 2))
    parts = PerReplica([keys[e - n : e] for e, n in zip(ends, (3, 0, 1, 2), strict=True)])

    def step(keys: Any, x: Any) -> Any:
        replica = get_replica_context()
        own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 7)
        total = replica.all_reduce("sum", x.sum())
        drawn = jax.vmap(jax.random.uniform)(own) + total
        every = replica.all_gather(jax.random.key_data(own), 0)
        return own, drawn, every

    x = _parts(X[:6], (3, 0, 1, 2))
    with jaxdist.config.run_eagerly(eagerly):
        own, drawn, every = _strategy().run(step, (parts, x))
    wanted = [jax.random.fold_in(k, 7) for k in keys]
    data = np.stack([np.asarray(jax.random.key_data(k)) for k in wanted])
    found = [np.asarray(jax.random.key_data(v)) for v in own.values]
    np.testing.assert_array_equal(np.concatenate(found), data)
    np.testing.assert_array_equal(every, data)
    numbers = [float(jax.random.uniform(k)) + X[:6].sum() for k in wanted]
    np.testing.assert_allclose(np.concatenate(_each(drawn)), numbers, rtol=1e-5)
