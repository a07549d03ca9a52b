"""Attaches shapes of all replicas, and uneven steps ahead, to the `PerReplica` of a dataset."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jaxdist import _compat, _processes
from jaxdist._mesh import ReplicaMesh
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist.errors import ProgramMismatchError

# Note [Agreed shapes]
# In a job of several processes a `PerReplica` whose values are stored one by one has those of the
# local replicas. Before a dataset gives such a value, the processes have agreed on the shapes of
# all replicas, and the value carries them. So every process can compile the program of the whole
# step without another exchange.

# Note [Batches to come]
# The last batch of a pass often has fewer rows than the batches before it. Without this, a user
# would learn at the end of an epoch that the step cannot handle it. So an iterator that knows which
# batches will be uneven attaches this list to each batch that it gives. A step that is traced for
# such a batch is also traced for the uneven ones, before anything runs.

AgreedShapes: TypeAlias = tuple[tuple[int, ...], ...]


def mark_with_shapes(value: PerReplica, shapes: AgreedShapes) -> None:
    """Attach the shape of the value of every replica, in replica order."""
    value._agreed = shapes


def agreed_shapes(value: PerReplica) -> AgreedShapes | None:
    """Return the shape of the value of every replica, or None if it is not known.

    Example:
        >>> from jaxdist._values import agreed_shapes
        >>> agreed_shapes(PerReplica([1, 2])) is None
        True
    """
    # The slot is empty for values that no dataset gave.
    return getattr(value, "_agreed", None)


@dataclasses.dataclass(frozen=True)
class UnevenStep:
    """A step of a pass over data for which replicas have different numbers of rows."""

    number: int  # counted from 1
    rows: tuple[int, ...]  # for each replica
    is_last: bool

    def __str__(self) -> str:
        which = "the last batch of the data" if self.is_last else "an uneven batch of the data"
        found = f"{sum(self.rows)} rows on {len(self.rows)} replicas"
        return f"step {self.number}, {which} ({found})"


# All uneven steps of the pass that a batch belongs to.
Ahead: TypeAlias = tuple[UnevenStep, ...]


def mark_with_steps_ahead(batch: Any, ahead: Ahead) -> None:
    """Attach the uneven steps of a pass to the `PerReplica` values of one of its batches."""
    for leaf in _list_values(batch):
        if isinstance(leaf, PerReplica):
            leaf._ahead = ahead


def steps_ahead(value: PerReplica) -> Ahead:
    """Return the uneven steps of the pass that gave this value; `()` if they are not known."""
    # The slot is empty for values that no dataset gave.
    return getattr(value, "_ahead", ())


def copy_steps_ahead(given: Any, to: Any) -> None:
    """Copy what a dataset attached to `given`, also shapes, to `to` of the same structure."""
    for old, new in zip(_list_values(given), _list_values(to), strict=True):
        if not isinstance(old, PerReplica):
            continue
        if ahead := steps_ahead(old):
            mark_with_steps_ahead(new, ahead)
        if (shapes := agreed_shapes(old)) is not None:
            mark_with_shapes(new, shapes)


def _list_values(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PerReplica))


_CHANNEL = "values"


def find_shapes(name: object, value: PerReplica, layout: ReplicaMesh) -> AgreedShapes | None:
    """Return the shape of the value of every replica, in all processes.

    See Note [Agreed shapes]. Values that no dataset gave are compared here; a second call with the
    same value exchanges nothing.

    Cost:
        In a job of several processes one exchange over its key-value store, about 1 ms.

    Args:
        name: Its `str` names the value in errors, and is computed only for them.
        value: Values that are stored one by one. All processes pass the value of the same call.
        layout: The mesh of the strategy.

    Returns:
        The shapes, in replica order; None if some value has none.

    Raises:
        ContextError: This process has not joined any others.
        DeadlineExceededError: A process did not arrive within the `timeout_seconds` of the mesh.
        ProgramMismatchError: The ranks or dtypes of the processes differ.
    """
    own = [_describe(x) for x in value.values]
    if not layout.is_shared:
        return None if None in own else tuple(shape for shape, _ in filter(None, own))
    known = agreed_shapes(value)
    if known is not None:
        return known
    call, purpose = f"The call with {name}", f"the shapes of {name}"
    seconds = layout.timeout_seconds
    texts = _processes.exchange(call, _CHANNEL, json.dumps(own), seconds, purpose)
    reported = [json.loads(text) for text in texts]
    left = {process: iter(one) for process, one in enumerate(reported)}
    everyone = [next(left[process]) for process in layout.replica_owners]
    _check_alike(name, reported, layout)
    if None in everyone:
        return None
    shapes = tuple(tuple(shape) for shape, _ in everyone)
    mark_with_shapes(value, shapes)
    return shapes


def take_own(value: PerReplica, layout: ReplicaMesh) -> PerReplica:
    """Return the values of the replicas of this process.

    A program may list the values of all replicas, such as `PerReplica([1.0, 2.0])`, in every
    process. Then each process takes its own, as it does for any other value.
    """
    if value.is_global or not layout.is_shared:
        return value
    values = value.values
    if len(values) != layout.num_replicas or len(values) == len(layout.local_replicas):
        return value
    # All processes share a traced program, so it has the values of all replicas.
    if _compat.is_inside_trace():
        return value
    described = [_describe(x) for x in values]
    own = PerReplica([values[r] for r in layout.local_replicas])
    # Otherwise they are compared, and the error names a process that has other values.
    if None not in described and len({*map(_get_kind, described)}) == 1:
        mark_with_shapes(own, tuple(shape for shape, _ in filter(None, described)))
    return own


def _describe(array: Any) -> tuple[tuple[int, ...], str] | None:
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return tuple(array.shape), str(array.dtype)
    # Python numbers get the dtype that JAX gives them.
    return ((), type(array).__name__) if isinstance(array, (bool, int, float, complex)) else None


def _check_alike(name: object, reported: Sequence[Sequence[Any]], layout: ReplicaMesh) -> None:
    """Raise if values of other processes differ from those of process 0 in rank or dtype."""
    kinds = [sorted(set(map(_get_kind, own))) for own in reported]
    first: list[str] = next(filter(None, kinds), [])
    odd = [p for p, k in enumerate(kinds) if k and k != first]
    if not odd:
        return
    raise ProgramMismatchError(
        f"{name} has other values in process {odd[0]}: {', '.join(kinds[odd[0]])}, and "
        f"{', '.join(first)} elsewhere.\n\n"
        "The values of all replicas have one rank and one dtype.\n\n"
        "Convert them to one dtype in every process, and give them the same dims.",
        odd[:1],
    )


def _get_kind(described: Any) -> str:
    return "no array" if described is None else f"{described[1]} of rank {len(described[0])}"
