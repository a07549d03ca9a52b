"""Traces the call of a Keras model for two numbers of rows, and keeps the proofs from them.

Note [Proofs of steps op by op]
A compiled step is traced once, and so are the programs of its proofs. Op by op, the code of the
layers runs at every step, and may compute something else: a callback may have changed an attribute
that a layer reads. So the call is traced at every step for the rows of the replica. If this
gives the program of an earlier step, the second trace and all proofs are reused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._collectives import trace_beside_step
from jaxdist._keras.forward.aligned import are_same
from jaxdist._keras.forward.marks import ADD_UP, mark, trace_with_marks
from jaxdist._keras.models import forget_losses, name_of
from jaxdist._keras.rows import Rows, use_rows
from jaxdist.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class TracedReplica:
    """A replica in a program that is traced for a proof: its number is an input."""

    strategy: Any
    num_replicas_in_sync: int
    replica_id_in_sync_group: Any

    def all_reduce(self, how: str, value: Any) -> Any:
        """Mark a sum over the replicas; layers of Keras use no other all-reduce."""
        del how
        return jax.tree.map(lambda x: mark(ADD_UP, lambda a: a, x), value)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """A call of a model as a program.

    The inputs are the number of the replica, the trainable variables, the other variables, and the
    leaves of the batch. The results are the leaves of the outputs, the other variables after the
    call, and the sum of each loss that the call adds, without those of weight regularizers.
    """

    closed: Any
    num_trainable: int
    num_fixed: int
    num_outputs: int
    num_losses: int

    def result_of(self, number: int) -> int:
        """Return the number of the result with the new value of a variable."""
        return self.num_outputs + number

    def input_of(self, number: int) -> int:
        """Return the number of the input with the value of a non-trainable variable."""
        return 1 + self.num_trainable + number

    @property
    def first_of_rows(self) -> int:
        """The number of the first input that has rows."""
        return 1 + self.num_trainable + self.num_fixed

    @property
    def losses(self) -> list[int]:
        """The numbers of the results that are losses."""
        start = self.num_outputs + self.num_fixed
        return list(range(start, start + self.num_losses))

    def is_changed(self, number: int) -> bool:
        """Whether the call assigns a non-trainable variable."""
        jaxpr = self.closed.jaxpr
        return jaxpr.outvars[self.result_of(number)] is not jaxpr.invars[self.input_of(number)]


def trace_rows(
    model: Any, rows: Rows, function: Callable[[Any, Any], Any], state: Any, x: Any
) -> Any:
    """Return the program of `function(state, x)` on a replica with `rows.own` rows.

    The number of the replica is the first input. Only the shapes of `state` count, and those of `x`
    without the rows.
    """
    numbers = {id(v): n for n, v in enumerate(model.non_trainable_variables)}

    def call(number: Any, state: Any, x: Any) -> Any:
        replica = TracedReplica(rows.replica.strategy, rows.count, number)
        own = Rows(rows.own, rows.total, replica, has_shares=False)
        forget_losses(model)
        with use_rows(own), trace_with_marks(numbers):
            return function(state, x)

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def shape_of_rows(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((rows.own, *leaf.shape[1:]), leaf.dtype)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.make_jaxpr(call)(number, jax.tree.map(shape, state), jax.tree.map(shape_of_rows, x))


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a model in the step of a replica.

    Args:
        model: The model.
        trainable: The values of the trainable variables.
        fixed: The values of the other variables before the call.
        x: The rows of this replica.
        rows: The number of rows.
        training: Whether the model is called for training.
    """

    model: Any
    trainable: Sequence[Any]
    fixed: Sequence[Any]
    x: Any
    rows: Rows
    training: bool

    def trace(self, rows: Rows) -> Forward:
        """Trace the call for other numbers of rows."""
        model = self.model
        kwargs = {"training": self.training} if model._call_has_training_arg else {}
        num_regularizers = sum(v.regularizer is not None for v in model.trainable_variables)
        counts: list[int] = []

        def call(state: Any, x: Any) -> Any:
            outputs, new, added = model.stateless_call(*state, x, return_losses=True, **kwargs)
            losses = [jnp.sum(loss) for loss in added[: len(added) - num_regularizers]]
            leaves = jax.tree.leaves(outputs)
            counts[:] = [len(leaves), len(losses)]
            return leaves, list(new), losses

        state = list(self.trainable), list(self.fixed)
        closed = trace_rows(model, rows, call, state, self.x)
        return Forward(closed, len(self.trainable), len(self.fixed), *counts)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A call of a model for two numbers of rows.

    Args:
        one: The program for the rows of one replica.
        more: The program for more rows.
        proved: The results of proofs, by question.
    """

    one: Forward
    more: Forward
    proved: dict[Any, Any] = dataclasses.field(default_factory=dict)


class Pairs:
    """The traces of the steps of a model."""

    def __init__(self) -> None:
        self._kept: dict[Any, Pair] = {}

    def find(self, call: Call, sizes: tuple[int, int]) -> Pair:
        """Return the traces of a call of the model for two numbers of rows.

        Raises:
            UnsupportedError: JAX cannot trace the call for these numbers of rows.
        """
        shapes = [(v.shape, v.dtype) for v in (*call.trainable, *call.fixed)]
        shapes += [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(call.x)]
        key = sizes, call.training, jax.tree.structure(call.x), tuple(shapes)
        with trace_beside_step():
            one = _trace(call, sizes[0], sizes[1])
            kept = self._kept.get(key)
            if kept is not None and are_same(kept.one.closed, one.closed):
                return kept
            pair = Pair(one, _trace(call, sizes[1], sizes[1]))
        if not _has_tracers(pair.one) and not _has_tracers(pair.more):
            self._kept[key] = pair
        return pair


def _trace(call: Call, own: int, total: int) -> Forward:
    try:
        return call.trace(Rows(own, total, call.rows.replica))
    except Exception as error:
        raise UnsupportedError(
            f"Layers of the Keras model {name_of(call.model)!r} add losses or change state of "
            f"their own, and the call of the model cannot be traced for {own} rows of a "
            f"replica, which has {call.rows.own}: {type(error).__name__}: {error}\n\n"
            "jaxdist compares two traces to find what belongs to the rows of all replicas.\n\n"
            "Let the layers be functions that JAX can trace for every number of rows, without "
            "Python branches that depend on the values of arrays."
        ) from error


def _has_tracers(forward: Forward) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in forward.closed.consts)
