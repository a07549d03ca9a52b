"""Steps of virtual replicas give the same bits on 1, 2, 4 and 8 devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxdist
from jaxdist import (
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    Strategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from tests.program.run.counting import compilations

pytestmark = pytest.mark.optimized


def virtual(devices: int, deterministic: bool | int = True) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(devices)], deterministic=deterministic)


def bits(tree: Any) -> list[bytes]:
    """The bytes of every array, of `PerReplica`s those of all replicas in order."""
    return [_raw(x).tobytes() for x in jax.tree.leaves(tree)]


def _raw(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def on_all(run: Callable[[Strategy], Any], among: Sequence[int] = (2, 8)) -> Any:
    """Return the result of `run` on one device, after comparing its bits with more devices."""
    one = run(OneDeviceStrategy("cpu:3", deterministic=True))
    for devices in among:
        assert bits(run(virtual(devices))) == bits(one), f"{devices} devices"
    return one


# Training

_RNG = np.random.default_rng(0)
IMAGES = _RNG.normal(size=(32, 6, 6, 1)).astype(np.float32)
LABELS = _RNG.integers(0, 5, size=32)
_TX = optax.adamw(1e-2)


def _parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"conv": (3, 3, 1, 4), "w": (144, 16), "b": (16,), "v": (16, 5)}
    return {k: (0.3 * rng.normal(size=s)).astype(np.float32) for k, s in shapes.items()}


def _losses(params: Any, batch: Any, keys: Any, *, keep: float) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=dims)
    x = jnp.tanh(jax.nn.relu(x).reshape(x.shape[0], -1) @ params["w"] + params["b"][None])
    kept = jax.vmap(lambda k: jax.random.bernoulli(k, keep, (16,)))(keys)
    logits = (x * kept) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def _train_step(state: Any, batch: Any) -> Any:
    params, optimizer, key = state
    key, own = jax.random.split(key)
    keys = jaxdist.nn.example_keys(own, batch["x"].shape[0])

    def loss(params: Any) -> Any:
        losses = _losses(params, batch, keys, keep=0.8)
        return jaxdist.nn.compute_average_loss(losses), losses

    (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(params)
    grads = get_replica_context().all_reduce("sum", grads)
    updates, optimizer = _TX.update(grads, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer, key), losses


def _trained(strategy: Strategy, steps: int = 6) -> Any:
    params = _parameters()
    state = (params, _TX.init(params), jax.random.key(7))
    batch = {"x": IMAGES, "y": LABELS}
    if strategy.num_replicas_in_sync > 1:
        batch = jax.device_put(batch, strategy.per_replica_sharding)
    means, losses = [], None
    for _ in range(steps):
        state, losses = strategy.run(_train_step, (state, batch))
        if strategy.num_replicas_in_sync > 1:
            means.append(strategy.reduce("MEAN", losses, axis=0))
            means.append(strategy.reduce("SUM", losses, axis=None))
    return state, means, losses


def test_training_with_dropout_gives_the_bits_that_it_gives_on_one_device() -> None:
    state, _, _ = on_all(_trained, among=(2, 4, 8))
    plain, _, _ = _trained(OneDeviceStrategy("cpu:0"))
    for name, value in plain[0].items():
        np.testing.assert_allclose(state[0][name], value, atol=2e-5, err_msg=name)


def test_the_ordinary_strategy_gives_other_bits() -> None:
    """Without `deterministic` the bits differ, so the test above is not trivial."""
    (first, *_), (second, *_) = (_trained(MirroredStrategy(["cpu:0", "cpu:1"][:n])) for n in (1, 2))
    assert bits(first) != bits(second)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_steady_loop_compiles_once(devices: int) -> None:
    strategy = virtual(devices)
    params = _parameters()
    state: Any = (params, _TX.init(params), jax.random.key(7))
    batch = jax.device_put({"x": IMAGES, "y": LABELS}, strategy.per_replica_sharding)
    with compilations() as compiled:
        for _ in range(20):
            state, _ = strategy.run(_train_step, (state, batch))
    assert compiled.number == 1


class Net(nnx.Module):
    """Batch statistics, dropout with a stream of its own, and parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def _train_flax(strategy: Strategy) -> Any:
    with strategy.scope():
        net, metric = Net(), nnx.metrics.Average()
        optimizer = nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)
        seen = Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        mean = Variable(np.zeros(6, np.float32), aggregation=VariableAggregation.MEAN)

    def step(net: Net, optimizer: Any, metric: Any, batch: Any) -> Any:
        def loss(net: Net) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(net(batch["x"]), batch["y"])
            return losses.mean(), losses

        (own, losses), grads = nnx.value_and_grad(loss, has_aux=True)(net)
        optimizer.update(net, get_replica_context().all_reduce("mean", grads))
        metric.update(values=losses)
        seen.assign_add(batch["x"].sum())
        mean.assign(batch["x"].mean(0))
        return own, losses

    data = jaxdist.data.batches({"x": IMAGES[:, :, 0, 0], "y": LABELS % 3}, 16)
    outputs = []
    for batch in strategy.experimental_distribute_dataset(data):
        own, losses = strategy.run(step, (net, optimizer, metric, batch))
        outputs += [
            own,
            strategy.reduce("MEAN", own, axis=None),
            strategy.gather(losses, 0),
            metric.compute(),
            seen.read_value(),
            mean.read_value(),
        ]
    return nnx.state((net, optimizer)), outputs


def test_flax_modules_metrics_and_variables_have_the_same_bits() -> None:
    on_all(_train_flax, among=(8,))


# Values and collectives


def _in_a_tree(rows: np.ndarray) -> np.ndarray:
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def test_a_sum_is_that_of_numpy_in_the_order_of_the_tree() -> None:
    rows = (_RNG.normal(size=(8, 1003)) * 10.0 ** _RNG.integers(-6, 6, (8, 1003))).astype("f4")

    def run(strategy: Strategy) -> Any:
        def step(x: Any) -> Any:
            return get_replica_context().all_reduce("sum", (x, 3 * x[:5])), x

        sums, held = strategy.run(step, (PerReplica(list(rows)),))
        return *sums, strategy.reduce("SUM", held, axis=None), strategy.reduce("SUM", held, axis=0)

    whole, few, across, rows_and_dims = on_all(run)
    assert np.array_equal(whole, _in_a_tree(rows))
    assert np.array_equal(few, _in_a_tree(3 * rows[:, :5]))
    assert np.array_equal(across, _in_a_tree(rows))
    assert np.array_equal(rows_and_dims, _in_a_tree(np.add.reduce(rows, axis=1)))


def test_large_arrays_and_half_precision_are_added_in_the_same_order() -> None:
    large = _RNG.normal(size=(8, 40_000)).astype(np.float32)
    half = (_RNG.normal(size=(8, 7)) * 100).astype(jnp.bfloat16)

    def run(strategy: Strategy) -> Any:
        def step(x: Any, y: Any) -> Any:
            return get_replica_context().all_reduce("mean", (x, y)), x

        means, held = strategy.run(step, (PerReplica(list(large)), PerReplica(list(half))))
        return means, strategy.reduce("SUM", held, axis=None)

    (means, halves), total = on_all(run)
    assert np.array_equal(means, _in_a_tree(large) / 8)
    assert np.array_equal(total, _in_a_tree(large))
    # Added in float32 and rounded once.
    expected = _in_a_tree(half.astype(np.float32)).astype(jnp.bfloat16) / 8
    assert np.array_equal(np.asarray(halves), expected)


def test_two_nans_leave_the_same_bits_on_every_device() -> None:
    words = np.full((8, 2), 0x3F800000, np.uint32)
    words[2], words[5] = 0x7FC00001, 0xFFC00002  # quiet NaNs that are not alike

    def run(strategy: Strategy) -> Any:
        def step(x: Any) -> Any:
            total = get_replica_context().all_reduce("sum", x)
            return lax.bitcast_convert_type(total, jnp.uint32)

        total = strategy.run(step, (PerReplica(list(words.view(np.float32))),))
        strategy.check_replicas(total)
        return total

    on_all(run)


GROUPS = [[0, 3, 5, 6], [7, 1, 2, 4]]
PAIRS = [(0, 3), (1, 0), (2, 7), (5, 5)]


def _collectives(x: Any, k: Any) -> Any:
    """Every collective on per-replica values, and some on a value that is equal on all replicas."""
    axis: Any = "replica"
    rows = jnp.outer(jnp.arange(1.0, 9.0), x)
    of_group = jnp.outer(jnp.arange(1.0, 5.0), x)
    return {
        "psum": lax.psum(x, axis),
        "psum_of_same": lax.psum(k, axis),
        "psum_of_int": lax.psum((x * 10).astype(int), axis),
        "psum_of_complex": lax.psum(x + 1j * x[::-1], axis),
        "pmax": lax.pmax(x, axis),
        "pmin": lax.pmin((x, k), axis),
        "pmean": lax.pmean(x, axis),
        "grouped": lax.psum(x, axis, axis_index_groups=GROUPS),
        "grouped_max": lax.pmax(x, axis, axis_index_groups=GROUPS),
        "gather": lax.all_gather(x, axis),
        "gather_dim": lax.all_gather(rows, axis, axis=1),
        "gather_tiled": lax.all_gather(rows, axis, axis=1, tiled=True),
        "gather_grouped": lax.all_gather(x, axis, axis_index_groups=GROUPS),
        "gather_same": lax.all_gather(k, axis, tiled=True),
        "scatter": lax.psum_scatter(rows, axis),
        "scatter_tiled": lax.psum_scatter(rows, axis, tiled=True),
        "scatter_grouped": lax.psum_scatter(of_group, axis, axis_index_groups=GROUPS),
        "all_to_all": lax.all_to_all(rows, axis, 0, 0),
        "all_to_all_tiled": lax.all_to_all(rows, axis, 0, 1, tiled=True),
        "all_to_all_grouped": lax.all_to_all(of_group, axis, 0, 0, axis_index_groups=GROUPS),
        "ppermute": lax.ppermute(x, axis, PAIRS),
        "ppermute_same": lax.ppermute(k, axis, PAIRS),
        "number": lax.axis_index(axis) + 0 * k[0].astype(int),
        "vmapped": jax.vmap(lambda v: lax.psum(v * x, axis))(rows),
        "number_in_vmap": jax.vmap(lambda v: v * lax.axis_index(axis))(rows),
        "gradient": jax.grad(lambda v: (lax.psum(v * x, axis) * v).sum())(x),
        "nothing": lax.psum(x[:0], axis),
    }


def _in_loops(x: Any, k: Any) -> Any:
    axis: Any = "replica"

    def add(carry: Any, row: Any) -> Any:
        own, same = carry
        total = lax.psum(own * row, axis)
        own = jnp.tanh(own + total * lax.axis_index(axis))
        return (own, same + total.sum()), (own, total)

    def numbered(carry: Any, row: Any) -> Any:
        return carry + row * lax.axis_index(axis), carry

    def more(state: Any) -> Any:
        return state[0] < 3

    def once(state: Any) -> Any:
        i, own, same = state
        return i + 1, own + same, same + lax.pmean(own.sum(), axis)

    is_positive = lax.psum(x.sum(), axis) > 0
    return {
        "scan": lax.scan(add, (x, 0.0), jnp.stack([k, k * 2, k + 1])),
        "scan_without_collectives": lax.scan(numbered, x, jnp.stack([k, x])),
        "while": lax.while_loop(more, once, (0, x, 0.0)),
        "cond": lax.cond(is_positive, lambda v: v, lambda v: lax.psum(v, axis), x),
        "switch": lax.switch(lax.axis_index(axis) % 2, [jnp.sin, jnp.cos], x),
        "fori": lax.fori_loop(0, lax.axis_index(axis), lambda i, v: v * 1.1 + i, x),
        "checkpoint": jax.grad(
            lambda v: jax.checkpoint(lambda u: jnp.sin(lax.psum(u * x, axis)))(v).sum()
        )(k),
        "checkpoint_of_own": jax.grad(
            lambda v: jax.checkpoint(lambda u: jnp.sin(jnp.cos(u * x)))(v).sum()
        )(x),
        "jit": jax.jit(lambda v: (jax.nn.relu(v) + lax.axis_index(axis), k + 1))(x),
        "solve": jnp.linalg.solve(jnp.outer(x, x) + 8 * jnp.eye(4), x),
        "debug": jax.debug.callback(lambda _: None, x),
    }


@pytest.mark.parametrize("step", [_collectives, _in_loops])
def test_collectives_mean_what_they_mean_on_eight_devices(step: Callable[..., Any]) -> None:
    own = _RNG.normal(size=(8, 4)).astype(np.float32)
    same = _RNG.normal(size=4).astype(np.float32)

    def run(strategy: Strategy) -> Any:
        return strategy.run(step, (PerReplica(list(own)), same))

    virtually, really = on_all(run), run(MirroredStrategy())
    # Which results are one value, and which are one for each replica.
    shapes = [jax.tree.map(jnp.shape, x) for x in (virtually, really)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    for name in really:
        pairs = zip(jax.tree.leaves(virtually[name]), jax.tree.leaves(really[name]), strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(
                np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-5, err_msg=name
            )


def test_a_replica_context_speaks_of_the_virtual_replicas() -> None:
    def step() -> Any:
        context = get_replica_context()
        return context.num_replicas_in_sync, context.replica_id_in_sync_group

    def run(strategy: Strategy) -> Any:
        count, numbers = strategy.run(step)
        assert (count, strategy.num_replicas_in_sync, len(numbers.values)) == (8, 8, 8)
        assert strategy.experimental_local_results(numbers) == tuple(range(8))
        return numbers

    on_all(run)
    count, numbers = virtual(2, 16).run(step)
    assert (count, len(numbers.values)) == (16, 16)


def test_values_of_replicas_are_their_rows() -> None:
    rows = np.arange(32.0, dtype=np.float32).reshape(16, 2)

    def run(strategy: Strategy) -> Any:
        x = jax.device_put(rows, strategy.per_replica_sharding)
        doubled = strategy.run(lambda v: 2 * v, (x,))
        assert [v.tolist() for v in doubled.values] == (2 * rows.reshape(8, 2, 2)).tolist()
        again = strategy.run(lambda v, w: v + w, (doubled, PerReplica(list(rows.reshape(8, 2, 2)))))
        merged = strategy.run(
            lambda v: get_replica_context().merge_call(
                lambda s, u: s.reduce("MEAN", u, axis=0), (v,)
            ),
            (x,),
        )
        return again, strategy.gather(again, 0), strategy.gather(again, 1), merged

    again, gathered, _, merged = on_all(run)
    assert np.array_equal(gathered, 3 * rows)
    assert np.array_equal(again.array, 3 * rows)
    assert np.array_equal(merged, rows.mean(0))


def test_many_steps_in_one_function_have_the_same_bits() -> None:
    rows = _RNG.normal(size=(16, 3)).astype(np.float32)

    def run(strategy: Strategy) -> Any:
        def step(w: Any, x: Any) -> Any:
            grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
            return w - 0.1 * get_replica_context().all_reduce("mean", grad)

        @jaxdist.function
        def loop(w: Any, x: Any) -> Any:
            w = lax.fori_loop(0, 5, lambda _, w: strategy.run(step, (w, x)), w)
            own = strategy.run(lambda w, x: jnp.sum(x @ w), (w, x))
            return w, strategy.reduce("SUM", own, axis=None)

        x = PerReplica.of_global(jax.device_put(rows, strategy.per_replica_sharding))
        return loop(jax.device_put(np.ones(3, np.float32), strategy.replicated_sharding), x)

    on_all(run)


def test_programs_of_other_strategies_are_as_they_were() -> None:
    """No barrier, no loop, and one all-reduce."""
    strategy = MirroredStrategy()
    params = _parameters()
    state = (params, _TX.init(params), jax.random.key(7))
    batch = jax.device_put({"x": IMAGES, "y": LABELS}, strategy.per_replica_sharding)
    compiled = strategy.lower(_train_step, (state, batch)).compile()
    assert "opt-barrier" not in compiled.as_text()
    assert [c.kind for c in compiled.collectives] == ["all-reduce"]


def test_reductions_of_what_a_step_is_given_have_the_same_bits_too() -> None:
    x = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
    images = np.random.default_rng(1).normal(size=(64, 4, 4, 3)).astype(np.float32)

    def step(x: Any, images: Any) -> Any:
        replica = get_replica_context()
        keys = jax.random.split(jax.random.key(replica.replica_id_in_sync_group))
        noise = jax.random.normal(keys[0], x.shape)
        centred = (images - images.mean(0, keepdims=True)) / (images.std(0, keepdims=True) + 1e-5)
        sums = [jnp.sum(x), jnp.mean(x**2), jnp.var(x), jnp.linalg.norm(x.ravel()), noise.sum()]
        return replica.all_reduce("sum", [*sums, centred.sum((1, 2, 3))]), keys

    found = []
    for count in (1, 2, 4, 8):
        strategy = jaxdist.MirroredStrategy(jax.devices()[:count], deterministic=True)
        given = [jax.device_put(v, strategy.per_replica_sharding) for v in (x, images)]
        sums, _ = strategy.run(step, tuple(given))
        found.append([np.asarray(v).tobytes() for v in sums])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_function_takes_rows_for_what_their_layout_says_on_one_device_too(count: int) -> None:
    strategy = jaxdist.MirroredStrategy(jax.devices()[:count], deterministic=True)
    x = np.arange(128, dtype=np.float32).reshape(64, 2)
    rows = jax.device_put(x, strategy.per_replica_sharding)

    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("sum", jnp.sum(x))

    whole = jaxdist.function(lambda x: strategy.run(step, (x,)))
    assert float(strategy.run(step, (rows,))) == float(whole(rows)) == 8128


def test_explain_says_that_sums_go_by_the_tree() -> None:
    strategy = jaxdist.MirroredStrategy(deterministic=True)
    options = jaxdist.experimental.CommunicationOptions(bytes_per_pack=8)

    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("sum", [x, x + 1], options)

    rows = jax.device_put(np.ones((8, 4), np.float32), strategy.per_replica_sharding)
    report = strategy.lower(step, (rows,)).explain()
    assert {asked.algorithm for asked in report.asked} == {"tree"}
    assert any("bytes_per_pack" in sentence for sentence in report.ignored)
