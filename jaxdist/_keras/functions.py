"""The train, test and predict functions of a Keras model on a strategy."""

import contextlib
import dataclasses
import itertools
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._keras.forward.written import WrittenStep, check_written_metrics, check_written_step
from jaxdist._keras.models import (
    check_interrupt,
    forget_losses,
    give_back_after_errors,
    has_own,
    name_of,
)
from jaxdist._keras.place import count_rows, is_whole, place_batch, place_state
from jaxdist._keras.rows import OnlyReplica, Rows, use_rows
from jaxdist._keras.step import Step
from jaxdist._program import EAGERLY, RunOptions, run_eagerly
from jaxdist._replica import current_frame
from jaxdist._values import is_per_replica
from jaxdist.errors import ShapeError, StateDivergenceError

_OPTIONS = RunOptions(donate_argnums=(0,))
_LOG = logging.getLogger("jaxdist")
_NUMBERS = itertools.count()


class StepFunction:
    """A function that Keras calls with its state and an iterator over batches.

    Args:
        strategy: The strategy of the model.
        model: The Keras model.
        kind: "train", "test" or "predict".
    """

    def __init__(self, strategy: Any, model: Any, kind: str) -> None:
        self._strategy = strategy
        self._model = model
        self._kind = kind
        self._step = Step(model)
        self._is_written = has_own(model, f"{kind}_step")
        self._replica_step = self._find_step()
        # One function for each number of rows of a batch.
        self._programs: dict[int, Callable[..., Any]] = {}
        self._last: Any = None

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next `steps_per_execution` steps; return the logs or outputs, and the state."""
        outputs: list[Any] = []
        with give_back_after_errors(self._model, self._kind, lambda: state):
            batches = take_batches(self._model, iterator)
            layout = self._strategy.layout
            if state is not self._last:
                state = place_state(state, self._find_variables(), layout)
            for rows, group in _group(batches):
                if is_whole(rows, layout):
                    self._check_whole(rows)
                placed = [place_batch(b, rows, layout) for b in group]
                results, state = self._run(state, placed, rows)
                outputs += results
        self._last = state
        if self._kind != "predict":
            return outputs[-1], state
        if len(outputs) == 1:
            return outputs[0], state
        joined = jax.tree.map(lambda *x: np.concatenate([np.asarray(p) for p in x]), *outputs)
        return joined, state

    def _run(self, state: Any, placed: list[Any], rows: int) -> tuple[list[Any], Any]:
        eagerly = self._model.run_eagerly or not self._model.jit_compile
        block = run_eagerly() if eagerly and not EAGERLY else contextlib.nullcontext()
        program = self._programs.get(rows)
        if program is None:
            program = self._programs[rows] = self._make_program(rows)
        try:
            with block:
                results, state = self._strategy.run(program, (state, placed), options=_OPTIONS)
        except StateDivergenceError as error:
            raise self._name_variables(error) from error
        if eagerly:
            # Op by op, a result has the layout of its last operation.
            state = place_state(state, self._find_variables(), self._strategy.layout)
        if self._kind == "predict":
            return [jax.tree.map(_join_rows, r, is_leaf=is_per_replica) for r in results], state
        self._check_logs(results[-1])
        return results, state

    def _check_whole(self, rows: int) -> None:
        """Check a batch that the replicas do not divide; see Note [Whole batches]."""
        count = self._strategy.num_replicas_in_sync
        sizes = [n for n in (rows - rows % count, rows + -rows % count) if n]
        fitting = " or ".join(map(str, sizes))
        if self._is_written:
            raise ShapeError(
                f"{self._kind}_step of the Keras model {name_of(self._model)!r} was called with a "
                f"batch of {rows} row(s) on {count} replicas with several devices each.\n\n"
                "A step of your own runs on each replica with its rows, and replicas with several "
                "devices need equal numbers of rows.\n\n"
                f"Use a batch of {fitting} rows, and data that fit."
            )
        if self._last is None and self._kind == "train":
            _LOG.warning(
                "The batch of the Keras model %r has %d rows, which %d replicas with several "
                "devices each do not divide: each replica computes all of them. Use a batch_size "
                "of %s to split the work.",
                name_of(self._model),
                rows,
                count,
                fitting,
            )

    def _make_program(self, total: int) -> Callable[..., Any]:
        step = self._replica_step

        def keras_step(state: Any, batches: Any) -> tuple[list[Any], Any]:
            results = []
            for batch in batches:
                logs, new = step(state, batch, total)
                # Keeping the structure of the state also keeps its layout.
                state = jax.tree.structure(state).unflatten(jax.tree.leaves(new))
                results.append(logs)
            return (results if self._kind == "predict" else results[-1:]), state

        # `run` warns about many functions with one code object, since each is compiled. Here each
        # belongs to another model.
        name = f"{name_of(self._model)}_{self._kind}_step_{next(_NUMBERS)}"
        code = keras_step.__code__.replace(co_name=name)
        return types.FunctionType(code, globals(), name, None, keras_step.__closure__)

    def _find_step(self) -> Callable[..., Any]:
        own, layout = getattr(self._step, self._kind), self._strategy.layout
        # One device shares nothing, so the step is that of Keras.
        if self._is_written or len(layout.devices) == layout.num_replicas == 1:
            own = self._call_model(getattr(self._model, f"{self._kind}_step"))

        def step(state: Any, batch: Any, total: int) -> Any:
            frame = current_frame()
            replica = None if frame is None else frame.replica
            if is_whole(total, layout):
                replica = OnlyReplica(self._strategy)
            return own(state, batch, Rows(jax.tree.leaves(batch)[0].shape[0], total, replica))

        return step

    def _call_model(self, written: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of Keras or of the user for the rows of one replica."""

        def find_state(state: Any, batch: Any) -> Any:
            _, new = written(state, batch)
            return split(new)

        def split(new: Any) -> tuple[Any, Any]:
            """Return the non-trainable variables, and those of the metrics."""
            return (new, ()) if self._kind == "predict" else (new[1], new[-1])

        judged: set[tuple[int, int]] = set()

        def own(state: Any, batch: Any, rows: Rows) -> Any:
            forget_losses(self._model)
            with use_rows(dataclasses.replace(rows, has_shares=False)):
                result, new = written(state, batch)
            if self._is_written and rows.count > 1:
                step = WrittenStep(self._model, find_state, state, batch, rows)
                fixed, of_metrics = split(new)
                check_written_step(step, fixed)
                # Check once: op by op, the step is called for every batch.
                if self._kind != "predict" and (rows.own, rows.total) not in judged:
                    check_written_metrics(step, of_metrics)
                    judged.add((rows.own, rows.total))
            return result, ((state[0], new) if self._kind == "predict" else new)

        return own

    def _find_variables(self) -> list[list[Any]]:
        """Return the variables of the model in the order of the state."""
        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        groups += [model.optimizer.variables] if self._kind == "train" else []
        return groups if self._kind == "predict" else [*groups, model.metrics_variables]

    def _name_variables(self, error: StateDivergenceError) -> StateDivergenceError:
        """Return an error of `run` that has names of variables instead of positions."""
        groups = self._find_variables()

        def name(found: re.Match[str]) -> str:
            group, position = map(int, found.groups())
            return str(groups[group][position].path)

        text = re.sub(r"args\[0\]\[(\d+)\]\[(\d+)\]", name, str(error))
        text = text.replace("args[0]", "the state of the model")
        where = f"{self._kind}_step of the Keras model {name_of(self._model)!r}"
        return StateDivergenceError(text.replace("strategy.run", where, 1))

    def _check_logs(self, logs: Any) -> None:
        # A fast path for the usual logs: this runs at each step.
        if type(logs) is dict and all(isinstance(x, jax.Array) for x in logs.values()):
            return
        if not any(map(is_per_replica, jax.tree.leaves(logs, is_leaf=is_per_replica))):
            return
        named = jax.tree_util.tree_flatten_with_path(logs, is_leaf=is_per_replica)[0]
        differ = [jax.tree_util.keystr(path) for path, x in named if is_per_replica(x)]
        raise StateDivergenceError(
            f"{self._kind}_step of the Keras model {name_of(self._model)!r} returned logs with a "
            f"different value on each of {self._strategy.num_replicas_in_sync} replicas: "
            f"{differ}.\n\nKeras shows one number for all rows of a batch.\n\n"
            "Return jaxdist.get_replica_context().all_reduce('mean', value)."
        )


def take_batches(model: Any, iterator: Iterator[Any]) -> list[Any]:
    """Return the batches of the next `steps_per_execution` steps, or the remaining ones.

    Raises:
        StopIteration: No batch is left, as Keras expects.
        KeyboardInterrupt: Ctrl-C was pressed since the last step.
    """
    check_interrupt()
    return [next(iterator), *itertools.islice(iterator, model.steps_per_execution - 1)]


def _group(batches: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Return runs of batches with equal shapes, each with its number of rows."""
    if len(batches) == 1:
        yield count_rows(batches[0]), batches
        return

    def describe(batch: Any) -> tuple[int, Any, Any]:
        leaves, treedef = jax.tree.flatten(batch)
        return count_rows(batch), treedef, tuple((x.shape, x.dtype) for x in leaves)

    for (rows, _, _), group in itertools.groupby(batches, describe):
        yield rows, list(group)


def _join_rows(value: Any) -> Any:
    """Return the rows of all replicas as one array."""
    if not is_per_replica(value):
        return value
    return np.concatenate([np.asarray(x) for x in value.values])
