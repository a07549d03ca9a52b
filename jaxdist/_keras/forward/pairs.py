"""Traces the call of a Keras model for two numbers of rows, and keeps the proofs from them.

Note [Proofs of steps op by op]
A compiled step is traced once, and so are the programs of its proofs. Op by op, the code of the
layers runs at every step, and may compute something else: a callback may have changed an attribute
that a layer reads. So the call is traced at every step for the rows of the replica. If this
gives the program of an earlier step, the second trace and all proofs are reused.
"""

import dataclasses
from collections.abc import Sequence
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


def trace_forward(
    model: Any, trainable: Sequence[Any], fixed: Sequence[Any], x: Any, rows: Rows, training: bool
) -> Forward:
    """Trace the call of a model for the rows of one replica.

    Args:
        model: The model.
        trainable: The values or shapes of the trainable variables.
        fixed: The values or shapes of the other variables.
        x: A batch; only its shapes without the rows count.
        rows: The numbers of rows and of replicas.
        training: Whether the model is called for training.
    """
    kwargs = {"training": training} if model._call_has_training_arg else {}
    num_fixed = sum(v.regularizer is not None for v in model.trainable_variables)
    numbers = {id(v): n for n, v in enumerate(model.non_trainable_variables)}
    counts: list[int] = []

    def call(replica: Any, trainable: Any, fixed: Any, x: Any) -> Any:
        known = TracedReplica(rows.replica.strategy, rows.count, replica)
        own = Rows(rows.own, rows.total, known, has_shares=False)
        forget_losses(model)
        with use_rows(own), trace_with_marks(numbers):
            outputs, new, added = model.stateless_call(
                trainable, fixed, x, return_losses=True, **kwargs
            )
        losses = [jnp.sum(loss) for loss in added[: len(added) - num_fixed]]
        leaves = jax.tree.leaves(outputs)
        counts[:] = [len(leaves), len(losses)]
        return leaves, list(new), losses

    def shape(array: Any) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    def shape_of_rows(array: Any) -> Any:
        return jax.ShapeDtypeStruct((rows.own, *array.shape[1:]), array.dtype)

    closed = jax.make_jaxpr(call)(
        jax.ShapeDtypeStruct((), jnp.int32),
        [shape(v) for v in trainable],
        [shape(v) for v in fixed],
        jax.tree.map(shape_of_rows, x),
    )
    return Forward(closed, len(trainable), len(fixed), *counts)


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
    """The traces of the steps of a model.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[Any, Pair] = {}

    def find(
        self,
        trainable: Sequence[Any],
        fixed: Sequence[Any],
        x: Any,
        rows: Rows,
        sizes: tuple[int, int],
        training: bool,
    ) -> Pair:
        """Return the traces of a call of the model.

        Args:
            trainable: The values of the trainable variables.
            fixed: The values of the other variables.
            x: The rows of this replica.
            rows: The number of rows.
            sizes: The two numbers of rows.
            training: Whether the model is called for training.

        Raises:
            UnsupportedError: JAX cannot trace the call for these numbers of rows.
        """

        key = sizes, training, jax.tree.structure(x), _get_shapes(trainable, fixed, x)
        given = trainable, fixed, x, rows
        with trace_beside_step():
            one = self._trace(*given, sizes[0], sizes[1], training)
            kept = self._kept.get(key)
            if kept is not None and are_same(kept.one.closed, one.closed):
                return kept
            pair = Pair(one, self._trace(*given, sizes[1], sizes[1], training))
        if not _has_tracers(pair.one) and not _has_tracers(pair.more):
            self._kept[key] = pair
        return pair

    def _trace(
        self,
        trainable: Sequence[Any],
        fixed: Sequence[Any],
        x: Any,
        rows: Rows,
        own: int,
        total: int,
        training: bool,
    ) -> Forward:
        size = Rows(own, total, rows.replica)
        try:
            return trace_forward(self._model, trainable, fixed, x, size, training)
        except Exception as error:
            raise UnsupportedError(
                f"Layers of the Keras model {name_of(self._model)!r} add losses or change state of "
                f"their own, and the call of the model cannot be traced for {own} rows of a "
                f"replica, which has {rows.own}: {type(error).__name__}: {error}\n\n"
                "jaxdist compares two traces to find what belongs to the rows of all replicas.\n\n"
                "Let the layers be functions that JAX can trace for every number of rows, without "
                "decisions of Python by the values of arrays."
            ) from error


def _get_shapes(trainable: Sequence[Any], fixed: Sequence[Any], x: Any) -> tuple[Any, ...]:
    of_rows = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(x)]
    return (*[(v.shape, v.dtype) for v in (*trainable, *fixed)], *of_rows)


def _has_tracers(forward: Forward) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in forward.closed.consts)
