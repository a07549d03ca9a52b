"""The datasets that users pass: checks, single examples in memory, and passes over them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from jaxdist._called import called, name_call, refuse_type
from jaxdist._not_there import MISSING_MEMBERS, missing_member
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, show
from jaxdist._values import PerReplica
from jaxdist.data._reading.ahead import UNKNOWN_CARDINALITY, cardinality_of
from jaxdist.data._reading.batches import Batches, batches, check_arrays
from jaxdist.data._reading.files import Files
from jaxdist.data._reading.readers import ListIterator, SingleReader, use_default_device
from jaxdist.errors import ArgumentTypeError, ContextError


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


class Source:
    """A user's dataset; each `open` starts a new pass over it."""

    def __init__(self, dataset: Any, name: str) -> None:
        check_dataset(dataset, name)
        if name == "dataset" and isinstance(dataset, Examples):
            raise ArgumentTypeError(
                f"{name_call()} takes an iterable of global batches, and {dataset!r} yields single "
                "examples.\n\nEach replica takes a share of dim 0 of what is given.\n\n"
                "Batch them first: examples.batch(batch_size)."
            )
        self._caller = name_call()
        # Both count epochs, so that each pass shuffles differently. Two strategies that use one
        # object must not advance each other's count.
        # Whether no other code refers to an element's arrays. See Note [Who owns a batch].
        self.has_exclusive_arrays = isinstance(dataset, (Batches, Files))
        self.dataset: Any = dataset.restarted() if self.has_exclusive_arrays else dataset
        self._is_one_shot = isinstance(dataset, Iterator) and iter(dataset) is dataset
        self._is_spent = False

    @property
    def is_in_memory(self) -> bool:
        """Whether reading an element costs nothing."""
        return isinstance(self.dataset, (Batches, list, range))

    @property
    def batch_size(self) -> int:
        """Rows of the largest element if the dataset reports it; else 0."""
        data = self.dataset
        if isinstance(data, Files):
            return data.batch_size
        return min(data.batch_size, data.num_examples) if isinstance(data, Batches) else 0

    @property
    def cardinality(self) -> int:
        """Number of elements of one pass."""
        if self._is_one_shot or not _is_container(self.dataset):
            return UNKNOWN_CARDINALITY
        return cardinality_of(self.dataset)

    def cardinality_of_multiples(self, divisor: int) -> int:
        """Return how many elements of one pass have a multiple of `divisor` rows."""
        data = self.dataset
        is_known = isinstance(data, Batches)
        return data.cardinality_of_multiples(divisor) if is_known else UNKNOWN_CARDINALITY

    @called(lambda self: self._caller)
    def open(self, make: Callable[[], Iterator[Any]] | None = None) -> SingleReader:
        """Start a pass; `make` makes its iterator, and None means the dataset's own iterator."""
        # A generator can be read only once. A second pass would be empty, without an error.
        if self._is_one_shot:
            if self._is_spent:
                raise _spent_error(self.dataset)
            self._is_spent = True
            return SingleReader(lambda: self.dataset, UNKNOWN_CARDINALITY, is_own=False)
        # The state of a `Batches` iterator holds the number of examples already, and it stays
        # valid for another batch size, which changes the number of elements.
        length = UNKNOWN_CARDINALITY if self.has_exclusive_arrays else self.cardinality
        return SingleReader(make or self._new_iterator, length, is_own=True)

    def open_on(self, device: jax.Device | None) -> SingleReader:
        """Start a pass with `device` as JAX's default device."""
        with use_default_device(device):
            return self.open()

    @called(lambda self: self._caller)
    def _new_iterator(self) -> Iterator[Any]:
        data = self.dataset
        if hasattr(data, "as_numpy_iterator"):  # tf.data: arrays instead of its tensors
            return data.as_numpy_iterator()
        # A list's own iterator has no `set_state`.
        if isinstance(data, (list, range)):
            return ListIterator(data)
        dataset = data if isinstance(data, Iterable) else data()
        if not isinstance(dataset, Iterable):
            raise refuse_type(
                f"dataset={show(data)}, and calling it gave {show(dataset)}.",
                "A dataset is an iterable of batches, or a function that makes one for each pass.",
                "Pass for instance jaxdist.data.batches(arrays, 32).",
            )
        return iter(dataset)

    def __repr__(self) -> str:
        return repr(self.dataset) if self.has_exclusive_arrays else type(self.dataset).__name__


def _is_container(dataset: Any) -> bool:
    """Whether `dataset` is a dataset, and not a function that makes one."""
    return isinstance(dataset, Iterable) or hasattr(dataset, "as_numpy_iterator")


def check_dataset(dataset: Any, name: str) -> None:
    """Check that `dataset` is a dataset, and not a value that is often passed by mistake."""
    # Arrays, mappings and tuples are iterable, so the loop would run over rows, keys or leaves.
    if isinstance(dataset, (np.ndarray, jax.Array, Mapping, tuple, PerReplica)):
        what = f"{type(dataset).__name__}"
        raise refuse_type(
            f"{name}={show(dataset)}.",
            f"{name} is an iterable of batches; this {what} could be one batch, or all the data, "
            "or a sequence of batches.",
            "For arrays that hold all the data use jaxdist.data.batches(arrays, batch_size); for "
            "batches that exist already, a list of them.",
        )
    if isinstance(dataset, (str, bytes)) or not (_is_container(dataset) or callable(dataset)):
        raise refuse_type(
            f"{name}={show(dataset)}.",
            f"{name} is an iterable of batches.",
            "Pass a list of batches, an object with __iter__ (a loader, a tf.data or Grain "
            "dataset), a generator function, or jaxdist.data.batches(arrays, batch_size).",
        )
    if not _is_container(dataset):
        _check_needs_no_arguments(dataset)


def _check_needs_no_arguments(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise refuse_type(
            f"the function {getattr(function, '__name__', function)!r}, which takes arguments: "
            f"{error}.",
            "A function that makes a dataset is called without arguments for each pass.",
            "Pass a function without arguments. A function of an InputContext is for "
            "strategy.distribute_datasets_from_function(dataset_fn).",
        ) from None


def _spent_error(dataset: Any) -> ContextError:
    name = getattr(dataset, "__name__", type(dataset).__name__)
    return ContextError(
        f"{name_call()}: this dataset was iterated over already, and {name} of type "
        f"{type(dataset).__name__} yields its elements only once.\n\n"
        "A dataset is read from its start in every pass.\n\n"
        "Pass something that can start again: the generator function itself instead of its "
        "result, a list, or an object whose __iter__ makes a new iterator."
    )
