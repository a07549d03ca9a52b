"""A batch that may be missing."""

from jaxdist._typing import PyTree
from jaxdist.errors import ArgumentError


class OptionalBatch:
    """A batch, or the end of the data.

    Source:
        `tf.experimental.Optional`, as `get_next_as_optional` returns it.
    """

    __slots__ = ("_held",)

    def __init__(self, held: tuple[PyTree, ...]) -> None:
        # A tuple of at most one batch: a batch may be any pytree, so no value can mark the end.
        self._held = held

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._held)

    def get_value(self) -> PyTree:
        """Return the batch.

        Raises:
            ArgumentError: The `OptionalBatch` is empty.
        """
        if not self._held:
            raise ArgumentError(
                "get_value() was called on an empty OptionalBatch.\n\n"
                "An OptionalBatch is empty when the dataset has ended.\n\n"
                "Ask has_value() first."
            )
        return self._held[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({self._held[0]!r})" if self._held else "OptionalBatch(empty)"
