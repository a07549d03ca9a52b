"""Rules for operations that may run on pieces, besides elementwise ones.

See Note [Update on pieces].
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._compat import CALLS
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import Interpreter
from jaxdist._update.values import Broadcast, Partial, Piece, Value, Whole
from jaxdist._values import ELEMENTWISE, NEUTRAL, Cut, reduce_over_replicas

# A rule returns the result, or None if the operation must run on whole arrays.
Rule = Callable[[Any, Sequence[Value]], Value | None]


def _broadcast(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    # Further inputs are sizes that are known only at run time.
    if len(inputs) != 1:
        return None
    [operand] = inputs
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    if isinstance(operand, Partial):
        operand = Whole(operand.whole(), operand.layout)
    # Not computed yet: the operation that uses it may need only the piece.
    if isinstance(operand, Whole):
        array = jnp.asarray(operand.array, eqn.invars[0].aval.dtype)
        return Broadcast(Whole(array, operand.layout, operand.name), shape, dims)
    if not isinstance(operand, Piece):
        return None
    cut = operand.cut._replace(dim=dims[operand.cut.dim])
    # A dim of size 1 that is broadcast is no longer the dim that was cut.
    if shape[cut.dim] != cut.size:
        return None
    local = cut.local_shape(shape, cut.pieces(operand.layout))
    return Piece(jax.lax.broadcast_in_dim(operand.array, local, dims), cut, operand.layout)


def _reshape(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    """Reshape a piece if the cut dim stays, or if it is the first and is merged with later dims."""
    [operand, *sizes] = inputs
    if sizes or not isinstance(operand, Piece):
        return None
    if eqn.params.get("dimensions") is not None:
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut, count = operand.cut, operand.cut.pieces(operand.layout)
    # A dim is unchanged if its size and the product of the dims before it are unchanged.
    lead = math.prod(before[: cut.dim])
    # Flattening. With padding the pieces would have a wrong length: the pieces of a flat array
    # have `ceil(n*m / R)` elements, and those of its rows `ceil(n / R) * m`.
    can_flatten = lead == 1 and not cut.padding(count)
    for dim, size in enumerate(after):
        is_flat = can_flatten and size == math.prod(before)
        if math.prod(after[:dim]) != lead or not (size == cut.size or is_flat):
            continue
        new = Cut(dim, size, cut.axes)
        local = new.local_shape(tuple(after), count)
        if math.prod(local) == operand.array.size:
            return Piece(operand.array.reshape(local), new, operand.layout)
    return None


def _transpose(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    [operand] = inputs
    if not isinstance(operand, Piece):
        return None
    order = tuple(eqn.params["permutation"])
    cut = operand.cut._replace(dim=order.index(operand.cut.dim))
    return Piece(jax.lax.transpose(operand.array, order), cut, operand.layout)


# Note [NaN in a maximum]
# XLA on CPU ignores nan in a maximum over many elements, and in one over devices. A nan in the
# gradients would then disappear, or become a large number. So the rule computes the maximum of the
# other numbers and a flag for nan, and puts nan back. Both are reduced by one collective.
_EXTREMES = frozenset({"reduce_max", "reduce_min"})


def _reduce(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    [operand] = inputs
    name, over = eqn.primitive.name, tuple(eqn.params["axes"])
    has_nan = name in _EXTREMES and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    if has_nan and over:
        return _reduce_extreme(eqn, operand, over)
    if not isinstance(operand, Piece):
        return None
    dtype, cut, layout = operand.array.dtype, operand.cut, operand.layout
    # `and` and `or` of booleans are their minimum and maximum. Bitwise ones of integers are not.
    is_bitwise = name in ("reduce_and", "reduce_or") and dtype != np.bool_
    if is_bitwise or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    if cut.dim not in over:
        return Piece(_bind(eqn, operand.array), _drop_dims(cut, over), layout)
    local = _bind(eqn, operand.mask_padding(NEUTRAL[name](dtype)))
    # Not reduced over the replicas yet, so that sums of several leaves share one all-reduce.
    if name == "reduce_sum":
        return Partial(local, None, layout, cut.over(layout))
    return Whole(reduce_over_replicas(name, local, cut.over(layout)), layout)


def _reduce_extreme(eqn: Any, operand: Value, over: tuple[int, ...]) -> Value | None:
    """Reduce to the largest or smallest number, or to nan. See Note [NaN in a maximum]."""
    neutral = NEUTRAL[eqn.primitive.name](eqn.invars[0].aval.dtype)
    if isinstance(operand, Whole):
        return Whole(
            _restore_nan(*_separate_nan(eqn, operand.array, over, neutral)), operand.layout
        )
    if not isinstance(operand, Piece):
        return None
    cut, layout = operand.cut, operand.layout
    if cut.dim not in over:
        array = _restore_nan(*_separate_nan(eqn, operand.array, over, neutral))
        return Piece(array, _drop_dims(cut, over), layout)
    # The sign turns a minimum into a maximum, so that one `pmax` reduces the number and the flag.
    largest, found = _separate_nan(eqn, operand.mask_padding(neutral), over, neutral)
    sign = -1 if eqn.primitive.name == "reduce_min" else 1
    both = jnp.stack([largest * sign, found.astype(largest.dtype)])
    both = jax.lax.pmax(both, cut.over(layout))
    return Whole(_restore_nan(both[0] * sign, both[1] > 0), layout)


def _separate_nan(eqn: Any, array: Any, over: tuple[int, ...], neutral: Any) -> tuple[Any, Any]:
    """Return the largest or smallest number that is not nan, and whether a nan exists."""
    array = jnp.asarray(array)
    is_nan = jnp.isnan(array)
    found = _bind(eqn, jnp.where(is_nan, jnp.asarray(neutral, array.dtype), array))
    return found, jnp.any(is_nan, axis=over)


def _restore_nan(array: Any, is_nan: Any) -> Any:
    return jnp.where(is_nan, jnp.asarray(jnp.nan, array.dtype), array)


def _bind(eqn: Any, array: Any) -> Any:
    return eqn.primitive.bind(array, **eqn.params)


def _drop_dims(cut: Cut, dims: tuple[int, ...]) -> Cut:
    """Return the `Cut` of the array without `dims`, none of which is cut."""
    return cut._replace(dim=cut.dim - sum(d < cut.dim for d in dims))


def _dot(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    """Multiply pieces if the cut dim is contracted, as in an inner product of two leaves."""
    left, right = inputs
    (of_left, of_right), (batch, _) = eqn.params["dimension_numbers"]
    if not (isinstance(left, Piece) and isinstance(right, Piece)) or batch:
        return None
    pairs = list(zip(of_left, of_right, strict=True))
    if left.cut[1:3] != right.cut[1:3] or (left.cut.dim, right.cut.dim) not in pairs:
        return None
    # Both are masked: the padding of one may be nan, and nan times 0 is nan.
    local = eqn.primitive.bind(left.mask_padding(0), right.mask_padding(0), **eqn.params)
    return Partial(local, None, left.layout, left.cut.over(left.layout))


def _add(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    first, second = inputs
    # Only for equal shapes and dtypes: `Partial.add` neither broadcasts nor promotes.
    if len({v.aval.shape for v in eqn.invars}) > 1 or len({v.aval.dtype for v in eqn.invars}) > 1:
        return None
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Partial) and isinstance(other, (Partial, Whole)):
            return one.add(other)
    return None


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "dot_general": _dot,
    "add": _add,
    "add_any": _add,
    **dict.fromkeys(NEUTRAL, _reduce),
}


# Note [Update on pieces]
# `sharded_update` must give correct results for any optax transformation, without a list of those
# that work on shards. So it traces `tx.update` on whole arrays, and runs the program operation by
# operation on `Value`s (`values.py`), which are whole, in pieces, or a sum that is not reduced yet.
# An operation runs on pieces only if that is known to be correct: elementwise operations of an
# allow-list, and the rules of `rules.py`. For every other operation an all-gather makes whole
# arrays. An unknown operation is therefore slow, but never wrong.
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
