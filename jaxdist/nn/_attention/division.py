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
        count_bytes: What a device sends, from `q` and `k` of the replica and the number of devices:
            the bytes of the result, and those of the gradient.
        check: Called with the number of heads, of heads of `k` and `v`, and of devices, before
            anything is computed: raises if this kind cannot divide them.
    """

    name: str
    attend: Callable[[Division, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
    count_bytes: Callable[[jax.Array, jax.Array, int], tuple[int, int]]
    check: Callable[[int, int, int], None] = lambda heads, kv_heads, devices: None
    # Whether a device computes some heads of all positions.
    has_all_positions: bool = False
    # Whether keys pass from device to device, so that all devices wait for each other in each turn.
    is_in_turns: bool = False


def count_bytes_of_keys(k: jax.Array, devices: int) -> int:
    """Return the bytes of the keys and values of one device."""
    return 2 * k.nbytes // devices
