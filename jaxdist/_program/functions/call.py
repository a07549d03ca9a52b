"""One call of a compiled function."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._program.arguments.arguments import Flat
from jaxdist._program.functions.draws import Draws, shapes_of
from jaxdist._values import Origin


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """The arguments of a call, the state of its NNX objects, and its batches."""

    flat: Flat
    shape: Any  # of the NNX objects
    state: list[Any]
    draws: Draws

    def origins(self) -> tuple[Origin, ...]:
        """Return the placements of all arrays; those of the batches come last."""
        return tuple(map(origin_of_value, jax.tree.leaves((self.flat.dynamic, self.draws.batches))))

    def origins_of_arguments(self) -> tuple[Origin, ...]:
        """Return the placements of the arguments' arrays."""
        return tuple(map(origin_of_value, jax.tree.leaves(self.flat.dynamic)))

    def key(self) -> Any:
        """Return the part of the program's key that is not the structure of the call."""
        batches = self.draws.batches
        return (self.origins(), shapes_of(batches)) if batches else self.origins()


def origin_of_value(leaf: Any) -> Origin:
    """Return the placement of an array. Host arrays have none."""
    if not isinstance(leaf, jax.Array):
        return _NOWHERE
    # The program does not depend on which single device it is.
    if len(leaf.sharding.device_set) == 1 and not _names_axes(leaf.sharding):
        return _ON_ONE_DEVICE
    return Origin(leaf.sharding, _compat.is_committed(leaf))


def _names_axes(sharding: Any) -> bool:
    """Whether a sharding names mesh axes. With virtual replicas it does so even on one device."""
    return isinstance(sharding, NamedSharding) and any(sharding.spec)


_NOWHERE = Origin(None, False)
_ON_ONE_DEVICE = Origin(None, True)
