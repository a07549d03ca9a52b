"""Maps, layouts and collectives of JAX inside a step: the right numbers, or a named error."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxdist
from jaxdist.errors import AxisNameError, ContextError, DeviceError, JaxdistError
from tests import tables

DEVICES = np.array(jax.devices()[:8])
MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
OTHER = Mesh(DEVICES[:2], ("data",))
ROWS = np.arange(64, dtype=np.float32).reshape(16, 4)
OWN = ROWS[:4]  # the rows of the first replica
DATA, MODEL = PartitionSpec("data"), PartitionSpec(None, "model")


def four() -> jaxdist.MirroredStrategy:
    """Four replicas of two logical devices each."""
    return jaxdist.MirroredStrategy(mesh=MESH, replica_axes=("data",))


def _map(over: str, spec: PartitionSpec, **options: Any) -> Callable[[Any], Any]:
    total = lambda y: jax.lax.psum(y.sum(), over)  # noqa: E731
    return jax.shard_map(total, in_specs=spec, out_specs=PartitionSpec(), **options)


def _lay_out(sharding: Any) -> Callable[[Any], Any]:
    return lambda x: jax.lax.with_sharding_constraint(x, sharding) * 2


def _put(sharding: Any) -> Callable[[Any], Any]:
    return lambda x: jax.device_put(x, sharding) * 2


def _jit(sharding: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x * 2, in_shardings=sharding)


def _vmap(axis: str) -> Callable[[Any], Any]:
    return jax.vmap(lambda y: jax.lax.psum(y, axis), axis_name=axis)


# For each form its function, and what NumPy computes for the first replica; None: an error.
FORMS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "map over a logical axis": (_map("model", MODEL, axis_names={"model"}), OWN.sum()),
    "map over all axes, split over a logical one": (_map("model", MODEL), OWN.sum()),
    "map over a logical axis with the mesh": (
        _map("model", MODEL, axis_names={"model"}, mesh=MESH),
        None,
    ),
    "map over the replicas": (_map("data", DATA, axis_names={"data"}), None),
    "map over the replicas with the mesh": (
        _map("data", DATA, axis_names={"data"}, mesh=MESH),
        None,
    ),
    "map over all axes": (_map("data", DATA), None),
    "map over all axes of the mesh": (_map("data", DATA, mesh=MESH), None),
    "map over another mesh": (_map("data", DATA, mesh=OTHER), None),
    "map over no axis": (_map("none", PartitionSpec("none"), axis_names={"none"}), None),
    "map in a map": (
        jax.shard_map(
            _map("data", DATA, axis_names={"data"}),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={"model"},
        ),
        None,
    ),
    "pmap": (lambda x: jax.pmap(lambda y: y * 2)(x), None),
    "vmap over another name": (_vmap("rows"), np.tile(OWN.sum(0), (4, 1))),
    "vmap over the name of the replicas": (_vmap("data"), np.tile(OWN.sum(0), (4, 1))),
    "all_reduce in a vmap over the name of the replicas": (
        jax.vmap(lambda y: jaxdist.get_replica_context().all_reduce("sum", y), axis_name="data"),
        None,
    ),
    "jit laid out over the replicas": (_jit(NamedSharding(MESH, DATA)), OWN * 2),
    "jit laid out over a logical axis": (_jit(NamedSharding(MESH, MODEL)), OWN * 2),
    "jit laid out by a spec": (lambda x: _jit(DATA)(x), OWN * 2),
    "laid out over the replicas": (_lay_out(NamedSharding(MESH, DATA)), OWN * 2),
    "laid out over the replicas by a spec": (_lay_out(DATA), OWN * 2),
    "laid out over a logical axis": (_lay_out(MODEL), OWN * 2),
    "not constrained, and over the replicas": (
        _lay_out(PartitionSpec(PartitionSpec.UNCONSTRAINED, "data")),
        OWN * 2,
    ),
    "laid out over no axis": (_lay_out(PartitionSpec("none")), None),
    "laid out over another mesh": (_lay_out(NamedSharding(OTHER, DATA)), None),
    "laid out on one device": (_lay_out(SingleDeviceSharding(DEVICES[0])), None),
    "put over the replicas": (_put(NamedSharding(MESH, DATA)), OWN * 2),
    "put on one device": (_put(DEVICES[0]), OWN * 2),
    "reshard over the replicas": (lambda x: jax.sharding.reshard(x, DATA), OWN),
    "sum over no axis": (lambda x: jax.lax.psum(x, "none"), None),
    "sum over no axis and the replicas": (lambda x: jax.lax.psum(x, ("none", "data")), None),
    "sum over a dim": (lambda x: jax.lax.psum(x, 0), OWN.sum(0)),
    "sum over a float": (lambda x: jax.lax.psum(x, 1.5), None),
    "sum over None": (lambda x: jax.lax.psum(x, None), None),
    "sum over a list": (lambda x: jax.lax.psum(x, ["data"]), ROWS.reshape(4, 4, 4).sum(0)),
    "sum over a set": (lambda x: jax.lax.psum(x, {"data"}), None),
    "sum over the replicas twice": (lambda x: jax.lax.psum(x, ("data", "data")), None),
    "sum over a spec": (lambda x: jax.lax.psum(x, DATA), None),
    "sum over a logical axis": (lambda x: jax.lax.psum(x, "model"), None),
    "gather over a dim": (lambda x: jax.lax.all_gather(x, 0), None),
    "gather over no axis": (lambda x: jax.lax.all_gather(x, axis_name="none"), None),
    "permute over a dim": (lambda x: jax.lax.ppermute(x, 0, [(0, 1)]), None),
    "permute over no axis": (lambda x: jax.lax.ppermute(x, "none", [(0, 1)]), None),
    "index of a dim": (lambda x: x + jax.lax.axis_index(0), None),
    "size of no axis": (lambda x: x * jax.lax.axis_size("none"), None),
    "a mesh that is set": (lambda x: _set_mesh(x), None),
}


def _set_mesh(x: Any) -> Any:
    with jax.set_mesh(MESH):
        return x * 2


def _in_scan(fn: Callable[[Any], Any], x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c, fn(x)), 0, None, length=2)[1][1]


def _in_grad(fn: Callable[[Any], Any], x: Any) -> Any:
    return jax.value_and_grad(lambda y: (fn(y).sum(), fn(y))[0])(x)[0]


def _in_remat(fn: Callable[[Any], Any], x: Any) -> Any:
    return jax.value_and_grad(jax.checkpoint(lambda y: fn(y).sum()))(x)[0]


# Each place with what it makes of the value of a form.
PLACES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "top": (lambda fn, x: fn(x), lambda value: value),
    "jit": (lambda fn, x: jax.jit(fn)(x), lambda value: value),
    "scan": (_in_scan, lambda value: value),
    "grad": (_in_grad, np.sum),
    "remat": (_in_remat, np.sum),
}
TABLE = list(itertools.product(FORMS, PLACES, ("compiled", "op by op")))


@pytest.mark.parametrize("row", tables.sampled(TABLE, 60, name=" / ".join))
def test_a_step_with_axes_is_right_or_a_named_error(row: tuple[str, str, str]) -> None:
    form, place, executor = row
    fn, expected = FORMS[form]
    around, of = PLACES[place]
    strategy = four()
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    eagerly = jaxdist.config.run_eagerly(True) if executor == "op by op" else None
    with eagerly or contextlib.nullcontext():
        try:
            got = strategy.run(lambda x: around(fn, x), (rows,))
        except JaxdistError:
            # A map runs in compiled steps only.
            assert expected is None or (executor == "op by op" and form.startswith("map"))
            return
    # Op by op each replica has whole arrays on one device, and layouts change nothing.
    if expected is None:
        assert executor == "op by op"
        assert "laid out" in form
        expected = OWN * 2
    first = strategy.experimental_local_results(got)[0]
    np.testing.assert_allclose(np.asarray(first), of(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "kind", "words"),
    [
        ("map over the replicas with the mesh", ContextError, ("its own", "'data'", "fn(x)")),
        ("map over the replicas", ContextError, ("'data'", "axis_names={'model'}")),
        ("map over no axis", AxisNameError, ("'none'", "['model']")),
        ("laid out on one device", DeviceError, ("1 device(s)", "all 8 devices")),
        ("index of a dim", AxisNameError, ("0", "Write 'data'")),
        ("gather over a dim", AxisNameError, ("all_gather", "'data'")),
        ("sum over no axis", AxisNameError, ("'none'", "jax.lax.psum(x, 'data')")),
    ],
)
def test_an_error_about_an_axis_names_it_and_the_way_on(
    form: str, kind: type[Exception], words: tuple[str, ...]
) -> None:
    strategy = four()
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    with pytest.raises(kind) as raised:
        strategy.run(FORMS[form][0], (rows,))
    for word in words:
        assert word in str(raised.value)


def test_a_map_that_the_step_itself_makes_over_the_replicas_is_refused() -> None:
    def step(x: Any) -> Any:
        return _map("data", DATA, axis_names={"data"})(x)

    with pytest.raises(ContextError, match=r"maps a function over \['data'\]"):
        four().run(step, (ROWS,))


def test_a_gradient_goes_through_a_map_over_a_logical_axis() -> None:
    weights = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)

    def product(x: Any, w: Any) -> Any:
        part = lambda x, w: jax.lax.psum(x @ w, "model")  # noqa: E731
        specs = (MODEL, PartitionSpec("model"))
        mapped = jax.shard_map(
            part, in_specs=specs, out_specs=PartitionSpec(), axis_names={"model"}
        )
        return mapped(x, w)

    def step(x: Any, w: Any) -> Any:
        grad = jax.grad(lambda w: jnp.sin(product(x, w)).mean())(w)
        return jaxdist.get_replica_context().all_reduce("mean", grad)

    strategy = four()
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    whole = jax.grad(lambda w: jnp.sin(ROWS @ w).mean())(weights)
    np.testing.assert_allclose(strategy.run(step, (rows, weights)), whole, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_dim_may_be_unconstrained_where_no_axis_is_left_to_lay_it_out_by(axis_type: str) -> None:
    types = (jax.sharding.AxisType[axis_type],)
    mesh = jax.make_mesh((4,), ("data",), axis_types=types, devices=jax.devices()[:4])
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    free = PartitionSpec(PartitionSpec.UNCONSTRAINED, "data")
    got = strategy.run(lambda x: _lay_out(free)(x), (rows,))
    np.testing.assert_array_equal(strategy.gather(got, 0), ROWS * 2)


@pytest.mark.parametrize("executor", ["compiled", "op by op"])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_layout_that_keeps_a_sum_over_the_replicas_apart_is_refused(
    axis_type: str, executor: str
) -> None:
    types = (jax.sharding.AxisType[axis_type],)
    mesh = jax.make_mesh((4,), ("data",), axis_types=types, devices=jax.devices()[:4])
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    layouts: list[Any] = [PartitionSpec(unreduced={"data"})]
    # JAX makes no other layouts with a sum on the other mesh.
    if axis_type == "Explicit":
        specs = (PartitionSpec(unreduced={"data"}), PartitionSpec(reduced={"data"}))
        layouts += [NamedSharding(mesh, spec) for spec in specs]
    for sharding in layouts:
        with (
            jaxdist.config.run_eagerly(executor == "op by op"),
            pytest.raises(AxisNameError, match=r"sum over \['data'\] unreduced") as raised,
        ):
            strategy.run(lambda x, sharding=sharding: _lay_out(sharding)(x), (ROWS,))
        assert "all_reduce('sum', x)" in str(raised.value)
