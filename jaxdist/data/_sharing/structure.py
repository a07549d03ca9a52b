"""The structure of batches as strings, so that processes can compare them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import name_call
from jaxdist._processes import find_odd_ones
from jaxdist.data._reading.elements import Element, device_dtype
from jaxdist.errors import ProgramMismatchError


@dataclasses.dataclass(frozen=True)
class Structure:
    """The leaves of a batch, without their rows.

    Attributes:
        tree: The containers, as a string to compare.
        skeleton: The containers as JSON if they are dicts, lists, tuples and None; else `null`.
        leaves: Name, dtype and trailing dims of each leaf; a scalar has None instead of dims.
    """

    tree: str
    skeleton: str
    leaves: tuple[tuple[str, str, tuple[int, ...] | None], ...]

    @property
    def has_rows(self) -> bool:
        """Whether a leaf has rows."""
        return any(dims is not None for _, _, dims in self.leaves)

    def to_text(self) -> str:
        """Return JSON that `structure_of_text` reads."""
        return json.dumps([self.tree, self.skeleton, self.leaves])


def structure_of(element: Element) -> Structure:
    """Return the structure of an element.

    Example:
        >>> from jaxdist.data._reading.elements import ElementReader
        >>> from jaxdist.data._sharing.structure import structure_of
        >>> structure_of(ElementReader()({"x": np.ones((4, 2), np.int8)}, 0)).leaves
        (("batch['x']", 'int8', (2,)),)
    """
    leaves = tuple(
        (name, str(device_dtype(x.dtype)), tuple(x.shape[1:]) if x.ndim else None)
        for name, x in element.named_leaves()
    )
    skeleton = json.dumps(_describe(element.treedef.unflatten(range(len(leaves)))))
    return Structure(str(element.treedef), skeleton, leaves)


def structure_of_text(text: str) -> Structure:
    """Return the structure that `to_text` wrote."""
    tree, skeleton, leaves = json.loads(text)
    named = tuple((n, d, None if dims is None else tuple(dims)) for n, d, dims in leaves)
    return Structure(tree, skeleton, named)


def make_empty(structure: Structure, owner: int) -> Element:
    """Return an element without rows, for a process that has no element.

    Args:
        structure: The structure of another process.
        owner: The index of this process.

    Raises:
        ProgramMismatchError: The containers are not built into Python, so they cannot be made here.
    """
    try:
        leaves: list[Any] = [
            np.zeros(() if dims is None else (0, *dims), np.dtype(dtype))
            for _, dtype, dims in structure.leaves
        ]
        skeleton = json.loads(structure.skeleton)
        built = None if skeleton is None else _build(skeleton, leaves)
    except TypeError:  # a dtype that NumPy does not know
        built = None
    if built is None:
        raise ProgramMismatchError(
            f"{name_call()}: process {owner} has no element at all, and the batches of the others "
            f"are {structure.tree}.\n\nA process without data takes part with batches of no rows. "
            "It can build dicts, lists and tuples of arrays, and no other containers.\n\nGive "
            "every process one element or more, or make the batches dicts of arrays.",
            (owner,),
        )
    flat, treedef = jax.tree.flatten(built[0])
    return Element(flat, treedef, 0 if structure.has_rows else None)


def check_equal(structures: Sequence[Structure | None]) -> None:
    """Check that all processes that have a structure have the same one.

    Raises:
        ProgramMismatchError: Structures differ; the message names the processes and the first leaf
            that differs.
    """
    culprits, usual = find_odd_ones(structures)
    if not culprits or usual is None:
        return
    first = culprits[0]
    found, wanted = _describe_difference(structures[first], structures[usual])
    which = ", ".join(f"process {p}" for p in culprits)
    raise ProgramMismatchError(
        f"{name_call()}: the batches of {which} are not built like those of the others.\n"
        f"  there: {found}\n"
        f"  else:  {wanted}\n\n"
        "All processes run one program, so their batches have the same structure, dtypes and "
        "trailing dims in each step; only the rows may differ.\n\n"
        "Make the same batches in every process; pad dims that vary to one length.",
        culprits,
    )


def _describe_difference(found: Structure | None, usual: Structure | None) -> tuple[str, str]:
    one, other = ({n: (d, s) for n, d, s in x.leaves} if x else {} for x in (found, usual))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            return _show_leaf(name, one), _show_leaf(name, other)
    return (found.tree if found else ""), (usual.tree if usual else "")


def _show_leaf(name: str, leaves: dict[str, Any]) -> str:
    if name not in leaves:
        return f"no {name}"
    dtype, dims = leaves[name]
    if dims is None:
        return f"{name} is a scalar of {dtype}"
    return f"{name} is {dtype}[{', '.join(['rows', *map(str, dims)])}]"


def _describe(tree: Any) -> Any:
    """Return nested containers as JSON values; None if one is not built into Python."""
    if tree is None:
        return ["none"]
    if isinstance(tree, int):
        return ["leaf", tree]
    kind = {dict: "dict", list: "list", tuple: "tuple"}.get(type(tree))
    if kind is None or (kind == "dict" and not all(isinstance(k, str) for k in tree)):
        return None
    parts = [_describe(x) for x in (tree.values() if kind == "dict" else tree)]
    return None if None in parts else [kind, parts, [*tree] if kind == "dict" else None]


def _build(skeleton: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return a list of one item: the containers that `_describe` described, with `leaves`."""
    kind = skeleton[0]
    if kind == "none":
        return [None]
    if kind == "leaf":
        return [leaves[skeleton[1]]]
    parts = [_build(x, leaves)[0] for x in skeleton[1]]
    if kind == "dict":
        return [dict(zip(skeleton[2], parts, strict=True))]
    return [parts if kind == "list" else tuple(parts)]
