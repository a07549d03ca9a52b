"""Makes the train, test and predict functions of a Keras model whose variables are on servers."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._integers import check_all_fit
from jaxdist._keras import (
    OnlyReplica,
    Rows,
    add_to_metrics,
    count_rows,
    give_back_after_errors,
    has_own,
    is_call_on_batch,
    name_of,
    place_batch,
    take_batches,
)
from jaxdist._keras_servers.checks import UNKNOWN, check_model, find_accumulated
from jaxdist._keras_servers.runners import make_runner
from jaxdist._keras_servers.step import Seeds, ServerStep
from jaxdist._keras_servers.variables import ModelOnServers
from jaxdist._replica import current_frame


class Results:
    """The values of the metrics of a model, to which the results of steps are added.

    Args:
        model: The Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.values: list[Any] = []
        # The logs that Keras shows after a batch; None before the first result.
        self.logs: Any = None
        self._add = jax.jit(self._compute)

    def start(self, values: Any) -> None:
        """Start from the values of the variables of the metrics."""
        self.values, self.logs = list(values), None

    def add(self, result: Any, total: int) -> None:
        """Add the results of a step on `total` rows."""
        given = {name: result[name] for name in ("loss", "metrics", "rows")}
        self.logs, self.values = self._add(self.values, given, total)

    def _compute(self, values: Any, result: Any, total: Any) -> Any:
        return add_to_metrics(
            self._model, values, result["metrics"], result["loss"], result["rows"], total
        )


class FunctionHere:
    """A predict function, or a test function with a step of the user.

    Arrays that a step does not change stay the same objects, because new ones would be sent to
    the servers: see Note [Keras models on servers].

    Args:
        model: The Keras model.
        kind: "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self._kind = model, kind
        # The numbers of the arrays that the step changed in its last trace, by the batch's shapes.
        self._changed: dict[Any, list[int]] = {}
        eagerly = model.run_eagerly or not model.jit_compile
        self._step = self._compute if eagerly else jax.jit(self._compute)

    @called("evaluate or predict of Keras")
    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next `steps_per_execution` steps; return the logs or outputs, and the state."""
        found = []
        with give_back_after_errors(self._model, self._kind, lambda: state):
            for batch in take_batches(self._model, iterator):
                check_all_fit("data", batch)
                result, new = self._step(state, batch)
                arrays, structure = jax.tree.flatten(state)
                for number, array in zip(self._changed[_describe(batch)], new, strict=True):
                    arrays[number] = array
                state = jax.tree.unflatten(structure, arrays)
                found.append(result)
        if self._kind != "predict":
            return found[-1], state
        if len(found) == 1:
            return found[0], state
        return jax.tree.map(lambda *x: jnp.concatenate(x), *found), state

    @_compat.check_constants()
    def _compute(self, state: Any, batch: Any) -> tuple[Any, list[Any]]:
        """Return the result of a step, and the arrays of the state that it changed."""
        result, new = getattr(self._model, f"{self._kind}_step")(state, batch)
        new = (state[0], new) if self._kind == "predict" else new
        pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True))
        changed = [n for n, (before, after) in enumerate(pairs) if after is not before]
        self._changed[_describe(batch)] = changed
        return result, [pairs[n][1] for n in changed]


def _describe(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    # In a trace, dtypes are those of JAX.
    return structure, tuple((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)


_MODELS: "weakref.WeakKeyDictionary[Any, ModelOnServers]" = weakref.WeakKeyDictionary()


def make_function(strategy: Any, model: Any, kind: str) -> Any:
    """Return a function that Keras calls with its state and an iterator over batches.

    Args:
        strategy: The strategy of the model.
        model: The Keras model.
        kind: "train", "test" or "predict".
    """
    # A user's step of evaluation, and predictions, change nothing on the servers.
    if kind == "predict" or (kind == "test" and has_own(model, "test_step")):
        return FunctionHere(model, kind)
    check_model(model, kind, strategy)
    return ServerFunction(strategy, model, kind)


class ServerFunction:
    """A train or test function whose steps run on workers.

    Args:
        strategy: The strategy of the model.
        model: The Keras model.
        kind: "train" or "test".
    """

    def __init__(self, strategy: Any, model: Any, kind: str) -> None:
        self._strategy, self._model, self._kind = strategy, model, kind
        remote = _MODELS.get(model)
        if remote is None:
            remote = _MODELS[model] = ModelOnServers(strategy)
        self._remote = remote
        self._seeds = Seeds(model, strategy.worker_number)
        self._step = ServerStep(model, remote=remote, seeds=self._seeds)
        self._results = Results(model)
        self._runner = make_runner(strategy)
        # One function for each number of rows of a batch.
        self._functions: dict[int, Callable[..., Any]] = {}
        self._state: Any = None

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Start the next `steps_per_execution` steps; return the newest known metrics."""
        batches = take_batches(self._model, iterator)
        try:
            if state is not self._state:
                self._begin(state, batches[0])
            for batch in batches:
                self._start(batch)
                is_first = self._results.logs is None or not self._seeds.is_known
                self._add(self._runner.collect(least=int(is_first)))
            if is_call_on_batch():
                self._add(self._runner.collect_all())
        except BaseException:
            self._runner.drop()
            self._give_back(state)
            raise
        return self._results.logs, state

    def owns(self, state: Any) -> bool:
        """Whether it returned this state, whose values are on the servers."""
        return self._state is not None and state.get("trainable_variables") is self._state[0]

    def sync(self) -> None:
        """Wait for all steps, and set the variables of Keras to the values of the servers."""
        state, self._state = self._state, None
        try:
            self._add(self._runner.collect_all())
        except BaseException:
            self._runner.drop()
            raise
        finally:
            self._take_values(state)

    def _take_values(self, state: Any) -> None:
        model, is_train, groups = self._model, self._kind == "train", self._find_variables()
        own = [v for n, v in enumerate(groups[1]) if n not in self._seeds.positions]
        wanted = [*groups[0], *own] if is_train else own
        try:
            found, of_optimizer = self._remote.fetch(wanted, state[2] if is_train else None)
        except BaseException:
            self._give_back(state)
            raise
        fixed = list(state[1])
        self._seeds.put_into(fixed)
        values = [state[0], fixed, *([of_optimizer] if is_train else []), self._results.values]
        now = dict(zip(map(id, wanted), found, strict=True))
        for group, new in zip(groups, values, strict=True):
            for variable, value in zip(group, new, strict=True):
                variable.assign(now.get(id(variable), value))
        self._remote.note([*groups[0], *groups[1]], model.optimizer if is_train else None)

    def _begin(self, state: Any, batch: Any) -> None:
        """Send everything that changed since the last step to the servers."""
        trainable, fixed, *_ = self._find_variables()
        positions = self._seeds.positions
        own = [n for n in range(len(fixed)) if n not in positions]
        self._remote.send(trainable, state[0])
        self._remote.send([fixed[n] for n in own], [state[1][n] for n in own])
        if self._kind == "train":
            self._remote.send_optimizer(self._model.optimizer, trainable, state[2])
        self._seeds.start(state[1])
        self._results.start(state[-1])
        if self._step.accumulated is UNKNOWN:
            is_train = self._kind == "train"
            self._step.accumulated = find_accumulated(
                self._strategy, self._model, state, batch, training=is_train
            )
        self._state = state

    def _start(self, batch: Any) -> None:
        rows = count_rows(batch)
        layout = self._strategy.layout
        if rows % layout.num_replicas:
            placed = jax.tree.map(np.asarray, batch)
        else:
            placed = place_batch(batch, rows, layout)
        args = placed, self._seeds.take()
        function = self._functions.get(rows)
        if function is None:
            function = self._functions[rows] = self._make_step(rows)
        self._runner.start(function, args, rows)

    def _make_step(self, total: int) -> Callable[..., Any]:
        run = functools.partial(self._step.run, is_train=self._kind == "train")
        whole = OnlyReplica(self._strategy)

        def keras_step(batch: Any, seeds: Any) -> Any:
            frame = current_frame()
            own = jax.tree.leaves(batch)[0].shape[0]
            replica = whole if frame is None or own == total else frame.replica
            return run(batch, seeds, Rows(own, total, replica))

        keras_step.__name__ = f"{name_of(self._model)}_{self._kind}_step"
        return keras_step

    def _add(self, found: Iterator[tuple[Any, int]]) -> None:
        for result, rows in found:
            self._seeds.learn(result["seeds"])
            self._results.add(result, rows)

    def _find_variables(self) -> list[Any]:
        """Return the variables of the model in the order of the state."""
        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        groups += [model.optimizer.variables] if self._kind == "train" else []
        return [*groups, model.metrics_variables]

    def _give_back(self, state: Any) -> None:
        """Give the variables of Keras back the arrays that this function took from them."""
        for group, values in zip(self._find_variables(), state, strict=True):
            for variable, value in zip(group, values, strict=True):
                if variable._value is None:
                    variable._value = value
