"""A dataset of single examples from arrays in memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import jax
import numpy as np

from jaxdist._called import called
from jaxdist._not_there import MISSING_MEMBERS, missing_member
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag
from jaxdist.data._reading.batches import Batches, batches, check_arrays


class Examples:
    """A dataset of single examples; `experimental_make_numpy_dataset` makes it.

    Example:
        >>> examples = MirroredStrategy().experimental_make_numpy_dataset({"x": np.arange(3)})
        >>> [e["x"].item() for e in examples], len(examples.batch(2))
        ([0, 1, 2], 2)

    Source:
        `tf.data.Dataset.from_tensor_slices`.
    """

    def __init__(self, arrays: PyTree) -> None:
        self.num_examples = check_arrays(arrays, "numpy_input")
        self.arrays: PyTree = jax.tree.map(np.asarray, arrays)

    @called("Examples.batch", replaces="data.batches")
    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        *,
        shuffle: bool = False,
        seed: int = 0,
        repeat: int | None = 1,
    ) -> Batches:
        """Return batches of these examples, as `jaxdist.data.batches` does.

        Example:
            >>> examples = MirroredStrategy().experimental_make_numpy_dataset(np.arange(5))
            >>> [b.tolist() for b in examples.batch(2)]
            [[0, 1], [2, 3], [4]]
        """
        as_flag("drop_remainder", drop_remainder)
        as_flag("shuffle", shuffle)
        return batches(
            self.arrays,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
            repeat=repeat,
        )

    def __iter__(self) -> Iterator[PyTree]:
        # A copy, so that writing to an example does not change the dataset.
        for i in range(self.num_examples):
            yield jax.tree.map(lambda leaf, i=i: np.array(leaf[i]), self.arrays)

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return f"Examples({self.num_examples} examples)"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_member(self, name, MISSING_MEMBERS["Examples"])
