"""`PutOn`: arrays on the devices of a worker."""

from typing import Any

import jax

from jaxdist._mesh import ReplicaMesh


class PutOn:
    """Puts a list of arrays on the devices of a layout. With several, arrays are replicated."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self._where = layout.first_device if layout.num_replicas == 1 else layout.replicated
        self._devices = frozenset(layout.devices)

    def __call__(self, values: list[Any]) -> list[Any]:
        if len(self._devices) == 1:
            return jax.device_put(values, self._where)
        return [x if self._has(x) else jax.device_put(x, self._where) for x in values]

    def _has(self, value: Any) -> bool:
        # The batch of all replicas is split over the devices already.
        return isinstance(value, jax.Array) and value.sharding.device_set == self._devices
