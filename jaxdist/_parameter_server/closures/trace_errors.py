"""Errors of traces of closures."""

from typing import Any

from jaxdist.errors import ContextError, MixedStrategyError, UnsupportedError


def make_lookup_error(function: str, label: str, wrong: Any) -> ContextError:
    """Return the error of rows whose numbers depend on a variable."""
    return ContextError(
        f"{function} reads rows of {label!r} whose numbers depend on the variable "
        f"{wrong.label!r}.\n\n"
        "The worker reads rows before it runs the function, so their numbers come from its "
        "arguments and batches.\n\n"
        "Read the variable as a whole (table.value()[ids]), or pass the numbers as an argument."
    )


def make_key_error(function: str) -> UnsupportedError:
    """Return the error of a function that returns a random key."""
    return UnsupportedError(
        f"{function} returns a random key.\n\n"
        "Results are arrays of NumPy, which has no random keys.\n\n"
        "Return jax.random.key_data(key), and use jax.random.wrap_key_data on the coordinator."
    )


def make_foreign_error(function: str, variable: Any) -> ContextError:
    """Return the error of a variable that is on no server."""
    return ContextError(
        f"{function} uses Variable {variable.label!r}, which was made outside of the scope of the "
        "ParameterServerStrategy.\n\n"
        "Workers read and change variables of the parameter servers; a variable of this process is "
        "on no server.\n\n"
        "Make it inside `with strategy.scope():`, or pass its value as an argument."
    )


def make_other_strategy_error(function: str, name: str) -> MixedStrategyError:
    """Return the error of a variable on the servers of another strategy."""
    return MixedStrategyError(
        f"{function} uses {name}, which is on the parameter servers of another strategy.\n\n"
        "A function reads and changes variables on the servers of the strategy that runs it; one "
        "of the same name there would be another variable.\n\n"
        "Use that strategy, or make the variable inside `with strategy.scope():` of this one. "
        "To take a model over, give it arrays: "
        "nnx.update(model, jax.tree.map(jnp.asarray, nnx.state(model)))."
    )


def make_used_after_error(function: str, name: str) -> ContextError:
    """Return the error of a parameter that is used after its update, or updated twice."""
    return ContextError(
        f"{function} uses {name} after optimizer.update, or updates it twice.\n\n"
        "The servers compute the new value when the whole function has run, so a worker does not "
        "have it.\n\n"
        "Let the function end with the update, and schedule it once for each step."
    )


def make_lost_update_error(function: str, name: str) -> ContextError:
    """Return the error of a gradient whose parameter is in no argument."""
    return ContextError(
        f"{function} calls optimizer.update with a gradient of parameter {name}, and no model "
        "among its arguments gets the new value.\n\n"
        "The servers update variables; the model has to be an argument, whose variables they hold."
        "\n\nPass the model and the optimizer: coordinator.schedule(fn, args=(model, optimizer))."
    )


def make_state_error(function: str, name: str) -> UnsupportedError:
    """Return the error of a function that uses the state of an optimizer."""
    return UnsupportedError(
        f"{function} reads or changes {name}, which is the state of an optimizer.\n\n"
        "The servers hold it beside the parameters, and no worker has it.\n\n"
        "Change the parameters by optimizer.update(model, grads) only."
    )
