"""Members of `tf.compat.v1.distribute.StrategyExtended` that version 2 does not have."""

import collections as containers
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdist import _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._devices import runtime
from jaxdist._program import UpdateOfCopies
from jaxdist._strategies.contexts import CALL_BEFORE_RUN, check_across
from jaxdist._strategies.extended import input_v1
from jaxdist._strategies.extended.input_v1 import MultiStepContext
from jaxdist._typing import PyTree
from jaxdist._validate import (
    ErrorNote,
    as_flag,
    as_integer,
    check_call_arguments,
    check_callable,
)
from jaxdist._values import Variable
from jaxdist.data import DistributedIterator, Examples


@dataclasses.dataclass(frozen=True)
class _WithoutVariable:
    """Adapter that drops the variable argument of a function call."""

    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, _: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


class ExtendedV1:
    """The members of `StrategyExtended` that come from version 1."""

    __slots__ = ()

    _strategy: Any

    @called("StrategyExtended.update_non_slot")
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(*args, **kwargs)` once on each replica, for state that belongs to no variable.

        Cost:
            A step; no collective of its own, but inside a step `group=False` is an all-gather.

        Args:
            colocate_with: The result of `non_slot_devices`, or a variable of this strategy.
            fn: Function of the arguments.
            args: Positional arguments; each call gets its own value of a `PerReplica`.
            kwargs: Keyword arguments, in the same way.
            group: Whether to return the results as one value, as `run` does.

        Returns:
            The results of `fn`, as `run` returns them; with `group=False`, a tuple with one entry
            for each replica.

        Raises:
            ArgumentError: `colocate_with` is not all the devices of this strategy.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> devices = strategy.extended.non_slot_devices([])
            >>> strategy.extended.update_non_slot(devices, lambda x: x + 1, (PerReplica([1, 2]),))
            PerReplica(2, 3)

        Source:
            `tf.compat.v1.distribute.StrategyExtended.update_non_slot`.
        """
        check_callable(fn)
        check_call_arguments(args, kwargs)
        group = as_flag("group", group)
        self._check_colocated(colocate_with)
        return self._update_copies(_WithoutVariable(fn), None, args, kwargs, group)

    def _check_colocated(self, given: Any) -> None:
        strategy = self._strategy
        if isinstance(given, Variable):
            is_ours = given.distribute_strategy is strategy
        else:
            # The list may mix names and devices in any order, so sets of devices are compared.
            listed = [given] if isinstance(given, (str, jax.Device)) else given
            is_list = isinstance(listed, (list, tuple))
            devices = runtime.distinct_devices(listed, "colocate_with") if is_list else []
            is_ours = set(devices) == strategy.layout.device_set
        if not is_ours:
            raise refuse(
                f"colocate_with={given!r}.",
                f"State of a {type(strategy).__name__} is on all its devices, "
                f"{list(strategy.extended.worker_devices)}.",
                "Pass strategy.extended.non_slot_devices(variables), or a variable that was made "
                "in the scope of this strategy.",
            )

    @called(None, replaces="strategy.run", arguments={"args[1]": "args", "args[2]": "kwargs"})
    def _update_copies(
        self,
        fn: Callable[..., Any],
        variable: Variable | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        group: bool,
    ) -> Any:
        """Call `fn` on each replica, with its own copy of `variable`."""
        strategy = self._strategy
        frame = _replica.innermost_explicit_frame()
        step: Any = UpdateOfCopies(fn)
        if frame is None or not frame.is_inside_step:
            # The user's arguments are nested in those of the internal step.
            result = strategy.run(step, (variable, tuple(args), dict(kwargs or {})))
            return result if group else strategy.experimental_local_results(result)
        # A step is being traced, so the update becomes part of it and is not a step of its own.
        result = step(variable, args, kwargs)
        if group:
            return result
        # In a trace a replica has only its own result; a tuple of all results needs a collective.
        axes, count = strategy.layout.replica_axes, strategy.layout.num_replicas
        rows = jax.tree.map(lambda x: jax.lax.all_gather(jax.numpy.asarray(x), axes), result)
        return tuple(jax.tree.map(lambda x, r=r: x[r], rows) for r in range(count))

    @called("StrategyExtended.experimental_run_steps_on_iterator")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, PyTree], Any],
        iterator: DistributedIterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, batch)` for several batches of an iterator.

        Cost:
            That of `fn`, `iterations` times. `jaxdist.multi_step` runs several steps in one
            dispatch.

        Args:
            fn: Function of a context and of a batch, called across replicas; it may call `run`,
                and `context.set_last_step_output`.
            iterator: The result of `iter(distributed_dataset)` or `make_dataset_iterator`.
            iterations: Number of batches.
            initial_loop_values: Initial outputs, by name.

        Returns:
            The context: `last_step_outputs`, `non_tensor_outputs`.

        Raises:
            OutOfRangeError: The iterator ends earlier; effects of earlier calls of `fn` remain.
            ArgumentError: `iterations` is below 0.
            ArgumentTypeError: `iterator` is not that of a distributed dataset, or
                `initial_loop_values` is not a mapping.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def fn(context, batch):
            ...     context.set_last_step_output("rows", strategy.run(len, (batch,)))
            >>> iterator = strategy.make_dataset_iterator([np.zeros(4), np.zeros(6)])
            >>> strategy.extended.experimental_run_steps_on_iterator(fn, iterator, 2)
            MultiStepContext(last_step_outputs={'rows': 3}, non_tensor_outputs={})

        Source:
            `tf.compat.v1.distribute.StrategyExtended.experimental_run_steps_on_iterator`.
        """
        caller = "StrategyExtended.experimental_run_steps_on_iterator"
        check_across(self._strategy, "extended.experimental_run_steps_on_iterator", CALL_BEFORE_RUN)
        check_callable(fn)
        input_v1.check_iterator("iterator", iterator)
        iterations = as_integer("iterations", iterations, least=0, example=1)
        if not isinstance(initial_loop_values, (Mapping, type(None))):
            raise refuse_type(
                f"initial_loop_values={initial_loop_values!r}, of type "
                f"{type(initial_loop_values).__name__}.",
                "initial_loop_values has the first outputs, by their names.",
                "Pass a dict such as {'loss': 0.0}, or None.",
            )
        context = MultiStepContext(self._strategy, dict(initial_loop_values or {}))
        # Added to an error that ends the loop early, so that it names the number of iterations.
        note = f"{caller} was given iterations={iterations}."
        with self._strategy.scope(), ErrorNote(note):
            for _ in range(iterations):
                fn(context, iterator.get_next())
        return context

    @called("StrategyExtended.experimental_make_numpy_dataset")
    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: Any = None) -> Examples:
        """Call `Strategy.experimental_make_numpy_dataset`.

        Example:
            >>> len(MirroredStrategy().extended.experimental_make_numpy_dataset(np.zeros((5, 2))))
            5

        Source:
            `tf.compat.v1.distribute.StrategyExtended.experimental_make_numpy_dataset`.
        """
        return input_v1.make_examples(numpy_input, session)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds its own program: False.

        Example:
            >>> MirroredStrategy().extended.experimental_between_graph
            False
        """
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables: True in every process.

        Example:
            >>> MirroredStrategy().extended.experimental_should_init
            True
        """
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process should write checkpoints.

        True, except in processes after the first of a `TPUStrategy` over several processes.

        Example:
            >>> MirroredStrategy().extended.should_checkpoint
            True
        """
        # A strategy of one process trains its own model, which no other process writes.
        layout = self._strategy.layout
        return layout.is_local or layout.process.is_first

    @property
    def should_save_summary(self) -> bool:
        """Whether this process should write metrics; equal to `should_checkpoint`.

        Example:
            >>> MirroredStrategy().extended.should_save_summary
            True
        """
        return self.should_checkpoint

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the replicas' devices.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
            >>> MirroredStrategy().extended.num_hosts, TPUStrategy(resolver).extended.num_hosts
            (1, 2)
        """
        return len(set(self._strategy._hosts_of_replicas()))

    @property
    def num_replicas_per_host(self) -> int:
        """Number of replicas on the host with the most replicas.

        Example:
            >>> MirroredStrategy(["cpu:0", "cpu:1"]).extended.num_replicas_per_host
            2
        """
        return max(containers.Counter(self._strategy._hosts_of_replicas()).values())
