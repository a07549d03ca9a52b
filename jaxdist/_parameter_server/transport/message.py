"""`Message`: what one task sends to another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

# A reply repeats the name, also beside the text of an error.
LONGEST_METHOD = 500


@dataclasses.dataclass(frozen=True)
class Message:
    """A request or a reply: a name, values that JSON can hold, and arrays.

    Arrays that are received may be read-only, and in one process they are the sender's own arrays,
    so neither side writes into them.

    Args:
        method: The name of the method that is called; a reply repeats it.
        fields: Numbers, texts, None, lists and dicts with texts as keys.
        arrays: NumPy arrays of fixed-size dtypes, bfloat16 and its like included.
    """

    method: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)
