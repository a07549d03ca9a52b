"""Better errors for a step that raises: unbound mesh axes, and arrays in pieces."""

import re
import traceback
from collections.abc import Sequence
from typing import Any

from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ArgumentTypeError, AxisNameError, JaxdistError, ReplicaValueError

_UNBOUND = re.compile(r"unbound axis name:? '?(.+?)'?(?:\. |\.?$)", re.MULTILINE)


def needs_explicit_axes(error: Exception) -> bool:
    """Whether JAX refused a sharding of a result because its axis is Auto. It has no class."""
    text = str(error)
    return "cannot contain axis names that are of type Auto" in text


def out_sharding_error(error: Exception, fn: Any, layout: ReplicaMesh) -> AxisNameError:
    """Return the error for a sharding over an axis that is Manual or Auto in the step."""
    first = str(error).partition(" This error occurs")[0]
    return AxisNameError(
        f"The step {_name(fn)!r} names an axis in out_sharding or reshard that is not Explicit "
        f"there: {first}\n\n"
        f"The replica axes {list(layout.replica_axes)} are manual in a step, which sees the rows "
        "of one replica. Other axes are Explicit if they are so on the strategy's mesh: "
        f"{layout.mesh}.\n\n"
        "Leave replica axes out of the spec: PartitionSpec(None, 'model'). For an Auto axis use "
        "jax.lax.with_sharding_constraint, or make the mesh with jax.make_mesh."
    )


def unbound_axis_error(error: Exception, fn: Any, layout: ReplicaMesh) -> AxisNameError | None:
    """Return a better error for JAX's error about an unbound axis; None for other errors."""
    found = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    if found is None or isinstance(error, AxisNameError):
        return None
    given = found.group(1)
    axes = layout.replica_axes
    written = repr(axes[0]) if len(axes) == 1 else repr(axes)
    if given in layout.logical_axes:
        return AxisNameError(
            f"The step {_name(fn)!r} uses the axis {given!r} in a collective.\n\n"
            f"{given!r} is an axis of logical devices: XLA splits values over it, and no "
            f"collective by hand can. The replica axes are {list(axes)}.\n\n"
            f"Write jax.lax.psum(x, {written}), or leave the collective out: "
            "jax.lax.with_sharding_constraint says how a value is split."
        )
    return AxisNameError(
        f"The step {_name(fn)!r} uses the axis {given!r}, which no mesh or jax.vmap around it "
        f"has.\n\nThe axes of the strategy's mesh are {dict(layout.mesh.shape)}, and its replicas "
        f"are along {list(axes)}.\n\n"
        f"Write {written} in the place of {given!r}, such as jax.lax.psum(x, {written}), or call "
        "jaxdist.get_replica_context().all_reduce('sum', x), which needs no name."
    )


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


# Libraries that a transformation of optax calls, and that are not the cause.
_BENEATH = frozenset({"jax", "jaxlib", "numpy", "jaxdist", "flax"})

# Texts of errors about wrong arguments, by Python and by optax.
_OF_CALLS = (
    "required positional argument",
    "required keyword-only argument",
    "unexpected keyword argument",
    "positional arguments but",
    "must be provided",
)


def find_better_error(error: Exception, names: Sequence[str]) -> JaxdistError | None:
    """Return the error to raise instead of an error of a step that has arrays in pieces.

    Args:
        error: The error that the step raised.
        names: The names of the arguments that are in pieces.

    Returns:
        None if the pieces are not the cause.
    """
    is_of_arguments = isinstance(error, (TypeError, ValueError))
    if not names or not is_of_arguments or isinstance(error, JaxdistError):
        return None
    text = str(error)
    first = text.partition("\n")[0]
    held = f"{len(names)} argument(s) are in pieces, such as {names[0]}."
    if "__jax_array__" in text:
        return ArgumentTypeError(
            f"A function that takes only arrays, such as those of jax.lax, was given an array in "
            f"pieces: {first}\n\n{held}\n\n"
            "Gather it before, jaxdist.partition.gather(value), or use jax.numpy, which gathers."
        )
    is_of_structures = "pytree" in text and "Sharded" in text
    if is_of_structures or (_is_raised_by_optax(error) and not _is_about_call(text)):
        found = (
            "A function of several pytrees was given one with arrays in pieces and another with "
            "something else in their places"
            if is_of_structures
            else f"A transformation of optax raised {type(error).__name__} in a step with pieces"
        )
        return ReplicaValueError(
            f"{found}: {' '.join(text.split())} {held}\n\n"
            "The pytrees of a function have pieces in the same places. Optimizers whose state has "
            "other shapes than the parameters (adafactor, flatten), or that look at the dims of "
            "what a mask leaves (muon), cannot take pieces.\n\n"
            "Place the state of an optimizer with its model: jaxdist.partition.place(strategy, "
            "(model, optimizer), rules). For such an optimizer use tx = "
            "jaxdist.sharded_update(tx), "
            "which gives it whole arrays. A tree of masks or numbers comes first: "
            "jax.tree.map(lambda mask, grad: ..., masks, grads)."
        )
    return None


def _is_about_call(text: str) -> bool:
    """Whether a call has missing or surplus arguments; then the pieces are not the cause."""
    return any(words in text for words in _OF_CALLS)


def _is_raised_by_optax(error: Exception) -> bool:
    """Whether a transformation of optax raised the error, and not a function of the user's."""
    raised_in = ""
    # The innermost frame outside of the libraries decides: optax calls functions of the user.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _BENEATH:
            raised_in = name
    return raised_in.startswith("optax.")
