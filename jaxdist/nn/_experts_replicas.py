"""Experts over an axis of replicas: each replica has the pieces of its own experts."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxdist._called import refuse, refuse_type
from jaxdist._collectives import current_log, find_uses
from jaxdist._validate import show
from jaxdist._values import gather_whole, is_sharded, open_to_gather
from jaxdist.errors import AxisNameError, ContextError
from jaxdist.nn._axis import Axis
from jaxdist.nn._experts_arguments import check_leaf, map_weights

# Note [Experts of replicas]
# `OPEN` gives a replica the piece of its own experts. Their gradients have the contributions of the
# rows of all replicas, which the transposed exchange has brought. The transpose of `OPEN` divides
# them by the number of replicas, and sums over the replica axes that are not exchanged. So they are
# the mean over replicas, as with `gather_whole`.
#
# What an expert computes is of rows of other replicas, so it may use nothing of its own replica
# but its weights. A value from outside could be that of one replica; and where it is equal on all
# of them, its gradient before an all-reduce would be that of other rows. A collective would combine
# rows of different experts. Both would be wrong numbers without an error, so both are refused, also
# where nothing is exchanged.


def open_weights(weights: Any, experts: int, axis: Axis) -> tuple[Any, Axis | None]:
    """Check that each leaf is in pieces of whole experts, and return those of this replica.

    Returns:
        A pytree of arrays `[experts / replicas, ...]`, and the axis. Or arrays `[experts, ...]` and
        None, where replicas do not exchange rows, and each of them computes all experts: in an
        uneven step they have different numbers of groups, and op by op they have whole arrays.
    """
    layout = axis.frame.strategy.layout

    def check(name: str, x: Any) -> Any:
        x = _as_pieces(name, x, axis)
        check_leaf(name, x.held, experts)
        _check_cut(name, x, axis)
        return x

    checked = map_weights(check, weights)
    around = jax.sharding.get_abstract_mesh()
    is_compiled = frozenset(layout.replica_axes) <= frozenset(around.manual_axes)
    if not is_compiled or current_log() is not None:
        return map_weights(lambda _, x: gather_whole(x, layout), checked), None
    return map_weights(lambda _, x: open_to_gather(x, layout), checked), axis


def _as_pieces(name: str, x: Any, axis: Axis) -> Any:
    """Return a leaf as a `Sharded` of this step; raise if it is anything else."""
    found = x.get_raw_value() if hasattr(x, "get_raw_value") else x
    if is_sharded(found) and isinstance(found.held, jax.core.Tracer) and not found.is_assigned:
        return found
    if not is_sharded(found):
        has_dtype = hasattr(found, "dtype")
        what = f"{found.dtype}{list(found.shape)}, whole on each replica" if has_dtype else show(x)
        shown = f"{name}, {what}"
        remedy = f"{_write_rule(axis)} In the step pass the parameters as they are, not gathered."
        logical = axis.frame.strategy.layout.logical_axes
        if axis.frame.strategy.layout.num_logical > 1:
            remedy += f" Inside of nn.pipeline_loss they are gathered: pass one of {list(logical)}."
    elif found.is_assigned:
        shown = f"{name}, {found!r}, to which this step has assigned a whole array"
        remedy = "Return the new value from the step, and pass it to the next one."
    else:
        shown = f"{name}, {found!r}, which is not an argument of the step"
        remedy = "Pass it in the args of strategy.run, so that each replica gets its piece."
    raise refuse_type(
        f"{shown}, and axis={axis.name!r}, an axis of replicas.",
        f"Each of the {axis.size} replicas holds the weights of its own experts, as pieces.",
        remedy,
    )


def _check_cut(name: str, x: Any, axis: Axis) -> None:
    layout = axis.frame.strategy.layout
    over = tuple(a for a in x.cut.over(layout) if layout.mesh.shape[a] > 1)
    if x.cut.dim == 0 and over == (axis.name,):
        return
    raise refuse(
        f"{name}, {x!r} over the axes {list(over)}, and axis={axis.name!r}.",
        "The weights are cut along dim 0, the number of the expert, over the axis of the exchange "
        "alone. So each piece has all weights of its experts.",
        _write_rule(axis),
    )


def _write_rule(axis: Axis) -> str:
    only = axis.frame.strategy.layout.replica_axes == (axis.name,)
    axes = "" if only else f", axes=({axis.name!r},)"
    return (
        f'Place them by a rule such as ("experts/**", partition.Shard(0{axes})): '
        "params = partition.place(strategy, params, rules)."
    )


def check_uses_only_its_rows(
    expert: Callable[[Any, jax.Array], jax.Array], weights: Any, x: jax.Array, axis: Axis
) -> None:
    """Check that an expert uses only its arguments, and no collective over replicas.

    See Note [Experts of replicas].

    Args:
        expert: The function of the user.
        weights: The weights of several experts.
        x: The tokens.
        axis: The axis of replicas.

    Raises:
        ContextError: It uses an array of the step that is not its argument.
        AxisNameError: It uses a collective over replicas, or its gradient does.
    """
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    rows = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    programs = _trace(expert, one, rows)
    outside = [c for p in programs for c in p.consts if isinstance(c, jax.core.Tracer)]
    if outside:
        shapes = ", ".join(dict.fromkeys(f"{c.dtype}{list(c.shape)}" for c in outside))
        raise refuse(
            f"expert, which uses arrays of the step besides its arguments: {shapes}; and "
            f"axis={axis.name!r}, an axis of replicas.",
            "An expert computes rows of all replicas, and such an array is that of one replica.",
            "Pass it in weights, with a row for each expert, or apply it to x or to y. Compute a "
            "constant inside of expert.",
            kind=ContextError,
        )
    replica_axes = axis.frame.strategy.layout.replica_axes
    found = [use for p in programs for use in find_uses(p.jaxpr, replica_axes)]
    if found:
        name, over = found[0]
        raise refuse(
            f"expert, which calls {name} over {over!r}, an axis of replicas.",
            f"The experts are divided over the replicas, axis={axis.name!r}, so the operation "
            "would combine rows of different experts.",
            "Leave it out of expert. Communicate in the step, before or after nn.experts.",
            kind=AxisNameError,
        )


def _trace(expert: Callable[..., jax.Array], weights: Any, rows: Any) -> list[Any]:
    """Return the program of an expert, and that of its gradient if it has one.

    The rule of a function with its own derivative may use what the function does not.
    """

    def pull(weights: Any, rows: Any) -> Any:
        result, pull_back = jax.vjp(expert, weights, rows)
        return pull_back(result)

    programs = [jax.make_jaxpr(expert)(weights, rows)]
    # A function without a derivative is for steps that take none.
    with contextlib.suppress(Exception):
        programs.append(jax.make_jaxpr(pull)(weights, rows))
    return programs
