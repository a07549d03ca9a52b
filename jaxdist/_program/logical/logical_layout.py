"""The mark for the layout of a value over the logical devices of a replica, and its analysis."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import get_input_variables

# A primitive of jaxdist, for two reasons: JAX's sharding constraint cannot name parts of a mesh
# axis, and `MarkAnalysis` must find the marks of a step in its trace.
LOGICAL_LAYOUT = Primitive("jaxdist_logical_layout")

# In `parts`: the partitioner chooses the layout of a dim that `jax.vmap` maps over.
OPEN = 0


def laid_out(array: Any, parts: Sequence[int], layout: ReplicaMesh) -> jax.Array:
    """Return `array` with a mark that splits each dim into a number of parts.

    The cotangent gets the same layout. If a dim is not divisible by its parts, the partitioner pads
    it and removes the padding afterwards.

    Shapes:
        That of `array`.
    """
    [axis] = layout.logical_axes
    shape = tuple(layout.mesh.shape.items())
    return LOGICAL_LAYOUT.bind(array, parts=tuple(parts), axis=axis, mesh_shape=shape)


def _lower(context: Any, value: Any, *, parts: Any, axis: str, mesh_shape: Any) -> list[Any]:
    return [_compat.constrain_tiles(context, value, parts, axis, mesh_shape)]


def _batch(values: Sequence[Any], dims: Sequence[Any], *, parts: Any, **rest: Any) -> Any:
    [value], [dim] = values, dims
    marked = LOGICAL_LAYOUT.bind(value, parts=(*parts[:dim], OPEN, *parts[dim:]), **rest)
    return marked, dim


LOGICAL_LAYOUT.def_impl(lambda x, **_: x)
LOGICAL_LAYOUT.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(LOGICAL_LAYOUT, _lower)
ad.deflinear2(LOGICAL_LAYOUT, lambda ct, _, **how: [LOGICAL_LAYOUT.bind(ct, **how)])
batching.primitive_batchers[LOGICAL_LAYOUT] = _batch


# The number of parts of each dim; None for a value that is not marked.
Parts: TypeAlias = tuple[int, ...] | None


def marks_of_results(program: Any) -> list[Parts]:
    """Return the marks of the results of an open or closed program.

    A value keeps its mark when a function or a loop returns it.
    """
    return MarkAnalysis().run(program, [None] * len(get_input_variables(program)))


class MarkAnalysis(Interpreter[Parts]):
    """Finds the layout over logical devices that each value is marked with."""

    def literal(self, literal: Any) -> Parts:
        return None

    def constant(self, variable: Any, value: Any) -> Parts:
        return None

    def operation(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        if eqn.primitive is LOGICAL_LAYOUT:
            return [tuple(max(n, 1) for n in eqn.params["parts"])]
        return [None] * len(eqn.outvars)

    def call(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        inside = eqn.primitive.name == "shard_map"
        return self.operation(eqn, inputs) if inside else super().call(eqn, inputs)

    def scan(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        loop = Scan.of(eqn.params)
        inside = marks_of_results(loop.program)
        # A scan without iterations returns its initial carry, not the marked one.
        state = [m if loop.length else None for m in inside[: loop.num_carry]]
        return [*state, *(None if m is None else (1, *m) for m in inside[loop.num_carry :])]

    # A mark inside one of these does not determine the layout of the result.
    cond = operation
    while_loop = operation
    linear_solve = operation
