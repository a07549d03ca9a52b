"""Changes of some rows of a variable, as methods."""

from typing import Any

import jax

from jaxdist._values.variable.scatter import Scatter


class RowChanges:
    """The methods of a variable that change some of its rows."""

    __slots__ = ()

    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> jax.Array:
        raise NotImplementedError

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Add rows to some of its rows.

        In a step, the rows of all replicas are applied one after the other with aggregation SUM,
        and so are those rows divided by their number with MEAN; with ONLY_FIRST_REPLICA, those of
        the first replica; with NONE they have to be proved equal.

        Cost:
            In a step with SUM or MEAN, an all-gather of the rows.

        Args:
            sparse_delta: `IndexedSlices`, or a `BCOO` of whole rows.
            use_locking: Without effect: an update is whole or not at all.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as seen from here.

        Raises:
            ShapeError: Rows of another shape.
            ArgumentError: A row that is not there; inside a step such rows are dropped.
            NotImplementedError: An `ON_READ` variable.

        Example:
            >>> Variable([1.0, 2.0]).scatter_add(IndexedSlices([10.0], [1])).tolist()
            [1.0, 12.0]
        """
        return self._scatter(Scatter.ADD, sparse_delta, use_locking, name)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Subtract rows from some of its rows.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_sub(IndexedSlices([10.0], [1])).tolist()
            [1.0, -8.0]
        """
        return self._scatter(Scatter.SUBTRACT, sparse_delta, use_locking, name)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Multiply some of its rows.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_mul(IndexedSlices([10.0], [1])).tolist()
            [1.0, 20.0]
        """
        return self._scatter(Scatter.MULTIPLY, sparse_delta, use_locking, name)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Divide some of its rows.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_div(IndexedSlices([4.0], [1])).tolist()
            [1.0, 0.5]
        """
        return self._scatter(Scatter.DIVIDE, sparse_delta, use_locking, name)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Lower some of its rows to given ones where those are lower.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_min(IndexedSlices([10.0], [1])).tolist()
            [1.0, 2.0]
        """
        return self._scatter(Scatter.MIN, sparse_delta, use_locking, name)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Raise some of its rows to given ones where those are higher.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_max(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.MAX, sparse_delta, use_locking, name)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace some of its rows.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_update(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.UPDATE, sparse_delta, use_locking, name)
