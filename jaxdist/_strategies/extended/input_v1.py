"""Input in the style of version 1 of `tf.distribute`: iterators instead of datasets."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jaxdist import _collectives, _replica
from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._collectives import ReduceOp
from jaxdist._typing import PyTree
from jaxdist._validate import log_without_effect
from jaxdist.data import DistributedIterator, Examples, InputContext, InputReplicationMode
from jaxdist.errors import ContextError, OutOfRangeError


def check_iterator(name: str, iterator: Any) -> None:
    """Raise an error if `iterator` is not an iterator of a distributed dataset."""
    if not isinstance(iterator, DistributedIterator):
        raise refuse_type(
            f"{name}={iterator!r:.200}, of type {type(iterator).__name__}.",
            "Its batches must be split over the replicas.",
            "Pass iter(strategy.experimental_distribute_dataset(dataset)), or "
            "strategy.make_dataset_iterator(dataset).",
        )


def check_per_worker(mode: Any) -> None:
    """Raise an error for a replication mode other than PER_WORKER."""
    if mode is not InputReplicationMode.PER_WORKER:
        raise refuse(
            f"replication_mode={mode!r}.",
            f"It supports only {InputReplicationMode.PER_WORKER}, as in tf.distribute.",
            "For a dataset of each replica use distribute_datasets_from_function with "
            "InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA).",
        )


def make_dataset_fn(
    input_fn: Callable[[InputContext], Any],
) -> Callable[[InputContext], Any]:
    """Return `input_fn` as a `dataset_fn`: `input_fn` may also return a function of one element."""

    def dataset_fn(context: InputContext) -> Any:
        made = input_fn(context)
        # Dataset objects may be callable too, so only plain functions and methods count as element
        # functions. A call of a generator function returns an iterable, not one element.
        is_function = inspect.isfunction(made) or inspect.ismethod(made)
        if is_function and not inspect.isgeneratorfunction(made):
            return lambda: _call_repeatedly(made)
        return made

    return dataset_fn


def _call_repeatedly(function: Callable[[], PyTree]) -> Iterator[PyTree]:
    while True:
        try:
            element = function()
        except (StopIteration, OutOfRangeError):
            return
        yield element


def make_examples(numpy_input: PyTree, session: Any) -> Examples:
    """Return arrays in memory as a dataset of single examples."""
    if session is not None:
        log_without_effect("session", "there are no sessions")
    return Examples(numpy_input)


class MultiStepContext:
    """The outputs that the function of `extended.experimental_run_steps_on_iterator` sets.

    The outputs of each step overwrite those of earlier steps.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def fn(context, batch):
        ...     sums = strategy.run(lambda x: x.sum(), (batch,))
        ...     context.set_last_step_output("total", sums, "sum")
        >>> data = strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)])
        >>> context = strategy.extended.experimental_run_steps_on_iterator(
        ...     fn, iter(data), iterations=2)
        >>> int(context.last_step_outputs["total"])
        22

    Source:
        `MultiStepContext` of TensorFlow's `input_lib`.
    """

    def __init__(self, strategy: Any, initial: dict[str, Any]) -> None:
        self._strategy = strategy
        self._last_step_outputs = dict(initial)
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def run_op(self) -> None:
        """None, since the steps have run; in a TensorFlow graph, the operation that runs them."""
        return None

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """Outputs by name, from the last step that set them."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """Values that are not arrays, by name."""
        return self._non_tensor_outputs

    @called("MultiStepContext.set_last_step_output")
    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Set an output of this step.

        Cost:
            With `reduce_op`, that of `Strategy.reduce`.

        Args:
            name: The name of the output.
            output: A value of all replicas, or a pytree of such values.
            reduce_op: How to reduce the values of the replicas; None does not reduce them.

        Raises:
            ArgumentTypeError: `name` is not a string.
            ContextError: In a replica, whose values are traced.
        """
        self._check(name)
        if reduce_op is not None:
            op = _collectives.reduce_op(reduce_op)
            output = self._strategy.reduce(op, output, axis=None)
        self._last_step_outputs[name] = output

    @called("MultiStepContext.set_non_tensor_output")
    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set a value that is not an array.

        Raises:
            ArgumentTypeError: `name` is not a string.
            ContextError: In a replica.
        """
        self._check(name)
        self._non_tensor_outputs[name] = output

    def _check(self, name: Any) -> None:
        if not isinstance(name, str):
            raise refuse_type(
                f"the name {name!r}, of type {type(name).__name__}.",
                "Outputs are found by their names.",
                "Pass a string.",
            )
        # A traced value must not leave its step: JAX would raise `UnexpectedTracerError` later,
        # without the name of the output.
        frame = _replica.current_frame()
        if frame is not None and frame.is_inside_step:
            raise ContextError(
                f"{name_call()}({name!r}) was called {frame.describe()}.\n\n"
                "The step is traced, and its values are unavailable while tracing.\n\n"
                f"Return the value from the step, and call it with what strategy.run returns."
            )

    def __repr__(self) -> str:
        return (
            f"MultiStepContext(last_step_outputs={self._last_step_outputs!r}, "
            f"non_tensor_outputs={self._non_tensor_outputs!r})"
        )
