"""A dataset whose batches are shared out over the replicas and put on the devices ahead of use."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxdist import _validate
from jaxdist._typing import PyTree
from jaxdist.data._iterator import DistributedIterator
from jaxdist.data._reading.assemble import Assembler
from jaxdist.data._reading.cardinality import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from jaxdist.data._reading.readers import Reader
from jaxdist.errors import ArgumentTypeError

S = TypeVar("S")
CheckContext = Callable[[], None]


class DistributedDataset(Iterable[PyTree]):
    """A dataset as a strategy gives it: each element is the batch of one step.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. Every leaf of a batch is a `PerReplica`, or a
    plain array where the strategy has one replica. With `partial_batch=PAD` an element is
    `(batch, mask)`. Each `for` over it begins anew.

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
        open_reader: Callable[[], Reader],
        assembler: Callable[[int], Assembler],
        *,
        depth: int,
        cardinality: int,
        check_context: CheckContext | None,
    ) -> None:
        self._describe = describe
        self._open_reader = open_reader
        self._assembler = assembler
        self._depth = depth
        self._cardinality = cardinality
        self._check_context = check_context
        self._spec: PyTree = None
        self._has_spec = False
        self._next_pass: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        next_pass, self._next_pass = self._next_pass, None
        return self._start_pass() if next_pass is None else next_pass

    def _start_pass(self) -> DistributedIterator:
        return DistributedIterator(
            self._open_reader,
            self._assembler,
            depth=self._depth,
            check_context=self._check_context,
        )

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what replica 0 gets of a batch, read from the first one.

        Nothing is lost by asking: the pass that is begun for it is the next one that `iter`
        gives. Later batches may have other shapes if the dataset has, and other replicas fewer
        rows of an uneven batch.

        Raises:
            OutOfRangeError: The dataset is empty.
        """
        if not self._has_spec:
            self._next_pass = self._next_pass or self._start_pass()
            self._spec, self._has_spec = self._next_pass.element_spec, True
        return self._spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`.

        Counted where the dataset tells how many elements it has. With `partial_batch=DROP` the
        sizes of its batches decide, which only `jaxdist.data.batches` tells.
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
                "The number is known of a list, of jaxdist.data.batches, and of a dataset with a "
                "len(). It is unknown where partial_batch=DROP leaves out batches by their shapes."
                "\n\nUse one of these, or count the batches in the loop."
            )
        return self._cardinality

    def __bool__(self) -> bool:
        # An object with __len__ would be false where it is empty, and an error where unknown.
        return True

    def reduce(self, initial_state: S, reduce_func: Callable[[S, PyTree], S]) -> S:
        """Go through one pass, carrying a state from batch to batch.

        Args:
            initial_state: The state before the first batch.
            reduce_func: Takes the state and a batch, and returns the next state.

        Returns:
            The state after the last batch; `initial_state` if there is none.

        Example:
            >>> data = MirroredStrategy().experimental_distribute_dataset(
            ...     jaxdist.data.batches(np.arange(32), 8))
            >>> data.reduce(0, lambda count, batch: count + 1)
            4
        """
        _validate.is_callable("DistributedDataset.reduce", reduce_func, "reduce_func")
        state = initial_state
        with iter(self) as iterator:
            for batch in iterator:
                state = reduce_func(state, batch)
        return state

    def __repr__(self) -> str:
        return f"DistributedDataset({self._describe})"
