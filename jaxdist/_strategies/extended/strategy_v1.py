"""Methods of strategies from version 1 of `tf.distribute`."""

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from jaxdist import data
from jaxdist._called import called
from jaxdist._collectives import ReduceOp
from jaxdist._not_there import MISSING_MEMBERS, missing_member
from jaxdist._strategies.extended import input_v1
from jaxdist._typing import PyTree
from jaxdist._validate import check_callable, check_text, log_without_effect
from jaxdist._values import Variable


class StrategyMethodsV1:
    """The methods from version 1 that strategies of version 2 still have."""

    # A mixin: type checkers do not know that `self` is a `Strategy`, so `Any` is returned.
    @property
    def _strategy(self) -> Any:
        """This strategy."""
        return self

    @called(
        "experimental_distribute_datasets_from_function",
        replaces="distribute_datasets_from_function",
    )
    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[data.InputContext], Any],
        options: data.InputOptions | None = None,
    ) -> data.DistributedDataset:
        """Call `distribute_datasets_from_function`; this older name is deprecated.

        Example:
            >>> import warnings
            >>> with warnings.catch_warnings():
            ...     warnings.simplefilter("ignore")
            ...     dataset = MirroredStrategy().experimental_distribute_datasets_from_function(
            ...         lambda context: [np.zeros(2)] * 16)
            >>> len(dataset)
            2

        Source:
            `tf.distribute.Strategy.experimental_distribute_datasets_from_function`.
        """
        warnings.warn(
            "experimental_distribute_datasets_from_function is deprecated; use "
            "distribute_datasets_from_function.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._strategy.distribute_datasets_from_function(dataset_fn, options)

    @called("Strategy.unwrap", replaces="experimental_local_results")
    def unwrap(self, value: PyTree) -> tuple[Any, ...]:
        """Call `experimental_local_results`; this is its older name.

        Example:
            >>> MirroredStrategy(["cpu:0", "cpu:1"]).unwrap(PerReplica([1, 2]))
            (1, 2)

        Source:
            `tf.compat.v1.distribute.Strategy.unwrap`.
        """
        return self._strategy.experimental_local_results(value)

    @called("Strategy.group", replaces="experimental_local_results")
    def group(self, value: PyTree, name: str | None = None) -> Any:
        """Return the values of the replicas in this process, to wait for all of them.

        In a TensorFlow graph this is one operation that runs those of all replicas. In jaxdist
        steps run when they are called; `jax.block_until_ready(strategy.group(value))` waits.

        Args:
            value: A value of all replicas, or a pytree of such values.
            name: Has no effect, which is logged: there are no operations to name.

        Returns:
            The value itself if there is one replica, else a tuple of the replicas' values.

        Raises:
            ArgumentTypeError: `name` is not a string.

        Example:
            >>> MirroredStrategy(["cpu:0", "cpu:1"]).group(PerReplica([1, 2]))
            (1, 2)
            >>> OneDeviceStrategy("cpu:0").group(7)
            7

        Source:
            `tf.distribute.Strategy.group`.
        """
        if name is not None:
            check_text("name", name, "train")
            log_without_effect("name", "there are no operations to name")
        values = self._strategy.experimental_local_results(value)
        return values[0] if len(values) == 1 else values

    @called("Strategy.make_dataset_iterator", replaces="experimental_distribute_dataset")
    def make_dataset_iterator(self, dataset: Any) -> data.DistributedIterator:
        """Return the iterator of `experimental_distribute_dataset(dataset)`.

        Example:
            >>> iterator = MirroredStrategy(["cpu:0", "cpu:1"]).make_dataset_iterator([np.zeros(4)])
            >>> iterator.initialize()
            []
            >>> iterator.get_next()
            PerReplica([0., 0.], [0., 0.])

        Source:
            `tf.compat.v1.distribute.Strategy.make_dataset_iterator`.
        """
        return iter(self._strategy.experimental_distribute_dataset(dataset))

    @called(
        "Strategy.make_input_fn_iterator",
        replaces="distribute_datasets_from_function",
        arguments={"dataset_fn": "input_fn"},
    )
    def make_input_fn_iterator(
        self,
        input_fn: Callable[[data.InputContext], Any],
        replication_mode: data.InputReplicationMode = data.InputReplicationMode.PER_WORKER,
    ) -> data.DistributedIterator:
        """Return an iterator that distributes consecutive elements of `input_fn` to the replicas.

        Args:
            input_fn: Function of an `InputContext`. It returns a dataset, as for
                `distribute_datasets_from_function`, or a function without arguments that returns
                the next element at each call, until it raises `StopIteration` or
                `errors.OutOfRangeError`.
            replication_mode: `InputReplicationMode.PER_WORKER`.

        Raises:
            ArgumentError: Another replication mode.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.make_input_fn_iterator(lambda context: [np.zeros(2)] * 2).get_next()
            PerReplica([0., 0.], [0., 0.])

        Source:
            `tf.compat.v1.distribute.Strategy.make_input_fn_iterator`.
        """
        check_callable(input_fn, "input_fn")
        input_v1.check_per_worker(replication_mode)
        make = input_v1.make_dataset_fn(input_fn)
        return iter(self._strategy.distribute_datasets_from_function(make))

    @called("Strategy.experimental_make_numpy_dataset")
    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: Any = None
    ) -> data.Examples:
        """Return arrays in memory as a dataset of single examples; `.batch(size)` makes batches.

        Shapes:
            Leaves `[N, ...]`, the same `N`; an example has leaves `[...]`.

        Cost:
            None; the arrays are not copied. Batches are copies.

        Args:
            numpy_input: Pytree of arrays.
            session: Has no effect, which is logged: there are no sessions.

        Raises:
            ShapeError: A scalar among the leaves, or leaves of different lengths.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> examples = strategy.experimental_make_numpy_dataset(np.arange(4))
            >>> strategy.make_dataset_iterator(examples.batch(4)).get_next()
            PerReplica([0, 1], [2, 3])

        Source:
            `tf.compat.v1.distribute.Strategy.experimental_make_numpy_dataset`.
        """
        return input_v1.make_examples(numpy_input, session)

    @called("Strategy.experimental_run")
    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: data.DistributedIterator | None = None
    ) -> Any:
        """Call `run(fn, args=(input_iterator.get_next(),))`; without an iterator `run(fn)`.

        Raises:
            OutOfRangeError: The iterator has no batch left.
            ArgumentTypeError: `input_iterator` is not an iterator of a distributed dataset.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> iterator = strategy.make_dataset_iterator([np.arange(4)])
            >>> strategy.experimental_run(lambda x: x.sum(), iterator)
            PerReplica(1, 5)

        Source:
            `tf.compat.v1.distribute.Strategy.experimental_run`.
        """
        check_callable(fn)
        if input_iterator is None:
            return self._strategy.run(fn)
        input_v1.check_iterator("input_iterator", input_iterator)
        return self._strategy.run(fn, args=(input_iterator.get_next(),))

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Call `extended.colocate_vars_with`; this is its older name.

        Example:
            >>> strategy = MirroredStrategy()
            >>> with strategy.scope():
            ...     v = Variable(1.0)
            ...     with strategy.colocate_vars_with(v):
            ...         momentum = Variable(0.0)

        Source:
            `tf.compat.v1.distribute.Strategy.colocate_vars_with`.
        """
        return self._strategy.extended.colocate_vars_with(colocate_with_variable)

    # Type checkers must not see this method: they would accept every misspelled member.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_member(self, name, MISSING_MEMBERS["Strategy"])


def get_loss_reduction() -> ReduceOp:
    """Return the default reduction of losses over replicas: sum.

    Example:
        >>> jaxdist.compat.v1.get_loss_reduction()
        <ReduceOp.SUM: 'SUM'>

    Source:
        `tf.compat.v1.distribute.get_loss_reduction`.
    """
    return ReduceOp.SUM
