"""Primitives and pieces: two that convert pieces and arrays, and those that run on pieces.

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


def _lower(ctx: Any, x: Any, **_: Any) -> list[Any]:
    # Other shapes mean that the rewriting did not reach this operation, and that its program would
    # compute with arrays of the wrong size.
    [before], [after] = ctx.avals_in, ctx.avals_out
    if before.shape != after.shape:
        raise ShardedArrayError(
            f"An array in pieces, {after.dtype}{list(after.shape)}, is used inside an operation of "
            "your own that holds a program, or in a step within a step.\n\n"
            "jaxdist does not find arrays in pieces in such a place.\n\n"
            "Gather it before: jaxdist.partition.gather(value)."
        )
    return [x]


def _identity(x: Any, **_: Any) -> Any:
    return x


# Declares its operand to be the piece of this replica, as `Sharded(array, dim, size)` does in a
# step. The result is the array. The gradient is the piece of the array's gradient.
PIECE = Primitive("jaxdist_piece")
PIECE.def_impl(_identity)
PIECE.def_abstract_eval(lambda x, *, cut, rows: _resize(x, cut.dim, cut.size))
mlir.register_lowering(PIECE, _lower)

# Returns the piece of this replica as an independent array. The gradient is declared a piece again,
# after it is summed over the axes `others` and divided by `divisor`. `name` is the name of a result
# of the step, for error messages.
OPEN = Primitive("jaxdist_open_piece")
OPEN.def_impl(_identity)
OPEN.def_abstract_eval(lambda x, *, cut, rows, divisor, others, name: _resize(x, cut.dim, rows))
mlir.register_lowering(OPEN, _lower)


def _transpose_open(
    ct: Any, *_: Any, cut: Any, rows: int, divisor: int, others: tuple[str, ...], name: str
) -> list[Any]:
    if others:
        ct = jax.lax.psum(ct, others)
    if divisor > 1:
        ct = ct / divisor
    return [PIECE.bind(ct, cut=cut, rows=rows)]


def _transpose_piece(ct: Any, *_: Any, cut: Any, rows: int) -> list[Any]:
    return [OPEN.bind(ct, cut=cut, rows=rows, divisor=1, others=(), name="")]


ad.deflinear2(OPEN, _transpose_open)
ad.deflinear2(PIECE, _transpose_piece)


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
