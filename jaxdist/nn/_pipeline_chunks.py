"""Reads from the placement of layers how many chunks each stage of a pipeline has."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxdist import _pipeline, _replica
from jaxdist._called import refuse
from jaxdist._validate import format_lines
from jaxdist._values import Sharded, find_split_entries, is_sharded
from jaxdist.errors import ShapeError
from jaxdist.nn._axis import Axis


def find_chunks(layers: Any, axis: Axis, given: int | None) -> int:
    """Return the number of chunks of each stage, by the placement of the layers.

    Raises:
        ShapeError: The layers are not placed on the stages.
        ArgumentError: They have other chunks than `given`.
    """
    found: dict[str, set[int]] = {}
    unplaced: list[str] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(layers, is_leaf=is_sharded)[0]:
        name = f"parts[1]{jax.tree_util.keystr(path)}"
        dims = _find_dims(leaf, axis)
        if dims is None:  # the step has made it, such as the numbers of the layers
            continue
        if dims & {0, 1}:
            found[name] = {1 if dim == 0 else leaf.shape[0] for dim in dims & {0, 1}}
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
            unplaced.append(f"{name} {leaf.dtype}{list(leaf.shape)}")
    leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(layers, is_leaf=is_sharded)}
    if not found and len(leading) > 1:
        return given or 1  # They are no stack, which the engine refuses.
    if unplaced or not found:
        name = (unplaced or ["parts[1]"])[0]
        raise refuse(
            f"{name}, which is not placed on the {axis.size} stages of the axis {axis.name!r}.",
            "Each stage has its own layers, so that none of them moves. A jax.jit around "
            "strategy.run hides where arrays are.",
            'Place the layers by a rule such as ("layers/**", partition.Stage()): '
            "params = partition.place(strategy, params, rules).",
            kind=ShapeError,
        )
    # Other inputs of the same shape may be placed in another way, so a leaf may fit several.
    counts = set.intersection(*found.values())
    if given in counts or (given is None and len(counts) == 1):
        return given or counts.pop()
    lines = [f"{name}: chunks={' or '.join(map(str, sorted(n)))}" for name, n in found.items()]
    if given is None and counts:
        raise refuse(
            f"chunks=None, and layers that have the shapes of inputs which are placed with other "
            f"chunks.\n{format_lines(lines)}",
            "By its shape alone, an input does not show which placement is that of the layers.",
            f"Pass the chunks of the layers' placement: chunks={lines[0].partition('=')[2]}.",
        )
    raise refuse(
        f"chunks={given}, and layers that are placed with other chunks.\n{format_lines(lines)}",
        "All layers have the chunks of their placement, partition.Stage(chunks=...).",
        f"Pass chunks={max(counts)}, or leave it out."
        if len(counts) == 1
        else "Place all layers by one rule.",
    )


def check_not_in_chunks(layers: Any) -> None:
    """Check that the step has not placed the layers in chunks, which are whole here.

    Raises:
        ArgumentError: It has.
    """
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(layers)[0]:
        chunks = _pipeline.find_chunks(frame.strategy.layout.mesh, tuple(jnp.shape(leaf)))
        if chunks is not None:
            name = f"parts[1]{jax.tree_util.keystr(path)}"
            raise refuse(
                f"chunks=None, and {name} {list(jnp.shape(leaf))}, a shape that partition.place "
                f"was given with partition.Stage(chunks={chunks}).",
                "Layers that are not on several stages do not show their chunks.",
                f"Pass chunks={chunks}, which is right on stages, too; or chunks=1 if dim 0 of "
                "these layers is over all of them.",
            )


def _find_dims(leaf: Any, axis: Axis) -> set[int] | None:
    """Return the dims of a leaf that are split over an axis; None if no input of the step is alike.

    A traced array does not know its layout. So the inputs of the step with its shape are asked.
    """
    if isinstance(leaf, Sharded):
        entries = find_split_entries(leaf.cut, axis.frame.strategy.layout)
        return {dim for dim, names in entries.items() if axis.name in names}
    shape = tuple(jnp.shape(leaf))
    specs = [spec for of_input, spec in axis.frame.placed if of_input == shape]
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        specs = [sharding.spec]
    if not specs:
        return None
    name = axis.name
    return {dim for spec in specs for dim, entry in enumerate(spec) if name in _names_of(entry)}


def _names_of(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)
