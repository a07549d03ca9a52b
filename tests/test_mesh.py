"""The mesh of a strategy."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxdist import MirroredStrategy
from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.layouts import make_layout
from tests.strategies.oracle import refused


def _users_mesh() -> Mesh:
    devices = np.asarray(jax.devices(), dtype=object).reshape(2, 4)
    return Mesh(devices, ("model", "data"), axis_types=(AxisType.Explicit,) * 2)


def _adopt(mesh: Any, axes: Any) -> Any:
    return MirroredStrategy(mesh=mesh, replica_axes=axes).layout


def test_a_mesh_of_devices_has_a_replica_on_each() -> None:
    layout = make_layout(3)
    assert layout.mesh.axis_names == ("replica", "logical")
    assert (layout.num_replicas, layout.num_logical) == (3, 1)
    assert layout.devices == tuple(jax.devices()[:3])
    assert layout.local_replicas == (0, 1, 2)
    assert layout.is_local
    assert layout.platform == "cpu"


def test_devices_of_one_replica_lie_side_by_side() -> None:
    layout = make_layout(4, 2)
    assert (layout.num_replicas, layout.num_logical) == (4, 2)
    ids = [[d.id for d in row] for row in layout.device_grid]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_users_mesh_is_kept_and_programs_have_auto_axes() -> None:
    given = _users_mesh()
    layout = _adopt(given, ("data",))
    assert layout.mesh is given
    assert layout.auto_mesh.axis_names == given.axis_names
    assert set(layout.auto_mesh.axis_types) == {AxisType.Auto}
    assert layout.has_explicit_axes
    assert layout.replica_axes == ("data",)
    assert layout.logical_axes == ("model",)
    ids = [[d.id for d in row] for row in layout.device_grid]
    assert ids == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_one_replica_axis_may_be_given_by_its_name_alone() -> None:
    assert _adopt(_users_mesh(), "data") == _adopt(_users_mesh(), ["data"])


def test_all_axes_are_manual_only_where_a_replica_is_one_device() -> None:
    assert _adopt(_users_mesh(), "data").manual_axes == {"data"}
    assert _adopt(_users_mesh(), ("data", "model")).manual_axes == {"data", "model"}
    assert make_layout(8).manual_axes == {"replica", "logical"}


def test_the_layouts_name_the_replica_axes() -> None:
    layout = make_layout(8)
    assert layout.replicated.spec == PartitionSpec()
    assert layout.per_replica.spec == PartitionSpec("replica")
    both = _adopt(_users_mesh(), ("data", "model"))
    assert both.per_replica.spec == PartitionSpec(("data", "model"))


def test_the_mesh_of_a_replica_has_its_logical_devices() -> None:
    layout = _adopt(_users_mesh(), "data")
    one = layout.replica_mesh(2)
    assert one.axis_names == ("model",)
    assert [d.id for d in one.devices.ravel()] == [2, 6]


def test_meshes_of_the_same_devices_and_axes_are_equal_and_hash_alike() -> None:
    first, second = make_layout(8), make_layout(8)
    assert first == second
    assert hash(first) == hash(second)
    assert first != MirroredStrategy(jax.devices()[::-1]).layout


def test_the_repr_says_what_runs_where() -> None:
    shown = repr(_adopt(_users_mesh(), "data"))
    assert "4 replicas x 2 logical on cpu" in shown
    assert "'data'" in shown


def test_replica_axes_cannot_be_guessed() -> None:
    with refused(ArgumentError, "replica_axes", "('model', 'data')"):
        _adopt(_users_mesh(), None)


@pytest.mark.parametrize(
    ("axes", "part"),
    [(("rows",), "['rows']"), ((), "empty"), (("data", "data"), "repeats a name")],
    ids=str,
)
def test_replica_axes_that_do_not_fit_are_refused_with_those_that_do(
    axes: tuple[str, ...], part: str
) -> None:
    with refused(ArgumentError, part, "('model', 'data')", "each once"):
        _adopt(_users_mesh(), axes)


def test_what_is_no_mesh_is_refused() -> None:
    with refused(ArgumentTypeError, "jax.sharding.Mesh", "of type str"):
        _adopt("mesh", "data")


def test_pieces_are_replicas_only_in_the_order_of_the_mesh_and_without_logical_devices() -> None:
    assert make_layout(8).has_shard_per_replica
    assert _adopt(_users_mesh(), ("model", "data")).has_shard_per_replica
    assert not _adopt(_users_mesh(), ("data", "model")).has_shard_per_replica
    assert not _adopt(_users_mesh(), "data").has_shard_per_replica
