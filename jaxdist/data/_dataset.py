"""A dataset whose batches are split over the replicas and copied to the devices in advance."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxdist import _validate
from jaxdist._called import called
from jaxdist._typing import PyTree
from jaxdist.data._iterator import DistributedIterator
from jaxdist.data._reading.ahead import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from jaxdist.errors import ArgumentTypeError

S = TypeVar("S")


class DistributedDataset(Iterable[PyTree]):
    """The dataset of a strategy; each element is the batch of one step.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function`
    make it. Every leaf of a batch is a `PerReplica`, or a plain array if the strategy has one
    replica. With `partial_batch=PAD` an element is `(batch, mask)`. Each `for` loop over it starts
    a new pass.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)])
        >>> isinstance(dataset, DistributedDataset), [len(b.values) for b in dataset]
        (True, [2, 2])

    Source:
        `tf.distribute.DistributedDataset`.
    """

    def __init__(
        self,
        describe: str,
        start_pass: Callable[[], DistributedIterator],
        cardinality: int,
    ) -> None:
        self._describe = describe
        self._start_pass = start_pass
        self._cardinality = cardinality
        self._spec: PyTree = None  # of the first batch, once it is known
        # The pass that `element_spec` started. A generator cannot be read twice, so the next
        # `iter` must return this pass; otherwise its first batch would be lost.
        self._next_pass: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        next_pass, self._next_pass = self._next_pass, None
        return self._start_pass() if next_pass is None else next_pass

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of replica 0's part of the first batch.

        Reading it starts a pass, and the next `iter` returns that pass, so no batch is lost. Later
        batches may have other shapes. Other replicas may have fewer rows of an uneven batch.

        Raises:
            OutOfRangeError: The dataset is empty.
        """
        if self._spec is None:
            self._next_pass = self._next_pass or self._start_pass()
            self._spec = self._next_pass.element_spec
        return self._spec

    @property
    def cardinality(self) -> int:
        """Number of batches in one pass, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`.

        The number is known if the dataset reports how many elements it has. With
        `partial_batch=DROP` it also depends on the sizes of the batches, which only
        `jaxdist.data.batches` reports.
        """
        return self._cardinality

    def __len__(self) -> int:
        if self._cardinality == INFINITE_CARDINALITY:
            raise ArgumentTypeError(
                f"len() was called on {self!r}.\n\n"
                "The dataset has no end, so it has no length.\n\n"
                "Count the steps of the loop, or use a dataset that ends (repeat=1)."
            )
        if self._cardinality == UNKNOWN_CARDINALITY:
            raise ArgumentTypeError(
                f"len() was called on {self!r}, whose number of batches is unknown.\n\n"
                "The number is known for a list, jaxdist.data.batches, and a dataset with a "
                "len(). It is unknown if partial_batch=DROP leaves out batches by their shapes."
                "\n\nUse one of these, or count the batches in the loop."
            )
        return self._cardinality

    def __bool__(self) -> bool:
        # Without this, Python calls __len__: an empty dataset would be false, and a dataset of
        # unknown length would raise in `if dataset:`.
        return True

    @called("DistributedDataset.reduce")
    def reduce(self, initial_state: S, reduce_func: Callable[[S, PyTree], S]) -> S:
        """Combine the batches of one pass into one state, batch by batch.

        Args:
            initial_state: The state before the first batch.
            reduce_func: A function of the state and a batch that returns the next state.

        Returns:
            The state after the last batch; `initial_state` if there is no batch.

        Example:
            >>> data = MirroredStrategy().experimental_distribute_dataset(
            ...     jaxdist.data.batches(np.arange(32), 8))
            >>> data.reduce(0, lambda count, batch: count + 1)
            4
        """
        _validate.check_callable(reduce_func, "reduce_func")
        state = initial_state
        # `with` stops the prefetch thread also when `reduce_func` raises.
        with iter(self) as iterator:
            for batch in iterator:
                state = reduce_func(state, batch)
        return state

    def __repr__(self) -> str:
        return f"DistributedDataset({self._describe})"
