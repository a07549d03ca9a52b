"""The methods of a variable that change some of its rows."""

from typing import Any

import jax

from jaxdist._values.variable.scatter import Scatter


class RowChanges:
    """A base class with the methods of a variable that change some of its rows."""

    __slots__ = ()

    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> jax.Array:
        raise NotImplementedError

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Add rows to some rows of the variable.

        In a step, the aggregation decides which rows are applied. SUM: the rows of all replicas,
        one after the other. MEAN: the same rows, divided by the number of replicas.
        ONLY_FIRST_REPLICA: the rows of the first replica. NONE: the rows of all replicas must be
        proved equal.

        Cost:
            In a step with SUM or MEAN, an all-gather of the rows.

        Args:
            sparse_delta: `IndexedSlices`, or a `BCOO` of whole rows.
            use_locking: Without effect: an update changes all copies or none.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The rows have another shape.
            ArgumentError: An index is out of bounds; inside a step such rows are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_add(IndexedSlices([10.0], [1])).tolist()
            [1.0, 12.0]
        """
        return self._scatter(Scatter.ADD, sparse_delta, use_locking, name)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Subtract rows from some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_sub(IndexedSlices([10.0], [1])).tolist()
            [1.0, -8.0]
        """
        return self._scatter(Scatter.SUBTRACT, sparse_delta, use_locking, name)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Multiply some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_mul(IndexedSlices([10.0], [1])).tolist()
            [1.0, 20.0]
        """
        return self._scatter(Scatter.MULTIPLY, sparse_delta, use_locking, name)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Divide some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_div(IndexedSlices([4.0], [1])).tolist()
            [1.0, 0.5]
        """
        return self._scatter(Scatter.DIVIDE, sparse_delta, use_locking, name)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the minimum of some rows of the variable and the given ones.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_min(IndexedSlices([10.0], [1])).tolist()
            [1.0, 2.0]
        """
        return self._scatter(Scatter.MIN, sparse_delta, use_locking, name)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the maximum of some rows of the variable and the given ones.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_max(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.MAX, sparse_delta, use_locking, name)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace some rows of the variable.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_update(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.UPDATE, sparse_delta, use_locking, name)
