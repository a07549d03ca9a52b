"""Two marks that tell the analysis of a step where pieces of one array are.

Both leave nothing in the compiled program.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Declares a value to be the piece of this replica: `Sharded(array, dim, size)` says so.
PIECE = Primitive("jaxdist_piece")
PIECE.def_impl(lambda x, **_: x)
PIECE.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(PIECE, lambda ctx, x, **_: [x])
ad.deflinear2(PIECE, lambda ct, *_, **__: [ct])
batching.defvectorized(PIECE)

# Takes a piece for what it is, an array of this replica alone. Its gradient is a piece again:
# summed over the axes `others`, and divided by `divisor`.
OPEN = Primitive("jaxdist_open_piece")
OPEN.def_impl(lambda x, **_: x)
OPEN.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(OPEN, lambda ctx, x, **_: [x])
batching.defvectorized(OPEN)


def _transposed(
    ct: Any, *_: Any, cut: Any, divisor: int = 1, others: tuple[str, ...] = ()
) -> list[Any]:
    if others:
        ct = jax.lax.psum(ct, others)
    if divisor > 1:
        ct = ct / divisor
    return [PIECE.bind(ct, cut=cut)]


ad.deflinear2(OPEN, _transposed)


def as_piece(array: Any, cut: Any) -> Any:
    """`array`, declared to be the piece of this replica where it is traced."""
    return PIECE.bind(array, cut=cut) if isinstance(array, jax.core.Tracer) else array


def opened(array: Any, cut: Any, *, divisor: int = 1, others: tuple[str, ...] = ()) -> Any:
    """A piece as an array of its own."""
    if not isinstance(array, jax.core.Tracer):
        return array
    return OPEN.bind(array, cut=cut, divisor=divisor, others=others)
