"""Traces the call of a Keras model as a program for a number of rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras.forward.marks import ADD_UP, mark, trace_with_marks
from jaxdist._keras.models import forget_losses
from jaxdist._keras.rows import Rows, use_rows


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
