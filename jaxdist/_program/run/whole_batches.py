"""Logs steps in which every replica computes the same rows.

A batch that is passed to `run` as a plain array is copied to all replicas. The results are those of
a step that gets all rows, but several devices take as long as one. In a function that JAX traces, a
batch that is split over the devices looks the same, and a sum over the replicas counts it once for
each of them.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.exact import is_key
from jaxdist._program.arguments.leaf_names import leaf_names
from jaxdist._program.proof.dependence import Part, part_of_result
from jaxdist._program.proof.same_work import find_same_work
from jaxdist._program.run.call import Call
from jaxdist._program.state.carried import find_carried_arguments, named_arguments_of
from jaxdist._program.trace.axis_errors import name_of
from jaxdist._program.trace.trace import Argument, Signature, TracedStep, replica_axes_of
from jaxdist._program.variables.access import UpdateOfCopies
from jaxdist._values import Kind, origin_of

_LOG = logging.getLogger("jaxdist")

# Names of arguments, keys and attributes that hold the state of modules and optimizers, or keys.
_STATE_NAMES = frozenset(
    """
    params parameters weights variables batch_stats state train_state opt_state optimizer_state
    optimizer model module key keys rng rngs
    """.split()
)
_STATE_CLASSES = ("State", "Module", "Variable", "Optimizer")
_UPDATED = (Part.MOVED, Part.UPDATED)
_WORDS_OF_KEYS = (2, 4)


class WholeBatches:
    """Finds whole batches among the arguments of one step, and logs each once for a program.

    Args:
        fn: Returns the function of the user.
        layout: The layout of the strategy.
    """

    def __init__(self, fn: Callable[[], Any], layout: ReplicaMesh) -> None:
        self._fn = fn
        self._layout = layout
        # A traced call gets a line of its own: there the numbers may be wrong, too.
        self._checked: set[tuple[Signature, bool]] = set()

    def find(self, call: Call) -> tuple[int, ...]:
        """Return the arguments of a call that are on no mesh yet and have a row for each replica.

        Returns:
            Their numbers among the traced arguments; none if the program was checked before.
        """
        layout = self._layout
        if layout.num_replicas == 1 or layout.described is not None:
            return ()
        # `extended.update` and `update_non_slot` change equal copies in the same way.
        if isinstance(self._fn(), UpdateOfCopies):
            return ()
        # One process is enough: all of them run the same program with equal arguments.
        if layout.process.index != min(layout.device_owners.values()):
            return ()
        found = tuple(n for n, x in enumerate(call.flat.dynamic) if _is_whole_batch(x, layout))
        return () if not found or _key(call) in self._checked else found

    def check(
        self,
        call: Call,
        batches: Sequence[int],
        signature: Signature,
        traced: TracedStep,
        reached: frozenset[int],
    ) -> None:
        """Log whole batches of a program in which every replica does the same work.

        Args:
            call: The call.
            batches: Its arguments, from `find`.
            signature: The signature of the program, with the variables that it uses.
            traced: The trace of one replica.
            reached: The inputs of the program that `find_same_work` returned.
        """
        self._checked.add(_key(call))
        # The inputs begin with the variables of NNX objects and the assigned variables.
        num_state = traced.num_graph
        chosen = [n for n in batches if num_state + n in reached]
        if not chosen:
            return
        names = leaf_names(self._fn(), call.signature)[-len(call.flat.dynamic) :]
        in_state = {*_find_leaves_of_state(named_arguments_of(signature, traced).values())}
        chosen = [n for n in chosen if n not in in_state and not _is_named_as_state(names[n])]
        chosen = _without_updated(chosen, signature, traced, self._layout.num_replicas)
        if chosen:
            leaves = [call.flat.dynamic[n] for n in chosen]
            shapes = {names[n]: np.shape(x) for n, x in zip(chosen, leaves, strict=True)}
            is_traced = any(_is_of_unknown_place(x) for x in leaves)
            explain = _explain_traced if is_traced else _explain
            _LOG.warning("%s", explain(self._fn(), shapes, self._layout.num_replicas))


def describe_whole_beside_split(
    fn: Callable[..., Any], signature: Signature, names: Sequence[str], num_replicas: int
) -> str | None:
    """Return a note for an error of a step that gets its rows of one array, and all of another.

    Args:
        fn: The function of the user. Arguments whose names are those of a state are left out.
        signature: The signature of the call.
        names: The names of its traced arguments.
        num_replicas: The number of replicas.

    Returns:
        The note, or None if no array has as many rows as one that is split.
    """
    inputs = signature.inputs[len(signature.inputs) - len(names) :]
    parameters = leaf_names(fn, signature)[len(signature.inputs) - len(names) :]
    named = [
        (n, s)
        for n, s, parameter in zip(names, inputs, parameters, strict=True)
        if s.shape and not s.is_scalar and not _is_named_as_state(parameter)
    ]
    split = {s.shape[0]: n for n, s in named if s.kind is Kind.PER_REPLICA}
    whole = [n for n, s in named if s.kind is Kind.MIRRORED and s.shape[0] in split]
    if not whole:
        return None
    rows = next(s.shape[0] for n, s in named if n == whole[0])
    return (
        f"{split[rows]} is split over the replicas: each gets {rows // num_replicas} of its {rows} "
        f"rows. {whole[0]} is a plain array, and each replica gets all of its {rows} rows. To "
        f"split it too, pass jax.device_put({whole[0]}, strategy.per_replica_sharding), or take "
        "both from one strategy.experimental_distribute_dataset."
    )


def find_in_program(
    signature: Signature, traced: TracedStep, layout: ReplicaMesh
) -> frozenset[int]:
    """Return the inputs of a traced program that reach its results, if all replicas do the same."""
    axes = replica_axes_of(layout)
    numbers = [o if type(o) is Argument else None for o in traced.operands]
    slots = [None if n is None else signature.inputs[n] for n in numbers]
    found = find_same_work(
        traced.jaxpr,
        [s is not None and bool(s.differs(axes)) for s in slots],
        [s is not None and s.cut is not None for s in slots],
        traced.cuts,
        axes,
    )
    return frozenset(n for i in found if (n := numbers[i]) is not None)


def _key(call: Call) -> tuple[Signature, bool]:
    return call.signature, call.is_traced


def _is_whole_batch(leaf: Any, layout: ReplicaMesh) -> bool:
    """Whether an argument is on no mesh yet, and has at least one row for each replica."""
    if not isinstance(leaf, (np.ndarray, jax.Array)) or not leaf.ndim:
        return False
    if leaf.shape[0] < layout.num_replicas or _is_key(leaf):
        return False
    if isinstance(leaf, np.ndarray):
        return True
    if isinstance(leaf, jax.core.Tracer):
        origin = origin_of(leaf)
        if origin is None:
            return True
        sharding, is_committed = origin.sharding, origin.is_committed
    else:
        sharding, is_committed = leaf.sharding, _compat.is_committed(leaf)
    if sharding is None:
        return True
    is_there = is_committed and sharding.device_set == layout.device_set
    return len(sharding.device_set) == 1 and not is_there


def _is_named_as_state(name: str) -> bool:
    return not _STATE_NAMES.isdisjoint(re.findall(r"\w+", name.lower()))


def _is_of_unknown_place(leaf: Any) -> bool:
    # Only `jaxdist.function` knows where the arguments of a traced function are.
    return isinstance(leaf, jax.core.Tracer) and origin_of(leaf) is None


def _is_key(leaf: Any) -> bool:
    return is_key(leaf) or (leaf.dtype == jnp.uint32 and leaf.shape[-1] in _WORDS_OF_KEYS)


def _find_leaves_of_state(nodes: Any, in_state: bool = False) -> Iterator[int]:
    """Yield the numbers of arguments in nodes whose class has the name of a state."""
    for node in nodes:
        if type(node) is Argument:
            if in_state:
                yield int(node)
        elif isinstance(node, (tuple, list)):
            is_state = hasattr(node, "_fields") and type(node).__name__.endswith("State")
            yield from _find_leaves_of_state(node, in_state or is_state)
        elif isinstance(node, dict):
            yield from _find_leaves_of_state(node.values(), in_state)
        elif in_state or any(c.__name__.endswith(_STATE_CLASSES) for c in type(node).__mro__):
            yield from (int(x) for x in jax.tree.leaves(node) if type(x) is Argument)


def _without_updated(
    chosen: list[int], signature: Signature, traced: TracedStep, num_replicas: int
) -> list[int]:
    """Return the arguments without those that are returned as state, such as plain parameters."""
    carried = find_carried_arguments(signature, traced, num_replicas)
    offset = traced.num_graph
    others = [n for n in chosen if offset + n not in carried.values()]
    if others:
        return others
    # A batch may be returned with the structure that it had. A state is returned with a step added.
    variables = {
        int(operand): variable
        for operand, variable in zip(traced.operands, traced.jaxpr.invars, strict=True)
        if type(operand) is Argument
    }
    parts = [
        part_of_result(traced.jaxpr, variables[before], {}, after)
        for after, before in carried.items()
        if before - offset in chosen
    ]
    # A residual block is an update, too, so a single array does not prove a state.
    return [] if len(parts) > 1 and any(part in _UPDATED for part in parts) else chosen


@called("strategy.run")
def _explain(fn: Any, shapes: dict[str, tuple[int, ...]], num_replicas: int) -> str:
    name, shape = next(iter(shapes.items()))
    by_hand = (
        f"; or a single batch with jax.device_put({name}, strategy.per_replica_sharding)"
        if shape[0] % num_replicas == 0
        else ""
    )
    return (
        f"{name_call()}({name_of(fn)}): each of {num_replicas} replicas computes all rows of "
        f"{_list_shapes(shapes)}. A plain array is the same on every replica, and nothing else in "
        "this step differs between them, so all devices do the same work. To split the rows, take "
        f"the batches from strategy.experimental_distribute_dataset(batches){by_hand}. If this is "
        "intended, place the array on all devices first: "
        "jax.device_put(x, strategy.replicated_sharding)"
    )


@called("strategy.run")
def _explain_traced(fn: Any, shapes: dict[str, tuple[int, ...]], num_replicas: int) -> str:
    name = next(iter(shapes))
    return (
        f"{name_call()}({name_of(fn)}): each of {num_replicas} replicas computes all rows of "
        f"{_list_shapes(shapes)}. In a function that JAX traces (jax.jit, scan), an array does not "
        "show how it is split over the devices, so it is the same on every replica, and a sum over "
        f"the replicas counts each row {num_replicas} times. To split the rows, pass "
        f"jaxdist.PerReplica.of_global({name}). If every replica is to compute all rows, ignore "
        "this line"
    )


def _list_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    listed = [f"{name} {list(shape)}" for name, shape in shapes.items()]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
