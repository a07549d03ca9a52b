"""`sharded_update` in steps: memory, compilations, executors, layouts, and what it refuses."""

import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Sharded, compressed_update, sharded_update
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    ReplicaValueError,
    ShapeError,
    StateDivergenceError,
)
from tests.program.run.counting import compilations
from tests.strategies.oracle import refused

pytestmark = pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")


def parameters() -> dict[str, Any]:
    """Two matrices, of which one has no dim that 8 divides, and leaves that stay whole."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(0, 0.3, (12, 20)).astype("float32"),
        "v": rng.normal(0, 0.3, (20, 16)).astype("float32"),
        "odd": rng.normal(size=3).astype("float32"),
        "scale": np.float32(1),
    }


def rows(count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return (
        rng.normal(size=(count, 12)).astype("float32"),
        rng.normal(size=(count, 16)).astype("float32"),
    )


def loss_of(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    error = jnp.tanh(x @ params["w"]) @ params["v"] * params["scale"] + params["odd"].sum() - y
    return jnp.mean(error**2)


TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def sharded(**options: Any) -> jaxdist._update.ShardedUpdate:
    return jaxdist.sharded_update(TX, min_bytes=0, **options)


class Training:
    """A loop whose step is one function object."""

    def __init__(self, strategy: jaxdist.Strategy, tx: Any, *, mode: str = "sharded") -> None:
        self.strategy, self.tx, self.mode = strategy, tx, mode

    def step(self, params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        context = jaxdist.get_replica_context()
        value = context.all_reduce("mean", value)
        if self.mode == "replicated":
            grads = context.all_reduce("mean", grads)
        if self.mode == "in one":
            return *self.tx.apply_gradients(grads, state, params), value
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def run(
        self,
        steps: int = 3,
        *,
        params: Any = None,
        state: Any = None,
        batch: Any = None,
        **how: Any,
    ) -> tuple[list[float], Any, Any]:
        params = parameters() if params is None else params
        if state is None:
            with self.strategy.scope():
                state = self.tx.init(params)
        if batch is None:
            batch = jax.device_put(rows(), self.strategy.per_replica_sharding)
        options = jaxdist.RunOptions(**how) if how else None
        losses = []
        step = self.step
        for _ in range(steps):
            params, state, value = self.strategy.run(step, (params, state, batch), options=options)
            losses.append(float(value))
        return losses, params, state


def cpus(count: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


@pytest.fixture(scope="module")
def strategy() -> jaxdist.MirroredStrategy:
    return cpus(8)


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    return Training(cpus(1), TX).run()[0]


def pieces(state: Any) -> list[Sharded]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Sharded))
    return [x for x in leaves if isinstance(x, Sharded)]


def bytes_on_a_device(state: Any) -> int:
    arrays = jax.tree.leaves(state)
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


@pytest.mark.parametrize("mode", ["sharded", "in one"])
def test_losses_are_those_of_one_device_with_one_compilation_and_donation(
    strategy: jaxdist.MirroredStrategy, wanted: list[float], mode: str
) -> None:
    training = Training(strategy, sharded(), mode=mode)
    with strategy.scope():
        state = training.tx.init(parameters())
    with compilations() as count:
        losses, _, after = training.run(state=state, donate_argnums=(1,))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert count.number == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert len(pieces(after)) == 4


def test_state_takes_its_share_of_memory_on_each_device(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    params = {"w": np.zeros((64, 48), "float32")}
    tx = jaxdist.sharded_update(optax.adam(1e-3), min_bytes=0)
    with strategy.scope():
        state: Any = tx.init(params)
    whole = 2 * params["w"].nbytes
    assert bytes_on_a_device(state) - state[0].count.nbytes == whole // 8
    after = strategy.run(lambda p, s: tx.update(p, s, p)[1], (params, state))
    assert bytes_on_a_device(after) - state[0].count.nbytes == whole // 8


@pytest.mark.parametrize("where", ["in a step", "outside", "by strategy"])
def test_state_may_be_made_anywhere(
    strategy: jaxdist.MirroredStrategy, wanted: list[float], where: str
) -> None:
    tx = sharded(strategy=strategy if where == "by strategy" else None)
    init = tx.init
    state = strategy.run(init, (parameters(),)) if where == "in a step" else init(parameters())
    assert len(pieces(state)) == (0 if where == "outside" else 4)
    losses, _, after = Training(strategy, tx).run(state=state)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert len(pieces(after)) == 4


def _mesh(*names: str) -> Mesh:
    devices = np.asarray(jax.devices("cpu")[:8], dtype=object).reshape(4, 2)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cpus(1),
        lambda: cpus(3),
        lambda: jaxdist.MirroredStrategy(mesh=_mesh("a", "b"), replica_axes=("b", "a")),
        lambda: jaxdist.MirroredStrategy(mesh=_mesh("a", "b"), replica_axes=("a",)),
        lambda: jaxdist.OneDeviceStrategy("cpu:2"),
    ],
    ids=["1", "3", "two axes", "two logical devices", "one device"],
)
def test_every_layout_of_replicas_gives_the_same(make: Any) -> None:
    strategy = make()
    batch = jax.device_put(rows(24), strategy.per_replica_sharding)
    losses = Training(strategy, sharded()).run(batch=batch)[0]
    alone = cpus(1)
    one = Training(alone, TX).run(batch=jax.device_put(rows(24), alone.per_replica_sharding))[0]
    assert losses == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_executor_op_by_op_gives_the_same(wanted: list[float]) -> None:
    strategy = cpus(2)
    jaxdist.config.run_eagerly(True)
    try:
        losses, _, state = Training(strategy, sharded()).run(2)
    finally:
        jaxdist.config.run_eagerly(False)
    assert losses == pytest.approx(wanted[:2], rel=1e-5)
    assert len(pieces(state)) == 6


@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
def test_replicas_may_have_uneven_batches() -> None:
    strategy = cpus(3)
    cut = np.cumsum([0, 5, 5, 4])
    batch = tuple(PerReplica([x[a:b] for a, b in itertools.pairwise(cut)]) for x in rows(14))
    losses = Training(strategy, sharded()).run(2, batch=batch)[0]
    replicated = Training(strategy, TX, mode="replicated").run(2, batch=batch)[0]
    assert losses == pytest.approx(replicated, rel=1e-5)


def test_dtypes_may_be_mixed(strategy: jaxdist.MirroredStrategy) -> None:
    params = parameters()
    params["w"] = jnp.asarray(params["w"], jnp.bfloat16)
    found, after, _ = Training(strategy, sharded()).run(params=params)
    replicated, _, _ = Training(strategy, TX, mode="replicated").run(params=params)
    assert found == pytest.approx(replicated, rel=2e-3)
    assert after["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("reduces", "batch", "is_told"),
    [(True, None, True), (False, None, False), (False, "whole", False)],
    ids=["reduced", "of the replica", "the same work"],
)
def test_gradients_that_are_reduced_already_are_told_once(
    reduces: bool, batch: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    two, tx = cpus(2), sharded()
    batch = rows() if batch else jax.device_put(rows(), two.per_replica_sharding)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss_of)(params, batch)
        if reduces:
            grads = jaxdist.get_replica_context().all_reduce("mean", grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with two.scope():
        params, state = parameters(), tx.init(parameters())
    with caplog.at_level(logging.WARNING, "jaxdist"):
        for _ in range(2):
            params, state = two.run(step, (params, state, batch))
    told = [r.message for r in caplog.records if "sharded_update gets" in r.message]
    assert len(told) == is_told
    assert all("test_sharded_update.py" in line and "2 times too large" in line for line in told)


def test_one_equal_gradient_of_several_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    two, tx = cpus(2), sharded()
    batch = jax.device_put(rows(), two.per_replica_sharding)

    def step(params: Any, state: Any, batch: Any) -> Any:
        frozen = {**params, "w": jax.lax.stop_gradient(params["w"])}
        grads = jax.grad(lambda p: loss_of({**frozen, "v": p["v"]}, batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with two.scope():
        state = tx.init(parameters())
    with caplog.at_level(logging.WARNING, "jaxdist"):
        two.run(step, (parameters(), state, batch))
    assert "sharded_update gets" not in caplog.text


def test_sums_are_an_option(strategy: jaxdist.MirroredStrategy) -> None:
    tx = jaxdist.sharded_update(optax.sgd(1.0), reduce_op="sum", min_bytes=0)
    params = {"cut": jnp.ones(16), "whole": jnp.ones(())}
    found, _ = strategy.run(lambda p: tx.update(p, tx.init(p), p), (params,))
    assert jax.tree.map(lambda x: float(x.ravel()[0]), found) == {"cut": -8, "whole": -8}


def test_small_leaves_stay_whole_by_the_cost_of_a_collective(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    params = {"small": np.zeros((32, 32), "float32"), "large": np.zeros((512, 512), "float32")}
    with strategy.scope():
        state: Any = jaxdist.sharded_update(optax.sgd(0.1, momentum=0.9)).init(params)
    assert isinstance(state[0].trace["large"], Sharded)
    assert state[0].trace["small"].shape == (32, 32)


def test_collectives_are_a_reduce_scatter_and_an_all_gather(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    tx = jaxdist.sharded_update(optax.adam(0.1), min_bytes=1000)
    params = {"w": np.ones((16, 32), "float32"), "b": np.ones(32, "float32"), "s": np.float32(1)}
    with strategy.scope():
        state = tx.init(params)
    asked = strategy.lower(lambda p, s: tx.update(p, s, p), (params, state)).traced_collectives
    assert [(c.kind, c.operands, c.bytes_per_device) for c in asked] == [
        ("psum", 1, 132),
        ("reduce_scatter", 1, 2048),
        ("all_gather", 1, 256),
    ]


def test_state_of_other_replicas_is_refused_and_can_be_cut_anew(wanted: list[float]) -> None:
    tx = sharded()
    eight, two = cpus(8), cpus(2)
    _, params, state = Training(eight, tx).run(1)
    training = Training(two, tx)
    with pytest.raises(ReplicaValueError, match=r"jaxdist\.shard_state\(state, strategy\)"):
        training.run(1, params=params, state=state)
    state = jaxdist.shard_state(state, two, min_bytes=0)
    losses, _, _ = training.run(2, params=jax.device_get(params), state=state)
    assert losses == pytest.approx(wanted[1:], rel=1e-5)
    alone = jaxdist.shard_state(state, cpus(1))
    assert pieces(alone) == []


class TestRefused:
    """Bad input is named, with what to do."""

    def test_transformation_that_is_none(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"tx is an optax\.GradientTransformation"):
            jaxdist.sharded_update(lambda g: g)  # pyrefly: ignore[bad-argument-type]

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"min_bytes": -1}, ArgumentError),
            ({"min_bytes": "1MB"}, ArgumentTypeError),
            ({"reduce_op": "product"}, ArgumentError),
            ({"strategy": "mirrored"}, ArgumentTypeError),
        ],
    )
    def test_option(self, options: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            jaxdist.sharded_update(TX, **options)

    def test_update_outside_of_steps(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx, params = sharded(), parameters()
        with strategy.scope():
            state = tx.init(params)
            with pytest.raises(ContextError, match=r"strategy\.run"):
                tx.update(params, state, params)
        with pytest.raises(ContextError, match=r"outside every strategy.*mu\['v'\]"):
            tx.update(params, state, params)

    def test_gradients_that_do_not_fit(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx, params = sharded(), parameters()
        wrong = {**params, "w": params["w"].T, "more": params["odd"], "odd": np.ones(3, "int32")}
        with strategy.scope():
            state = tx.init(params)
        with pytest.raises(ShapeError) as caught:
            strategy.run(lambda g, s, p: tx.update(g, s, p), (wrong, state, params))
        for name in (
            "3 gradient(s)",
            "updates['w']: float32[20, 12], the parameter float32[12, 20]",
            "updates['more']: float32[3], the parameter nothing",
            "updates['odd']: int32[3]",
        ):
            assert name in str(caught.value)

    def test_gradients_that_do_not_fit_the_state(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx, params = jaxdist.sharded_update(optax.adam(0.1), min_bytes=0), parameters()
        wrong = {**params, "w": params["w"].T}
        with strategy.scope():
            state = tx.init(params)
        with pytest.raises(ShapeError, match=r"in the state float32\[12, 20\]"):
            strategy.run(lambda g, s: tx.update(g, s), (wrong, state))

    def test_parameters_that_are_missing(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx = jaxdist.sharded_update(optax.add_decayed_weights(0.1), min_bytes=0)
        with pytest.raises(ArgumentError, match=r"tx\.update\(grads, state, params\)"):
            strategy.run(lambda g: tx.update(g, tx.init(g)), (parameters(),))

    def test_loss_that_is_not_reduced(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx = jaxdist.sharded_update(optax.polyak_sgd(1.0), min_bytes=0)

        def step(params: Any, x: Any) -> Any:
            return tx.update(params, tx.init(params), params, value=x.sum())

        with pytest.raises(StateDivergenceError, match=r"extra arguments\['value'\]"):
            strategy.run(step, (parameters(), PerReplica(np.arange(8.0, dtype="float32"))))

    def test_parameters_that_differ(self, strategy: jaxdist.MirroredStrategy) -> None:
        tx = jaxdist.sharded_update(optax.adamw(0.1), min_bytes=0)

        def step(params: Any, x: Any) -> Any:
            own = jax.tree.map(lambda p: p * x, params)
            return tx.update(params, tx.init(params), own)

        with pytest.raises(StateDivergenceError, match=r"params\['"):
            strategy.run(step, (parameters(), PerReplica(np.arange(8.0, dtype="float32"))))


def test_gradients_of_a_functional_step_can_be_checked() -> None:
    strategy, tx = cpus(3), sharded()
    with strategy.scope():
        state = tx.init(parameters())
    batch = jax.device_put(rows(24), strategy.per_replica_sharding)
    training = Training(strategy, tx)
    args = (parameters(), state, batch)
    assert strategy.check_gradients(training.step, args).is_equal
    summed = jaxdist.sharded_update(optax.sgd(0.1), min_bytes=0, reduce_op="sum")
    wrong = Training(strategy, summed).step
    report = strategy.check_gradients(wrong, (parameters(), summed.init(parameters()), batch))
    assert report.factor == pytest.approx(3, rel=1e-3)


def test_virtual_replicas_are_refused() -> None:
    exact = jaxdist.MirroredStrategy(deterministic=True)
    tx = jaxdist.sharded_update(optax.adam(0.1), min_bytes=0)
    with exact.scope(), pytest.raises(ArgumentError, match="deterministic=True"):
        tx.init(jnp.ones(64))
    w = jnp.ones(64)
    with pytest.raises(ArgumentError, match="use tx itself"):
        exact.run(lambda w: tx.update(w, optax.adam(0.1).init(w), w), (w,))


def _one_update(tx: Any, strategy: Any) -> Any:
    params = jnp.linspace(0.0, 1.0, 48)
    with strategy.scope():
        state = tx.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p.reshape(4, 12)) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    x = jax.device_put(rows, strategy.per_replica_sharding)
    for _ in range(2):
        params, state = strategy.run(step, (params, state, x))
    return np.asarray(params), state


def test_what_brings_gradients_together_twice_is_refused_wherever_it_is_nested() -> None:
    strategy = MirroredStrategy()
    adam = optax.adam(0.1)
    sharded = sharded_update(adam, min_bytes=0)
    compressed = compressed_update(adam, workers=2)
    chained = optax.chain(optax.clip_by_global_norm(1.0), sharded)
    for tx, parts in (
        (sharded_update(sharded), "sharded_update was given|contains a sharded_update"),
        (sharded_update(chained), "sharded_update was given|contains a sharded_update"),
        (sharded_update(optax.MultiSteps(sharded, 2)), "contains a sharded_update"),
        (
            sharded_update(compressed),
            "contains a compressed_update|compressed_update(sharded_update(tx))",
        ),
        (compressed_update(compressed, workers=2), "compressed_update was given"),
        (compressed_update(sharded_update(adam, reduce_op="sum"), workers=2), "reduce_op='sum'"),
    ):
        with refused(ArgumentError, *parts.split("|")), strategy.scope():
            tx.init(jnp.ones(16))
    # A state from before they were nested.
    with strategy.scope():
        state = sharded.init(jnp.ones(16))
    for tx in (sharded_update(sharded), sharded_update(compressed)):
        with refused(ArgumentError, "sharded_update was given"):
            strategy.run(lambda s, w, tx=tx: tx.update(w, s, w)[0], (state, jnp.ones(16)))


def test_a_sharded_update_of_compressed_gradients_is_the_update_of_compressed_gradients() -> None:
    strategy = MirroredStrategy()
    adam = optax.adam(0.1)
    both = compressed_update(sharded_update(adam, min_bytes=0), "bf16", workers=2)
    found, state = _one_update(both, strategy)
    wanted, _ = _one_update(compressed_update(adam, "bf16", workers=2), strategy)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert isinstance(state[1][0].mu, jaxdist.Sharded)


def test_numpy_has_the_one_array_of_a_sharded_one_outside_of_steps() -> None:
    rows = np.arange(10.0, dtype=np.float32).reshape(5, 2)
    held = jaxdist.Sharded(np.pad(rows, ((0, 3), (0, 0))), dim=0, size=5)
    strategy = MirroredStrategy()
    held = strategy.run(lambda x: jaxdist.Sharded(x.array, 0, 5), (held,))
    np.testing.assert_array_equal(np.asarray(held), rows)
    np.testing.assert_array_equal(held, rows)
    assert np.asarray(held, np.float16).dtype == np.float16
    assert np.array(held).flags.writeable
    with refused(ArgumentTypeError, "Sharded(float32[5, 2]", "inside a step", "jnp.asarray"):
        strategy.run(lambda x: np.asarray(x).sum(), (held,))


def test_complex_gradients_that_are_constants_are_brought_together() -> None:
    # XLA ends the process where it sees that a complex constant is summed in pieces.
    strategy = MirroredStrategy()
    tx = sharded_update(optax.sgd(1.0), min_bytes=0)
    params = {"w": jnp.zeros(16, jnp.complex64)}
    with strategy.scope():
        state = tx.init(params)

    def step(params: Any, state: Any) -> Any:
        return tx.update({"w": jnp.full(16, 2j, jnp.complex64)}, state, params)[0]

    np.testing.assert_array_equal(strategy.run(step, (params, state))["w"], np.full(16, -2j))
