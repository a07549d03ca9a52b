"""Where the pieces of one array lie."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist.errors import ReplicaValueError
from jaxdist.mesh import ReplicaMesh
from jaxdist.values._placement import Kind, Placement
from jaxdist.values._sharded import Cut, Sharded, pad_dim


def sharded_placement(value: Sharded, layout: ReplicaMesh) -> Placement:
    """The layout that the pieces have, or get when they enter a step."""
    array, cut = value.array, value.cut
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(array, jax.core.Tracer):
        if sharding.mesh == layout.mesh and layout.num_logical > 1:
            found = Placement(Kind.SHARDED, sharding)
            if tuple(found.manual_spec(layout)) == tuple(cut.spec(layout)):
                return found
    return Placement(Kind.SHARDED, NamedSharding(layout.mesh, cut.spec(layout)))


def checked_sharded(name: object, value: Sharded, layout: ReplicaMesh) -> Sharded:
    """`value` laid out over this mesh, or an error that names it as `str(name)`."""
    array, cut = value.array, value.cut
    count = layout.num_replicas
    have, need = array.shape[cut.dim], cut.rows(count) * count
    if have != need:
        raise ReplicaValueError(_of_others(name, value, layout, f"{have} rows, not {need}"))
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        if isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            return value
        return Sharded(jax.device_put(array, sharded_placement(value, layout).sharding), *cut)
    if len(array.sharding.device_set) > 1 and array.sharding.device_set != layout.device_set:
        where = f"devices {sorted(str(d) for d in array.sharding.device_set)[:4]}"
        raise ReplicaValueError(_of_others(name, value, layout, where))
    wanted = sharded_placement(value, layout).sharding
    if _compat.is_committed(array) and array.sharding.is_equivalent_to(wanted, array.ndim):
        return value
    return Sharded(jax.device_put(array, wanted), *cut)


def _of_others(name: object, value: Sharded, layout: ReplicaMesh, what: str) -> str:
    return (
        f"{name} is cut for other replicas: {value!r}, on {what}; this strategy has "
        f"{layout.num_replicas} replicas on {[str(d) for d in layout.devices][:4]}.\n\n"
        "An array in pieces stays with the strategy that cut it.\n\n"
        "Cut it anew: state = jaxdist.shard_state(state, strategy)."
    )


def cut_for(array: Any, cut: Cut, layout: ReplicaMesh) -> Sharded:
    """A whole array in pieces over the replicas, one piece on each."""
    padded = pad_dim(jax.numpy.asarray(array), cut.dim, cut.padding(layout.num_replicas))
    return Sharded(jax.device_put(padded, NamedSharding(layout.mesh, cut.spec(layout))), *cut)
