"""How positions lie over the devices of an axis: each device has some rows, in some order."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxdist._called import refuse_type
from jaxdist._validate import refuse_choice, show


@dataclasses.dataclass(frozen=True)
class Order:
    """One order. On one device every order is that of the positions themselves.

    Args:
        devices: The number of devices.
    """

    name: ClassVar[str]
    devices: int

    @property
    def is_sorted(self) -> bool:
        """Whether the rows of all devices, one device after another, are in their true order."""
        return self.devices == 1 or self.name == _Contiguous.name

    @property
    def divisor(self) -> int:
        """What the number of positions is a multiple of."""
        raise NotImplementedError

    def arrange(self, array: jax.Array) -> jax.Array:
        """Return an array `[b, positions, ...]` with its rows in this order."""
        raise NotImplementedError

    def find(self, device: jax.Array | int, row: jax.Array, rows: int) -> jax.Array:
        """Return the position of a row of a device, which has `rows` of them."""
        raise NotImplementedError

    def run(self, rows: int) -> int:
        """Return how many of the rows of one device follow each other."""
        raise NotImplementedError

    def number(self, device: jax.Array | int, rows: int) -> jax.Array:
        """Return the positions of the rows of one device."""
        return self.find(device, jnp.arange(rows, dtype=jnp.int32), rows)

    def number_all(self, rows: int) -> jax.Array:
        """Return the positions of the rows of all devices, `rows` of each."""
        # Each number by itself: slices of these numbers would move between devices.
        numbers = jnp.arange(self.devices * rows, dtype=jnp.int32)
        return self.find(numbers // max(rows, 1), numbers % max(rows, 1), rows)


class _Contiguous(Order):
    """Device i has the i-th part of the positions."""

    name: ClassVar[str] = "contiguous"

    @property
    def divisor(self) -> int:
        return self.devices

    def arrange(self, array: jax.Array) -> jax.Array:
        return array

    def find(self, device: jax.Array | int, row: jax.Array, rows: int) -> jax.Array:
        return device * rows + row

    def run(self, rows: int) -> int:
        return rows


class _Zigzag(Order):
    """Of 2n parts, device i of n has the i-th from the front and the i-th from the end."""

    name: ClassVar[str] = "zigzag"

    @property
    def divisor(self) -> int:
        return 2 * self.devices if self.devices > 1 else 1

    def arrange(self, array: jax.Array) -> jax.Array:
        if self.devices == 1:
            return array
        shape = array.shape
        half, count = shape[1] // 2, self.devices
        front, back = array[:, :half], array[:, half:]
        parts = (shape[0], count, half // count, *shape[2:])
        # Slices and a reversal, not a gather by indices: their gradients are the same, again.
        pairs = (front.reshape(parts), jnp.flip(back.reshape(parts), 1))
        return jnp.stack(pairs, 2).reshape(shape)

    def find(self, device: jax.Array | int, row: jax.Array, rows: int) -> jax.Array:
        if self.devices == 1:
            return row
        part = rows // 2
        front = device * part + row
        back = (2 * self.devices - 2 - device) * part + row
        return jnp.where(row < part, front, back)

    def run(self, rows: int) -> int:
        return rows if self.devices == 1 else rows // 2


_ORDERS: dict[str, type[Order]] = {kind.name: kind for kind in (_Contiguous, _Zigzag)}


def check_name(order: str) -> str:
    """Check that `order` is the name of an order, and return it.

    Raises:
        ArgumentTypeError: It is not a string.
        ArgumentError: There is no such order.
    """
    rule = f"order is one of {list(_ORDERS)}."
    if not isinstance(order, str):
        raise refuse_type(f"order={show(order)}.", rule, "Pass order='contiguous'.")
    if order not in _ORDERS:
        raise refuse_choice("order", order, _ORDERS)
    return order


def make(name: str, devices: int) -> Order:
    """Return the order with this name over some devices."""
    return _ORDERS[name](devices)


def name_fitting(positions: int, devices: int) -> str | None:
    """Return the name of an order by which this number of positions can be divided, or None."""
    fitting = (kind for kind in _ORDERS.values() if positions % kind(devices).divisor == 0)
    return next((kind.name for kind in fitting), None)


def describe_lengths(positions: int, divisor: int) -> str:
    """Return the nearest numbers of positions that `divisor` divides."""
    below, above = positions // divisor * divisor, math.ceil(positions / divisor) * divisor
    return f"{below} or {above}" if below else str(above)
