"""Tensors split over, and replicated to, the logical devices of a replica."""

import itertools
import math
from typing import Any

import flax.nnx as nnx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from jaxdist.training import Checkpoints
from tests.program.run.counting import compilations
from tests.strategies.logical import check_tiles, tpus
from tests.strategies.oracle import refused
from tests.tables import examples

TWO_BY_FOUR = tpus(2, 4)
SPLIT = TWO_BY_FOUR.experimental_split_to_logical_devices
REPLICATE = TWO_BY_FOUR.experimental_replicate_to_logical_devices


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


@st.composite
def _array_and_parts(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    parts = draw(st.sampled_from([[4], [2, 2], [4, 1], [1, 4], [1, 2, 2], [2, 1, 2], [2, 2, 1]]))
    shape = [p * draw(st.integers(1, 3)) for p in parts]
    return np.arange(math.prod(shape), dtype="float32").reshape(shape), parts


@given(_array_and_parts())
@settings(max_examples=examples(25))
def test_part_i_j_lies_on_logical_device_i_times_n_plus_j(case: tuple[Any, list[int]]) -> None:
    whole, parts = case
    check_tiles(SPLIT(whole, parts), whole, parts, TWO_BY_FOUR.layout)
    check_tiles(REPLICATE(whole), whole, [1] * whole.ndim, _only_one(TWO_BY_FOUR.layout))


def _only_one(layout: Any) -> Any:
    """A grid in which every device is the only one of its replica."""

    class Grid:
        device_grid = layout.device_grid.reshape(-1, 1)

    return Grid


def test_values_of_replicas_are_split_over_the_logical_devices_of_each() -> None:
    rows = _random(6, 4, 6)
    placed = SPLIT(PerReplica([rows[:3], rows[3:]]), [1, 2, 2])
    for replica in range(2):
        own = rows[3 * replica : 3 * replica + 3]
        grid = type("Grid", (), {"device_grid": TWO_BY_FOUR.layout.device_grid[replica][None]})
        check_tiles(placed.array, own, [1, 2, 2], grid)
        np.testing.assert_array_equal(placed.values[replica], own)
    np.testing.assert_array_equal(TWO_BY_FOUR.gather(placed, axis=0), rows)
    total = TWO_BY_FOUR.reduce("sum", placed, axis=None)
    np.testing.assert_allclose(total, rows[:3] + rows[3:], rtol=1e-6)


def _step(split: Any, replicate: Any) -> Any:
    """Marks on inputs, intermediate values and results, under grad, scan, remat and vmap."""

    def step(w: Any, uneven: Any, x: Any, state: Any) -> Any:
        w = split(w, [1, 4])

        def layer(carry: Any, _: Any) -> Any:
            return split(jnp.tanh(split(carry, [1, 2, 2]) @ w), [1, 1, 4]), carry.sum()

        def loss(w: Any, x: Any) -> Any:
            y, sums = jax.lax.scan(jax.checkpoint(layer), x @ split(w, [4, 1]), length=2)
            y = jax.vmap(lambda row: split(row, [2, 2]))(y)
            return (replicate(y) ** 2).sum() + sums.sum()

        value, (dw, dx) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
        dw = jaxdist.get_replica_context().all_reduce("mean", dw)
        key = jax.random.fold_in(split(jax.random.split(jax.random.key(0), 4), [4])[1], 3)
        return {
            "w": split(w - 0.1 * dw, [1, 4]),
            "dx": split(dx, [1, 2, 2]),
            "loss": value,
            "uneven": split(uneven * 2, [2, 2]),
            "padded": split(jnp.cumsum(split(uneven, [4, 1]), axis=0), [4, 1]).sum(1),
            "state": jax.tree.map(jnp.sin, split(state, [4])),
            "random": jax.random.normal(key, (2,)),
            "by_jit": jax.jit(lambda a: split(a, [1, 2, 2]))(x),
            "rows": split(x, [4, 1, 1]),
        }

    return step


def test_marks_change_no_value_and_marked_results_come_back_as_they_are_marked() -> None:
    args = (
        _random(8, 8),
        _random(5, 6),
        PerReplica([_random(4, 2, 8), _random(4, 2, 8) + 1]),
        {"a": _random(8), "b": (_random(4),)},
    )
    made = TWO_BY_FOUR.run(_step(SPLIT, REPLICATE), args)
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    expected = two.run(_step(lambda x, _: x, lambda x: x), args)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5, err_msg=name)
    layout = TWO_BY_FOUR.layout
    check_tiles(made["w"], np.asarray(made["w"]), [1, 4], layout)
    assert made["dx"].values[0].addressable_shards[0].data.shape == (4, 1, 4)
    assert made["by_jit"].values[0].addressable_shards[0].data.shape == (4, 1, 4)
    # 5 rows do not go into 2 parts, and dim 0 of a value for each replica is that of replicas.
    assert made["uneven"].addressable_shards[0].data.shape == (5, 3)
    assert made["rows"].array.sharding.is_equivalent_to(layout.per_replica, 3)


def test_branches_may_lie_in_different_ways() -> None:
    def chosen(w: Any, turn: Any) -> Any:
        one = jax.lax.cond(turn > 0, lambda v: SPLIT(v, [1, 4]), lambda v: SPLIT(v, [4, 1]), w)
        two = jax.lax.cond(turn > 0, lambda v: SPLIT(2 * v, [1, 4]), lambda v: 3 * v, w)
        by_hand = jax.lax.with_sharding_constraint
        several = jax.lax.switch(
            turn.astype(int),
            [
                REPLICATE,
                jax.jit(lambda v: by_hand(v * v, PartitionSpec(None, "logical"))),
                lambda v: by_hand(v, PartitionSpec("logical")),
            ],
            w,
        )
        return one + two + several

    def step(w: Any, turn: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: (w * chosen(w, turn)).sum())(w)
        return value, gradient, chosen(w, turn)

    w = _random(8, 8)
    for made in (
        TWO_BY_FOUR.run(step, (w, 1.0)),
        jax.jit(TWO_BY_FOUR.run, static_argnums=0)(step, (w, 1.0)),
    ):
        value, gradient, result = made
        np.testing.assert_allclose(result, 3 * w + w * w, rtol=1e-5)
        np.testing.assert_allclose(value, (3 * w**2 + w**3).sum(), rtol=1e-4)
        np.testing.assert_allclose(gradient, 6 * w + 3 * w**2, rtol=1e-4, atol=1e-5)
    _, gradient, result = TWO_BY_FOUR.run(step, (w, 0.0))
    np.testing.assert_allclose(result, 5 * w, rtol=1e-5)
    np.testing.assert_allclose(gradient, 10 * w, rtol=1e-4)


def test_op_by_op_a_mark_is_the_value_itself() -> None:
    def step(x: Any) -> Any:
        return SPLIT(x, [2, 2]) + REPLICATE(x)

    x = _random(2, 6)
    with jaxdist.config.run_eagerly(True):
        np.testing.assert_array_equal(TWO_BY_FOUR.run(step, (x,)), x + x)


def test_a_steady_loop_over_marked_state_compiles_once() -> None:
    strategy = tpus(4, 2)
    split = strategy.experimental_split_to_logical_devices
    with strategy.scope():
        variable = jaxdist.Variable(split(_random(2, 6), [1, 2]))
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    model.kernel[...] = split(model.kernel[...], [1, 2])
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, w: Any, x: Any) -> Any:
        replica = jaxdist.get_replica_context()

        def loss(model: Any, w: Any) -> Any:
            return (model(jnp.tanh(x @ split(variable, [1, 2]) @ w)) ** 2).sum()

        value, (grads, dw) = nnx.value_and_grad(loss, argnums=(0, 1))(model, w)
        optimizer.update(model, replica.all_reduce("mean", grads))
        variable.assign_sub(0.01 * jnp.ones((2, 6)))
        return split(w - 0.1 * replica.all_reduce("mean", dw), [2, 1]), value

    w: Any = split(_random(6, 6), [2, 1])
    x = PerReplica([_random(3, 2) + r for r in range(4)])
    first = strategy.run(step, (model, optimizer, w, x))
    w, _ = strategy.run(step, (model, optimizer, first[0], x))
    with compilations() as count:
        for _ in range(3):
            w, _ = strategy.run(step, (model, optimizer, w, x))
    assert count.number == 0
    assert w.addressable_shards[0].data.shape == (3, 6)
    assert variable.value().addressable_shards[0].data.shape == (2, 3)
    for held in (model.kernel, optimizer.opt_state[0].mu["kernel"]):
        assert held[...].addressable_shards[0].data.shape == (6, 2)


def test_the_weight_of_a_split_product_is_not_gathered() -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        w, v = SPLIT(w, [1, 4]), SPLIT(v, [4, 1])
        return jnp.tanh(x @ w) @ v

    w, v = SPLIT(_random(64, 128), [1, 4]), SPLIT(_random(128, 64), [4, 1])
    x = PerReplica.of_global(jax.device_put(_random(16, 64), TWO_BY_FOUR.per_replica_sharding))
    compiled = TWO_BY_FOUR.lower(step, (w, v, x)).compile()
    assert [(c.kind, len(c.groups)) for c in compiled.collectives] == [("all-reduce", 2)]
    made = TWO_BY_FOUR.gather(TWO_BY_FOUR.run(step, (w, v, x)), axis=0)
    whole = np.tanh(np.asarray(x.array) @ np.asarray(w)) @ np.asarray(v)
    np.testing.assert_allclose(made, whole, rtol=1e-3, atol=1e-4)


def test_inside_a_traced_function_marks_mean_the_same() -> None:
    rows = _random(4, 4)
    x = PerReplica.of_global(jax.device_put(rows, TWO_BY_FOUR.per_replica_sharding))

    def step(w: Any, x: Any) -> Any:
        return (jnp.tanh(SPLIT(x, [2, 2]) @ SPLIT(w, [4, 1])) ** 2).sum()

    def whole(w: Any) -> Any:
        return jnp.sum(TWO_BY_FOUR.run(step, (SPLIT(w, [2, 2]), x)).array)

    def plain(w: Any) -> Any:
        return (jnp.tanh(rows @ w) ** 2).sum()

    w = _random(4, 4)
    np.testing.assert_allclose(
        jax.jit(jax.grad(whole))(w), jax.grad(plain)(w), rtol=1e-4, atol=1e-5
    )


def test_one_logical_device_holds_everything() -> None:
    strategy = tpus(2, 1)

    def step(x: Any) -> Any:
        x = strategy.experimental_split_to_logical_devices(x, [1, 1])
        return strategy.experimental_replicate_to_logical_devices(x)

    x = _random(2, 2)
    np.testing.assert_array_equal(strategy.run(step, (x,)), x)
    placed = strategy.experimental_split_to_logical_devices(x, [1, 1])
    assert placed.sharding.is_equivalent_to(strategy.layout.replicated, 2)


_REFUSED: list[tuple[Any, ...]] = [
    ((4, 8), [4], ShapeError, ["float32[4, 8]", "2 dim(s)", "is for 1", "[1, 4]"]),
    ((), [4], ShapeError, ["0 dim(s)", "experimental_replicate_to_logical_devices"]),
    ((4, 8), [1, 2], ArgumentError, ["2 part(s)", "4 logical device(s)", "[1, 4]"]),
    ((4, 8), [8, 1], ShapeError, ["4 element(s) in dim 0", "8 parts", "[1, 4]"]),
    ((2, 3), [4, 1], ShapeError, ["2 element(s) in dim 0", "No dim of [2, 3]"]),
    ((4, 8), [0, 4], ArgumentError, ["4 element(s) in dim 0, and", "0 parts of dim 0"]),
    ((4, 8), "14", ArgumentTypeError, ["'14'", "[1, 2], which splits dim 1"]),
    ((4, 8), [1, 4.0], ArgumentTypeError, ["[1, 4.0]"]),
]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_parts_that_do_not_fit_are_refused(inside: bool) -> None:
    for shape, parts, error, words in _REFUSED:
        value = {"kernel": np.zeros(shape, "float32")}
        with refused(error, *words):
            if inside:
                TWO_BY_FOUR.lower(lambda v, p=parts: SPLIT(v, p), (value,))
            else:
                SPLIT(value, parts)


def test_what_cannot_be_split_outside_of_a_step_is_refused() -> None:
    with refused(ShapeError, "dim 1 of tensor['w']", "6 elements", "4 parts", "4 or 8 long"):
        SPLIT({"w": np.zeros((2, 6))}, [1, 4])
    with refused(ArgumentError, "dim 0 is split over the replicas"):
        SPLIT(PerReplica([np.zeros((4, 2))] * 2), [4, 1])
    for wrong in ("text", object(), np.array(["a", "b", "c", "d"])):
        for call in (REPLICATE, lambda x: SPLIT(x, [4])):
            with refused(ArgumentTypeError, "tensor['w'] is ", "an array of numbers"):
                call({"w": wrong})
            with refused(ArgumentTypeError, "tensor['w'] is ", "an array of numbers"):
                TWO_BY_FOUR.lower(lambda _, c=call, w=wrong: c({"w": w}), (1.0,))
    state = jaxdist.shard_state({"m": np.zeros(1 << 20, "float32")}, TWO_BY_FOUR)
    with refused(ArgumentTypeError, "Sharded"):
        REPLICATE(state)


def test_a_step_of_another_strategy_and_a_merge_function_are_refused() -> None:
    other = tpus(4, 2)
    with refused(ContextError, "inside a replica", "TPUStrategy"):
        other.run(lambda x: SPLIT(x, [1, 4]), (np.zeros((4, 4)),))

    def merging(x: Any) -> Any:
        context = jaxdist.get_replica_context()
        return context.merge_call(lambda _, y: SPLIT(y, [1, 4]), (x,))

    with refused(ContextError, "merge function"):
        TWO_BY_FOUR.run(merging, (np.zeros((4, 4)),))


def test_gradients_of_a_step_with_marks_are_checked_on_one_device() -> None:
    def step(w: Any, x: Any) -> Any:
        dw = jax.grad(lambda w: (x @ SPLIT(w, [1, 4])).mean())(w)
        return jaxdist.get_replica_context().all_reduce("mean", dw)

    report = TWO_BY_FOUR.check_gradients(step, (_random(4, 4), PerReplica([_random(2, 4)] * 2)))
    assert report.is_equal


def test_every_factorisation_gives_a_layout_over_the_same_devices() -> None:
    layout = tpus(1, 8).layout
    for parts in itertools.product([1, 2, 4, 8], repeat=3):
        if math.prod(parts) == 8:
            sharding = layout.tiles(parts)
            assert list(sharding.mesh.devices.ravel()) == list(layout.mesh.devices.ravel())
            assert sharding.shard_shape((8, 8, 8)) == tuple(8 // p for p in parts)
    assert layout.tiles((1, 1)).spec == PartitionSpec(None, None)


SPMD = tpus(2, 4, spmd=True)


def _said(x: Any) -> Any:
    return SPMD.experimental_replicate_to_logical_devices(x)


def test_under_spmd_every_input_that_is_used_is_marked_first() -> None:
    v = jaxdist.Variable(np.ones(3, "float32"))
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    placed = SPMD.experimental_split_to_logical_devices(np.ones((4, 3), "float32"), [4, 1])

    def step(model: Any, batch: Any, scale: Any, placed: Any, unused: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return carry + _said(row), None

        @jax.checkpoint
        def loss(w: Any) -> Any:
            return (_said(w) * v).sum() * scale

        y, _ = jax.lax.scan(body, jnp.zeros(3), batch["x"])
        split = jax.jit(lambda t: SPMD.experimental_split_to_logical_devices(t, [4]))
        return model(y), jax.grad(loss)(batch["w"]), placed * 2, split(batch["y"]), batch["out"]

    ones = np.ones((4, 3), "float32")
    batch = {"x": ones, "y": ones[:, 0], "w": ones[0], "out": ones}
    made = SPMD.run(step, (model, batch, 2.0, placed, ones))
    np.testing.assert_array_equal(made[1], 2 * ones[0])


def test_under_spmd_inputs_that_are_not_marked_are_named_with_the_line_of_their_use() -> None:
    ones = np.ones((4, 3), "float32")

    def step(batch: Any, state: Any) -> Any:
        first = _said(batch["x"])

        def body(carry: Any) -> Any:
            return carry[0] + 1, carry[1] * batch["late"].sum()

        n, w = jax.lax.while_loop(lambda c: c[0] < 2, body, (0, _said(state["w"])))
        return first + batch["y"], n, w, jax.checkpoint(jnp.sin)(state["m"])

    with refused(
        ArgumentError,
        "3 input(s)",
        "args[0]['late'], used at",
        "args[0]['y'], used at",
        "args[1]['m'], used at",
        "test_logical_devices.py",
        "4 logical devices",
    ):
        SPMD.run(step, ({"x": ones, "y": ones, "late": ones}, {"w": ones, "m": ones}))
    # One logical device, and SPMD off, have no such rule.
    assert float(tpus(2, 1, spmd=True).run(lambda x: x.sum(), (ones,))) == 12
    assert float(TWO_BY_FOUR.run(lambda x: x.sum(), (ones,))) == 12


def test_variables_checkpoints_and_local_results_keep_arrays_split_over_several_dims(
    tmp_path: Any,
) -> None:
    whole = np.arange(64, dtype="float32").reshape(4, 4, 4)
    with TWO_BY_FOUR.scope():
        variable = jaxdist.Variable(SPLIT(whole, [1, 2, 2]))
    variable.assign(whole + 1)
    TWO_BY_FOUR.run(lambda: variable.assign_add(SPLIT(jnp.ones((4, 4, 4)), [2, 1, 2])))
    held = variable.value()
    check_tiles(held, whole + 2, [1, 2, 2], TWO_BY_FOUR.layout)
    for local in TWO_BY_FOUR.experimental_local_results(held):
        np.testing.assert_array_equal(local, whole + 2)
        assert local.addressable_shards[0].data.shape == (4, 2, 2)
    other = tpus(1, 8)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": held}, {})
        same = checkpoints.restore(1, like={"w": held}).state["w"]
        like = other.experimental_split_to_logical_devices(whole, [2, 2, 2])
        moved = checkpoints.restore(1, like={"w": like}).state["w"]
    check_tiles(same, whole + 2, [1, 2, 2], TWO_BY_FOUR.layout)
    check_tiles(moved, whole + 2, [2, 2, 2], other.layout)
