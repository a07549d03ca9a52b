"""Reads stacks of layers that were saved in another number of chunks.

A pipeline has the parameters of its layers as `[layers, ...]`, or as `[chunks, layers / chunks,
...]`; both are in the order of the model, so a reshape makes one from the other.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxdist._called import refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.partition import Replicate, Rules

Shape: TypeAlias = tuple[int, ...]

# Note [Stacks are named by the caller]
# Arrays with equal numbers of elements need not be the same layers in another form. So stacks are
# reshaped only if the caller names them, only along their one or two dims, and only if all of them
# change from the same layers to the same chunks: a model of fewer and wider layers does not.


def check_stacks(stacks: Any) -> None:
    """Check the pattern that names the stacks."""
    if stacks is None or (isinstance(stacks, str) and stacks):
        return
    raise refuse_type(
        f"stacks={show(stacks)}.",
        "stacks is a pattern of paths, as in partition.Rules, or None.",
        'Pass for instance stacks="layers/**".',
    )


def find_stacks(
    pattern: str | None, like: PyTree, saved: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the saved shapes of the leaves of stacks that have another form now, by name.

    Args:
        pattern: The pattern of the paths of stacks; None for no stacks.
        like: The wanted state, as whole arrays.
        saved: The shapes of the saved leaves, by name.
        shapes: Those of the wanted leaves; for random keys, of their numbers.

    Raises:
        ArgumentError: The pattern matches no leaf.
    """
    if pattern is None:
        return {}
    rules = Rules([(pattern, Replicate())], must_match=False)
    paths = list_paths(like)
    matched = [name for name, path in paths.items() if rules.placement_of(path) is not None]
    if not matched:
        some = ", ".join(list(paths.values())[:4])
        raise refuse(
            f"stacks={pattern!r}, which matches no leaf of the state.",
            f"It is a pattern of paths such as {some}.",
            "Pass the pattern of the stacked layers, or leave stacks out.",
        )
    pairs = {name: (saved[name], shapes[name]) for name in matched if name in saved}
    # A placeholder of one element, such as a counter, is no stack.
    pairs = {n: p for n, p in pairs.items() if p[0] != p[1] or math.prod(p[0]) > 1}
    return {n: p[0] for n, p in pairs.items()} if find_form([*pairs.values()]) else {}


def find_form(pairs: Sequence[tuple[Shape, Shape]]) -> tuple[Shape, Shape] | None:
    """Return the dims of the stack in the saved and in the wanted shapes, which all have.

    Args:
        pairs: The saved and the wanted shape of each leaf.

    Returns:
        The dims, such as `((8,), (2, 4))` for 8 layers and 2 chunks of 4; None if the shapes have
        no such dims.

    Example:
        >>> find_form([((8, 3, 4), (2, 4, 3, 4)), ((8, 3), (2, 4, 3))])
        ((8,), (2, 4))
        >>> print(find_form([((8, 3, 4), (2, 4, 3, 4)), ((8, 6), (8, 2, 3))]))
        None
    """
    forms = [_list_forms(saved, wanted) for saved, wanted in pairs]
    common = [form for form in forms[0] if all(form in of for of in forms)] if forms else []
    # [8, 3] and [3, 8] may be layers of 3 numbers each and of 8: another leaf has to show the dims.
    is_shown = any(len(saved) > 2 for saved, _ in pairs)
    return next((f for f in common if is_shown or (len(f[0]), len(f[1])) != (2, 2)), None)


def suggest_pattern(names: Sequence[str], like: PyTree) -> str:
    """Return a pattern that matches the leaves with these names, and if possible no others."""
    parts = {name: path.split("/") for name, path in list_paths(like).items()}
    chosen = {*names}
    first = parts[next(iter(names))]
    common = [p for p in first if all(p in parts[name] for name in chosen) and not p.isdigit()]
    others = {p for name, own in parts.items() if name not in chosen for p in own}
    if not common:
        return "{" + ",".join("/".join(parts[name]) for name in names) + "}"
    return f"{next((p for p in common if p not in others), common[-1])}/**"


def list_paths(tree: PyTree) -> dict[str, str]:
    """Return the path of each leaf by its name, with slashes."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "value": jax.tree_util.keystr(
            path, simple=True, separator="/"
        )
        or "value"
        for path, _ in flat
    }


def _list_forms(saved: Shape, wanted: Shape) -> list[tuple[Shape, Shape]]:
    """Return the dims that two shapes may have for a stack of the same layers."""
    return [
        (saved[:i], wanted[:j])
        for i, j in ((1, 2), (2, 1), (2, 2))
        if len(saved) >= i and len(wanted) >= j and saved != wanted
        if saved[i:] == wanted[j:] and math.prod(saved[:i]) == math.prod(wanted[:j])
    ]


def choose_saved_layout(saved: Shape, wanted: Shape, layout: Sharding | None) -> Sharding | None:
    """Return the layout in which a stack is read in its saved form, so that no device has it whole.

    Each device reads a share of the layers as large as its own; which layers these are may differ.
    """
    if not isinstance(layout, NamedSharding):
        return layout
    i, j = map(len, _list_forms(saved, wanted)[0])
    entries = [*layout.spec, *[None] * (len(wanted) - len(layout.spec))]
    names = [n for e in entries[:j] if e is not None for n in (e if isinstance(e, tuple) else (e,))]
    count = math.prod(layout.mesh.shape[name] for name in names)
    stack: list[Any] = [None] * i
    # The last dim of a stack is split over the stages.
    for dim in reversed(range(i)):
        if count > 1 and saved[dim] % count == 0:
            stack[dim] = tuple(names)
            break
    return NamedSharding(_as_auto(layout.mesh), PartitionSpec(*stack, *entries[j:]))


def restack(array: Any, shape: Sequence[int], layout: Sharding | None) -> Any:
    """Return a stack in another form, bit for bit.

    Cost:
        Devices of one stack exchange the layers that they read for others.
    """
    if isinstance(array, np.ndarray):
        return array.reshape(shape)
    if not isinstance(layout, NamedSharding):
        return jnp.reshape(array, shape)
    auto = NamedSharding(_as_auto(layout.mesh), layout.spec)
    made = jax.jit(lambda x: jnp.reshape(x, shape), out_shardings=auto)(array)
    pieces = [shard.data for shard in made.addressable_shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), layout, pieces)


def _as_auto(mesh: Any) -> Mesh:
    """Return the mesh with axes that XLA divides: a reshape of Explicit ones can be refused."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
