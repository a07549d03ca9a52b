"""Gather of the values of all replicas, outside of a step: one function for each kind."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import name_call
from jaxdist._collectives.across.kinds import (
    Function,
    Planned,
    Request,
    ValueKind,
    find_kind,
    read_rows,
)
from jaxdist._collectives.across.plain import (
    bring_all,
    choose_fetch,
    fetch_bits,
    gather_whole,
    is_addressable,
    put_on_default_device,
    take_plain_array,
)
from jaxdist._collectives.across.together import check_together
from jaxdist._collectives.in_replica import gather_dim
from jaxdist._collectives.reduction import check_supported
from jaxdist._mesh import ReplicaMesh, make_auto_sharding
from jaxdist._values import (
    PerReplica,
    Sharded,
    compute_auto,
    is_mirrored,
    origin_of,
    refuse_leaked,
    view_auto,
)
from jaxdist.errors import ContextError


def plan_rows(request: Request, name: str, leaf: Any) -> Callable[[Any], Any]:
    """Plan the gather of an array with the rows of all replicas."""
    layout = request.layout
    refuse_leaked(name, leaf)
    array, local = read_rows(request, name, leaf)
    struct = jax.ShapeDtypeStruct(local, array.dtype)
    dim = gather_dim(name, struct, request.axis)
    if isinstance(array, jax.core.Tracer):
        return lambda array: compute_auto(lambda x: _join_traced(x, dim, layout), array)
    if isinstance(array, jax.Array) and not is_addressable(array):
        # Several processes: no process has all rows, so a program moves them.
        moved = jax.jit(_concatenate_parts, static_argnums=(1, 2), out_shardings=layout.replicated)
        return lambda array: take_plain_array(moved(view_auto(array), dim, layout.num_replicas))
    fetch = choose_fetch(array, layout) if isinstance(array.dtype, np.dtype) else fetch_bits
    if not dim:
        return lambda array: put_on_default_device(fetch(array), like=array)
    # The rows of all replicas follow each other on dim 0 of a global array.
    return lambda array: put_on_default_device(
        np.concatenate(np.split(fetch(array), layout.num_replicas), axis=dim), like=array
    )


def _join_traced(array: jax.Array, dim: int, layout: ReplicaMesh) -> jax.Array:
    """Concatenate the replicas' parts of a traced array, in a function that the user compiles."""
    whole = _concatenate_parts(array, dim, layout.num_replicas)
    if layout.is_shared:
        # Without this, XLA may leave the rows of other processes there.
        whole = jax.lax.with_sharding_constraint(whole, make_auto_sharding(layout.replicated))
    return whole


def _concatenate_parts(array: jax.Array, dim: int, num_replicas: int) -> jax.Array:
    """Concatenate the replicas' parts of a global array on `dim`."""
    if not dim:
        return array
    return jnp.concatenate(jnp.split(array, num_replicas), axis=dim)


def plan_one(request: Request, name: str, leaf: Any) -> Callable[[Any], Any]:
    """Plan the gather of a value that is equal on all replicas."""
    replicas = request.layout.num_replicas
    refuse_leaked(name, leaf)
    is_traced = isinstance(leaf, jax.core.Tracer)
    if is_traced and replicas > 1 and origin_of(leaf) is None:
        raise make_unknown_error(request, name, leaf)
    if replicas == 1 or not is_mirrored(leaf, request.layout):
        return lambda value: value
    # Every replica has this value, so the gathered array repeats it once for each.
    dim = gather_dim(name, leaf, request.axis)
    if is_traced:
        return lambda value: jnp.concatenate([value] * replicas, axis=dim)
    return lambda value: put_on_default_device(
        np.concatenate([fetch_bits(value)] * replicas, axis=dim), like=value
    )


def make_unknown_error(request: Request, name: str, value: jax.Array) -> ContextError:
    """Describe the gather of a tracer whose placement is unknown.

    The placement of a tracer is known only if it comes from an argument of the step.
    """
    replicas = request.layout.num_replicas
    return ContextError(
        f"{name_call()} cannot gather {name}, {value.aval.str_short()}, in a function that JAX "
        "traces.\n\n"
        "There the strategy does not know where an array is. A value of every replica is repeated "
        f"for each of the {replicas} replicas, but rows of all replicas are not.\n\n"
        f"For rows use PerReplica.of_global(x), for a value of every replica PerReplica([x] * "
        f"{replicas}), or call gather outside of the function."
    )


gather_rows = Planned(plan_rows)
gather_one = Planned(plan_one)


def gather_list(request: Request, name: str, value: PerReplica) -> Any:
    """Gather values that are not placed yet, or that have different shapes."""
    axis = request.axis
    value = bring_all(request, name, value)
    for v in value.values:
        check_supported(f"cannot gather {name}", v)
    arrays = [v if hasattr(v, "dtype") else np.asarray(v) for v in value.values]
    dim = min(gather_dim(name, a, axis) for a in arrays)
    check_gatherable({name: value}, axis)
    return put_on_default_device(
        np.concatenate([fetch_bits(a) for a in arrays], axis=dim), like=arrays[0]
    )


def gather_sharded(request: Request, name: str, leaf: Sharded) -> Any:
    """Gather a sharded array: the whole array, for any axis."""
    # The axis has no effect, but a wrong one must fail as it does for other values.
    gather_dim(name, leaf.array, request.axis)
    return gather_whole(leaf)


# One column of the table; see Note [Kinds and contexts].
GATHER: Mapping[ValueKind, Function] = {
    ValueKind.HELD: gather_rows,
    ValueKind.ROWS: gather_rows,
    ValueKind.LIST: gather_list,
    ValueKind.TRACED_VALUES: gather_rows,
    ValueKind.TRACED: gather_one,
    ValueKind.SHARDED: gather_sharded,
    ValueKind.ONE: gather_one,
}


def gather_across(request: Request, name: str, leaf: Any) -> Any:
    """Return one leaf of all replicas, concatenated."""
    return GATHER[find_kind(leaf, request.layout)](request, name, leaf)


def check_gatherable(named: Mapping[str, Any], axis: Any) -> None:
    """Refuse values that cannot be concatenated, and name all of them."""
    free = (axis.__index__(),) if hasattr(axis, "__index__") else ()
    remedy = "Gather on the dim that differs, or pad the others first."
    check_together(named, free, remedy=remedy, arguments=f"(axis={axis})")
