"""An interpreter that runs a traced program of whole arrays on the pieces of one replica.

# Note [Update on pieces]
`sharded_update` must give correct results for any optax transformation, without a list of those
that work on shards. So it traces `tx.update` on whole arrays, and runs the program operation by
operation on `Value`s (`values.py`), which are whole, in pieces, or a sum that is not reduced yet.
An operation runs on pieces only if that is known to be correct: elementwise operations of an
allow-list, and the rules of `rules.py`. For every other operation an all-gather makes whole arrays.
An unknown operation is therefore slow, but never wrong.
"""

from typing import Any

import jax

from jaxdist import _compat
from jaxdist._compat import CALLS
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import Interpreter
from jaxdist._update.rules import RULES
from jaxdist._update.values import Partial, Piece, Value, Whole
from jaxdist._values import ELEMENTWISE, Cut


class PieceInterpreter(Interpreter[Value]):
    """An interpreter of programs whose values are whole or in pieces.

    See Note [Update on pieces].

    Guarantees:
        Every operation gives the result that it gives on whole arrays. Elementwise operations,
        broadcasts, reductions and inner products run on pieces if the allow-list or the rules
        permit. Every other operation gets whole arrays, from an all-gather.
    """

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout

    def literal(self, literal: Any) -> Value:
        """Return the value of a literal, whole."""
        return self._wrap_whole(literal.val)

    def constant(self, variable: Any, value: Any) -> Value:
        """Return the value of a constant, whole."""
        return self._wrap_whole(value)

    def _wrap_whole(self, array: Any) -> Whole:
        return Whole(array, self._layout)

    def equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Return the results of one operation, by the first method that is known to be correct."""
        name = eqn.primitive.name
        # An effect (a print, a callback) must see whole arrays, as in the original program.
        if eqn.effects:
            return self.operation(eqn, inputs)
        rule = RULES.get(name)
        if rule is not None:
            found = rule(eqn, inputs)
            if found is not None:
                return [found]
        # `Broadcast` is not in this test: as an operand of an elementwise operation it may still
        # become a piece.
        if all(type(v) is Whole for v in inputs):
            return self.operation(eqn, inputs)
        if name in ELEMENTWISE:
            return self._run_elementwise(eqn, inputs)
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Return the results of an operation that needs whole arrays."""
        results = _compat.bind_like(eqn, [v.whole() for v in inputs], eqn.params)
        return [self._wrap_whole(x) for x in results]

    def call(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Return the results of a function call."""
        # A `shard_map`, or an all-reduce, counts as one operation.
        inside = eqn.primitive.name in CALLS
        return super().call(eqn, inputs) if inside else self.operation(eqn, inputs)

    def _run_elementwise(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        # Operands are scalars or have the shape of the result. An operand of another shape could
        # not be sharded along the same dim.
        shape = eqn.outvars[0].aval.shape
        shapes = {tuple(v.aval.shape) for v in eqn.invars} - {(), tuple(shape)}
        cut = next((v.cut for v in inputs if isinstance(v, Piece)), None)
        if cut is None or shapes or eqn.primitive.multiple_results:
            return self.operation(eqn, inputs)
        local = [v.piece(cut) for v in inputs]
        [result] = _compat.bind_like(eqn, local, eqn.params)
        return [Piece(result, cut, self._layout)]

    def cond(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Run a `cond` on pieces; a result is in pieces if an operand of its shape is."""
        # The operands of `switch` must be arrays, and a `Partial` is not one, so reduce it first.
        index, *operands = [
            self._wrap_whole(v.whole()) if isinstance(v, Partial) else v for v in inputs
        ]
        cuts = [v.cut if isinstance(v, Piece) else None for v in operands]
        avals = [v.aval for v in eqn.invars[1:]]
        known = {tuple(a.shape): c for a, c in zip(avals, cuts, strict=True) if c is not None}
        # All branches must return the same form, so it is chosen before any branch is traced.
        out = [known.get(tuple(v.aval.shape)) for v in eqn.outvars]

        def make_branch(program: Any) -> Any:
            def branch(*arrays: Any) -> list[Any]:
                given = [self._wrap(x, c) for x, c in zip(arrays, cuts, strict=True)]
                results_of_branch = self.run(program, given)
                return [_unwrap(v, c) for v, c in zip(results_of_branch, out, strict=True)]

            return branch

        arrays = [v.array if isinstance(v, Piece) else v.whole() for v in operands]
        branches = [make_branch(p) for p in eqn.params["branches"]]
        # Branches may contain all-gathers, so all replicas must take the same branch. `piece`
        # marks the scalar index, and `run` proves that it is equal on all replicas.
        results = jax.lax.switch(index.piece(Cut(0, 1)), branches, *arrays)
        return [self._wrap(x, c) for x, c in zip(results, out, strict=True)]

    def _wrap(self, array: Any, cut: Cut | None) -> Value:
        return self._wrap_whole(array) if cut is None else Piece(array, cut, self._layout)


def _unwrap(value: Value, cut: Cut | None) -> Any:
    return value.whole() if cut is None else value.piece(cut)
