"""Variables of Keras in steps that `strategy.run` runs.

A step reads and assigns them like a `jaxdist.Variable`: see Note [Lifted variables]. The first
step that uses one makes a `jaxdist.Variable`, which holds its value from then on.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _compat, _replica
from jaxdist._keras.place import drop_copies, is_placed, sharding_in_step, take_own
from jaxdist._keras.rows import current_rows
from jaxdist._keras.source import keras_module
from jaxdist._values import Variable, current_binding, put, use_binding
from jaxdist.errors import ContextError, MixedStrategyError

_HELD = "_jaxdist_variable"


class _OfMetric(Variable):
    """A `jaxdist.Variable` that holds the value of a variable of a Keras metric."""

    __slots__ = ()

    _is_of_metric = True
    _remedy_of_divergence = (
        "They belong to metrics of Keras, which have one value for all replicas, and each replica "
        "updates them with its own rows.\n\n"
        "Update the metric with the rows of all replicas: metric.update_state("
        "jaxdist.get_replica_context().all_gather(values, axis=0)). Or return the values, and "
        "update it outside of the step: metric.update_state(strategy.gather(values, axis=0)). Or "
        "use nnx.metrics in the step, or the metrics of jaxdist.fit, whose updates are added up."
    )


def is_held(variable: Any) -> bool:
    """Whether a step of the user used a variable, so that a `jaxdist.Variable` has its value."""
    return getattr(variable, _HELD, None) is not None


def _current_step() -> Any:
    """Return the frame of the user's step being traced around the caller, or None."""
    frame = _replica.innermost_explicit_frame()
    # `fit` passes the variables of the model as arguments of its steps.
    is_users = frame is not None and frame.is_inside_step and current_rows() is None
    return frame if is_users else None


def read_in_step(value: Any) -> Any:
    """Return a property `value` of Keras' variables that reads the current value in a step."""

    def read(self: Any) -> Any:
        held: Variable | None = getattr(self, _HELD, None)
        frame = _current_step()
        if held is None and frame is None and current_binding() is None:
            return value.fget(self)
        backend = keras_module("backend")
        if backend.in_stateless_scope():
            given = backend.get_stateless_scope().get_current_value(self)
            if given is not None:
                return self._maybe_autocast(given)
        if frame is not None:
            return self._maybe_autocast(_hold(self, frame.strategy).value())
        if held is None:
            raise _make_function_error(self, "read")
        # While a function is traced, the binding has the value.
        own = take_own(self, held.held) if current_binding() is None else held.value()
        return self._maybe_autocast(own)

    return property(read, doc=value.__doc__)


def assign_in_step(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_direct_assign` of Keras' variables that works in a step of `run`."""

    @functools.wraps(assign)
    def set_value(self: Any, value: Any) -> None:
        frame, held = _current_step(), getattr(self, _HELD, None)
        if frame is not None:
            _hold(self, frame.strategy).assign(value)
        elif held is not None:
            held.assign(value)
        elif current_binding() is not None:
            raise _make_function_error(self, "assigned")
        else:
            drop_copies(self)
            assign(self, value)

    return set_value


def _make_function_error(variable: Any, what: str) -> ContextError:
    return ContextError(
        f"The Keras variable {variable.path!r} was {what} in a jaxdist.function, outside of "
        "strategy.run.\n\n"
        "The function is traced once. A variable of Keras becomes an input and a result of it "
        "when a step of strategy.run first uses the variable.\n\n"
        "Do this in the step, or outside of the function."
    )


def make_outside(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `__init__` of Keras' variables that gives those made in a step a value at once."""

    @functools.wraps(initialize)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if _current_step() is None or keras_module("backend").in_stateless_scope():
            initialize(self, *args, **kwargs)
            return
        # An optimizer makes its variables when it is first applied, and some metrics when they are
        # first updated. Op by op, a replica computes in its own trace.
        with _replica.enter_frame(None), use_binding(None):
            _compat.call_outside_traces(lambda: initialize(self, *args, **kwargs))

    return make


def _hold(variable: Any, strategy: Any) -> Variable:
    """Return the `jaxdist.Variable` that holds the value of a variable of Keras."""
    held: Variable | None = getattr(variable, _HELD, None)
    if held is not None:
        if held.distribute_strategy is not strategy:
            raise MixedStrategyError(
                f"{strategy!r} runs a step that uses the Keras variable {variable.path!r}.\n\n"
                f"A step of {held.distribute_strategy!r} used it first, and that strategy has its "
                "value.\n\n"
                "Run all steps of a model on one strategy, or make another model."
            )
        return held
    # Make it outside a `jaxdist.function` too; the function then has it as an input.
    outside = _replica.enter_frame(_replica.Frame(strategy))
    with jax.ensure_compile_time_eval(), outside, use_binding(None):
        value = variable._value
        if is_placed(variable):
            value = put(value, sharding_in_step(variable, strategy.layout))
        # Keras uses this mode only for variables of metrics.
        kind = _OfMetric if variable.synchronization == "on_read" else Variable
        held = kind(value, name=variable.path, trainable=variable.trainable)
    setattr(variable, _HELD, held)
    # One copy is enough, and nobody should read the old value.
    variable._value = None
    return held
