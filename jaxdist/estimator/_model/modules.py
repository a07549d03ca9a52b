"""`get_module` and `get_global_step`: functions to call in a model function."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxdist._called import called, name_call, refuse
from jaxdist._compat import watch_made_variables
from jaxdist._validate import check_callable, check_text
from jaxdist.errors import ArgumentError, ContextError

# Note [Modules of a model function]
# TensorFlow calls a model function once, and its variables live in the graph. JAX traces a model
# function for each shape of the batch, and a module that it makes in a trace is lost with it. So a
# model function requests its modules by name. While the model is built, it is traced with the
# first batch. A module that does not exist ends the trace with `NeedsModule`, is made outside of
# the trace, and the trace starts again. Later traces get the modules as arguments.


class NeedsModule(BaseException):
    """Ends a trace to make a module first. Not an `Exception`, so `except Exception` ignores it."""

    def __init__(self, name: str, factory: Callable[[nnx.Rngs], Any]) -> None:
        super().__init__(name)
        self.name, self.factory = name, factory


@dataclasses.dataclass(frozen=True)
class Frame:
    """The things that a running model function may request.

    Args:
        modules: The modules by name.
        find_step: Returns the global step.
        can_add: Whether new modules may be made.
    """

    modules: Any
    find_step: Callable[[], Any]
    can_add: bool


_FRAME: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)


@contextlib.contextmanager
def enter_model_fn(frame: Frame) -> Iterator[None]:
    """Enable `get_module` and `get_global_step`, and refuse modules that are made otherwise."""
    token = _FRAME.set(frame)
    try:
        with watch_made_variables(_refuse_made):
            yield
    finally:
        _FRAME.reset(token)


def _refuse_made(kind: type, module: str | None) -> None:
    """Refuse a parameter, or a module with variables, that belongs to the trace.

    Other variables, such as those of `nnx.Rngs.fork`, are made in calls of modules too.
    """
    if module is None and not issubclass(kind, nnx.Param):
        return
    what = f"nnx.{kind.__name__}" if module is None else module
    example = (
        "nnx.Dict(w=nnx.Param(jnp.zeros(3)))" if module is None else f"{module}(..., rngs=rngs)"
    )
    raise ArgumentError(
        f"estimator: model_fn made {'a' if what[0] not in 'AEIOU' else 'an'} {what} without "
        "get_module.\n\n"
        "A module that it makes in another way is made again in each trace, and is neither "
        "trained nor saved.\n\n"
        f"Write jaxdist.estimator.get_module(lambda rngs: {example}, name='another name'), with "
        "one name for each module."
    )


@called("estimator.get_module")
def get_module(factory: Callable[[nnx.Rngs], Any], name: str = "model") -> Any:
    """Return a Flax NNX module of the model; make it if it does not exist.

    Call it in a model function. Making a module in any other way is an error: each trace would
    make it again, and it would be neither trained nor saved.

    Args:
        factory: Makes the module from random keys: `lambda rngs: nnx.Linear(4, 2, rngs=rngs)`.
        name: The name of the module in checkpoints.

    Returns:
        The module, in training mode for `ModeKeys.TRAIN` and else in evaluation mode.

    Raises:
        ContextError: No model function is running, or it requests a module that it did not
            request when the model was built.
        ArgumentError: `factory` does not return an NNX object.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     model = jaxdist.estimator.get_module(lambda rngs: nnx.Linear(2, 1, rngs=rngs))
        ...     return jaxdist.estimator.EstimatorSpec(mode, predictions=model(features))

    Source:
        `tf.compat.v1.get_variable` in a model function.
    """
    check_callable(factory, "factory", "Pass lambda rngs: nnx.Linear(4, 2, rngs=rngs).")
    check_text("name", name, "model")
    frame = _find_frame()
    if name in frame.modules:
        return frame.modules[name]
    if frame.can_add:
        raise NeedsModule(name, factory)
    raise ContextError(
        f"{name_call()} was asked for the module {name!r}, and the model has "
        f"{', '.join(map(repr, sorted(frame.modules))) or 'none'}.\n\n"
        "A model function asks for the same modules whenever it is called for one mode.\n\n"
        "Do not choose modules by the shape of a batch."
    )


@called("estimator.get_global_step")
def get_global_step() -> Any:
    """Return the number of completed steps of all workers, before this one.

    Call it in a model function.

    Raises:
        ContextError: No model function is running.

    Source:
        `tf.compat.v1.train.get_global_step`.
    """
    return jnp.asarray(_find_frame().find_step())


def _find_frame() -> Frame:
    frame = _FRAME.get()
    if frame is None:
        raise ContextError(
            f"{name_call()} was called outside of a model function.\n\n"
            "It belongs to the model that an Estimator builds.\n\n"
            "Call it in the model_fn that you pass to jaxdist.estimator.Estimator."
        )
    return frame


@called("estimator.get_module")
def make_module(needed: NeedsModule, seed: int) -> Any:
    """Return the module that a model function requested.

    Raises:
        ArgumentError: Its factory does not return an NNX object.
    """
    made = needed.factory(nnx.Rngs(seed))
    if not isinstance(made, nnx.Pytree) or isinstance(made, nnx.Optimizer):
        raise refuse(
            f"a factory that returned {type(made).__name__} for {needed.name!r}.",
            "A module of a model is a Flax NNX module.",
            "Pass for instance lambda rngs: nnx.Linear(4, 2, rngs=rngs).",
        )
    return made
