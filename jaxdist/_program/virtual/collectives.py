"""Collectives of virtual replicas, in an order that does not depend on the number of devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._collectives import tree_reduced
from jaxdist._program.op_by_op.rendezvous import over_one_axis
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.virtual.values import Own, Same, VirtualDevice, barrier
from jaxdist._values import in_pairs
from jaxdist.errors import UnsupportedError

_MEMBERS = "jaxdist_members"
_SUMS = frozenset({"psum", "psum2", "psum_invariant"})
_SCATTERED = frozenset({"reduce_scatter", "psum_scatter"})
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})
# Collectives that only move values. `jax.vmap` over the values of all replicas computes them.
_MOVES = frozenset({"all_to_all", "all_gather", "all_gather_invariant"})


def _add(a: Any, b: Any) -> Any:
    return jnp.logical_or(a, b) if a.dtype == jnp.bool_ else jax.lax.add(a, b)


def _extreme(of_bools: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: (of_bools if a.dtype == jnp.bool_ else of_numbers)(a, b)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_SUMS | _SCATTERED, _add),
    "pmax": _extreme(jnp.logical_or, jax.lax.max),
    "pmin": _extreme(jnp.logical_and, jax.lax.min),
}


def meet(eqn: Any, held: Sequence[Same | Own], turns: VirtualDevice) -> list[Same | Own]:
    """Return the results of one collective over the replica axis.

    Raises:
        UnsupportedError: A collective that virtual replicas do not have.
    """
    name = eqn.primitive.name
    groups = eqn.params.get("axis_index_groups")
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    # Under `vmap` a collective may also reduce over a dim of the array, which no rule here does.
    positional = [a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, int)]
    if not positional:
        if name in _COMBINE and name not in _SCATTERED and groups is None:
            return _reduced(_COMBINE[name], name in _SUMS, held, turns)
        if name in _COMBINE and name not in _SCATTERED:
            return [
                Own(_in_groups(_COMBINE[name], x, _members(groups, turns), turns)) for x in held
            ]
        if name in _SCATTERED:
            return [Own(_scattered(eqn.params, x, turns)) for x in held]
        if name == "ppermute":
            return [Own(_permuted(eqn.params["perm"], x, turns)) for x in held]
        if name == "pbroadcast":
            return [Same(turns.all_rows(x)[eqn.params["source"]]) for x in held]
        if name in _GATHERS and groups is None:
            return [Same(_gathered(eqn.params, turns.all_rows(x))) for x in held]
        if name in _MOVES:
            return _moved(eqn, held, turns)
    raise UnsupportedError(
        "strategy.run of a strategy with deterministic=True was given a step that has a "
        f"{name} at {_compat.source_of(eqn)}.\n\n"
        "Virtual replicas have psum, pmean, pmax, pmin, all_gather, psum_scatter, all_to_all and "
        "ppermute.\n\n"
        "Write it with all_gather, or leave deterministic out."
    )


def _wide(x: Any) -> Any:
    """Convert half precision to float32, so that a sum is rounded once."""
    is_half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_half else x


def _reduced(
    combine: Callable[[Any, Any], Any], adds: bool, held: Sequence[Same | Own], turns: VirtualDevice
) -> list[Same | Own]:
    own = [x for x in held if isinstance(x, Own)]
    layout = turns.layout
    stacks = [_wide(x.rows) if adds else x.rows for x in own]
    sums = iter(tree_reduced(stacks, combine, layout.replica_axes, layout.num_places))
    results: list[Same | Own] = []
    for x in held:
        if isinstance(x, Own):
            results.append(Same(next(sums).astype(x.rows.dtype)))
        elif adds:
            results.append(Same(_times(jnp.asarray(x.value), turns.count)))
        else:
            results.append(x)
    return results


def _times(value: Any, count: int) -> Any:
    """Return the sum of `count` equal values, in the order of the tree."""
    # `count * value` may be rounded in another way than the additions of the tree.
    total = _wide(barrier(value))
    while count > 1:
        total, count = _add(total, total), count // 2
    return barrier(total).astype(value.dtype)


def _members(groups: Any, turns: VirtualDevice) -> np.ndarray:
    """Return for each replica the members of its group in their order: `[V, members]`."""
    rows = [list(range(turns.count))] if groups is None else groups
    table: dict[int, Any] = {member: row for row in rows for member in row}
    return np.asarray([table[i] for i in range(turns.count)])


def _own_of(table: np.ndarray, turns: VirtualDevice) -> Any:
    """Return the rows of a table `[V, ...]` for the replicas of this device: `[V/R, ...]`."""
    return jnp.asarray(table)[turns.numbers()]


def _in_groups(
    combine: Callable[[Any, Any], Any], held: Same | Own, members: np.ndarray, turns: VirtualDevice
) -> Any:
    """Return the reduction of each replica's group: `[V/R, ...]`."""
    rows = turns.all_rows(held)[_own_of(members, turns)]  # [V/R, members, ...]
    whole = in_pairs(barrier(_wide(jnp.moveaxis(rows, 1, 0))), combine)
    return barrier(whole).astype(rows.dtype)


def _scattered(params: dict[str, Any], held: Same | Own, turns: VirtualDevice) -> Any:
    groups = params.get("axis_index_groups")
    members = _members(groups, turns)
    if groups is None:
        (whole,) = _reduced(_add, True, [held], turns)
        sums = turns.rows(whole)
    else:
        sums = _in_groups(_add, held, members, turns)
    size = members.shape[1]
    places = np.asarray([list(row).index(i) for i, row in enumerate(members)])
    dim = params["scatter_dimension"]

    def piece(total: Any, place: Any) -> Any:
        if not params["tiled"]:
            return jax.lax.dynamic_index_in_dim(total, place, dim, keepdims=False)
        rows = total.shape[dim] // size
        return jax.lax.dynamic_slice_in_dim(total, place * rows, rows, dim)

    return jax.vmap(piece)(sums, _own_of(places, turns))


def _permuted(pairs: Sequence[tuple[int, int]], held: Same | Own, turns: VirtualDevice) -> Any:
    """Return for each replica the value of its source; zeros for replicas without a source."""
    sources = {to: source for source, to in pairs}
    table = np.asarray([sources.get(i, 0) for i in range(turns.count)])
    gets = np.asarray([i in sources for i in range(turns.count)])
    rows = turns.all_rows(held)[_own_of(table, turns)]
    keeps = _own_of(gets, turns).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(keeps, rows, jnp.zeros_like(rows))


def _gathered(params: dict[str, Any], whole: Any) -> Any:
    """Convert the values of all replicas, `[V, ...]`, to the result of `all_gather`."""
    dim = params["all_gather_dimension"]
    moved = jnp.moveaxis(whole, 0, dim)
    if not params["tiled"]:
        return moved
    shape = whole.shape[1:]
    return moved.reshape(*shape[:dim], whole.shape[0] * shape[dim], *shape[dim + 1 :])


def _moved(eqn: Any, held: Sequence[Same | Own], turns: VirtualDevice) -> list[Same | Own]:
    """Return the results of a collective that only moves values, from those of all replicas."""
    groups = eqn.params.get("axis_index_groups") or [list(range(turns.count))]
    wholes = [turns.all_rows(x) for x in held]
    # The concatenated results below are in the order of the groups: this restores that of replicas.
    order = np.argsort(np.concatenate([np.asarray(g) for g in groups]))
    columns: list[list[Any]] = []
    for group in groups:
        params = over_one_axis(eqn.params, len(group), _MEMBERS)
        members = [x[np.asarray(group)] for x in wholes]
        moved = jax.vmap(lambda *x, p=params: eqn.primitive.bind(*x, **p), axis_name=_MEMBERS)(
            *members
        )
        columns.append(list(moved) if eqn.primitive.multiple_results else [moved])
    results = [jnp.concatenate(parts)[order] for parts in zip(*columns, strict=True)]
    return [Own(x[turns.numbers()]) for x in results]


def is_sum(eqn: Any) -> bool:
    """Whether an operation is a sum over all members of named axes."""
    axes = eqn.params.get("axes", ())
    is_whole = eqn.params.get("axis_index_groups") is None
    return eqn.primitive.name in _SUMS and is_whole and all(isinstance(a, str) for a in axes)


def added(held: Sequence[Same | Own], turns: VirtualDevice) -> list[Same | Own]:
    """Return the sums of several values over all replicas, with one exchange between devices."""
    return _reduced(_add, True, held, turns)


def is_over_replicas(eqn: Any, turns: VirtualDevice) -> bool:
    """Whether a collective communicates over a replica axis, and not only over axes of size 1."""
    return bool(frozenset(get_named_axes(eqn.params)) & turns.axes)
