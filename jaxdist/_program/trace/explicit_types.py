"""Named errors for operations that JAX refuses on values with Explicit types."""

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import UnsupportedError

_CONSTRAINT = "passed to with_sharding_constraint"


def explicit_types_error(
    error: Exception, step: str, layout: ReplicaMesh, *, in_lowering: bool = False
) -> UnsupportedError:
    """Return the error for a step that JAX accepts only without Explicit types.

    Args:
        error: The error of JAX.
        step: The name of the step.
        layout: The mesh of the strategy.
        in_lowering: Whether JAX has traced the step, and cannot lower it.
    """
    axes = tuple(a for a in layout.logical_axes if a in layout.mesh.explicit_axes)
    text = " ".join(str(error).split())
    remedy = (
        "Put the value together before it, jax.sharding.reshard(x, jax.P()). Or give the "
        "operation out_sharding=, if it takes one."
    )
    if in_lowering:
        # A scatter over replicas has no lowering beside Explicit axes, whatever the type is.
        remedy = (
            "Put the value together before it, x = jax.sharding.reshard(x, jax.P()), and call the "
            "operation where no axis is Explicit: jax.shard_map(fn, in_specs=jax.P(), "
            f"out_specs=jax.P(), axis_names={set(axes)}, check_vma=False)(x)."
        )
    if _CONSTRAINT in text:
        remedy = (
            "Write jax.sharding.reshard(x, spec) instead of jax.lax.with_sharding_constraint, or "
            "jaxdist.partition.constrain, which works with and without types."
        )
    return UnsupportedError(
        f"The step {step!r}, at "
        f"{_find_line(error)}, has an operation that JAX refuses on a value that "
        f"is split over an Explicit axis: {type(error).__name__}: {text[:300]}\n\n"
        f"A step that uses out_sharding or reshard over {list(axes)} is traced with the types of "
        "the strategy's mesh, and JAX has no rule for every operation along a split dim.\n\n"
        f"{remedy}"
    )


def _find_line(error: Exception) -> str:
    """Return the line of the step that an error is about."""
    # In a lowering, JAX keeps the traceback of the operation as the cause.
    cause = error.__cause__
    return _compat.find_line_of_error(error if cause is None else cause)
