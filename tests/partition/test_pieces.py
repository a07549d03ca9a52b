"""An optimizer gives the same results on pieces as on whole arrays, or raises an error."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import (
    ArgumentTypeError,
    ReplicaValueError,
    ShapeError,
    ShardedArrayError,
)
from jaxdist.partition import Replicate, Rules, Shard
from tests.update.test_every_transformation import batch, extra, loss, params_of, trained
from tests.update.transformations import made

STEPS = 2
FEW = ("adam", "chain", "masked")
# One of each way to need more than a piece; `test_every_transformation` has all the others.
MORE = ("adafactor", "add_noise", "apply_if_finite", "clip_by_block_rms", "lamb", "muon")
# Matrices in pieces with padding and without, a vector in pieces, the rest whole.
RULES = Rules(
    {"w": Shard(0, pad=True), "v": Shard(1), "b": Shard(pad=True)}, Replicate(), must_match=False
)


def train(names: Any, txs: Any, held: Any, rows: Any) -> Any:
    """One step of each transformation."""
    after, context = {}, jaxdist.get_replica_context()
    for name in names:
        params, state = held[name]
        own, grads = jax.value_and_grad(loss)(trained(params), rows)
        value = context.all_reduce("mean", own)
        tx = txs[name]
        if not isinstance(tx, jaxdist._update.ShardedUpdate):
            grads = context.all_reduce("mean", grads)
        updates, state = tx.update(grads, state, params, **extra(name, grads, value, rows))
        after[name] = (optax.apply_updates(params, updates), state)
    return after


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param(MORE, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_transformation_of_pieces_is_that_of_the_arrays_or_is_refused(names: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    plain = {n: made(n) for n in names}
    proved = {n: jaxdist.sharded_update(tx, min_bytes=0) for n, tx in plain.items()}
    rows = jax.device_put(batch(), strategy.per_replica_sharding)

    def placed(name: str) -> Any:
        return partition.place(strategy, params_of(name), RULES)

    with strategy.scope(), jax.numpy_rank_promotion("allow"):
        whole = {n: (params_of(n), tx.init(params_of(n))) for n, tx in plain.items()}
        in_pieces = {n: (placed(n), tx.init(placed(n))) for n, tx in proved.items()}
        allowed, refusals = {}, dict[str, str]()
        for name, tx in plain.items():
            try:
                held = {name: (placed(name), tx.init(placed(name)))}
                strategy.lower(lambda h, r, n=name: train([n], plain, h, r), (held, rows))
            except (ShardedArrayError, ReplicaValueError) as error:
                refusals[name] = str(error)
                continue
            allowed |= held
        assert set(allowed) == {"adam", "masked", "add_noise", "apply_if_finite"} & set(names)
        # What helps an optimizer, also where the operation does not say who called it.
        assert all("sharded_update" in text for text in refusals.values()), refusals

        def step(one: Any, two: Any, three: Any, rows: Any) -> Any:
            return (
                train(names, plain, one, rows),
                train(names, proved, two, rows),
                train(list(allowed), plain, three, rows),
            )

        for _ in range(STEPS):
            whole, in_pieces, allowed = strategy.run(step, (whole, in_pieces, allowed, rows))
    for name in names:
        wanted = jax.tree.leaves(trained(whole[name][0]))
        for found in (in_pieces, allowed):
            if name in found:
                same(name, wanted, trained(found[name][0]))


def same(name: str, wanted: list[Any], params: Any) -> None:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Sharded))
    for one, other in zip(wanted, leaves, strict=True):
        held = other.whole() if isinstance(other, Sharded) else other
        np.testing.assert_allclose(np.asarray(held), one, rtol=2e-4, atol=2e-5, err_msg=name)


LOWER = np.tri(8)


def counted(length: int) -> jax.Array:
    """0, 1, 2 and so on: one number in each round of a loop."""
    rows: Any = jax.lax.scan(lambda c, _: (c + 1, c), 0.0, None, length=length)[1]
    return rows


# Functions of pytrees whose results depend on the shape of an array or on positions in it.
BY_SHAPE: dict[str, Any] = {
    "size": lambda w: w * w.size,
    "a dim": lambda w: w / w.shape[-1],
    "arange": lambda w: w + jnp.arange(float(w.size)).reshape(w.shape),
    "iota": lambda w: w + jax.lax.broadcasted_iota(w.dtype, w.shape, w.ndim - 1),
    "noise": lambda w: w + jax.random.normal(jax.random.key(0), w.shape),
    "dropout": lambda w: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, w.shape), w, 0),
    "triangle": lambda w: (
        jnp.where(LOWER[: w.shape[0], : w.shape[-1]] > 0, w, 0) if w.ndim > 1 else w
    ),
    "row": lambda w: w * jnp.linspace(0.0, 1.0, w.shape[-1]),
    "column": lambda w: w + jnp.arange(float(w.shape[0])).reshape(-1, *[1] * (w.ndim - 1)),
    "filled": lambda w: jnp.full(w.shape, 1 / w.size),
    "of NumPy": lambda w: w * np.arange(w.size, dtype="float32").reshape(w.shape),
    "made": lambda w: jnp.asarray(np.arange(w.size, dtype="float32").reshape(w.shape)),
    "stacked": lambda w: counted(w.size).reshape(w.shape),
    "loop": lambda w: jax.lax.fori_loop(
        0, 3, lambda i, c: c * w + i + jnp.arange(float(w.shape[-1])), jnp.zeros_like(w)
    ),
    "branch": lambda w: jax.lax.cond(w.size > 5, jnp.negative, jnp.ones_like, w),
    "while": lambda w: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + w), (0, jnp.zeros(w.shape))
    )[1],
    "by value": lambda w: jnp.where(w > 0, w, jnp.broadcast_to(jnp.float32(w.size), w.shape)),
    "own derivative": lambda w: jax.nn.relu(w) * jax.nn.silu(w) * w.ndim,
    "jitted": lambda w: jax.jit(lambda v: v * v.shape[0])(w),
    "remat": lambda w: jax.checkpoint(lambda v: jnp.sin(v) * v.size)(w),
    "jvp": lambda w: jax.jvp(lambda v: jnp.sin(v) * v.size, (w,), (jnp.ones_like(w),))[1],
    "vmap": lambda w: jax.vmap(lambda row: jnp.sin(row) * (1 + row.size))(w),
    "mask": lambda w: w if w.ndim > 1 and w.shape[-1] > 2 else jnp.zeros_like(w),
    "one element": lambda w: w * jnp.arange(1.0, 2.0),
    "integers": lambda w: (w * 8).astype(int) % w.shape[-1],
    "half": lambda w: (w.astype(jnp.bfloat16) + jnp.arange(w.shape[-1])).astype(w.dtype),
    "complex": lambda w: jnp.real(w * jnp.exp(1j * jnp.arange(w.shape[-1]))),
}
# On two and three replicas: divided and not, as many as there are and one more, one, a prime.
SHAPES = [((4, 6), 1), ((4, 7), 1), ((3, 4), 0), ((2, 1), 1), ((3,), 0), ((4,), 0), ((7,), 0)]


SOME = ("size", "arange", "noise", "stacked", "loop", "own derivative", "one element", "half")


@pytest.mark.parametrize(
    ("names", "count", "eagerly"),
    [
        pytest.param(SOME, 3, False, id="some"),
        pytest.param(SOME[1:2], 3, True, id="one_op_by_op"),
        *(
            pytest.param(
                tuple(BY_SHAPE),
                n,
                e,
                marks=(pytest.mark.long, pytest.mark.timeout(900)),
                id=f"all_{n}_{e}",
            )
            for n in (2, 3, 4, 8)
            for e in (False, True)
        ),
    ],
)
def test_functions_that_look_at_shapes_find_those_of_the_arrays(
    names: tuple[str, ...], count: int, eagerly: bool
) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    rng = np.random.default_rng(0)
    arrays = {f"p{i}": rng.normal(size=s).astype("float32") for i, (s, _) in enumerate(SHAPES)}
    rules = {f"p{i}": Shard(dim, pad=True) for i, (_, dim) in enumerate(SHAPES)}
    pieces = partition.place(strategy, arrays, rules)

    def step(tree: Any) -> Any:
        return {name: tree_map(BY_SHAPE[name], tree) for name in names}

    with jaxdist.config.run_eagerly(eagerly), jax.numpy_rank_promotion("allow"):
        wanted, found = step(tree_map(jnp.asarray, arrays)), strategy.run(step, (pieces,))
    for name in names:
        for leaf, (shape, dim) in zip(arrays, SHAPES, strict=True):
            own = found[name][leaf]
            assert own.cut[:2] == (dim, shape[dim])
            # XLA does not round bfloat16 between operations that it joins.
            rtol = 1e-2 if name == "half" else 1e-5
            np.testing.assert_allclose(
                own.whole(), wanted[name][leaf], rtol=rtol, atol=1e-6, err_msg=f"{name} {shape}"
            )


def test_gradient_from_outside_of_a_step_is_that_of_the_arrays() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    array = np.arange(-6.0, 6.0, dtype="float32").reshape(4, 3)
    params = partition.place(strategy, {"w": array}, {"*": Shard(1, pad=True)})

    def step(params: Any) -> Any:
        own = tree_map(jax.nn.relu, params)
        return jnp.sum(own["w"][...] ** 2 + params["w"][...])

    found: Any = jax.grad(lambda p: strategy.run(step, (p,)))(params)
    np.testing.assert_array_equal(found["w"].whole(), 2 * np.maximum(array, 0) + 1)


def test_derivative_of_its_own_that_a_step_hides_is_refused_from_outside() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((4, 2), "float32")}, {"*": Shard(1)})
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))

    def step(params: Any) -> Any:
        return jnp.sum(tree_map(double, params)["w"][...])

    assert float(strategy.run(step, (params,))) == 16
    with pytest.raises(ShardedArrayError, match="differentiated from outside"):
        jax.grad(lambda p: strategy.run(step, (p,)))(params)


def refused(fn: Any) -> str:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((4, 6), "float32")}, {"*": Shard(1)})
    x = jax.device_put(np.ones((4, 4), "float32"), strategy.per_replica_sharding)
    with pytest.raises(ShardedArrayError) as caught:
        strategy.lower(fn, (params, x))
    return str(caught.value)


def tree_map(fn: Any, *trees: Any) -> Any:
    return jax.tree.map(fn, *trees)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda p, x: sum(jnp.sum(w**2) for w in jax.tree.leaves(p)), "reduce_sum"),
        (lambda p, x: tree_map(lambda w: w * x.sum(), p), "differs between replicas"),
        (lambda p, x: tree_map(lambda w: w[:, ::-1], p), "rev"),
        (lambda p, x: tree_map(lambda w: jnp.ones_like(w) * x.sum(), p), "not proved"),
        (
            lambda p, x: tree_map(
                lambda w: jnp.broadcast_to(jax.lax.axis_index("replica"), w.shape), p
            ),
            "result['w']",
        ),
        (
            lambda p, x: jax.lax.cond(
                x.sum() > 0, lambda p: p, lambda p: tree_map(jnp.zeros_like, p), p
            ),
            "a branch depends on values that differ between replicas",
        ),
        (
            lambda p, x: jax.lax.fori_loop(
                0, 3, lambda i, p: tree_map(lambda w: w / jnp.linalg.norm(w), p), p
            ),
            "of 6 elements",
        ),
        (
            lambda p, x: jax.lax.while_loop(
                lambda c: jnp.sum(jax.tree.leaves(c)[0]) > 1,
                lambda c: tree_map(lambda w: w * jax.lax.psum(x.sum(), "replica"), c),
                p,
            ),
            "reduce_sum",
        ),
    ],
    ids=["sum", "local", "turned", "made", "index", "branch", "loop", "search"],
)
def test_piece_that_is_taken_for_the_array_is_refused_with_the_remedy(step: Any, says: str) -> None:
    message = refused(step)
    assert says in message
    assert "jaxdist.partition.gather(tree)" in message


class OfLinen(nn.Module):
    """One dense layer that checks the shape of what it is given."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(6, use_bias=False)(x)


def by_linen(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        made: Any = OfLinen().apply({"params": {"Dense_0": params}}, x)
        return jnp.mean(made**2)

    grads = jax.grad(loss)(params)
    return jaxdist.get_replica_context().all_reduce("mean", grads)


def test_module_of_linen_takes_pieces_as_they_are() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    kernel = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    x = np.arange(16, dtype="float32").reshape(4, 4)
    params = partition.place(strategy, {"kernel": kernel}, {"*": Shard(1)})
    found = strategy.run(by_linen, (params, jax.device_put(x, strategy.per_replica_sharding)))
    wanted = jaxdist.OneDeviceStrategy("cpu:0").run(by_linen, ({"kernel": kernel}, x))
    np.testing.assert_allclose(found["kernel"].whole(), wanted["kernel"], rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (
            lambda p, x: tree_map(jnp.linalg.norm, p),
            ShapeError,
            [
                "result['kernel']",
                "cut along dim 1 of 6",
                "it is float32[]",
                "partition.gather(tree)",
            ],
        ),
        (lambda p, x: tree_map(lambda w: w.shape, p), ShapeError, ["result['kernel']", "(4, 6)"]),
        (
            lambda p, x: jax.lax.exp(p["kernel"]),
            ArgumentTypeError,
            ["jax.lax", "float32[4, 6], cut along dim 1", "partition.gather(value)"],
        ),
        (
            lambda p, x: optax.adafactor(0.1, min_dim_size_to_factor=2).update(
                p, optax.adafactor(0.1, min_dim_size_to_factor=2).init({"kernel": x}), p
            ),
            ReplicaValueError,
            ["pytree", "adafactor", "jaxdist.sharded_update(tx)"],
        ),
        (
            lambda p, x: optax.flatten(optax.trace(0.9)).update(
                p, optax.flatten(optax.trace(0.9)).init({"kernel": x})
            ),
            ReplicaValueError,
            ["incompatible shapes", "flatten", "jaxdist.sharded_update(tx)"],
        ),
    ],
    ids=["norms", "shapes", "lax", "adafactor", "flatten"],
)
def test_what_takes_no_pieces_is_told_in_words_of_jaxdist(step: Any, error: Any, says: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"kernel": np.ones((4, 6), "float32")}, {"*": Shard(1)})
    x = jax.device_put(np.ones((4, 4), "float32"), strategy.per_replica_sharding)
    with pytest.raises(error) as caught:
        strategy.lower(step, (params, x))
    for part in says:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("tx", "error", "says"),
    [
        (optax.polyak_sgd(0.1), TypeError, "required keyword-only argument: 'value'"),
        (optax.contrib.sophia(0.1), ValueError, "obj_fn must be provided"),
    ],
    ids=["polyak", "sophia"],
)
def test_an_argument_that_a_transformation_misses_is_told_as_optax_tells_it(
    tx: Any, error: Any, says: str
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params: Any = partition.place(strategy, {"kernel": np.ones((4, 6), "float32")}, {"*": Shard(1)})
    with pytest.raises(error, match=says) as caught:
        strategy.lower(lambda p: tx.update(p, tx.init(p), p)[0], (params,))
    assert type(caught.value) is error


def test_error_of_a_function_that_a_transformation_calls_stays_what_it_is() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params: Any = partition.place(strategy, {"kernel": np.ones((4, 6), "float32")}, {"*": Shard(1)})

    def schedule(count: Any) -> Any:
        raise ValueError("the schedule of this user")

    tx = optax.scale_by_schedule(schedule)
    with pytest.raises(ValueError, match=r"^the schedule of this user") as caught:
        strategy.lower(lambda p: tx.update(p, tx.init(p))[0], (params,))
    assert type(caught.value) is ValueError


def test_masks_and_labels_of_trees_with_pieces_are_those_of_arrays() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    arrays = {"w": np.ones((4, 3), "float32"), "b": np.ones(4, "float32"), "s": np.float32(1)}
    pieces: Any = partition.place(strategy, arrays, {"*": Shard(0)})
    for fn in (
        lambda x: x.ndim > 1,
        lambda x: "matrix" if x.ndim > 1 else "other",
        lambda x: optax.MaskedNode(),
    ):
        assert tree_map(fn, pieces) == tree_map(fn, arrays)
    tx = optax.masked(optax.adam(0.1), tree_map(lambda x: x.ndim > 1, arrays))
    state: Any = tx.init(pieces)
    of_adam = state.inner_state[0]
    assert of_adam.mu["b"] == optax.MaskedNode()
    assert getattr(of_adam.mu["w"], "cut", None) == pieces["w"].cut


@pytest.mark.parametrize("is_placed_first", [False, True], ids=["state_first", "placed_first"])
def test_linen_trains_on_pieces_that_it_gathers_and_frozen_parameters_stay(
    is_placed_first: bool,
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    labels = {"Dense_0": {"kernel": "free"}, "offset": "frozen"}
    tx = optax.multi_transform({"free": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels)
    params = {
        "Dense_0": {"kernel": np.ones((4, 6), "float32")},
        "offset": np.ones(6, "float32"),
    }
    x = np.arange(16, dtype="float32").reshape(4, 4)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            whole = partition.gather(params)
            layers = {"Dense_0": whole["Dense_0"]}
            return jnp.mean((OfLinen().apply({"params": layers}, x) + whole["offset"][None]) ** 2)

        grads = jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss)(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def trained_on(strategy: jaxdist.Strategy, params: Any, rules: Any) -> Any:
        if is_placed_first:
            params = partition.place(strategy, params, rules)
            state = tx.init(params)
        else:
            params, state = partition.place(strategy, (params, tx.init(params)), rules)
        rows = jax.device_put(x, strategy.per_replica_sharding)
        for _ in range(2):
            params, state = strategy.run(step, (params, state, rows))
        return partition.gather(params)

    wanted = trained_on(jaxdist.OneDeviceStrategy("cpu:0"), params, partition.replicated())
    found = trained_on(strategy, params, partition.fsdp(min_bytes=0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
    np.testing.assert_array_equal(found["offset"], params["offset"])


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op_by_op"])
def test_elementwise_work_in_loops_and_branches_is_proved_and_declared_pieces_are_trusted(
    eagerly: bool,
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    array = np.arange(12.0, dtype="float32").reshape(4, 3)
    params = partition.place(strategy, {"w": array}, {"*": Shard(0)})

    def step(p: Any, x: jax.Array) -> Any:
        context = jaxdist.get_replica_context()
        mean = context.all_reduce("mean", x.sum())
        zeros = tree_map(jnp.zeros_like, p)
        if not eagerly:
            p = jax.lax.cond(mean > 0, lambda p: tree_map(jnp.negative, p), lambda p: p, p)
            zeros = jax.lax.fori_loop(
                0, 3, lambda i, z: tree_map(lambda a, b: a + b * i, z, p), zeros
            )
        own = p["w"].array
        by_hand = Sharded(own * context.all_reduce("sum", own.sum()), *p["w"].cut)
        return tree_map(lambda w, z: jnp.where(w > 0, w, jnp.sqrt(w**2)) + z, p, zeros), by_hand

    x = jax.device_put(np.ones((2, 2), "float32"), strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(eagerly):
        found, by_hand = strategy.run(step, (params, x))
    sign = 1 if eagerly else -1
    np.testing.assert_allclose(
        found["w"].whole(), array + 0 * array if eagerly else array - 3 * array
    )
    np.testing.assert_allclose(by_hand.whole(), sign * array * (sign * array.sum()))


def test_op_by_op_refuses_a_norm_of_pieces_too() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((4, 3), "float32")}, {"*": Shard(0)})
    with jaxdist.config.run_eagerly(True), pytest.raises(ShardedArrayError, match="reduce_sum"):
        strategy.run(lambda p: tree_map(lambda w: w / jnp.sum(w), p), (params,))
