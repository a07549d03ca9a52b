"""Keeps two traces of the call of a model, and the proofs from them, for later steps.

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

from jaxdist._collectives import trace_beside_step
from jaxdist._keras.forward.aligned import are_same
from jaxdist._keras.forward.traced import Forward, trace_forward
from jaxdist._keras.models import name_of
from jaxdist._keras.rows import Rows
from jaxdist.errors import UnsupportedError


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
