"""How positions lie over the devices of an axis: each device has some rows, in some order."""

import dataclasses
import math
from typing import Any, ClassVar

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

    def number(self, device: jax.Array | int, rows: int) -> jax.Array:
        """Return the positions of the rows of one device."""
        numbers: jax.Array = self.place(device, jnp.arange(rows, dtype=jnp.int32), rows)
        return numbers

    def run(self, rows: int) -> int:
        """Return how many of the rows of one device follow each other."""
        raise NotImplementedError

    def number_all(self, rows: int) -> jax.Array:
        """Return the positions of the rows of all devices, `rows` of each.

        They are computed from the numbers of the rows one by one. XLA would divide an array that is
        arranged over the devices, and exchange its parts: in a stage of a pipeline, where other
        stages do something else, CPUs would wait forever.
        """
        device, row = jnp.divmod(jnp.arange(self.devices * rows, dtype=jnp.int32), max(rows, 1))
        numbers: jax.Array = self.place(device, row, rows)
        return numbers

    def place(self, device: Any, row: Any, rows: int) -> Any:
        """Return the positions of some of the `rows` rows of devices, by their numbers there.

        These are arrays of JAX or of NumPy.
        """
        raise NotImplementedError


class _Contiguous(Order):
    """Device i has the i-th part of the positions."""

    name: ClassVar[str] = "contiguous"

    @property
    def divisor(self) -> int:
        return self.devices

    def arrange(self, array: jax.Array) -> jax.Array:
        return array

    def place(self, device: Any, row: Any, rows: int) -> Any:
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

    def place(self, device: Any, row: Any, rows: int) -> Any:
        if self.devices == 1:
            return row
        part = rows // 2
        # The second part continues at the position of part 2n-1-i.
        further = (2 * self.devices - 2 - 2 * device) * part
        return row + device * part + (row >= part) * further

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
