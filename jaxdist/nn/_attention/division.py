"""What each kind of attention gets: how positions are divided, and how blocks are computed."""

import dataclasses
from collections.abc import Callable

import jax

from jaxdist.nn._attention.kernel import Plan, Rows
from jaxdist.nn._attention.orders import Order


@dataclasses.dataclass(frozen=True)
class Division:
    """How positions are divided over an axis that is manual here.

    Args:
        axis: The name of the axis.
        order: The order of positions over it.
        plan: The mask, the scale and the blocks.
    """

    axis: str
    order: Order
    plan: Plan

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.order.devices

    def rows_of(self, device: jax.Array, length: int, segments: jax.Array | None) -> Rows:
        """Return the positions and segments of the rows of one device.

        Args:
            device: The number of the device.
            length: Its number of rows.
            segments: The segments of the rows of all devices, or None.
        """
        own = segments
        if own is not None:
            own = jax.lax.dynamic_slice_in_dim(own, device * length, length, axis=1)
        return Rows(self.order.number(device, length), own)

    def all_rows(self, length: int, segments: jax.Array | None) -> Rows:
        """Return the positions and segments of the rows of all devices, `length` of each."""
        return Rows(self.order.number_all(length), segments)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to compute attention over divided positions.

    Args:
        name: The argument `kind`.
        attend: The attention of the rows of one device, from the division, its `q`, `k` and `v`,
            and the segments of all rows or None. It runs on each device of the axis.
        check: Called with the number of heads, of heads of `k` and `v`, and of devices, before
            anything is computed: raises if this kind cannot divide them.
    """

    name: str
    attend: Callable[[Division, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
    check: Callable[[int, int, int], None] = lambda heads, kv_heads, devices: None
