"""Strategies on meshes with Explicit axes: arguments and results are on the user's own mesh."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica, get_replica_context, partition
from tests.program.run.counting import compilations
from tests.strategies.oracle import refused
from tests.tables import sampled

W = np.arange(24, dtype="float32").reshape(6, 4) / 10
X = np.arange(16 * 6, dtype="float32").reshape(16, 6) / 50
E, A = AxisType.Explicit, AxisType.Auto


@dataclasses.dataclass(frozen=True)
class Axes:
    """The shape of a mesh, its names, and the replica axes."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    replicas: tuple[str, ...]


AXES = {
    "data_model": Axes((4, 2), ("data", "model"), ("data",)),
    "model_data": Axes((2, 4), ("model", "data"), ("data",)),
    "only_data": Axes((8,), ("data",), ("data",)),
    "hsdp": Axes((2, 4), ("slice", "data"), ("slice", "data")),
    "hsdp_swapped": Axes((2, 4), ("slice", "data"), ("data", "slice")),
    "two_logical": Axes((2, 2, 2), ("data", "model", "more"), ("data",)),
    "one_device": Axes((1,), ("data",), ("data",)),
}
TYPES: dict[str, Callable[[int], tuple[AxisType, ...]]] = {
    "explicit": lambda n: (E,) * n,
    "auto": lambda n: (A,) * n,
    "mixed": lambda n: ((E, A) * n)[:n],
    "mixed_swapped": lambda n: ((A, E) * n)[:n],
}


@dataclasses.dataclass
class Setting:
    """A strategy on a mesh of the user, and arrays on that mesh."""

    strategy: jaxdist.Strategy
    mesh: Mesh
    w: jax.Array
    x: jax.Array

    @property
    def rows(self) -> PerReplica:
        return PerReplica.of_global(self.x)


def _make(axes: str, types: str = "explicit") -> Setting:
    at = AXES[axes]
    count = int(np.prod(at.shape))
    kinds = TYPES[types](len(at.names))
    mesh = jax.make_mesh(at.shape, at.names, axis_types=kinds, devices=jax.devices()[:count])
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=at.replicas)
    on_model = P(None, "model") if "model" in at.names else P()
    rows = P(at.replicas if len(at.replicas) > 1 else at.replicas[0])
    return Setting(
        strategy,
        mesh,
        jax.device_put(W, NamedSharding(mesh, on_model)),
        jax.device_put(X, NamedSharding(mesh, rows)),
    )


def _loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def _update(w: Any, x: Any) -> Any:
    return w - 0.1 * get_replica_context().all_reduce("mean", jax.grad(_loss)(w, x))


def _total(w: Any, x: Any) -> Any:
    return get_replica_context().all_reduce("sum", (x @ w).sum())


NEW_W = W - 0.1 * 2 * X.T @ (X @ W) / (X @ W).size


def _array_of(value: Any) -> Any:
    """The global array of a result; with one replica all results are arrays."""
    return value.array if isinstance(value, PerReplica) else value


def _in_jit(fn: Callable[..., Any]) -> Callable[[Setting], Any]:
    return lambda s: jax.jit(lambda w, x: fn(s, w, PerReplica.of_global(x)))(s.w, s.x)


def _read_dataset(s: Setting) -> Any:
    batches = s.strategy.experimental_distribute_dataset([X, X])
    return sum(s.strategy.run(_total, (s.w, x)) for x in batches)


def _assign(s: Setting) -> Any:
    with s.strategy.scope():
        variable = jaxdist.Variable(W)
    variable.assign_add(np.ones_like(W))
    s.strategy.run(lambda: variable.assign(variable * 2))
    assert variable.value().sharding.mesh is s.mesh
    return variable.value()


def _run_eagerly(s: Setting) -> Any:
    with jaxdist.config.run_eagerly():
        return s.strategy.run(_update, (s.w, s.x))


def _train(s: Setting) -> Any:
    params = partition.place(s.strategy, {"w": W}, partition.Rules([], partition.Shard()))
    tx = optax.sgd(0.1)
    state = tx.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: _loss(p["w"], x))(params)
        grads = get_replica_context().all_reduce("mean", grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = s.strategy.run(step, (params, state, s.x))
    return partition.gather(params)["w"]


WAYS: dict[str, tuple[Callable[[Setting], Any], np.ndarray]] = {
    "total": (lambda s: s.strategy.run(_total, (s.w, s.x)), (X @ W).sum()),
    "update": (lambda s: s.strategy.run(_update, (s.w, s.x)), NEW_W),
    "update_op_by_op": (_run_eagerly, NEW_W),
    "sum_with_own_array": (lambda s: s.strategy.run(_update, (s.w, s.x)) + s.w, NEW_W + W),
    "rows": (lambda s: _array_of(s.strategy.run(lambda x: x * 2, (s.x,))), 2 * X),
    "gather": (lambda s: s.strategy.gather(s.strategy.run(jnp.tanh, (s.x,)), 0), np.tanh(X)),
    "reduce": (lambda s: s.strategy.reduce("mean", s.x, axis=0), X.mean(axis=0)),
    "reduce_mirrored": (
        lambda s: s.strategy.reduce("mean", jax.device_put(W, s.strategy.replicated_sharding), 0),
        W.mean(axis=0),
    ),
    "dataset": (_read_dataset, 2 * (X @ W).sum()),
    "variable": (_assign, 2 * (W + 1)),
    "fsdp": (_train, NEW_W),
    "in_jit": (_in_jit(lambda s, w, x: s.strategy.run(_update, (w, x)) + w), NEW_W + W),
    "reduce_in_jit": (
        _in_jit(lambda s, w, x: s.strategy.reduce("sum", x, axis=0) + w.sum()),
        X.sum(axis=0) + W.sum(),
    ),
    "grad_of_run": (
        _in_jit(lambda s, w, x: jax.grad(lambda w: s.strategy.run(_total, (w, x)))(w)),
        X.sum(axis=0)[:, None] * np.ones_like(W),
    ),
}
CONTEXTS: dict[str, Callable[[Setting], Any]] = {
    "none": lambda _: contextlib.nullcontext(),
    "own": lambda s: jax.set_mesh(s.mesh),
    "other": lambda _: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))),
}


@dataclasses.dataclass(frozen=True)
class Row:
    way: str
    axes: str
    types: str
    context: str

    def __str__(self) -> str:
        return f"{self.way}-{self.axes}-{self.types}-{self.context}"


def _is_possible(row: Row) -> bool:
    # JAX itself refuses the user's jit or operation on values of two meshes, and types with a mesh
    # in a jit whose context has none.
    in_users_code = row.way in ("in_jit", "reduce_in_jit", "grad_of_run", "sum_with_own_array")
    if row.context == "other":
        return not in_users_code and row.way not in ("dataset",)
    return row.context == "own" or row.way != "grad_of_run"


ROWS = [
    row
    for row in itertools.starmap(Row, itertools.product(WAYS, AXES, TYPES, CONTEXTS))
    if _is_possible(row)
]


@pytest.mark.parametrize("row", sampled(ROWS, 28))
def test_every_way_of_use_equals_numpy_on_every_mesh(row: Row) -> None:
    setting = _make(row.axes, row.types)
    way, expected = WAYS[row.way]
    with CONTEXTS[row.context](setting):
        found = way(setting)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("types", TYPES)
def test_results_are_on_the_mesh_object_of_the_user(axes: str, types: str) -> None:
    s = _make(axes, types)
    assert s.strategy.mesh is s.mesh
    assert s.strategy.replicated_sharding.mesh is s.mesh
    for _ in range(2):
        new = s.strategy.run(_update, (s.w, s.x))
        rows = _array_of(s.strategy.run(lambda x: x * 2, (s.x,)))
        assert new.sharding.mesh is s.mesh
        assert rows.sharding.mesh is s.mesh
        assert jax.typeof(new) == jax.typeof(s.w)


@pytest.mark.parametrize("axes", ["data_model", "only_data", "hsdp"])
@pytest.mark.parametrize("donates", [False, True])
def test_a_steady_loop_compiles_once(axes: str, donates: bool) -> None:
    s = _make(axes)
    options = jaxdist.RunOptions(donate_argnums=(0,)) if donates else None
    w = s.w
    with compilations() as count:
        for _ in range(4):
            w = s.strategy.run(_update, (w, s.x), options=options)
    assert count.number == 1
    assert w.sharding == s.w.sharding


def test_nnx_modules_train_as_on_an_auto_mesh() -> None:
    losses = []
    for types in ("explicit", "auto"):
        s = _make("data_model", types)
        with s.strategy.scope():
            model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            context = get_replica_context()
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, context.all_reduce("mean", grads))
            return context.all_reduce("mean", loss)

        run = s.strategy.run
        losses.append([float(run(step, (model, optimizer, s.x))) for _ in range(3)])
    assert losses[0] == losses[1]


# Steps that say the sharding of a result.


def _matmul(x: Any, w: Any) -> Any:
    return jnp.einsum("bi,io->bo", x, w, out_sharding=P(None, "model"))


def _explicit_total(w: Any, x: Any) -> Any:
    return get_replica_context().all_reduce("sum", _matmul(x, w).sum())


def _explicit_update(w: Any, x: Any) -> Any:
    grads = jax.grad(lambda w: (_matmul(x, w) ** 2).mean())(w)
    return w - 0.1 * get_replica_context().all_reduce("mean", grads)


def _reshard(w: Any, x: Any) -> Any:
    y = jax.sharding.reshard(x @ w, P(None, "model"))
    return get_replica_context().all_reduce("sum", jax.sharding.reshard(y, P(None, None)).sum())


def _scan(w: Any, x: Any) -> Any:
    def body(y: Any, _: Any) -> Any:
        return jax.sharding.reshard(y * 2, P(None, "model")), None

    y, _ = jax.lax.scan(body, _matmul(x, w), None, length=3)
    return get_replica_context().all_reduce("sum", y.sum())


def _two_layers(w: Any, x: Any) -> Any:
    hidden = jax.nn.relu(_matmul(x, w) - 1)
    y = jnp.einsum("bo,io->bi", hidden, w, out_sharding=P(None, None))
    return get_replica_context().all_reduce("sum", y.sum())


EXPLICIT_STEPS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "total": (_explicit_total, (X @ W).sum()),
    "update": (_explicit_update, NEW_W),
    "reshard": (_reshard, (X @ W).sum()),
    "scan": (_scan, 8 * (X @ W).sum()),
    "two_layers": (_two_layers, (np.maximum(X @ W - 1, 0) @ W.T).sum()),
    "rows": (lambda w, x: _matmul(x, w), X @ W),
}


EXPLICIT_ROWS = [
    Row(name, axes, "explicit", context)
    for name in EXPLICIT_STEPS
    for axes in ("data_model", "model_data", "two_logical")
    for context in CONTEXTS
]


@pytest.mark.parametrize("row", sampled(EXPLICIT_ROWS, 12))
def test_a_step_with_out_sharding_equals_numpy(row: Row) -> None:
    s = _make(row.axes)
    step, expected = EXPLICIT_STEPS[row.way]
    with CONTEXTS[row.context](s):
        array = _array_of(s.strategy.run(step, (s.w, s.x)))
    np.testing.assert_allclose(np.asarray(array), expected, rtol=2e-5, atol=1e-6)
    assert array.sharding.mesh is s.mesh


def test_a_steady_loop_of_a_step_with_out_sharding_compiles_once() -> None:
    s = _make("data_model")
    w = s.w
    with compilations() as count:
        for _ in range(3):
            w = s.strategy.run(_explicit_update, (w, s.x))
    assert count.number == 1
    assert jax.typeof(w) == jax.typeof(s.w)


@pytest.mark.parametrize("name", ["total", "update"])
def test_a_step_with_out_sharding_runs_in_a_jit_under_the_own_mesh(name: str) -> None:
    s = _make("data_model")
    step, expected = EXPLICIT_STEPS[name]
    with jax.set_mesh(s.mesh):
        found = _in_jit(lambda s, w, x: s.strategy.run(step, (w, x)) + w * 0)(s)
    np.testing.assert_allclose(found, expected + W * 0, rtol=2e-5, atol=1e-6)


STEPS_OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: jnp.zeros(x.shape) + x.shape[0],
    "sum": lambda x: jax.lax.psum(x, "data"),
    "scatter": lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
    "gather": lambda x: jax.lax.all_gather(x, "data"),
}


@pytest.mark.parametrize("step", STEPS_OF_ROWS.values(), ids=STEPS_OF_ROWS)
@pytest.mark.parametrize("context", ["none", "own"])
@pytest.mark.parametrize("axes", ["data_model", "only_data"])
def test_an_array_with_rows_of_each_replica_has_them_in_a_jit_of_the_user_too(
    axes: str, context: str, step: Callable[[Any], Any]
) -> None:
    s = _make(axes)
    rows = np.arange(256, dtype="float32").reshape(64, 4)
    rows = jax.device_put(rows, s.strategy.per_replica_sharding)
    outside = s.strategy.run(step, (rows,))
    with CONTEXTS[context](s):
        inside = jax.jit(lambda x: s.strategy.run(step, (x,)))(rows)
    assert type(inside) is type(outside)
    np.testing.assert_array_equal(_array_of(inside), _array_of(outside))
    # The type of a replicated array tells that, too.
    whole = jax.device_put(np.ones((4, 2), "float32"), s.strategy.replicated_sharding)
    with CONTEXTS[context](s):
        found = jax.jit(lambda x: s.strategy.run(STEPS_OF_ROWS["shape"], (x,)))(whole)
    np.testing.assert_array_equal(found, np.full((4, 2), 4.0))


def test_out_sharding_over_an_axis_that_is_not_explicit_is_refused_by_name() -> None:
    s = _make("data_model", "auto")
    step = lambda w, x: jnp.einsum("bi,io->bo", x, w, out_sharding=P(None, "model"))  # noqa: E731
    with refused(jaxdist.errors.AxisNameError, "out_sharding", "with_sharding_constraint"):
        s.strategy.run(step, (s.w, s.x))


def test_manual_axes_are_refused_by_name() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Manual, A))
    with refused(jaxdist.errors.ArgumentError, "'data'", "Manual", "jax.make_mesh"):
        jaxdist.MirroredStrategy(mesh=mesh, replica_axes="data")
