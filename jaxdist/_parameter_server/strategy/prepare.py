"""Prepares a call of `schedule` for the worker that will run it."""

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._parameter_server.closures.adopted import adopt
from jaxdist._parameter_server.closures.inputs import StateLeaf, is_key
from jaxdist._parameter_server.closures.move import move_optimizers
from jaxdist._parameter_server.closures.program import (
    ClosureProgram,
    TemplateSource,
    find_shardings,
)
from jaxdist._parameter_server.closures.trace import trace_closure
from jaxdist._parameter_server.closures.traced import Recent, Traced
from jaxdist._parameter_server.coordinator import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    on_worker,
    raise_outside,
)
from jaxdist._parameter_server.strategy.check_arguments import (
    check_arguments,
    check_signature,
    raise_no_iterator,
)
from jaxdist._parameter_server.variables.ports import Port, WorkerIndex
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.variables.sharded import ShardedVariable
from jaxdist._parameter_server.worker.datasets import is_value
from jaxdist._parameter_server.worker.devices import find_platform
from jaxdist._program import WholeCall, WholeCalls, is_unit
from jaxdist._typing import PyTree
from jaxdist._values import copy_if_writable
from jaxdist.errors import ArgumentTypeError, ContextError, DeadlineExceededError

_SECONDS = 300.0
# The error of Python when `next` is called on a list.
_NO_ITERATOR = "is not an iterator"


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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A scheduled function with its arguments.

    Args:
        program: The function for arguments of these shapes.
        arguments: Its arrays; a `PerWorkerValues` stands for a leaf of the value of each worker.
        iterators: The iterators that it takes batches from.
    """

    program: ClosureProgram
    arguments: Sequence[Any]
    iterators: Sequence[PerWorkerIterator]

    def find_arguments(self, index: int) -> list[Any]:
        """Return the arrays for one worker."""
        return [x.find(index) if isinstance(x, LeafOf | OwnIndex) else x for x in self.arguments]


@dataclasses.dataclass(frozen=True)
class OwnIndex:
    """The index of the worker that runs the function."""

    def find(self, index: int) -> Any:
        """Return the index, as an array."""
        return np.int32(index)


@dataclasses.dataclass(frozen=True)
class LeafOf:
    """One leaf of a per-worker value."""

    values: PerWorkerValues
    number: int

    def find(self, index: int) -> Any:
        """Return the leaf, of a worker in this process."""
        return jax.tree.leaves(self.values.of(index).value)[self.number]


class Preparer:
    """Traces scheduled functions, each once for arguments of one shape.

    Args:
        is_for_workers: Whether workers run the functions, and not this process.
        strategy: The strategy.
    """

    def __init__(self, strategy: Any, *, is_for_workers: bool = True) -> None:
        self._caller, self._is_for_workers = name_call(), is_for_workers
        self._strategy = weakref.ref(strategy)
        self._calls = WholeCalls()
        self._programs: Recent[Any, ClosureProgram] = Recent(256)
        # Calls without arguments are equal, so nothing has to be looked at again.
        self._without_arguments: Recent[Any, Prepared] = Recent(256)
        self._lock = threading.RLock()

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Prepared:
        """Return a call of a function as workers run it."""
        if args or kwargs:
            return self._prepare(fn, args, kwargs)
        with self._lock:
            found = self._without_arguments.find(
                (fn, _compat.read_context()),
                lambda: self._prepare(fn, (), {}),
                lambda known: known.program.is_current(),
            )
            self._get_strategy().adopted.send_new_values(found.program.captured)
            return found

    @called(lambda self: self._caller)
    def _prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Prepared:
        leaves_of: dict[int, tuple[Any, LeafOf]] = {}
        sources: list[TemplateSource] = []
        iterators: list[PerWorkerIterator] = []
        datasets: list[PerWorkerDataset] = []
        given_args, given_kwargs = args, kwargs

        def replace(value: Any) -> Any:
            if not isinstance(value, PerWorkerValues):
                return value
            made = _find_made(value)
            if isinstance(value, PerWorkerIterator):
                known = [n for n, i in enumerate(iterators) if i is value]
                if known:
                    return sources[known[0]]
                iterators.append(value)
                sources.append(TemplateSource(made.template))
                return sources[-1]
            if isinstance(value, PerWorkerDataset):
                datasets.append(value)
                if not is_value(made.value):
                    raise_no_iterator(args, kwargs, value)
            leaves, treedef = jax.tree.flatten(made.value)
            copies = [np.array(x) for x in leaves]
            leaves_of.update({id(c): (c, LeafOf(value, n)) for n, c in enumerate(copies)})
            return treedef.unflatten(copies)

        # An NNX object is a pytree of JAX too, which `tree.map` would copy.
        args, kwargs = jax.tree.map(
            replace,
            (tuple(args), dict(kwargs)),
            is_leaf=lambda x: is_unit(x) or isinstance(x, PerWorkerValues),
        )
        with self._lock:
            try:
                call = self._calls.read(fn, args, kwargs)
            except ArgumentTypeError:
                self._check(fn, given_args, given_kwargs)
                raise
            arguments = jax.tree.leaves(call.arguments)
            specs = tuple(_describe(_find_made(i).template) for i in iterators)

            def make() -> ClosureProgram:
                self._check(fn, given_args, given_kwargs)
                strategy = self._get_strategy()
                try:
                    return ClosureProgram(call, adopt(call, strategy), sources, self._trace)
                except Exception as error:
                    if datasets and isinstance(error, TypeError) and _NO_ITERATOR in str(error):
                        raise_no_iterator(given_args, given_kwargs, datasets[0])
                    # Errors of JAX do not name the function.
                    name = getattr(fn, "__name__", type(fn).__name__)
                    error.add_note(f"It was raised while {name} was traced for the workers.")
                    raise

            # A program reads the variables of the NNX objects that it was traced with.
            objects = () if call.graph is None else tuple(map(id, call.graph.variables))
            adopted = self._get_strategy().adopted
            if call.graph is not None:
                adopted.send_new_values(call.graph.variables)
            context = _compat.read_context()
            key = fn, call.key(), find_shardings(arguments), specs, objects, context
            program = self._programs.find(key, make, ClosureProgram.is_current)
            adopted.send_new_values(program.captured)
        given = [leaves_of[id(x)][1] if id(x) in leaves_of else _as_plain(x) for x in arguments]
        if self._is_for_workers:
            # The function runs later, and its caller may write other values into its arrays.
            given = [copy_if_writable(x) for x in given]
        return Prepared(program, [*given, *program.find_keys(), OwnIndex()], iterators)

    def _check(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._is_for_workers:
            check_signature(fn, args, kwargs)
            check_arguments(args, kwargs)

    def _get_strategy(self) -> Any:
        strategy = self._strategy()
        if strategy is None:
            raise ContextError(
                "A scheduled function is traced for other batches, and its strategy was deleted."
                "\n\nA trace needs the variables of the strategy.\n\n"
                "Keep the strategy until all functions have run: coordinator.join()."
            )
        return strategy

    def _read(self, leaf: Any) -> Any:
        """Return what the function returns for a leaf of its result.

        The result of a worker is the value that a variable has then, and not the variable, whose
        value changes later. A step that runs in this process returns variables, as all steps do.
        """
        is_read = self._is_for_workers and isinstance(leaf, ServerVariable | ShardedVariable)
        return leaf.value() if is_read else leaf

    def _trace(self, call: WholeCall, state: Sequence[StateLeaf]) -> Traced:
        """Trace in the scope of the strategy, for whichever worker runs the function."""
        strategy = self._get_strategy()
        if self._is_for_workers:
            platforms = strategy._tasks.find_platforms()
            index = Port("worker index", strategy.layout, (), np.int32, role=WorkerIndex()).value
        else:
            platforms, index = [find_platform(strategy.layout)], raise_outside
        with strategy.scope(), on_worker(index):
            traced, recorders = trace_closure(call, state, strategy, platforms, self._read)
            return move_optimizers(traced, recorders, call.flat.nodes, strategy)


def _as_plain(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value) else value


def _find_made(values: PerWorkerValues) -> Made:
    """Wait until some worker has made its value, and return it."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        index = values.find_any()
        if index is not None:
            made: Made = values.of(index)
            return made
        time.sleep(0.002)
    raise DeadlineExceededError(
        f"ClusterCoordinator.schedule waited {_SECONDS:g} s for the dataset of a worker.\n\n"
        "A function is traced with the shapes of the first batch, which a worker has to make.\n\n"
        "Look at what dataset_fn does, and whether any worker runs."
    )


def _describe(template: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(template)
    return treedef, tuple((np.shape(x), str(x.dtype)) for x in leaves)
