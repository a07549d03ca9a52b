"""The methods of a sharded variable that change some of its rows."""

from typing import Any, Self

import numpy as np

from jaxdist._parameter_server.variables.shard_rows import split_slices
from jaxdist._values import Scatter, as_indexed_slices, check_name, check_slices


class ShardedRowChanges:
    """A base class with the `scatter_*` methods of a sharded variable.

    Each shard gets only its own rows. For `scatter_add` and `scatter_sub`, rows with the same index
    are added up before that. All methods take `IndexedSlices`, or a `BCOO` of whole rows, and
    return the variable.
    """

    __slots__ = ()

    _variables: tuple[Any, ...]
    _starts: np.ndarray
    _label: str

    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> Self:
        check_name(self._label, kind.value, name, use_locking)
        slices = check_slices(self, kind, given)
        for shard, own in split_slices(kind, slices, self._variables, self._starts):
            if hasattr(shard, "change_rows"):
                # The methods `scatter_*` of a variable on a server return, and so read, all of it.
                shard.change_rows(kind, own)
            else:
                getattr(shard, kind.value)(own)
        return self

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Add rows to some rows, as `Variable.scatter_add`."""
        return self._scatter(Scatter.ADD, sparse_delta, use_locking, name)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Subtract rows from some rows, as `Variable.scatter_sub`."""
        return self._scatter(Scatter.SUBTRACT, sparse_delta, use_locking, name)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Multiply some rows, as `Variable.scatter_mul`."""
        return self._scatter(Scatter.MULTIPLY, sparse_delta, use_locking, name)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Divide some rows, as `Variable.scatter_div`."""
        return self._scatter(Scatter.DIVIDE, sparse_delta, use_locking, name)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Take the minimum of some rows and the given ones, as `Variable.scatter_min`."""
        return self._scatter(Scatter.MIN, sparse_delta, use_locking, name)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Take the maximum of some rows and the given ones, as `Variable.scatter_max`."""
        return self._scatter(Scatter.MAX, sparse_delta, use_locking, name)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace some rows, as `Variable.scatter_update`."""
        return self._scatter(Scatter.UPDATE, sparse_delta, use_locking, name)

    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace some rows, as `scatter_update`: indices have one dim, so there is one batch."""
        check_name(self._label, "batch_scatter_update", name, use_locking)
        slices = as_indexed_slices(self._label, "batch_scatter_update", sparse_delta)
        return self._scatter(Scatter.UPDATE, slices, use_locking, name)
