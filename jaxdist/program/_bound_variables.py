"""The variables of a function that is traced as a whole."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist.errors import ContextError
from jaxdist.program._draws import Draws
from jaxdist.values import Origin, Variable


class BoundVariables:
    """The arrays of known variables are inputs; others are noted, and are constants this time."""

    def __init__(
        self,
        known: Sequence[Variable],
        values: Sequence[Any],
        arguments: Sequence[Any],
        origins: Sequence[Origin],
        draws: Draws,
        batches: Sequence[Sequence[Any]],
    ) -> None:
        self._known = known
        self._draws = draws
        self._batches = batches
        self._trace = _compat.current_trace()
        # Kept with the arguments, whose numbers stay theirs as long as they live.
        self._origins = {id(x): (x, origin) for x, origin in zip(arguments, origins, strict=True)}
        for variable, value in zip(known, values, strict=True):
            home = variable.home.sharding
            self._origins[id(value)] = (value, Origin(home, home is not None))
        self._arrays = {id(v): array for v, array in zip(known, values, strict=True)}
        self._is_written: set[int] = set()
        self.unknown: list[Variable] = []
        # What a step in the function needs of whoever compiles it.
        self.compiler_options: dict[str, Any] | None = None

    def held(self, variable: Variable, array: Any) -> Any:
        """The array that stands for `array`, which the variable holds."""
        if id(variable) not in self._arrays:
            self.unknown.append(variable)
            self._arrays[id(variable)] = array
        return self._arrays[id(variable)]

    def hold(self, variable: Variable, array: Any) -> None:
        """Take the array that the variable holds from now on."""
        if _compat.current_trace() is not self._trace:
            raise ContextError(
                f"Variable {variable.label!r} was assigned inside a transformation (jax.jit, scan, "
                "cond, grad) in a jaxdist.function.\n\n"
                "What is assigned there belongs to the transformation.\n\n"
                "Return the value from it and assign it outside; inside strategy.run variables "
                "may be assigned in transformations."
            )
        self.held(variable, array)
        self._arrays[id(variable)] = array
        self._is_written.add(id(variable))

    def origin(self, value: Any) -> Origin | None:
        """Where the argument, or the variable's array, lies that a traced value stands for."""
        found = self._origins.get(id(value))
        return None if found is None else found[1]

    def next_of(self, feed: Any) -> Any:
        """What stands for the next batch of an iterator among the arguments."""
        if _compat.current_trace() is not self._trace:
            raise ContextError(
                "next() of a distributed dataset was called inside a transformation (jax.jit, "
                "scan, cond, grad) in a jaxdist.function.\n\n"
                "A transformation is traced on its own, and has what is passed to it.\n\n"
                "Take the batch before it, and pass it."
            )
        return self._draws.next_of(feed, self._batches)

    def written(self) -> dict[int, Any]:
        """New arrays of the known variables that were assigned, in the layouts that they had."""
        found = {}
        for number, variable in enumerate(self._known):
            if id(variable) in self._is_written:
                array, sharding = self._arrays[id(variable)], variable.home.sharding
                if sharding is not None:
                    array = jax.lax.with_sharding_constraint(array, sharding)
                found[number] = array
        return found
