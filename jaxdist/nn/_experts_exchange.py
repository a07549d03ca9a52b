"""The experts of a replica on its devices: tokens go to the devices of their experts, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxdist.nn._axis import Axis
from jaxdist.nn._experts_queues import fill_slots, read_slots, route

# The weights of one expert, its rows, and values that the user's function has from outside.
Expert = Callable[[Any, jax.Array, Sequence[jax.Array]], jax.Array]
Result = tuple[jax.Array, jax.Array, jax.Array]


def compute_groups(
    expert: Callable[[Any, jax.Array], jax.Array],
    router: jax.Array,
    weights: Any,
    x: jax.Array,
    *,
    top_k: int,
    capacity: int,
    axis: Axis | None,
) -> Result:
    """Return the results, the balance losses and the shares of dropped choices of all groups.

    Args:
        expert: The function of one expert and its rows. It returns an array like the rows.
        router: `[d, experts]`, in the dtype in which tokens are routed.
        weights: The weights of all experts, along dim 0 of each leaf.
        x: The groups `[groups, tokens, d]`.
        top_k: The number of choices of each token.
        capacity: The number of tokens of a group that an expert takes.
        axis: The axis over which experts and groups are divided; None for one device.
    """
    groups = x.shape[0]

    def compute(expert: Expert, router: Any, weights: Any, x: Any, outside: Any) -> Result:
        routed = jax.vmap(lambda x: route(x, router, top_k=top_k, capacity=capacity))(x)
        rows = jax.vmap(fill_slots)(x, routed)
        if axis is not None:
            # Each device gets the rows of its experts, of all groups in their order.
            rows = jax.lax.all_to_all(rows, axis.name, 1, 0, tiled=True)[:groups]
        own, width = rows.shape[1], rows.shape[-1]
        rows = rows.swapaxes(0, 1).reshape(own, groups * capacity, width)
        out = jax.vmap(expert, in_axes=(0, 0, None))(weights, rows, outside)
        out = out.reshape(own, groups, capacity, width).swapaxes(0, 1)
        if axis is not None:
            out = jax.lax.all_to_all(_pad(out, axis.size), axis.name, 0, 1, tiled=True)
        return jax.vmap(read_slots)(out, routed), routed.balance, routed.dropped

    if axis is None:
        return compute(lambda w, rows, _: expert(w, rows), router, weights, x, [])
    inner, outside = _pass_values_from_outside(expert, weights, groups * capacity, x)

    def local(*given: Any) -> Result:
        return compute(inner, *given)

    divided = P(axis.name)
    mapped = jax.shard_map(
        local,
        in_specs=(P(), divided, divided, P()),
        out_specs=divided,
        axis_names={axis.name},
        check_vma=False,
    )
    if jax.sharding.get_abstract_mesh().explicit_axes:
        weights = jax.tree.map(lambda w: _divide_first_dim(w, axis.name), weights)
    # The last devices may have groups of zeros, which no expert computes.
    results = mapped(replicate(router), weights, _pad(replicate(x), axis.size), outside)
    y, balance, dropped = (replicate(r)[:groups] for r in results)
    return y, balance, dropped


def replicate(x: jax.Array) -> jax.Array:
    """Return `x` with a type that names no Explicit axis."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    return jax.sharding.reshard(x, P())


def _divide_first_dim(w: jax.Array, axis: str) -> jax.Array:
    """Return `w` with a type whose dim 0 is split over `axis`, and no other one is."""
    spec = jax.typeof(w).sharding.spec
    rest = [_without(entry, axis) for entry in spec[1:]]
    return jax.sharding.reshard(w, P(axis, *rest))


def _without(entry: Any, axis: str) -> Any:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(n for n in names if n != axis) or None


def _pad(x: jax.Array, size: int) -> jax.Array:
    """Append zeros along dim 0, up to a multiple of `size`."""
    more = -x.shape[0] % size
    return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if more else x


# Note [Values from outside]
# A `shard_map` inside of a step takes no value of the step but its arguments. The user's function
# may have others: a scale that all experts share, a random key. So it is traced once before, which
# finds these values, and they become arguments. It is also the check that the function uses no
# collective over the axis of experts, which is not manual there: each device would pass the rows
# of other experts to it.


def _pass_values_from_outside(
    expert: Callable[[Any, jax.Array], jax.Array], weights: Any, rows: int, x: jax.Array
) -> tuple[Expert, list[Any]]:
    """Return `expert` with its values from outside as an argument, and these values."""
    of_one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    shape = jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype)
    traced = jax.make_jaxpr(expert)(of_one, shape)
    if not any(isinstance(c, jax.Array) for c in traced.consts):
        return (lambda w, rows, _: expert(w, rows)), []
    # On CPU, XLA cannot sum gradients in narrow dtypes where axes are automatic.
    dtypes = [c.dtype for c in traced.consts]

    def call(w: Any, rows: jax.Array, outside: Sequence[jax.Array]) -> jax.Array:
        consts = [_convert(c, dtype) for c, dtype in zip(outside, dtypes, strict=True)]
        [result] = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*jax.tree.leaves((w, rows)))
        return result

    return call, [replicate(_widen(jnp.asarray(c))) for c in traced.consts]


def _widen(x: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if is_narrow else x


def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)
