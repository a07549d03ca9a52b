"""How the devices of a replica divide the model: its layers, its positions, its experts."""

import dataclasses
from typing import TypeVar

import jax

from jaxdist import nn, partition


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How stacked layers run in micro-batches, on stages if the strategy has them."""

    stages: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 0
    chunks: int = 1
    least_rows: int = 1

    def choose_micro_batches(self, rows: int, *, must_be_asked: bool = True) -> int:
        """Return the number of micro-batches of `rows` rows.

        Without a configured one, it is the least divisor of the rows from 4 for each stage, so that
        a stage waits for less than a quarter of its time; or else the number of the rows. A
        micro-batch has `least_rows` rows or more if the rows allow it.

        Args:
            rows: The rows of a replica.
            must_be_asked: Whether to return a configured number that does not divide the rows.

        Example:
            >>> Pipeline(stages=4).choose_micro_batches(48)
            16
        """
        if self.micro_batches and (must_be_asked or rows % self.micro_batches == 0):
            return self.micro_batches
        fitting = [n for n in range(1, rows // self.least_rows + 1) if rows % n == 0]
        fitting = fitting or [max(rows, 1)]
        return next((n for n in fitting if n >= 4 * self.stages), fitting[-1])


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the devices of a replica divide positions and experts.

    Attributes:
        positions: The number of devices that divide the positions.
        attention: How these compute attention together, as `kind` of `nn.attention`.
        order: The order of the positions on them.
        experts: The number of devices that divide the experts.
    """

    positions: int = 1
    attention: str = "ulysses"
    order: str = "zigzag"
    experts: int = 1

    def split(self, arrays: T) -> T:
        """Return arrays `[b, s, ...]` with the positions in the order of the step."""
        if self.positions == 1:
            return arrays
        return nn.split_positions(arrays, order=self.order)

    def number(self, count: int) -> jax.Array:
        """Return the position of each of `count` rows of a sequence: `[s]`."""
        return jax.numpy.arange(count) if self.positions == 1 else nn.positions(count)

    def divide_rows(self, x: jax.Array) -> jax.Array:
        """Return an activation whose rows are divided over the devices of the experts.

        Each device would otherwise compute attention for all rows.
        """
        if self.experts == 1 or self.positions > 1 or x.shape[0] % self.experts:
            return x
        return partition.constrain(x, partition.Split(0, axis="experts"))


NOT_DIVIDED = Layout()
