"""Named errors for mesh axes in collectives, maps and layouts, and for values of Explicit types."""

import re
import traceback
from collections.abc import Callable
from typing import Any

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs import primitives as known
from jaxdist.errors import AxisNameError, ContextError, JaxdistError, UnsupportedError

# JAX has no classes for these errors; only their messages differ.
_UNBOUND = re.compile(r"unbound axis name:? '?(.+?)'?(?:\. |\.?$)", re.MULTILINE)
_OTHER_MESH = re.compile(
    r"context mesh .* should match the mesh passed to\s+shard_map (.*)"
    r"|cannot change the size of the mesh. Got new mesh: (.*?\))",
    re.DOTALL,
)
# A `jax.shard_map` over axes that are manual already: JAX 0.12 at once, JAX 0.10 in its gradient.
_MANUAL_MAP = re.compile(
    r"must refer to an axis marked as manual .* refers to (.*?)\s+Check"
    r"|Expected cotangent type.*V:(.*)",
    re.DOTALL,
)
_NOT_IN_MESH = (
    re.compile(r"requires axis_names=frozenset\(\{(.*?)\}\) to be a subset of mesh\.axis_names"),
    re.compile(r"Resource axis: (.+?) of "),
)
_WITHOUT_MESH = ("Please set a mesh via", "can only be used outside of `jax.jit`")
_OTHER_TYPES = "Going from `Manual` AxisType"
# Errors of JAX and NumPy for an axis that is not a name, or that is named twice.
_NOT_A_NAME = (
    "out of bounds for array of dimension",
    "unhashable",
    "not hashable",
    "repeated axis",
)
_COLLECTIVE = re.compile(
    r"\b(psum|pmean|pmax|pmin|psum_scatter|ppermute|pshuffle|all_gather|all_to_all|axis_index"
    r"|axis_size)\("
)


def axis_error(error: Exception, fn: Any, layout: ReplicaMesh) -> JaxdistError | None:
    """Return a better error for JAX's error about a mesh axis; None for other errors.

    Args:
        error: The error that the step raised.
        fn: The step.
        layout: The mesh of the strategy.
    """
    if isinstance(error, JaxdistError):
        return None
    text = str(error)
    if isinstance(error, NameError) and (found := _UNBOUND.search(text)):
        return unbound_axis_error(f"The step {name_of(fn)!r}", found.group(1), layout)
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        return None
    if found := _OTHER_MESH.search(text):
        return _mesh_given_error((found.group(1) or found.group(2)).strip(), fn, layout)
    if found := _MANUAL_MAP.search(text):
        named = re.findall(r"\w+", found.group(1) or found.group(2))
        axes = [a for a in layout.replica_axes if a in named]
        if axes:
            return map_over_replicas_error(f"The step {name_of(fn)!r}", axes, layout)
    for pattern in _NOT_IN_MESH:
        # JAX also raises this error for an axis that exists, between Auto and Explicit types.
        found = pattern.search(text)
        if found and found.group(1).strip("'") not in layout.mesh.axis_names:
            return _unknown_axes_error(found.group(1), fn, layout)
    if any(words in text for words in _WITHOUT_MESH):
        return ContextError(
            f"The step {name_of(fn)!r} sets a mesh, or passes a PartitionSpec to jax.device_put: "
            f"{' '.join(text.split())[:160]}\n\n"
            f"A step runs on the mesh of its strategy, {dict(layout.mesh.shape)}, which is set "
            f"already.\n\nLeave it out.{_how_to_constrain(layout)}"
        )
    if _OTHER_TYPES in text:
        return ContextError(
            f"The step {name_of(fn)!r} changes the types of all mesh axes, with "
            "jax.sharding.auto_axes, jax.sharding.explicit_axes, or a similar function.\n\n"
            f"The replica axes {list(layout.replica_axes)} are manual in a step, and stay so.\n\n"
            f"Leave it out, or name other axes: axes={layout.logical_axes or '...'!r}."
        )
    return _no_name_error(error, text, fn, layout)


def needs_explicit_axes(error: Exception) -> bool:
    """Whether JAX refused a sharding of a result because its axis is Auto."""
    text = str(error)
    return (
        "cannot contain axis names that are of type Auto" in text
        or "educed axes can only refer to mesh axes that is of type" in text
    )


def out_sharding_error(error: Exception, fn: Any, layout: ReplicaMesh) -> AxisNameError:
    """Return the error for a sharding over an axis that is Manual or Auto in the step."""
    first = str(error).partition(" This error occurs")[0]
    return not_explicit_error(
        f"The step {name_of(fn)!r} names an axis in out_sharding or reshard that is not Explicit "
        f"there: {first}",
        layout,
    )


def not_explicit_error(refused: str, layout: ReplicaMesh) -> AxisNameError:
    """Return the error for a sharding over an axis that is not Explicit in the step."""
    return AxisNameError(
        f"{refused}\n\n"
        "Axes of the logical devices are Explicit in a step if they are so on the strategy's mesh, "
        f"{layout.mesh}. A sum over the replicas {list(layout.replica_axes)} is not a layout.\n\n"
        "For an Auto axis use jax.lax.with_sharding_constraint, or make the mesh with "
        "jax.make_mesh. For a sum write jaxdist.get_replica_context().all_reduce('sum', x)."
    )


def check_names(
    name: str, params: dict[str, Any], find_line: Callable[[], str], layout: ReplicaMesh
) -> None:
    """Check that an operation is over different axes, each given by its name.

    Raises:
        AxisNameError: A collective is over a number that is not a dim, or over one axis twice.
    """
    if name not in known.COLLECTIVES and name != "axis_index":
        return
    axes = params.get("axes", params.get("axis_name", ()))
    flat = list(axes) if isinstance(axes, (tuple, list, set, frozenset)) else [axes]
    # In a sum a number is a dim of the array.
    is_of_dims = "axes" in params
    is_named = all(isinstance(a, str) or (is_of_dims and type(a) is int) for a in flat)
    if is_named and len(flat) == len(set(flat)) and not isinstance(axes, (set, frozenset)):
        return
    written = _written(layout)
    raise AxisNameError(
        f"A {name} at {find_line()} is over {axes!r}, which is not the name of a mesh axis.\n\n"
        "A collective takes the name of an axis, or a tuple of different names. The replicas are "
        f"along {list(layout.replica_axes)}.\n\nWrite {written} instead."
    )


def layout_error(where: str, spec: Any, layout: ReplicaMesh) -> ContextError:
    """Return the error for a layout inside a step that names an axis of replicas."""
    return ContextError(
        f"{where} lays an array out by the PartitionSpec {spec}, which names an axis of "
        f"replicas.\n\nThe replica axes are {list(layout.replica_axes)}. Inside a step there is "
        "only the value of one replica, which cannot be split over replicas.\n\n"
        "Leave the layout out; in jax.vmap it is spmd_axis_name."
        f"{_how_to_constrain(layout)} Arrays are split over the replicas "
        "before the step: jax.device_put(x, strategy.per_replica_sharding)."
    )


def map_over_replicas_error(where: str, axes: list[str], layout: ReplicaMesh) -> ContextError:
    """Return the error for a `jax.shard_map` inside a step over axes of replicas."""
    return ContextError(
        f"{where} maps a function over {axes} with jax.shard_map, inside a step.\n\n"
        f"The replica axes {list(layout.replica_axes)} are in use: a step has the rows of one "
        f"replica already, and no other rows to split.\n\n{_how_to_map(layout)}"
    )


def _mesh_given_error(mesh: str, fn: Any, layout: ReplicaMesh) -> ContextError:
    return ContextError(
        f"The step {name_of(fn)!r} uses a mesh of its own, {mesh}, in jax.shard_map (or jax.pmap, "
        "which is one) or in a layout.\n\n"
        f"A step runs on the mesh of its strategy, {dict(layout.mesh.shape)}, whose replica axes "
        f"{list(layout.replica_axes)} are in use: a step has the rows of one replica already.\n\n"
        f"{_how_to_map(layout)}"
    )


def _how_to_map(layout: ReplicaMesh) -> str:
    """Return the remedy for a function that a step maps over an axis."""
    remedy = (
        "Call the function itself, fn(x): in a step it gets the rows of one replica, and its "
        f"collectives, such as jax.lax.psum(x, {_written(layout)}), meet the other replicas."
    )
    if layout.num_logical == 1:
        return remedy
    names = "{" + ", ".join(map(repr, layout.logical_axes)) + "}"
    return (
        f"{remedy} To map over the logical devices of a replica, leave mesh= out: "
        f"jax.shard_map(fn, in_specs=..., out_specs=..., axis_names={names})."
    )


def _how_to_constrain(layout: ReplicaMesh) -> str:
    """Return the remedy for a value to split over the logical devices."""
    if layout.num_logical == 1:
        return ""
    axis = layout.logical_axes[0]
    return (
        " To split a value over the logical devices of a replica: "
        f"jax.lax.with_sharding_constraint(x, jax.P(None, {axis!r}))."
    )


def unbound_axis_error(where: str, given: str, layout: ReplicaMesh) -> AxisNameError:
    """Return the error for a collective over an axis that does not exist there."""
    axes, written = layout.replica_axes, _written(layout)
    if given in layout.logical_axes:
        return AxisNameError(
            f"{where} uses the axis {given!r} in a collective.\n\n"
            f"{given!r} is an axis of logical devices: XLA splits values over it, and "
            f"manual collectives cannot use it. The replica axes are {list(axes)}.\n\n"
            f"Write jax.lax.psum(x, {written}), or leave the collective out: "
            "jax.lax.with_sharding_constraint says how a value is split. A collective over "
            f"{given!r} is possible inside jax.shard_map(fn, in_specs=..., out_specs=..., "
            f"axis_names={{{given!r}}})."
        )
    return AxisNameError(
        f"{where} uses the axis {given!r}, which no mesh or jax.vmap around it "
        f"has.\n\nThe axes of the strategy's mesh are {dict(layout.mesh.shape)}, and its replicas "
        f"are along {list(axes)}.\n\n"
        f"Write {written} instead of {given!r}, such as jax.lax.psum(x, {written}), or call "
        "jaxdist.get_replica_context().all_reduce('sum', x), which needs no name."
    )


def _unknown_axes_error(names: str, fn: Any, layout: ReplicaMesh) -> AxisNameError:
    logical = list(layout.logical_axes)
    return AxisNameError(
        f"The step {name_of(fn)!r} splits values over the axis {names}, which the mesh does not "
        f"have.\n\nThe axes of the strategy's mesh are {dict(layout.mesh.shape)}. Inside a step, "
        f"values can be split over its logical axes only: {logical}.\n\n"
        f"Write one of {logical} instead, or make the strategy with a mesh that has this axis."
    )


def _no_name_error(
    error: Exception, text: str, fn: Any, layout: ReplicaMesh
) -> AxisNameError | None:
    """Return the error for a collective over something that is not the name of an axis."""
    if not any(words in text for words in _NOT_A_NAME):
        return None
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    called = [found.group(1) for line in lines if (found := _COLLECTIVE.search(line))]
    if not called:
        return None
    return AxisNameError(
        f"The step {name_of(fn)!r} calls {called[0]} with something that is not the name of a mesh "
        f"axis: {type(error).__name__}: {' '.join(text.split())[:120]}\n\n"
        "A collective takes the name of an axis, or a tuple of different names. The replicas are "
        f"along {list(layout.replica_axes)}.\n\n"
        f"Write jax.lax.{called[0]}(..., {_written(layout)})."
    )


def _written(layout: ReplicaMesh) -> str:
    """Return the replica axes as a user writes them in a collective."""
    axes = layout.replica_axes
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def name_of(fn: Any) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return str(getattr(fn, "__name__", type(fn).__name__))


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
    # In a lowering, JAX keeps the traceback of the operation as the cause.
    line = _compat.find_line_of_error(error if error.__cause__ is None else error.__cause__)
    remedy = (
        "Gather the value before it, jax.sharding.reshard(x, jax.P()). Or give the "
        "operation out_sharding=, if it takes one."
    )
    if in_lowering:
        # A scatter over replicas has no lowering beside Explicit axes, whatever the type is.
        remedy = (
            "Gather the value before it, x = jax.sharding.reshard(x, jax.P()), and call the "
            "operation where no axis is Explicit: jax.shard_map(fn, in_specs=jax.P(), "
            f"out_specs=jax.P(), axis_names={set(axes)}, check_vma=False)(x)."
        )
    if _CONSTRAINT in text:
        remedy = (
            "Write jax.sharding.reshard(x, spec) instead of jax.lax.with_sharding_constraint, or "
            "jaxdist.partition.constrain, which works with and without types."
        )
    return UnsupportedError(
        f"The step {step!r}, at {line}, has an operation that JAX refuses on a value "
        f"that is split over an Explicit axis: {type(error).__name__}: {text[:300]}\n\n"
        f"A step that uses out_sharding or reshard over {list(axes)} is traced with the types of "
        "the strategy's mesh, and JAX has no rule for every operation along a split dim.\n\n"
        f"{remedy}"
    )
