"""Functions of pytrees find an array in pieces without its padding, wherever they are called."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import ContextError, ReplicaValueError
from tests.tables import sampled
from tests.update.random_chains import OF_LEAVES

pytestmark = pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")

PADDED = partition.Rules({"**": partition.Shard(pad=True)})
# None has a dim that the replicas divide.
SHAPES = {2: (7, 11), 4: (5, 3), 8: (13,)}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda count: f"{count} replicas")
def strategy(request: pytest.FixtureRequest) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


def arrays(strategy: jaxdist.MirroredStrategy) -> dict[str, np.ndarray]:
    shape = SHAPES[strategy.num_replicas_in_sync]
    return {"w": np.random.default_rng(0).normal(size=shape).astype("float32")}


def in_pieces(strategy: jaxdist.MirroredStrategy) -> dict[str, Sharded]:
    placed: Any = partition.place(strategy, arrays(strategy), PADDED)
    assert placed["w"].has_padding
    return dict(placed)


def numbers(tree: Any) -> np.ndarray:
    """Return the value of the only leaf, which may be in a node."""
    leaf = tree["w"]
    return np.asarray(leaf.held if isinstance(leaf, Sharded) and not leaf.shape else leaf)


def outside(strategy: Any, fn: Any, params: Any) -> Any:
    return jax.tree.map(fn, params)


def compiled_by_the_user(strategy: Any, fn: Any, params: Any) -> Any:
    return jax.jit(lambda p: jax.tree.map(fn, p))(params)


def in_a_function(strategy: Any, fn: Any, params: Any) -> Any:
    return jaxdist.function(lambda p: jax.tree.map(fn, p))(params)


def closed_over_by_a_step(strategy: Any, fn: Any, params: Any) -> Any:
    return strategy.run(lambda: {"w": jax.tree.leaves(jax.tree.map(fn, params))[0]})


def closed_over_by_a_function(strategy: Any, fn: Any, params: Any) -> Any:
    return jaxdist.function(lambda: jax.tree.map(fn, params))()


def of_a_result(strategy: Any, fn: Any, params: Any) -> Any:
    return jax.tree.map(fn, strategy.run(lambda p: p, (params,)))


WAYS = (
    outside,
    compiled_by_the_user,
    in_a_function,
    closed_over_by_a_step,
    closed_over_by_a_function,
    of_a_result,
)
ROWS = list(itertools.product(OF_LEAVES, WAYS))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*row.values[0], id=row.id, marks=row.marks)
        for row in sampled(ROWS, 14, name=lambda row: f"{row[0]}, {row[1].__name__}")
    ],
)
def test_function_of_leaves_finds_the_array_without_padding(
    strategy: jaxdist.MirroredStrategy, name: str, way: Any
) -> None:
    fn = OF_LEAVES[name]
    wanted = fn(jnp.asarray(arrays(strategy)["w"]))
    found = numbers(way(strategy, fn, in_pieces(strategy)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_such_a_function_makes_goes_into_a_step(strategy: jaxdist.MirroredStrategy) -> None:
    doubled = jax.tree.map(lambda x: x * 2, in_pieces(strategy))
    found = strategy.run(lambda p: jax.tree.map(lambda x: x / x.size, p), (doubled,))
    wanted = arrays(strategy)["w"]
    np.testing.assert_allclose(np.asarray(found["w"]), wanted * 2 / wanted.size, rtol=1e-6)
    assert found["w"].has_padding


def test_state_made_outside_is_that_made_in_a_step(strategy: jaxdist.MirroredStrategy) -> None:
    params = in_pieces(strategy)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.full(x.shape, 1 / x.size), params)

    def step(gradients: Any, state: Any) -> Any:
        return jax.tree.map(lambda g, s: g * s, gradients, state)

    outside = strategy.run(step, (params, init(params)))
    wanted = arrays(strategy)["w"]
    np.testing.assert_allclose(np.asarray(outside["w"]), wanted / wanted.size, rtol=1e-6)


def test_array_of_another_length_in_a_node_is_refused() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    rules = partition.Rules({"**": partition.Shard(0, pad=True)})
    params = partition.place(strategy, {"w": np.ones((7, 8), "float32")}, rules)
    # Eight rows are what seven are with their padding.
    means = jax.tree.map(lambda x: jnp.mean(x, axis=0), params)
    with pytest.raises(ReplicaValueError, match=r"args\[0\]\['w'\] is float32\[8\]"):
        strategy.run(lambda m: m, (means,))


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("kind", ["run", "function"])
def test_no_call_of_a_loop_cuts_padding_off(
    monkeypatch: pytest.MonkeyPatch, donated: tuple[int, ...], kind: str
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params: Any = partition.place(strategy, {"w": np.ones((7, 11), "float32")}, PADDED)
    tx = optax.adam(0.1)
    state = strategy.run(tx.init, (params,))
    cut_off = []
    whole = Sharded.whole

    def counted(self: Sharded) -> Any:
        cut_off.append(self)
        return whole(self)

    monkeypatch.setattr(Sharded, "whole", counted)

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    options = jaxdist.RunOptions(donate_argnums=donated)
    run: Any = lambda *given: strategy.run(step, given, options=options)  # noqa: E731
    if kind == "function":
        run = jaxdist.function(run)
    for _ in range(3):
        params, state = run(params, state)
    assert not cut_off
    assert params["w"].has_padding


@pytest.mark.parametrize("width", [11, 12], ids=["padded", "even"])
def test_function_leaves_the_variables_of_a_module_in_pieces(width: int) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        context = jaxdist.get_replica_context()
        assert context is not None
        grads = context.all_reduce("mean", grads)
        optimizer.update(model, grads)
        return context.all_reduce("mean", loss)

    def losses(run: Any) -> list[float]:
        model = nnx.Linear(7, width, rngs=nnx.Rngs(0))
        partition.place(strategy, model, PADDED)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        x = jax.device_put(np.ones((4, 7), "float32"), strategy.per_replica_sharding)
        found = [float(run(model, optimizer, x)) for _ in range(3)]
        assert isinstance(model.kernel.get_raw_value(), Sharded)
        return found

    by_run = losses(lambda *given: strategy.run(step, given))
    by_function = losses(jaxdist.function(lambda *given: strategy.run(step, given)))
    assert by_function == pytest.approx(by_run, rel=1e-6)


@pytest.mark.parametrize("layout", ["replicated", "per_replica_sharding"])
def test_array_with_a_layout_that_a_step_closes_over_is_whole_on_each_replica(layout: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    where = strategy.layout.replicated if layout == "replicated" else strategy.per_replica_sharding
    rows = jax.device_put(np.arange(4.0, dtype="float32"), where)
    assert float(strategy.run(lambda: jnp.sum(rows * 2))) == 12
    found = strategy.run(lambda: jnp.where(jnp.all(jnp.isfinite(rows)), rows, 0))
    assert np.asarray(found).tolist() == [0, 1, 2, 3]


def test_array_on_another_mesh_that_a_step_closes_over_works_or_is_named() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    other = jax.sharding.Mesh(np.asarray(jax.devices()[:2], dtype=object), ("other",))
    where = jax.sharding.NamedSharding(other, jax.sharding.PartitionSpec("other"))
    rows = jax.device_put(np.arange(4.0, dtype="float32"), where)
    assert float(strategy.run(lambda: jnp.sum(rows * 2))) == 12
    with pytest.raises(ContextError, match=r"closes over rows, .* float32\[4\] laid out as"):
        strategy.run(lambda: jnp.where(jnp.all(jnp.isfinite(rows)), rows, 0))


def test_module_in_a_dict_beside_a_padded_array_is_updated_at_each_step() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((7, 11), "float32")}, PADDED)
    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step(given: Any, params: Any) -> None:
        given["model"].bias[...] += 1

    for _ in range(4):
        strategy.run(step, ({"model": model}, params))
    assert float(model.bias[0]) == 4
