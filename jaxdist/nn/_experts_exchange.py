"""The experts of a replica on its devices: tokens go to the devices of their experts, and back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.nn._axis import Axis
from jaxdist.nn._experts_queues import (
    Routed,
    fill_slots,
    find_logits,
    read_slots,
    route,
)

Expert = Callable[[Any, jax.Array], jax.Array]
Result = tuple[jax.Array, jax.Array, jax.Array]


def compute_groups(
    expert: Expert,
    router: jax.Array,
    weights: Any,
    x: jax.Array,
    *,
    top_k: int,
    capacity: int,
    axis: Axis | None,
) -> Result:
    """Return the results, the balance losses and the numbers of dropped choices of all groups.

    Args:
        expert: The function of one expert and its rows. It returns an array like the rows.
        router: `[d, experts]`, in the dtype in which tokens are routed, or the logits of all
            groups, `[groups, tokens, experts]`.
        weights: The weights of all experts, along dim 0 of each leaf; of the experts of this
            replica, if the axis is one of replicas.
        x: The groups `[groups, tokens, d]`.
        top_k: The number of choices of each token.
        capacity: The number of tokens of a group that an expert takes.
        axis: The axis over which experts and groups are divided; None for one device. An axis of
            replicas divides experts alone: each replica has its own groups.
    """
    own_groups, _, width = x.shape
    groups = own_groups * axis.size if axis is not None and axis.is_of_replicas else own_groups
    has_logits = router.ndim == 3

    def send(router: jax.Array, x: jax.Array) -> tuple[jax.Array, Routed]:
        logits = router if has_logits else find_logits(x, router)
        routed = jax.vmap(lambda own: route(own, top_k=top_k, capacity=capacity))(logits)
        rows = jax.vmap(fill_slots)(x, routed)
        if axis is not None:
            # Each device gets the rows of its experts, of all groups in their order.
            rows = jax.lax.all_to_all(rows, axis.name, 1, 0, tiled=True)[:groups]
        return rows.swapaxes(0, 1).reshape(rows.shape[1], groups * capacity, width), routed

    def answer(out: jax.Array, routed: Routed) -> jax.Array:
        out = out.reshape(out.shape[0], groups, capacity, width).swapaxes(0, 1)
        if axis is not None:
            out = jax.lax.all_to_all(_pad(out, axis.size), axis.name, 0, 1, tiled=True)
        return jax.vmap(read_slots)(out, routed)

    compute: Callable[[Any, jax.Array], jax.Array] = jax.vmap(expert)
    if axis is None or axis.is_of_replicas:
        rows, routed = send(router, x)
        return answer(compute(weights, rows), routed), routed.balance, routed.dropped

    divided = P(axis.name)
    divide = functools.partial(
        jax.shard_map, out_specs=divided, axis_names={axis.name}, check_vma=False
    )
    slots = jax.ShapeDtypeStruct((groups * capacity, width), x.dtype)
    if not _has_values_from_outside(expert, weights, slots):
        compute = divide(compute, in_specs=divided)
    if jax.sharding.get_abstract_mesh().explicit_axes:
        weights = jax.tree.map(lambda w: _divide_first_dim(w, axis.name), weights)
    # The last devices may have groups of zeros, which no expert computes.
    x, router = _pad(replicate(x), axis.size), replicate(router)
    router = _pad(router, axis.size) if has_logits else router
    of_router = divided if has_logits else P()
    rows, routed = divide(send, in_specs=(of_router, divided))(router, x)
    y = divide(answer, in_specs=divided)(compute(weights, rows), routed)
    y, balance, dropped = (replicate(r)[:own_groups] for r in (y, routed.balance, routed.dropped))
    return y, balance, dropped


def _has_values_from_outside(expert: Expert, weights: Any, rows: jax.ShapeDtypeStruct) -> bool:
    """Whether the user's function uses arrays of the step that are not its arguments.

    A `shard_map` in a step takes no such value. Then XLA divides the work of the experts, whose
    weights and rows are split alike. A kernel of Pallas needs the `shard_map`.

    The function must not use a collective over the axis either: a device would pass rows of its
    experts to others. The axis is not manual here, so JAX refuses that.
    """
    of_one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    return any(isinstance(c, jax.Array) for c in jax.make_jaxpr(expert)(of_one, rows).consts)


def replicate(x: jax.Array) -> jax.Array:
    """Return `x` with a type that names no Explicit axis."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    return jax.sharding.reshard(x, P())


def _divide_first_dim(w: jax.Array, axis: str) -> jax.Array:
    """Return `w` with a type whose dim 0 is split over `axis`, and no other dim is."""
    rest = [_without(entry, axis) for entry in jax.typeof(w).sharding.spec[1:]]
    return jax.sharding.reshard(w, P(axis, *rest))


def _without(entry: Any, axis: str) -> Any:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(n for n in names if n != axis) or None


def _pad(x: jax.Array, size: int) -> jax.Array:
    """Append zeros along dim 0, up to a multiple of `size`."""
    more = -x.shape[0] % size
    return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if more else x
