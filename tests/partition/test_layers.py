"""Scans, maps, rows and slices of stacked layers in pieces give the numbers of one device.

The table is {program} x {layout}, compiled and op by op. The oracle is the same function in plain
JAX, with all rows on one device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica, partition
from jaxdist.errors import ArgumentTypeError, ReplicaValueError, ShardedArrayError
from jaxdist.partition import Rules, Shard
from tests.partition.test_rules import mesh
from tests.tables import sampled

DEPTH, WIDTH = 4, 8
Program = Callable[[Any, Any], Any]


def layer(x: Any, p: Any) -> Any:
    """One layer; its matrices are square, so that sizes alone do not tell the dims apart."""
    return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def body(x: Any, p: Any) -> Any:
    return layer(x, p), None


def mean_square(x: Any) -> Any:
    return jnp.mean(x.astype("float32") ** 2)


def _scan(p: Any, x: Any, step: Any = body, **how: Any) -> Any:
    return mean_square(jax.lax.scan(step, x, p, **how)[0])


def _two_levels(p: Any, x: Any) -> Any:
    def outer(x: Any, p: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(body), x, p)

    pairs = jax.tree.map(lambda w: jnp.stack([w[:2], w[2:]]), p)
    return mean_square(jax.lax.scan(outer, x, pairs)[0])


def _dynamic(p: Any, x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        return layer(
            x, jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), p)
        ), None

    return mean_square(jax.lax.scan(step, x, jnp.arange(DEPTH))[0])


def _loop(p: Any, x: Any) -> Any:
    for i in range(DEPTH):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], p))
    return mean_square(x)


def _reuse(p: Any, x: Any) -> Any:
    """Each layer runs twice, and its parameters also go into a penalty."""

    def step(x: Any, p: Any) -> Any:
        return layer(layer(x, p), p), mean_square(jnp.asarray(p["up"]) * 2)

    x, penalties = jax.lax.scan(step, x, p)
    return mean_square(x) + penalties.sum()


def _stacked_results(p: Any, x: Any) -> Any:
    """A scan stacks new parameters, which a second scan uses."""

    def halve(total: Any, p: Any) -> Any:
        return total + 1, jax.tree.map(lambda w: jnp.sin(w) * total, p)

    return _scan(jax.lax.scan(halve, jnp.float32(1), p)[1], x)


def _in_the_carry(p: Any, x: Any) -> Any:
    """The carry of a scan is in pieces: a sum of the layers."""
    first = jax.tree.map(lambda w: w[0], p)

    def add(total: Any, p: Any) -> Any:
        return jax.tree.map(lambda t, w: t + w / 4, total, p), None

    return mean_square(layer(x, jax.lax.scan(add, first, p)[0]))


PROGRAMS: dict[str, Program] = {
    "scan": _scan,
    "reverse": lambda p, x: _scan(p, x, reverse=True),
    "unroll": lambda p, x: _scan(p, x, unroll=2),
    "checkpoint": lambda p, x: _scan(p, x, jax.checkpoint(body)),
    "policy": lambda p, x: _scan(p, x, jax.checkpoint(body, policy=partition.remat_policy)),
    "jit in it": lambda p, x: _scan(p, x, lambda x, p: (jax.jit(layer)(x, p), None)),
    "two levels": _two_levels,
    "map": lambda p, x: mean_square(jax.lax.map(lambda p: layer(x, p), p)),
    "map in batches": lambda p, x: mean_square(jax.lax.map(lambda p: layer(x, p), p, batch_size=2)),
    "vmap": lambda p, x: mean_square(jax.vmap(lambda p: layer(x, p))(p)),
    "vmap with an axis at the end": lambda p, x: mean_square(
        jax.vmap(lambda p: layer(x, p), out_axes=-1)(p)
    ),
    "vmap of scan": lambda p, x: mean_square(
        jax.vmap(lambda x: jax.lax.scan(body, x, p)[0])(jnp.stack([x, 2 * x]))
    ),
    "rows": _loop,
    "dynamic rows": _dynamic,
    "slice": lambda p, x: _scan(jax.tree.map(lambda w: w[1:3], p), x),
    "every second": lambda p, x: _scan(jax.tree.map(lambda w: w[::2], p), x),
    "flip": lambda p, x: _scan(jax.tree.map(lambda w: jnp.flip(w, 0), p), x),
    "roll": lambda p, x: _scan(jax.tree.map(lambda w: jnp.roll(w, 1, 0), p), x),
    "split": lambda p, x: _scan(jax.tree.map(lambda w: jnp.split(w, 2)[1], p), x),
    "unstack": lambda p, x: mean_square(layer(x, jax.tree.map(lambda w: jnp.unstack(w)[2], p))),
    "concatenate": lambda p, x: _scan(
        jax.tree.map(lambda w: jnp.concatenate([w[2:], 2 * w[:1]]), p), x
    ),
    "pad": lambda p, x: _scan(
        jax.tree.map(lambda w: jnp.pad(w, [(0, 1)] + [(0, 0)] * (w.ndim - 1)), p), x
    ),
    "reshape": lambda p, x: mean_square(
        jax.vmap(lambda p: jax.lax.scan(body, x, p)[0])(
            jax.tree.map(lambda w: w.reshape(2, DEPTH // 2, *w.shape[1:]), p)
        )
    ),
    "repeat": lambda p, x: _scan(jax.tree.map(lambda w: jnp.repeat(w, 2, axis=0), p), x),
    "mean of layers": lambda p, x: mean_square(layer(x, jax.tree.map(lambda w: w.mean(0), p))),
    "largest": lambda p, x: mean_square(layer(x, jax.tree.map(lambda w: w.max(0), p))),
    "reuse": _reuse,
    "stacked results": _stacked_results,
    "in the carry": _in_the_carry,
}


def params(dtype: Any = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (DEPTH, WIDTH, WIDTH), "bias": (DEPTH, 1, WIDTH), "down": (DEPTH, WIDTH, WIDTH)}
    return {k: (rng.normal(size=s) * 0.3).astype(dtype) for k, s in shapes.items()}


ROWS = np.random.default_rng(1).normal(size=(8, WIDTH)).astype("float32")


def strategy_of(name: str) -> jaxdist.Strategy:
    if name == "fsdp x tp":
        return jaxdist.MirroredStrategy(
            mesh=mesh((2, 2), ("replica", "logical")), replica_axes=("replica",)
        )
    if name == "padded":
        return jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    grid = mesh((2, 2), ("a", "b"))
    return jaxdist.MirroredStrategy(mesh=grid, replica_axes=("a", "b"))


LAYOUTS: dict[str, Rules] = {
    name: Rules(dict(zip(("up", "bias", "down"), placed, strict=True)))
    for name, placed in {
        "fsdp": (Shard(2), Shard(2), Shard(1)),
        "fsdp, other dims": (Shard(1), Shard(2), Shard(2)),
        "hsdp": (Shard(1, axes=("b",)), Shard(2, axes=("a",)), Shard(2)),
        "fsdp x tp": (Shard(1, split=2), Shard(2), Shard(2, split=1)),
        "padded": (Shard(2, pad=True), Shard(2, pad=True), Shard(1, pad=True)),
    }.items()
}


def gradients_on_replicas(
    name: str, program: Program, given: Any = None, x: Any = ROWS
) -> tuple[Any, Any]:
    strategy = strategy_of(name)
    if not isinstance(x, PerReplica):
        rows = x[: len(x) // strategy.num_replicas_in_sync * strategy.num_replicas_in_sync]
        x = jax.device_put(rows, strategy.per_replica_sharding)
    placed = partition.place(strategy, params() if given is None else given, LAYOUTS[name])

    def step(p: Any, x: Any) -> Any:
        context = jaxdist.get_replica_context()
        return context.all_reduce("mean", jax.value_and_grad(lambda p: program(p, x))(p))

    found = strategy.run(step, (placed, x))
    assert all(found[1][k].cut == placed[k].cut for k in placed)
    return found[0], {k: np.asarray(g) for k, g in found[1].items()}


def compare(found: Any, expected: Any, bound: float = 1e-5) -> None:
    for own, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        right = np.asarray(right, "float64")
        np.testing.assert_allclose(
            np.asarray(own, "float64"), right, atol=bound * np.abs(right).max(), rtol=0
        )


def run_and_compare(row: tuple[str, str]) -> None:
    name, program = row
    rows = ROWS[:6] if name == "padded" else ROWS
    expected = jax.jit(jax.value_and_grad(PROGRAMS[program]))(params(), rows)
    compare(gradients_on_replicas(name, PROGRAMS[program]), expected)


EVERY_PAIR = [(name, program) for name in LAYOUTS for program in PROGRAMS]


@pytest.mark.parametrize("row", sampled(EVERY_PAIR, 14, name=", ".join))
def test_layers_in_pieces_are_those_of_one_device(row: tuple[str, str]) -> None:
    run_and_compare(row)


@pytest.mark.parametrize("row", sampled(EVERY_PAIR, 2, name=", ".join))
def test_op_by_op_layers_are_the_same(row: tuple[str, str]) -> None:
    with jaxdist.config.run_eagerly(True):
        run_and_compare(row)


@pytest.mark.parametrize("name", ["hsdp", "fsdp x tp"])
def test_layers_in_bfloat16(name: str) -> None:
    low = params(jnp.bfloat16)
    rows = ROWS.astype(jnp.bfloat16)
    expected = jax.value_and_grad(_scan)(low, rows)
    found = gradients_on_replicas(name, _scan, low, rows)
    assert all(g.dtype == jnp.bfloat16 for g in found[1].values())
    compare(found, expected, bound=0.02)


# The mean is right here: the loss of a replica is its share of the mean over all rows.
@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
def test_replicas_with_different_numbers_of_rows() -> None:
    parts = np.split(ROWS[:7], [2, 4, 6])

    def program(p: Any, x: Any) -> Any:
        return _scan(p, x) * (x.shape[0] * 4 / 7)

    expected = jax.value_and_grad(_scan)(params(), ROWS[:7])
    compare(gradients_on_replicas("hsdp", program, x=PerReplica(parts)), expected)


def _sharpness(order: int, p: Any, x: Any, mean: Any, whole: Any) -> Any:
    """A number from derivatives of one order less, so that its gradient has this order."""
    if order == 1:
        return _scan(p, x)
    grads = jax.grad(lambda p: _sharpness(order - 1, p, x, mean, whole))(p)
    # Of a size at which a sine is no straight line.
    bent = [jnp.sin(g * 10 ** (3 - order)) for g in jax.tree.leaves(whole(mean(grads)))]
    return sum(map(jnp.sum, bent))


DEEPER = [(name, n, by) for name in LAYOUTS for n in (2, 3) for by in ("compiled", "op by op")]


@pytest.mark.parametrize("row", sampled(DEEPER, 3, name=lambda row: ", ".join(map(str, row))))
def test_derivatives_of_derivatives_go_through_a_scan_of_layers(row: tuple[str, int, str]) -> None:
    name, order, executor = row

    def program(p: Any, x: Any) -> Any:
        context = jaxdist.get_replica_context()
        return _sharpness(order, p, x, lambda t: context.all_reduce("mean", t), partition.gather)

    alone = functools.partial(_sharpness, order, mean=lambda t: t, whole=lambda t: t)
    rows = ROWS[:6] if name == "padded" else ROWS
    expected = jax.jit(jax.value_and_grad(alone))(params(), rows)
    with jaxdist.config.run_eagerly(executor == "op by op"):
        compare(gradients_on_replicas(name, program), expected, bound=1e-4)


def _all_gather_layers(p: Any) -> Any:
    dims = {"up": 1, "bias": 1, "down": 0}
    return {k: jax.lax.all_gather(w, "i", axis=dims[k], tiled=True) for k, w in p.items()}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_scan_needs_the_memory_and_the_collectives_of_the_one_written_by_hand(
    keeps: bool,
) -> None:
    rng = np.random.default_rng(0)
    shapes = {"up": (12, 32, 128), "bias": (12, 1, 128), "down": (12, 128, 32)}
    given = {k: rng.normal(size=s).astype("float32") * 0.1 for k, s in shapes.items()}
    x = rng.normal(size=(16, 32)).astype("float32")
    wrap: Any = (lambda f: f) if keeps else jax.checkpoint

    def by_hand(p: Any, x: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            return body(x, _all_gather_layers(p))

        grads = jax.grad(lambda p: _scan(p, x, wrap(step)))(p)
        return jax.tree.map(lambda g: g / 8, grads)

    def step(p: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: _scan(p, x, wrap(body)))(p)
        return jaxdist.get_replica_context().all_reduce("mean", grads)

    specs = {"up": P(None, None, "i"), "bias": P(None, None, "i"), "down": P(None, "i")}
    mapped = jax.shard_map(
        by_hand, mesh=mesh((8,), ("i",)), in_specs=(specs, P("i")), out_specs=specs, check_vma=False
    )
    compiled = jax.jit(mapped).lower(given, x).compile()
    strategy = jaxdist.MirroredStrategy()
    rules = Rules({"up": Shard(2), "bias": Shard(2), "down": Shard(1)})
    placed = partition.place(strategy, given, rules)
    rows = jax.device_put(x, strategy.per_replica_sharding)
    own: Any = strategy.lower(step, (placed, rows)).compiled()

    def temporaries(program: Any) -> int:
        return int(program.memory_analysis().temp_size_in_bytes)

    def counts(program: Any) -> dict[str, int]:
        text = program.as_text()
        return {k: text.count(f" {k}(") for k in ("all-gather", "reduce-scatter", "all-reduce")}

    assert counts(own) == counts(compiled)
    assert counts(own)["all-gather"] > 0
    assert temporaries(own) <= 1.02 * temporaries(compiled)
    whole = sum(x.nbytes for x in given.values())
    # The layers are never whole at once, except where each is kept for its gradient.
    assert keeps or temporaries(own) < whole / 4


class _Stack(nnx.Module):
    def __init__(self) -> None:
        keys = nnx.Rngs(0).split(DEPTH)
        self.layers = nnx.vmap(lambda r: nnx.Linear(WIDTH, WIDTH, rngs=r), in_axes=0)(keys)

    def __call__(self, x: Any) -> Any:
        run = nnx.scan(
            lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return run(self.layers, x)


def _train(strategy: jaxdist.Strategy, rules: Any) -> list[float]:
    model = _Stack()
    if rules is not None:
        partition.place(strategy, model, rules)
    with strategy.scope():
        optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_of(m: Any) -> Any:
            return mean_square(m(x) - 0.1)

        context = jaxdist.get_replica_context()
        loss, grads = context.all_reduce("mean", nnx.value_and_grad(loss_of)(model))
        optimizer.update(model, grads)
        return loss

    return [float(strategy.run(step, (model, optimizer, rows))) for _ in range(4)]


def test_scan_of_flax_trains_as_on_one_device() -> None:
    expected = _train(jaxdist.OneDeviceStrategy("cpu:0"), None)
    for name, rules in {
        "hsdp": Rules({"*": Shard(1, axes=("b",))}),
        "fsdp x tp": Rules({"kernel": Shard(1, split=2), "bias": Shard(1)}),
    }.items():
        assert _train(strategy_of(name), rules) == pytest.approx(expected, rel=1e-5)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a scan over the dim that is cut": (
        lambda p: jax.lax.scan(lambda c, w: (c + jnp.sum(jnp.asarray(w)), None), 0.0, p)[0],
        "a scan iterates over the dim",
    ),
    "a row of it": (lambda p: jnp.asarray(p[0]).sum(), "dim 0"),
    "a slice of it": (lambda p: p[:4], "slice changes dim 0"),
    "a dynamic row of it": (
        lambda p: jax.lax.fori_loop(
            0, 8, lambda i, c: c + jax.lax.dynamic_index_in_dim(p, i, 0, False).sum(), 0.0
        ),
        "dynamic_slice changes dim 0",
    ),
    "a sum over it": (lambda p: p.sum(0), "reduce_sum changes dim 0"),
    "rows by an array": (lambda p: p[:, jnp.array([0, 2])], "gather needs more"),
    "rows that are added": (lambda p: p.at[:, 1].add(1.0), "scatter-add holds"),
    "a reversal of it": (lambda p: p[::-1], "rev changes dim 0"),
    "a concatenation along it": (lambda p: jnp.concatenate([p, p]), "concatenate changes dim 0"),
    "a padding of it": (lambda p: jnp.pad(p, [(0, 1), (0, 0), (0, 0)]), "pad changes dim 0"),
    "a reshape through it": (lambda p: p.reshape(64, 8), "reshape changes dim 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_a_part_of_each_piece_is_refused(name: str) -> None:
    program, message = REFUSED[name]
    strategy = strategy_of("fsdp")
    # All dims are equal, so that a wrong cut cannot be found by sizes.
    placed = partition.place(strategy, {"w": np.ones((8, 8, 8), "float32")}, {"w": Shard(0)})

    def step(p: Any) -> Any:
        [array] = jax.tree.leaves(p)
        return program(array)

    with pytest.raises(ShardedArrayError, match=message):
        strategy.run(step, (placed,))


INDICES: list[Any] = [
    1,
    -1,
    np.int64(2),
    slice(1, 3),
    slice(None, None, 2),
    (0, 1),
    (0, slice(None), 3),
    (slice(1, 3), slice(2, 5), slice(None, None, -1)),
    (slice(None), 2),
    (..., 1),
    (1, ..., 2),
    (None, 1),
    (1, None),
    (0, slice(None), np.array([0, 2])),
    ([0, 2], 1),
    (True, 0),
    (np.array([True, False, True, False]),),
    (),
    ...,
]


@pytest.mark.parametrize("name", ["fsdp", "fsdp x tp"])
def test_an_index_of_an_array_in_pieces_is_that_of_the_array(name: str) -> None:
    strategy = strategy_of(name)
    placed = partition.place(strategy, params(), LAYOUTS[name])

    def step(p: Any) -> Any:
        return [{k: w[index] for k, w in p.items() if k != "bias"} for index in INDICES]

    found = strategy.run(step, (placed,))
    for index, own in zip(INDICES, found, strict=True):
        for k, array in own.items():
            np.testing.assert_array_equal(
                array, jnp.asarray(params()[k])[index], err_msg=str(index)
            )


def test_a_row_gathers_one_layer_and_no_more() -> None:
    strategy = strategy_of("fsdp")
    placed = partition.place(strategy, params(), LAYOUTS["fsdp"])
    program = strategy.lower(lambda p: p["up"][1] + p["down"][1:2].sum(0), (placed,))
    sizes = [c.bytes_per_device for c in program.traced_collectives]
    assert sizes == [WIDTH * WIDTH * 4 // 4] * 2


def test_gather_in_another_dtype_sends_half_and_keeps_the_dtype_of_the_gradient() -> None:
    strategy = strategy_of("hsdp")
    given = {"w": np.random.default_rng(0).normal(size=(8, 8)).astype("float32")}
    placed = partition.place(strategy, given, {"w": Shard(1, axes=("b",))})
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)

    def program(p: Any, x: Any) -> Any:
        low = partition.gather(p, dtype=jnp.bfloat16)["w"]
        assert low.dtype == jnp.bfloat16
        return mean_square(x @ low.astype("float32"))

    def step(p: Any, x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("mean", jax.grad(program)(p, x))

    lowered = strategy.lower(step, (placed, rows))
    sizes = {(c.kind, c.bytes_per_device) for c in lowered.traced_collectives}
    # The sum over the other axis is in the dtype of the parameter.
    assert sizes == {("all_gather", 64), ("reduce_scatter", 128), ("psum", 128)}
    found = np.asarray(strategy.run(step, (placed, rows))["w"])
    assert found.dtype == np.float32
    expected = jax.grad(program)(given, ROWS)["w"]
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
    for wrong in ("int32", "no dtype", 3):
        with pytest.raises(ArgumentTypeError, match="dtype="):
            partition.gather(placed, dtype=wrong)


def test_between_slices_one_all_reduce_adds_up_the_gradients_of_all_layers() -> None:
    strategy = strategy_of("hsdp")
    rules = Rules({"*": Shard(2, axes=("b",))})
    placed = partition.place(strategy, params(), rules)
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    for wrapped in (body, jax.checkpoint(body)):

        def step(p: Any, x: Any, f: Any = wrapped) -> Any:
            grads = jax.grad(lambda p: _scan(p, x, f))(p)
            return jaxdist.get_replica_context().all_reduce("mean", grads)

        traced = strategy.lower(step, (placed, rows)).traced_collectives
        sums = [c for c in traced if c.kind == "psum"]
        assert [c.times for c in sums] == [1, 1, 1]
        assert all(c.axes == ("a",) for c in sums)


def test_an_index_that_differs_between_replicas_is_refused() -> None:
    strategy = strategy_of("fsdp")
    placed = partition.place(strategy, {"w": np.ones((8, 8), "float32")}, {"w": Shard(1)})

    def step(p: Any) -> Any:
        i = jaxdist.get_replica_context().replica_id_in_sync_group
        return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), p)

    with pytest.raises(ShardedArrayError, match="differs between replicas"):
        strategy.run(step, (placed,))


# Each program is a function of its own.
@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("dims", [(-1,), (1, 0), (0, 2, 1)])
def test_a_node_whose_cut_was_guessed_wrong_is_an_error_or_the_array(dims: tuple[int, ...]) -> None:
    strategy = strategy_of("fsdp")
    rng = np.random.default_rng(0)
    given = {"w": rng.normal(size=(8, 8, 8)).astype("float32")}
    for cut in range(3):
        placed = partition.place(strategy, given, {"w": Shard(cut)})
        for change in (
            lambda w: jnp.expand_dims(w, dims[0]),
            lambda w: w.sum(dims[0]),
            lambda w: jnp.transpose(w, dims) if len(dims) == 3 else w.swapaxes(0, dims[0]),
        ):
            expected = change(given["w"])
            try:
                found = strategy.run(
                    lambda p, f=change: partition.gather(jax.tree.map(f, p)), (placed,)
                )
            except (ShardedArrayError, ReplicaValueError):
                continue
            np.testing.assert_allclose(found["w"], expected, rtol=1e-5)
