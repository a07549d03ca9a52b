"""Primitives that convert between pieces and arrays, and primitives that run on pieces.

See Note [Pieces in a trace].
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist.errors import ShardedArrayError

# Note [Pieces in a trace]
# jaxdist traces a step with sharded arrays in their whole shapes, so that code which looks at a
# shape sees the shape of the array, not that of a piece. `PIECE` turns the piece of this replica
# into the array, and `OPEN` turns the array into the piece. Before the step runs, jaxdist rewrites
# the trace in terms of pieces, which removes both primitives. With one piece their operand and
# their result have the same shape from the start, so they are lowered to nothing.


def _resize(array: Any, dim: int, size: int) -> Any:
    return array.update(shape=(*array.shape[:dim], size, *array.shape[dim + 1 :]))


def _lower(ctx: Any, x: Any, *, divisor: int, **_: Any) -> list[Any]:
    # Other shapes mean that the rewriting did not reach this operation, and that its program would
    # compute with arrays of the wrong size. A mean is computed by the rewriting too.
    [before], [after] = ctx.avals_in, ctx.avals_out
    if before.shape != after.shape or divisor > 1:
        raise ShardedArrayError(
            f"An array in pieces, {after.dtype}{list(after.shape)}, is used inside an operation of "
            "your own that holds a program, or in a step within a step.\n\n"
            "jaxdist does not find arrays in pieces in such a place.\n\n"
            "Gather it before: jaxdist.partition.gather(value)."
        )
    return [x]


def _identity(x: Any, **_: Any) -> Any:
    return x


# Note [Two transposes]
# With sharded parameters the gradient is the mean over the replicas. So the gather W = G(A), from
# pieces to whole arrays, has as its transpose the mean M: the cotangents of all replicas, summed,
# scattered and divided. Whole arrays have as inner product the mean over replicas of their
# products, <V, W> = mean(V_r . W_r), and arrays in pieces that of the one array. With these,
# <V, G A> = <M V, A>, so the transpose of M is G: nothing is divided a second time, and a gradient
# of a gradient is that of one device. Therefore the division is not an operation of its own in the
# trace. It is a parameter of both marks, and each is the other's transpose.

# Declares its operand to be the piece of this replica, as `Sharded(array, dim, size)` does in a
# step. The result is the array. Before, the operand is summed over the axes `others` and divided by
# `divisor`: `take_mean`, which is evaluated when the trace is rewritten.
PIECE = Primitive("jaxdist_piece")
PIECE.def_impl(_identity)
PIECE.def_abstract_eval(lambda x, *, cut, rows, divisor, others: _resize(x, cut.dim, cut.size))
mlir.register_lowering(PIECE, _lower)

# Returns the piece of this replica as an independent array. `divisor` and `others` are those of its
# transpose. `name` is the name of a result of the step, for error messages.
OPEN = Primitive("jaxdist_open_piece")
OPEN.def_impl(_identity)
OPEN.def_abstract_eval(lambda x, *, cut, rows, divisor, others, name: _resize(x, cut.dim, rows))
mlir.register_lowering(OPEN, _lower)


def take_mean(x: Any, *, divisor: int, others: tuple[str, ...]) -> Any:
    """Return what `PIECE` declares to be a piece, from its operand."""
    if others:
        x = jax.lax.psum(x, others)
    return x / divisor if divisor > 1 else x


ad.deflinear2(OPEN, lambda ct, *_, name, **params: [PIECE.bind(ct, **params)])
ad.deflinear2(PIECE, lambda ct, *_, **params: [OPEN.bind(ct, name="", **params)])


# Returns its operand, an array in pieces that was passed to `all_reduce`. The array is the same for
# all replicas, so nothing is reduced; the mark tells the proof where the user called it.
REDUCED_PIECES = Primitive("jaxdist_reduced_pieces")
REDUCED_PIECES.def_impl(_identity)
REDUCED_PIECES.def_abstract_eval(_identity)
mlir.register_lowering(REDUCED_PIECES, lambda ctx, x: [x])
ad.deflinear2(REDUCED_PIECES, lambda ct, *_: [ct])
batching.primitive_batchers[REDUCED_PIECES] = lambda args, dims: (
    REDUCED_PIECES.bind(args[0]),
    dims[0],
)


def _make_batching_rule(primitive: Primitive) -> Any:
    def rule(args: Any, dims: Any, *, cut: Any, **params: Any) -> Any:
        [x], [dim] = args, dims
        return primitive.bind(x, cut=cut.insert_dim(dim), **params), dim

    return rule


batching.primitive_batchers[PIECE] = _make_batching_rule(PIECE)
batching.primitive_batchers[OPEN] = _make_batching_rule(OPEN)

# The primitives that may run on pieces of an array instead of the whole array.
# Each element of a result depends only on the elements of the operands at the same index (or on
# scalar operands), and no parameter holds a shape. This is an allow-list: a primitive that is not
# listed, such as one of a newer JAX, gets the whole array.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic
    lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeros_like
    """.split()
)
