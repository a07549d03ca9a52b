"""Where the pieces of a `Sharded` are placed."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh, make_auto
from jaxdist._values.arrays import copy_if_writable, put, view_auto
from jaxdist._values.replicas.placement import Kind, Placement
from jaxdist._values.sharded.cuts import Cut
from jaxdist._values.sharded.sharded import Sharded, is_sharded, make_undeclared, pad_dim
from jaxdist.errors import ReplicaValueError


def sharded_placement(value: Sharded, layout: ReplicaMesh) -> Placement:
    """Return the placement that the pieces have, or get when they enter a step."""
    array, cut = value.held, value.cut
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(array, jax.core.Tracer):
        # Other dims may be sharded over the logical axes by GSPMD. Such a layout is kept, or each
        # call would move the array back.
        if make_auto(sharding.mesh) == layout.auto_mesh and layout.num_logical > 1:
            found = Placement(Kind.SHARDED, NamedSharding(layout.mesh, sharding.spec))
            # JAX's specs may end with None, and then differ from an equivalent one.
            manual = list(found.manual_spec(layout))
            while manual and manual[-1] is None:
                manual.pop()
            if tuple(manual) == tuple(cut.spec(layout)):
                return found
    return Placement(Kind.SHARDED, NamedSharding(layout.mesh, cut.full_spec(layout)))


@_compat.outside_of_meshes
def place_sharded(name: object, value: Sharded, layout: ReplicaMesh) -> Sharded:
    """Return `value` laid out over this mesh; errors call it `str(name)`."""
    array, cut = value.held, value.cut
    if layout.num_virtual is not None:
        raise ReplicaValueError(
            f"{name} is an array in pieces, {value!r}, and the strategy has deterministic=True.\n\n"
            "Its virtual replicas share devices, and a piece is on the device of one replica.\n\n"
            "Pass the whole array, value.whole(), or make the strategy without deterministic."
        )
    unknown = [a for a in value.axes or () if a not in layout.replica_axes]
    if unknown:
        raise ReplicaValueError(
            f"{name} is cut over the axes {value.axes}: {value!r}; the replica axes of this "
            f"strategy are {layout.replica_axes}.\n\n"
            "An array in pieces stays with the strategy that cut it.\n\n"
            "Cut it again: jaxdist.partition.place(strategy, state, rules)."
        )
    count = cut.pieces(layout)
    if not hasattr(array, "ndim"):
        raise ReplicaValueError(
            f"{name} is a Sharded that holds a {type(array).__name__}, {array!r}, instead of "
            "an array.\n\n"
            "A function of pytrees put it there: jax.tree.map goes into a Sharded and takes the "
            "piece for a leaf.\n\n"
            "Keep such values in a pytree of their own: jax.tree.map(fn, tree, "
            "is_leaf=lambda x: isinstance(x, jaxdist.Sharded)). If it is the state of an optimizer "
            "(optax.sm3 has lists), let sharded_update make it: tx = jaxdist.sharded_update(tx)."
        )
    # The cut dim is never shorter than `size`, and longer only by padding that the node knows of.
    fits = cut.dim < array.ndim and array.shape[cut.dim] >= cut.size
    if not fits or (array.shape[cut.dim] > cut.size and not value.has_padding):
        raise ReplicaValueError(
            f"{name} is {array.dtype}{list(array.shape)}, in a node that declares a cut along "
            f"dim {cut.dim} of {cut.size} elements.\n\n"
            "A function of pytrees put it there: jax.tree.map goes into a Sharded. Optimizers "
            "whose state has other shapes than the parameters (adafactor) do this.\n\n"
            "Call the function on whole arrays, jaxdist.partition.gather(tree). Let sharded_update "
            "make and cut such a state: tx = jaxdist.sharded_update(tx)."
        )
    have, need = array.shape[cut.dim], cut.rows(count) * count
    if have == cut.size < need:
        # A function of pytrees made the array, so it has no padding yet.
        array = _pad(view_auto(array), cut, count)
        value, have = make_undeclared(array, cut, has_padding=True), need
    if have != need:
        raise ReplicaValueError(
            _explain_other_layout(name, value, layout, f"{have} rows, not {need}")
        )
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        if isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct)):  # nothing to place
            return value
        held = put(copy_if_writable(array), sharded_placement(value, layout).sharding)
        return Sharded(held, *cut)
    # An array on one device was not placed by any strategy, so it may move.
    if len(array.sharding.device_set) > 1 and array.sharding.device_set != layout.device_set:
        where = _list_devices(array.sharding.device_set)
        raise ReplicaValueError(_explain_other_layout(name, value, layout, where))
    wanted = sharded_placement(value, layout).sharding
    if _compat.is_committed(array) and array.sharding.is_equivalent_to(wanted, array.ndim):
        return value
    return Sharded(put(array, wanted), *cut)


def _list_devices(devices: Iterable[jax.Device]) -> str:
    names = sorted(map(str, devices))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"devices {', '.join(names[:4])}{more}"


def _explain_other_layout(name: object, value: Sharded, layout: ReplicaMesh, what: str) -> str:
    return (
        f"{name} is cut for other replicas: {value!r}, on {what}; this strategy has "
        f"{layout.num_replicas} replicas on {_list_devices(layout.devices)}.\n\n"
        "An array in pieces stays with the strategy that cut it.\n\n"
        "Cut it again: jaxdist.partition.place(strategy, tree, rules), or the state of a "
        "sharded_update alone: state = jaxdist.shard_state(state, strategy)."
    )


def find_layout_of_pieces(tree: Any) -> ReplicaMesh | None:
    """Return the mesh of the `Sharded` arrays in a pytree, or None if no array determines it."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_sharded):
        sharding = getattr(leaf.held, "sharding", None) if is_sharded(leaf) else None
        # An array that is cut over some replica axes only does not show the other ones.
        if not isinstance(sharding, NamedSharding) or leaf.axes is not None:
            continue
        spec = tuple(sharding.spec)
        entry = spec[leaf.dim] if leaf.dim < len(spec) else None
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if axes and isinstance(sharding.mesh, Mesh):
            return ReplicaMesh(sharding.mesh, axes)
    return None


def _pad(array: Any, cut: Cut, pieces: int) -> Any:
    """Return `array` with padding, by the library that the array belongs to."""
    more = cut.padding(pieces)
    if isinstance(array, jax.ShapeDtypeStruct):
        longer = array.shape[cut.dim] + more
        shape = (*array.shape[: cut.dim], longer, *array.shape[cut.dim + 1 :])
        return jax.ShapeDtypeStruct(shape, array.dtype)
    if isinstance(array, jax.Array):
        return pad_dim(array, cut.dim, more)
    return np.pad(array, [(0, more if d == cut.dim else 0) for d in range(array.ndim)])


@_compat.outside_of_meshes
def cut_and_place(array: Any, cut: Cut, layout: ReplicaMesh) -> Sharded:
    """Cut a whole array into pieces, and copy one piece to each replica."""
    padded = pad_dim(jax.numpy.asarray(view_auto(array)), cut.dim, cut.padding(cut.pieces(layout)))
    return Sharded(put(padded, NamedSharding(layout.mesh, cut.full_spec(layout))), *cut)
