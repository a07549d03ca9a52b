"""Everything that a strategy does gives the same numbers inside of `jax.set_mesh(another mesh)`."""

import contextlib
import dataclasses
import itertools
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxdist
from jaxdist import PerReplica, get_replica_context, partition
from jaxdist.errors import ContextError
from tests.program.run.counting import compilations
from tests.tables import sampled

X = np.arange(16 * 6, dtype="float32").reshape(16, 6) / 50


def _mesh(shape: tuple[int, ...], kind: AxisType, reverse: bool = False) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))][:: -1 if reverse else 1]
    names = ("a", "b")[: len(shape)]
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(kind,) * len(shape))


@contextlib.contextmanager
def _as_context(mesh: Mesh) -> Any:
    """The older way, which JAX deprecates and programs still use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
CONTEXTS: dict[str, Callable[[], Any]] = {
    "explicit": lambda: jax.set_mesh(_mesh((4, 2), EXPLICIT)),
    "auto": lambda: jax.set_mesh(_mesh((4, 2), AUTO)),
    "other_order": lambda: jax.set_mesh(_mesh((2, 4), EXPLICIT, reverse=True)),
    "one_device": lambda: jax.set_mesh(_mesh((1,), EXPLICIT)),
    "four_devices": lambda: jax.set_mesh(_mesh((4,), AUTO)),
    "with_mesh": lambda: _as_context(_mesh((2, 4), AUTO)),
}
STRATEGIES: dict[str, Callable[[], jaxdist.Strategy]] = {
    "mirrored": jaxdist.MirroredStrategy,
    "mirrored_2": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: jaxdist.OneDeviceStrategy("cpu:1"),
    "logical": lambda: jaxdist.MirroredStrategy(mesh=_mesh((4, 2), AUTO), replica_axes="a"),
    "virtual": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4),
}


def _rows(strategy: jaxdist.Strategy, rows: np.ndarray = X) -> Any:
    return jax.device_put(rows, strategy.per_replica_sharding)


def _sum_of_squares(x: jax.Array) -> Any:
    return get_replica_context().all_reduce("sum", (x * x).sum())


def _train(strategy: jaxdist.Strategy, rules: Any = None, *, in_scope: bool = True) -> Any:
    with strategy.scope() if in_scope else contextlib.nullcontext():
        model = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    if rules is not None:
        partition.place(strategy, (model, optimizer), rules)

    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        context = get_replica_context()
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, context.all_reduce("mean", grads))
        return context.all_reduce("mean", loss)

    return [strategy.run(step, (model, optimizer, _rows(strategy))) for _ in range(3)]


def _change_variables(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        mirrored = jaxdist.Variable(np.ones(3, "float32"))
        own = jaxdist.Variable(
            0.0,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )

    def step() -> Any:
        own.assign_add(1.0 + get_replica_context().replica_id_in_sync_group)
        return mirrored * 2

    mirrored.assign(np.full(3, 2.0, "float32"))
    mirrored.assign_add(np.ones(3, "float32"))
    results = [strategy.run(step) for _ in range(2)]
    return *results, mirrored + 1, mirrored[1], mirrored.numpy(), own.value(), np.stack(own.values)


def _read_datasets(strategy: jaxdist.Strategy) -> Any:
    count = strategy.num_replicas_in_sync
    whole = strategy.experimental_distribute_dataset([X, X[: count * (16 // count)]])
    parts = strategy.distribute_datasets_from_function(lambda _: [X[:2]] * count)
    return [strategy.run(_sum_of_squares, (x,)) for x in (*whole, *parts)]


def _save_and_restore(strategy: jaxdist.Strategy, folder: pathlib.Path) -> Any:
    with strategy.scope():
        model = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        variable = jaxdist.Variable(np.ones(3, "float32"))
    partition.place(strategy, model, partition.fsdp())
    with jaxdist.training.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"model": model, "variable": variable})
        variable.assign(np.zeros(3, "float32"))
        checkpoints.restore({"model": model, "variable": variable})
    whole: Any = nnx.state(partition.gather(model))
    return variable.numpy(), np.asarray(whole["kernel"].get_value())


def _call_function(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        variable = jaxdist.Variable(1.0)

    @jaxdist.function
    def add(x: jax.Array) -> Any:
        variable.assign_add(1.0)
        return strategy.run(_sum_of_squares, (x,)) + variable

    return [add(_rows(strategy)) for _ in range(2)]


def _fit(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        model = jaxdist.fit.Model(nnx.Linear(6, 2, rngs=nnx.Rngs(0)))
        model.compile(optimizer=optax.adam(0.1), loss=lambda y, p: ((y - p) ** 2).mean(-1))
    history = model.fit(X, X[:, :2], batch_size=8, epochs=2, verbose=0, shuffle=False)
    return history.history["loss"], model.predict(X)


def _fit_keras(strategy: jaxdist.Strategy) -> Any:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend.")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse")
    history = model.fit(X, X[:, :2], batch_size=8, epochs=2, verbose=0, shuffle=False)
    return history.history["loss"], model.predict(X, verbose=0)


def _run_eagerly(strategy: jaxdist.Strategy) -> Any:
    with jaxdist.config.run_eagerly():
        return strategy.run(_sum_of_squares, (_rows(strategy),))


def _uneven(strategy: jaxdist.Strategy) -> PerReplica:
    return PerReplica([X[: i + 1] for i in range(strategy.num_replicas_in_sync)])


def _update_w(w: Any, x: jax.Array) -> Any:
    return w - 0.1 * get_replica_context().all_reduce("mean", jax.grad(lambda w: (x * w).mean())(w))


WAYS: dict[str, Callable[[jaxdist.Strategy], Any]] = {
    "run": lambda s: s.run(_sum_of_squares, (_rows(s),)),
    "run_op_by_op": _run_eagerly,
    "run_local_values": lambda s: s.run(
        _sum_of_squares, (PerReplica(list(X.reshape(s.num_replicas_in_sync, -1, 6))),)
    ),
    "run_uneven": lambda s: s.run(_sum_of_squares, (_uneven(s),)),
    "run_host_values": lambda s: s.run(
        lambda x, k: x + jax.random.normal(k, (4,)), (np.ones(4, "float32"), jax.random.key(3))
    ),
    "run_donating": lambda s: s.run(
        _update_w, (2.0, _rows(s)), options=jaxdist.RunOptions(donate_argnums=(0,))
    ),
    "gather_results": lambda s: s.gather(s.run(lambda x: x * 2, (_rows(s),)), axis=0),
    "gather_dim_1": lambda s: s.gather(PerReplica.of_global(_rows(s)), axis=1),
    "gather_uneven": lambda s: s.gather(_uneven(s), axis=0),
    "gather_mirrored": lambda s: s.gather(jax.device_put(X, s.replicated_sharding), axis=0),
    "reduce_on_host": lambda s: s.reduce("sum", _rows(s), axis=0),
    "reduce_on_devices": lambda s: s.reduce("mean", _rows(s, np.tile(X, (64, 8))), axis=0),
    "reduce_results": lambda s: s.reduce("mean", s.run(jnp.sum, (_rows(s),)), axis=None),
    "reduce_uneven": lambda s: s.reduce("mean", _uneven(s), axis=0),
    "reduce_mirrored": lambda s: s.reduce("sum", jax.device_put(X, s.replicated_sharding), None),
    "reduce_dims_of_mirrored": lambda s: s.reduce(
        "mean", jax.device_put(X, s.replicated_sharding), axis=0
    ),
    "local_results": lambda s: s.experimental_local_results(s.run(jnp.sum, (_rows(s),))),
    "show": lambda s: np.array(list(map(ord, repr(s.run(jnp.sum, (_rows(s),)))))),
    "values_from_function": lambda s: s.gather(
        s.experimental_distribute_values_from_function(
            lambda c: np.full((2, 3), c.replica_id_in_sync_group, "float32")
        ),
        axis=0,
    ),
    "variables": _change_variables,
    "datasets": _read_datasets,
    "train": _train,
    "train_outside_of_scope": lambda s: _train(s, in_scope=False),
    "train_fsdp": lambda s: _train(s, partition.fsdp()),
    "place": lambda s: partition.gather(partition.place(s, {"w": X}, partition.fsdp()))["w"],
    "function": _call_function,
    "lower": lambda s: len(s.lower(_sum_of_squares, (_rows(s),)).compile().collectives),
    "check_gradients": lambda s: s.check_gradients(_update_w, (2.0, _rows(s))).is_equal,
    "check_replicas": lambda s: s.check_replicas(jax.device_put(X, s.replicated_sharding)),
    "fit": _fit,
    "keras": _fit_keras,
}
# What virtual replicas and logical devices refuse on every mesh.
REFUSED = {
    ("virtual", "run_uneven"),
    ("virtual", "run_op_by_op"),
    ("logical", "run_uneven"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    way: str
    context: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.way}-{self.context}-{self.strategy}"


ROWS = [
    Row(w, c, s)
    for w, c, s in itertools.product(WAYS, CONTEXTS, STRATEGIES)
    if (s, w) not in REFUSED
]


@pytest.mark.parametrize("row", sampled(ROWS, 24))
def test_another_mesh_of_the_context_changes_no_number(row: Row) -> None:
    way, strategy = WAYS[row.way], STRATEGIES[row.strategy]()
    with CONTEXTS[row.context]():
        under_mesh = way(strategy)
    # A strategy of its own, whose programs were not compiled under the mesh.
    expected = way(STRATEGIES[row.strategy]())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), under_mesh, expected
    )


def test_run_reduce_and_gather_equal_numpy_under_every_mesh() -> None:
    strategy = jaxdist.MirroredStrategy()
    for context in CONTEXTS.values():
        with context():
            total = strategy.run(_sum_of_squares, (_rows(strategy),))
            mean = strategy.reduce("mean", _rows(strategy), axis=0)
            whole = strategy.gather(PerReplica.of_global(_rows(strategy)), axis=0)
        np.testing.assert_allclose(total, (X * X).sum(), rtol=1e-5)
        np.testing.assert_allclose(mean, X.mean(axis=0), rtol=1e-5)
        np.testing.assert_array_equal(whole, X)


def test_checkpoints_are_saved_and_restored_under_another_mesh(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    with CONTEXTS["explicit"]():
        variable, kernel = _save_and_restore(strategy, tmp_path / "under_mesh")
    expected = _save_and_restore(strategy, tmp_path / "without")
    np.testing.assert_array_equal(variable, np.ones(3))
    np.testing.assert_array_equal(kernel, expected[1])


def test_programs_compiled_under_a_mesh_are_used_without_it() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = _rows(strategy)
    with compilations() as count:
        for context in (*CONTEXTS.values(), contextlib.nullcontext):
            with context():
                strategy.run(_sum_of_squares, (x,))
    assert count.number == 1


def test_an_abstract_mesh_changes_no_number() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = _rows(strategy)
    mesh = AbstractMesh((4, 2), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT))
    with jax.sharding.use_abstract_mesh(mesh):
        total = strategy.run(_sum_of_squares, (x,))
        mean = strategy.reduce("mean", x, axis=0)
    np.testing.assert_allclose(total, (X * X).sum(), rtol=1e-5)
    np.testing.assert_allclose(mean, X.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("context", ["explicit", "other_order", "one_device", "four_devices"])
@pytest.mark.parametrize("strategy", ["mirrored", "mirrored_2", "logical"])
def test_a_traced_function_under_another_mesh_is_refused_by_name(
    context: str, strategy: str
) -> None:
    one = STRATEGIES[strategy]()
    step = lambda w: get_replica_context().all_reduce("mean", w * w)  # noqa: E731
    with (
        CONTEXTS[context](),
        pytest.raises(ContextError, match=r"jax\.set_mesh\(strategy\.mesh\)"),
    ):
        jax.grad(lambda w: one.run(step, (w,)))(2.0)


def test_a_traced_function_under_an_auto_mesh_of_the_same_devices_runs() -> None:
    strategy = jaxdist.MirroredStrategy()
    step = lambda w: get_replica_context().all_reduce("mean", w * w)  # noqa: E731
    with CONTEXTS["auto"]():
        assert float(jax.grad(lambda w: strategy.run(step, (w,)))(2.0)) == 4.0
        assert float(jax.jit(lambda w: strategy.run(step, (w,)))(3.0)) == 9.0
