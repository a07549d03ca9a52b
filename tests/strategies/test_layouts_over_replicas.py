"""Layouts in a step that name an axis of replicas: the axis has no effect, or a named error."""

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import AxisNameError, ContextError, JaxdistError, ShapeError
from tests.strategies.oracle import refused
from tests.tables import sampled

E, A = AxisType.Explicit, AxisType.Auto
X = np.arange(16 * 4, dtype="float32").reshape(16, 4) / 10
W = np.arange(16, dtype="float32").reshape(4, 4) / 7
BOTH = P("data", "model")

MESHES: dict[str, tuple[tuple[int, int], tuple[AxisType, AxisType]]] = {
    "auto": ((4, 2), (A, A)),
    "explicit": ((4, 2), (E, E)),
    "explicit replicas": ((4, 2), (E, A)),
    "explicit model": ((4, 2), (A, E)),
    "no logical devices": ((8, 1), (E, E)),
    "one replica": ((1, 2), (E, E)),
}


def _make(name: str) -> jaxdist.Strategy:
    shape, types = MESHES[name]
    mesh = jax.make_mesh(
        shape, ("data", "model"), axis_types=types, devices=jax.devices()[: np.prod(shape)]
    )
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _constrain(spec: Any) -> Callable[[Any, Mesh], Any]:
    return lambda x, _: jax.lax.with_sharding_constraint(x, spec) * 1


def _reshard(x: Any, spec: P = BOTH) -> Any:
    return jax.sharding.reshard(x, spec)


def _scan(x: Any, _: Mesh) -> Any:
    return jax.lax.scan(lambda c, _: (_reshard(c * 1), None), _reshard(x), None, length=2)[0]


def _make_layer(x: Any, _: Mesh) -> Any:
    init = nnx.with_partitioning(lambda *_: jnp.asarray(W), ("data", "model"))
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), use_bias=False, kernel_init=init)(x)


def _make_param(x: Any, _: Mesh) -> Any:
    return x @ nnx.Param(jnp.asarray(W), out_sharding=("model", "data"))[...]


# Forms that every mesh accepts, those that need Explicit logical axes, and what NumPy computes.
ON_ALL: dict[str, tuple[Callable[[Any, Mesh], Any], np.ndarray]] = {
    "constraint": (_constrain(BOTH), X),
    "constraint of rows over both": (_constrain(P(("data", "model"))), X),
    "constraint with an open dim": (_constrain(P("data", P.UNCONSTRAINED)), X),
    "constraint by a sharding": (lambda x, m: _constrain(NamedSharding(m, BOTH))(x, m), X),
    "jit with out_shardings": (lambda x, _: jax.jit(lambda y: y * 1, out_shardings=BOTH)(x), X),
    "jit with in_shardings": (lambda x, _: jax.jit(lambda y: y * 1, in_shardings=BOTH)(x), X),
    "reshard of rows": (lambda x, _: _reshard(x, P("data")), X),
    "dot": (lambda x, _: jnp.dot(x, W, out_sharding=P("data", None)), X @ W),
    "zeros of local rows": (
        lambda x, _: x + jnp.zeros((x.shape[0], 4), out_sharding=P("data", None)),
        X,
    ),
    "rows by numbers": (
        lambda x, _: x.at[jnp.arange(x.shape[0])].get(out_sharding=P("data", None)),
        X,
    ),
    "a layer made in the step": (_make_layer, X @ W),
    "a parameter made in the step": (_make_param, X @ W),
}
ON_EXPLICIT: dict[str, tuple[Callable[[Any, Mesh], Any], np.ndarray]] = {
    "reshard": (lambda x, _: _reshard(x) * 1, X),
    "reshard of rows over both": (lambda x, _: _reshard(x, P(("data", "model"))) * 1, X),
    "reshard by a sharding": (lambda x, m: jax.sharding.reshard(x, NamedSharding(m, BOTH)), X),
    "einsum": (lambda x, _: jnp.einsum("bi,io->bo", x, W, out_sharding=BOTH), X @ W),
    "einsum by a sharding": (
        lambda x, m: jnp.einsum("bi,io->bo", x, W, out_sharding=NamedSharding(m, BOTH)),
        X @ W,
    ),
    "gradient": (lambda x, _: jax.grad(lambda y: (_reshard(y) ** 2).sum())(x) / 2, X),
    "scan": (_scan, X),
    "mapped over rows": (
        lambda x, _: jax.vmap(lambda y: _reshard(y, P("model")), spmd_axis_name="data")(x),
        X,
    ),
}
FORMS = {**ON_ALL, **ON_EXPLICIT}
ROWS = list(itertools.product(FORMS, MESHES, ("compiled", "op by op")))


def _run(strategy: jaxdist.Strategy, form: str, executor: str) -> Any:
    rows = jax.device_put(X, strategy.per_replica_sharding)
    eagerly = jaxdist.config.run_eagerly(True) if executor == "op by op" else None
    with eagerly or contextlib.nullcontext():
        got = strategy.run(lambda x: FORMS[form][0](x, strategy.mesh), (rows,))
    return got.array if isinstance(got, PerReplica) else got


@pytest.mark.parametrize("row", sampled(ROWS, 18, name=" / ".join))
def test_an_axis_of_replicas_in_a_layout_changes_no_number(row: tuple[str, str, str]) -> None:
    form, mesh, executor = row
    try:
        got = _run(_make(mesh), form, executor)
    except AxisNameError:
        # Only an axis that is Auto may be refused, as JAX itself refuses it there.
        assert form in ON_EXPLICIT
        assert MESHES[mesh][1][1] is A
        return
    np.testing.assert_allclose(np.asarray(got), FORMS[form][1], rtol=1e-5, atol=1e-6)


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "in a layout" in r.message]


def test_the_log_names_the_line_of_such_a_layout_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy = _make("explicit")
    rows = jax.device_put(X, strategy.per_replica_sharding)

    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, BOTH).sum()

    with caplog.at_level(logging.INFO, logger="jaxdist"):
        for batch in (rows, rows, jax.device_put(X[:8], strategy.per_replica_sharding)):
            strategy.run(step, (batch,))
    (line,) = _logged(caplog)
    for word in ("step", "('data', 'model')", "with_sharding_constraint", __file__, "no effect"):
        assert word in line


def test_a_layout_without_an_axis_of_replicas_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = _make("explicit")
    rows = jax.device_put(X, strategy.per_replica_sharding)
    with caplog.at_level(logging.INFO, logger="jaxdist"):
        strategy.run(lambda x: _reshard(x, P(None, "model")).sum(), (rows,))
    assert not _logged(caplog)


def test_the_other_axes_of_a_layout_are_kept() -> None:
    types: list[str] = []

    def step(x: Any) -> Any:
        types.append(str(jax.typeof(_reshard(x))))
        return x

    strategy = _make("explicit")
    strategy.run(step, (jax.device_put(X, strategy.per_replica_sharding),))
    assert types[-1].startswith("float32[4,4@model]")


@pytest.mark.parametrize("mesh", ["explicit", "explicit model"])
def test_rows_that_a_step_splits_over_logical_devices_come_back_by_replica(mesh: str) -> None:
    strategy = _make(mesh)
    rows = jax.device_put(X, strategy.per_replica_sharding)
    got = strategy.run(lambda x: _reshard(x, P("model"))[:2], (rows,))
    local = strategy.experimental_local_results(got)
    np.testing.assert_allclose(np.stack(local), X.reshape(4, 4, 4)[:, :2])


ERRORS: dict[str, tuple[Callable[[Any], Any], type[JaxdistError], tuple[str, ...]]] = {
    "a sum that is kept apart": (
        lambda x: jnp.einsum("bi,io->bo", x, W, out_sharding=P(unreduced={"data"})),
        AxisNameError,
        ("'data'", "not a layout", "all_reduce('sum', x)"),
    ),
    "axes of other types": (
        lambda x: jax.sharding.auto_axes(lambda y: y, out_sharding=P("data"))(x),
        ContextError,
        ("auto_axes", "['data']", "axes=('model',)"),
    ),
    "device_put by a spec": (
        lambda x: jax.device_put(x, P("data")),
        ContextError,
        ("jax.device_put", "Leave it out"),
    ),
    "a constraint in a map over rows": (
        lambda x: jax.vmap(
            lambda y: jax.lax.with_sharding_constraint(y, P("model")), spmd_axis_name="data"
        )(x),
        ContextError,
        ("('data', 'model')", "spmd_axis_name"),
    ),
    "random numbers of rows": (
        lambda x: x + jax.random.normal(jax.random.key(0), x.shape, out_sharding=P("data")),
        ContextError,
        ("normal", "('data',)", "example_keys"),
    ),
    "numbers of rows": (
        lambda x: x + jnp.arange(x.shape[0], out_sharding=P("data"))[:, None],
        ContextError,
        ("jnp.arange", "replica_id_in_sync_group"),
    ),
    "as many rows as all replicas have": (
        lambda x: x + jnp.zeros((16, 4), out_sharding=P("data")),
        ShapeError,
        ("[16, 4]", "16 rows", "4 here", "x.shape[0]"),
    ),
    "rows of all replicas by broadcasting": (
        lambda x: x + jnp.broadcast_to(x[:1], (16, 4), out_sharding=P("data")),
        ShapeError,
        ("jnp.broadcast_to", "16 rows"),
    ),
}
# Op by op each replica has whole arrays, and these are accepted.
ONLY_COMPILED = ("axes of other types", "a constraint in a map over rows")
REFUSED = [(form, "compiled") for form in ERRORS] + [
    (form, "op by op") for form in ERRORS if form not in ONLY_COMPILED
]


@pytest.mark.parametrize(("form", "executor"), REFUSED)
def test_what_is_no_layout_of_one_value_is_a_named_error(form: str, executor: str) -> None:
    fn, kind, words = ERRORS[form]
    strategy = _make("explicit")
    rows = jax.device_put(X, strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(executor == "op by op"), refused(kind, *words):
        strategy.run(fn, (rows,))


def test_one_row_for_each_replica_is_not_broadcast_against_all_rows() -> None:
    strategy = _make("no logical devices")
    rows = jax.device_put(X[:8], strategy.per_replica_sharding)
    with refused(ShapeError, "8 rows", "1 here"):
        strategy.run(lambda x: (x + jnp.ones((8, 4), out_sharding=P("data"))).mean(), (rows,))


def test_rows_of_all_replicas_are_found_in_a_function_that_jax_has_traced_before() -> None:
    strategy = _make("explicit")

    @jax.jit
    def add_noise() -> jax.Array:
        return jnp.ones((16, 4), out_sharding=P("data"))

    # Sixteen rows are those of one replica here.
    rows = jax.device_put(np.ones((64, 4), np.float32), strategy.per_replica_sharding)
    assert strategy.run(lambda x: (x + add_noise()).sum(), (rows,)) is not None
    fewer = jax.device_put(X[:16], strategy.per_replica_sharding)
    with refused(ShapeError, "16 rows", "4 here"):
        strategy.run(lambda x: x.sum() + add_noise().mean(), (fewer,))


def test_a_parameter_with_another_number_of_rows_is_made_over_an_axis_of_replicas() -> None:
    strategy = _make("explicit")
    rows = jax.device_put(X, strategy.per_replica_sharding)
    made = strategy.run(lambda x: x @ jnp.ones((4, 4), out_sharding=P(None, "data")), (rows,))
    np.testing.assert_allclose(np.asarray(made.array), X @ np.ones((4, 4)), rtol=1e-6)
