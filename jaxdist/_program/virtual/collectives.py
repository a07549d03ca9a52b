"""Collectives of virtual replicas, in an order that does not depend on the number of devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import refuse
from jaxdist._collectives import reduce_by_tree
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.op_by_op import move_to_one_axis
from jaxdist._program.virtual.device import Own, Same, VirtualDevice, barrier
from jaxdist._values import combine_pairwise, widen
from jaxdist.errors import UnsupportedError

_MEMBERS = "jaxdist_members"
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})
# Collectives that only move values. `jax.vmap` over the values of all replicas computes them.
_MOVES = _GATHERS | {"all_to_all"}


def _choose_by_dtype(
    of_bools: Callable[..., Any], of_numbers: Callable[..., Any]
) -> Callable[..., Any]:
    return lambda a, b: (of_bools if a.dtype == jnp.bool_ else of_numbers)(a, b)


_add = _choose_by_dtype(jnp.logical_or, jax.lax.add)
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(known.SUMS, _add),
    "pmax": _choose_by_dtype(jnp.logical_or, jax.lax.max),
    "pmin": _choose_by_dtype(jnp.logical_and, jax.lax.min),
}


def run_collective(eqn: Any, held: Sequence[Same | Own], device: VirtualDevice) -> list[Same | Own]:
    """Return the results of one collective over the replica axis.

    Raises:
        UnsupportedError: Virtual replicas do not support the collective.
    """
    name = eqn.primitive.name
    groups = eqn.params.get("axis_index_groups")
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    # Under `vmap` a collective may also reduce over a dim of the array, which no rule here does.
    positional = [a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, int)]
    if not positional:
        if name in _COMBINE and groups is None:
            return _reduce(_COMBINE[name], name in known.SUMS, held, device)
        if name in _COMBINE:
            members = _list_members(groups, device)
            return [Own(_reduce_in_groups(_COMBINE[name], x, members, device)) for x in held]
        if name in known.SCATTERS:
            return [Own(_scatter(eqn.params, x, device)) for x in held]
        if name == "ppermute":
            return [Own(_permute(eqn.params["perm"], x, device)) for x in held]
        if name == "pbroadcast":
            return [Same(device.gather_rows(x)[eqn.params["source"]]) for x in held]
        if name in _GATHERS and groups is None:
            return [Same(_arrange_gathered(eqn.params, device.gather_rows(x))) for x in held]
        if name in _MOVES:
            return _move(eqn, held, device)
    raise refuse(
        f"a step that has a {name} at {_compat.find_source(eqn)}.",
        "Virtual replicas support psum, pmean, pmax, pmin, all_gather, psum_scatter, all_to_all "
        "and ppermute.",
        "Write it with all_gather, or leave deterministic out.",
        kind=UnsupportedError,
    )


def _reduce(
    combine: Callable[[Any, Any], Any],
    adds: bool,
    held: Sequence[Same | Own],
    device: VirtualDevice,
) -> list[Same | Own]:
    own = [x for x in held if isinstance(x, Own)]
    layout = device.layout
    stacks = [widen(x.rows) if adds else x.rows for x in own]
    sums = iter(reduce_by_tree(stacks, combine, layout.replica_axes, layout.num_places))
    results: list[Same | Own] = []
    for x in held:
        if isinstance(x, Own):
            results.append(Same(next(sums).astype(x.rows.dtype)))
        elif adds:
            results.append(Same(_sum_equal(jnp.asarray(x.value), device.count)))
        else:
            results.append(x)
    return results


def _sum_equal(value: Any, count: int) -> Any:
    """Return the sum of `count` equal values, in the order of the tree."""
    # `count * value` may be rounded differently from the additions of the tree.
    total = widen(barrier(value))
    while count > 1:
        total, count = _add(total, total), count // 2
    return barrier(total).astype(value.dtype)


def _list_members(groups: Any, device: VirtualDevice) -> np.ndarray:
    """Return for each replica the members of its group in their order: `[V, members]`."""
    rows = [list(range(device.count))] if groups is None else groups
    table: dict[int, Any] = {member: row for row in rows for member in row}
    return np.asarray([table[i] for i in range(device.count)])


def _select_local_rows(table: np.ndarray, device: VirtualDevice) -> Any:
    """Return the rows of a table `[V, ...]` for the replicas of this device: `[V/R, ...]`."""
    return jnp.asarray(table)[device.get_numbers()]


def _reduce_in_groups(
    combine: Callable[[Any, Any], Any], held: Same | Own, members: np.ndarray, device: VirtualDevice
) -> Any:
    """Return the reduction of each replica's group: `[V/R, ...]`."""
    rows = device.gather_rows(held)[_select_local_rows(members, device)]  # [V/R, members, ...]
    whole = combine_pairwise(barrier(widen(jnp.moveaxis(rows, 1, 0))), combine)
    return barrier(whole).astype(rows.dtype)


def _scatter(params: dict[str, Any], held: Same | Own, device: VirtualDevice) -> Any:
    groups = params.get("axis_index_groups")
    members = _list_members(groups, device)
    if groups is None:
        (whole,) = _reduce(_add, True, [held], device)
        sums = device.rows(whole)
    else:
        sums = _reduce_in_groups(_add, held, members, device)
    size = members.shape[1]
    places = np.asarray([list(row).index(i) for i, row in enumerate(members)])
    dim = params["scatter_dimension"]

    def piece(total: Any, place: Any) -> Any:
        if not params["tiled"]:
            return jax.lax.dynamic_index_in_dim(total, place, dim, keepdims=False)
        rows = total.shape[dim] // size
        return jax.lax.dynamic_slice_in_dim(total, place * rows, rows, dim)

    return jax.vmap(piece)(sums, _select_local_rows(places, device))


def _permute(pairs: Sequence[tuple[int, int]], held: Same | Own, device: VirtualDevice) -> Any:
    """Return for each replica the value of its source; zeros for replicas without a source."""
    sources = {to: source for source, to in pairs}
    table = np.asarray([sources.get(i, 0) for i in range(device.count)])
    gets = np.asarray([i in sources for i in range(device.count)])
    rows = device.gather_rows(held)[_select_local_rows(table, device)]
    keeps = _select_local_rows(gets, device).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(keeps, rows, jnp.zeros_like(rows))


def _arrange_gathered(params: dict[str, Any], whole: Any) -> Any:
    """Convert the values of all replicas, `[V, ...]`, to the result of `all_gather`."""
    dim = params["all_gather_dimension"]
    moved = jnp.moveaxis(whole, 0, dim)
    if not params["tiled"]:
        return moved
    shape = whole.shape[1:]
    return moved.reshape(*shape[:dim], whole.shape[0] * shape[dim], *shape[dim + 1 :])


def _move(eqn: Any, held: Sequence[Same | Own], device: VirtualDevice) -> list[Same | Own]:
    """Return the results of a collective that only moves values, from those of all replicas."""
    groups = eqn.params.get("axis_index_groups") or [list(range(device.count))]
    wholes = [device.gather_rows(x) for x in held]
    # The concatenated results below are in group order: this restores the order of replicas.
    order = np.argsort(np.concatenate([np.asarray(g) for g in groups]))
    columns: list[list[Any]] = []
    for group in groups:
        params = move_to_one_axis(eqn.params, len(group), _MEMBERS)
        members = [x[np.asarray(group)] for x in wholes]
        moved = jax.vmap(lambda *x, p=params: eqn.primitive.bind(*x, **p), axis_name=_MEMBERS)(
            *members
        )
        columns.append(list(moved) if eqn.primitive.multiple_results else [moved])
    results = [jnp.concatenate(parts)[order] for parts in zip(*columns, strict=True)]
    return [Own(x[device.get_numbers()]) for x in results]


def is_sum(eqn: Any) -> bool:
    """Whether an operation is a sum over all members of named axes."""
    axes = eqn.params.get("axes", ())
    is_whole = eqn.params.get("axis_index_groups") is None
    return eqn.primitive.name in known.SUMS and is_whole and all(isinstance(a, str) for a in axes)


def add_over_replicas(held: Sequence[Same | Own], device: VirtualDevice) -> list[Same | Own]:
    """Return the sums of several values over all replicas, with one exchange between devices."""
    return _reduce(_add, True, held, device)
