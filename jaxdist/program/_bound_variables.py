"""The variables of a function that is traced as a whole."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist.values import Variable


class BoundVariables:
    """The arrays of known variables are inputs; others are noted, and are constants this time."""

    def __init__(self, known: Sequence[Variable], values: Sequence[Any]) -> None:
        self._known = known
        self._arrays = {id(v): array for v, array in zip(known, values, strict=True)}
        self._is_written: set[int] = set()
        self.unknown: list[Variable] = []

    def held(self, variable: Variable, array: Any) -> Any:
        """The array that stands for `array`, which the variable holds."""
        if id(variable) not in self._arrays:
            self.unknown.append(variable)
            self._arrays[id(variable)] = array
        return self._arrays[id(variable)]

    def hold(self, variable: Variable, array: Any) -> None:
        """Take the array that the variable holds from now on."""
        self.held(variable, array)
        self._arrays[id(variable)] = array
        self._is_written.add(id(variable))

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
