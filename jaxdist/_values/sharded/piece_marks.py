"""Two marks between the piece that a replica holds and the array that it is a piece of.

A step is traced with arrays in pieces in their whole shapes, so that what looks at a shape sees
the one that it would see of the array. `PIECE` goes from the piece of this replica to the array,
and `OPEN` back. The traced step is put in terms of pieces before it runs, and then both are gone;
with one piece they are nothing from the start.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist.errors import ShardedArrayError


def _resized(array: Any, dim: int, size: int) -> Any:
    return array.update(shape=(*array.shape[:dim], size, *array.shape[dim + 1 :]))


def _lowered(ctx: Any, x: Any, **_: Any) -> list[Any]:
    [before], [after] = ctx.avals_in, ctx.avals_out
    if before.shape != after.shape:
        raise ShardedArrayError(
            f"An array in pieces, {after.dtype}{list(after.shape)}, is used inside an operation of "
            "your own that holds a program, or in a step within a step.\n\n"
            "jaxdist does not find arrays in pieces in such a place.\n\n"
            "Gather it before: jaxdist.partition.gather(value)."
        )
    return [x]


def _same(x: Any, **_: Any) -> Any:
    return x


# Declares a value to be the piece of this replica: `Sharded(array, dim, size)` says so. The
# result is the array. Its gradient is that of the piece.
PIECE = Primitive("jaxdist_piece")
PIECE.def_impl(_same)
PIECE.def_abstract_eval(lambda x, *, cut, rows: _resized(x, cut.dim, cut.size))
mlir.register_lowering(PIECE, _lowered)

# Takes the piece of this replica, an array of its own. Its gradient is a piece again: summed over
# the axes `others`, and divided by `divisor`. `name` is that of a result of the step.
OPEN = Primitive("jaxdist_open_piece")
OPEN.def_impl(_same)
OPEN.def_abstract_eval(lambda x, *, cut, rows, divisor, others, name: _resized(x, cut.dim, rows))
mlir.register_lowering(OPEN, _lowered)


def _closed_again(
    ct: Any, *_: Any, cut: Any, rows: int, divisor: int, others: tuple[str, ...], name: str
) -> list[Any]:
    if others:
        ct = jax.lax.psum(ct, others)
    if divisor > 1:
        ct = ct / divisor
    return [PIECE.bind(ct, cut=cut, rows=rows)]


def _opened_again(ct: Any, *_: Any, cut: Any, rows: int) -> list[Any]:
    return [OPEN.bind(ct, cut=cut, rows=rows, divisor=1, others=(), name="")]


ad.deflinear2(OPEN, _closed_again)
ad.deflinear2(PIECE, _opened_again)


def _mapped(primitive: Primitive) -> Any:
    def rule(args: Any, dims: Any, *, cut: Any, **params: Any) -> Any:
        [x], [dim] = args, dims
        return primitive.bind(x, cut=cut.behind(dim), **params), dim

    return rule


batching.primitive_batchers[PIECE] = _mapped(PIECE)
batching.primitive_batchers[OPEN] = _mapped(OPEN)
