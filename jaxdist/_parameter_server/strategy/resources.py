"""What a worker makes for itself: datasets, iterators and values."""

import dataclasses
from typing import Any

from jaxdist._typing import PyTree


@dataclasses.dataclass(eq=False)
class Made:
    """What a worker has made, as its link knows it.

    Args:
        value: The value, or the dataset.
        iterator: The iterator, for an iterator over a dataset.
        template: Arrays with the shapes of its first element.
        number: How a worker in another process calls it.
        name: How errors call a dataset.
    """

    value: Any = None
    iterator: Any = None
    template: PyTree = None
    number: int = 0
    name: str = ""
