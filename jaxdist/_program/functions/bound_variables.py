"""Holds the variables and batches of a function that is traced as a whole."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._program.functions.draws import Draws, origin_of_value
from jaxdist._program.jaxprs.primitives import placeholder
from jaxdist._values import Origin, Variable, copy_steps_ahead
from jaxdist.errors import ContextError


class BoundVariables:
    """The inputs that one trace of a function finds: each variable and batch becomes an input.

    The placeholder with the number `n` represents `inputs[n]`: a variable, or a leaf of a batch.
    """

    def __init__(self, arguments: Sequence[Any], origins: Sequence[Origin], draws: Draws) -> None:
        self._draws = draws
        self._trace = _compat.get_current_trace()
        # Also holds the arguments: an `id` is unique only while its object lives.
        self._origins = {id(x): (x, origin) for x, origin in zip(arguments, origins, strict=True)}
        self._arrays: dict[int, Any] = {}
        self._is_written: dict[int, Variable] = {}
        self.inputs: list[Variable | BatchLeaf] = []
        # Compile options that a step in the function needs; the function's `jax.jit` gets them.
        self.compiler_options: dict[str, Any] | None = None

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that the trace read or assigned."""
        read = {id(i): i for i in self.inputs if isinstance(i, Variable)}
        return tuple({**read, **self._is_written}.values())

    def held(self, variable: Variable, array: Any) -> Any:
        """Return the traced array that represents `array`, the value of the variable."""
        if id(variable) not in self._arrays:
            home = variable.home.sharding
            self._arrays[id(variable)] = self._add_input(
                variable, array, Origin(home, home is not None)
            )
        return self._arrays[id(variable)]

    def _add_input(self, what: "Variable | BatchLeaf", array: Any, origin: Origin) -> Any:
        aval = jax.typeof(array)
        given = placeholder(
            self._trace, len(self.inputs), aval.shape, aval.dtype, weak_type=aval.weak_type
        )
        self.inputs.append(what)
        self._origins[id(given)] = (given, origin)
        return given

    def hold(self, variable: Variable, array: Any) -> None:
        """Store the array that is the variable's value from now on."""
        if _compat.get_current_trace() is not self._trace:
            raise ContextError(
                f"Variable {variable.label!r} was assigned inside a transformation (jax.jit, scan, "
                "cond, grad) in a jaxdist.function.\n\n"
                "A value that is assigned there belongs to the transformation.\n\n"
                "Return the value from it and assign it outside; inside strategy.run variables "
                "may be assigned in transformations."
            )
        self._arrays[id(variable)] = array
        self._is_written[id(variable)] = variable

    def has_written(self, variable: Variable) -> bool:
        """Whether the trace has assigned the variable."""
        return id(variable) in self._is_written

    def origin(self, value: Any) -> Origin | None:
        """Return the placement of the argument or variable that a traced value represents."""
        found = self._origins.get(id(value))
        return None if found is None else found[1]

    def next_batch(self, feed: Any) -> Any:
        """Return traced values that represent the next batch of an iterator."""
        if _compat.get_current_trace() is not self._trace:
            raise ContextError(
                "next() of a distributed dataset was called inside a transformation (jax.jit, "
                "scan, cond, grad) in a jaxdist.function.\n\n"
                "A transformation is traced on its own, and gets only what is passed to it.\n\n"
                "Take the batch outside, and pass it."
            )
        number, which, values = self._draws.next_batch(feed)
        leaves, treedef = jax.tree.flatten(values)
        given = [
            self._add_input(BatchLeaf(number, which, n), leaf, origin_of_value(leaf))
            for n, leaf in enumerate(leaves)
        ]
        batch = treedef.unflatten(given)
        # The traced batch must also know which uneven batches follow; see Note [Batches to come].
        copy_steps_ahead(values, batch)
        return batch

    def collect_written(self) -> dict[int, Any]:
        """Return new arrays of the assigned variables, by the `id` of the variable.

        They keep the shardings of the old ones.
        """
        found = {}
        for variable in self._is_written.values():
            array, sharding = self._arrays[id(variable)], variable.home.sharding
            if sharding is not None:
                array = jax.lax.with_sharding_constraint(array, sharding)
            found[id(variable)] = array
        return found


@dataclasses.dataclass(frozen=True)
class BatchLeaf:
    """One leaf of a batch: the number of its iterator, of the batch, and of the leaf."""

    source: int
    batch: int
    leaf: int

    def of(self, batches: Sequence[Sequence[Any]]) -> Any:
        """Return the value of this leaf in the batches of a call."""
        return jax.tree.leaves(batches[self.source][self.batch])[self.leaf]
