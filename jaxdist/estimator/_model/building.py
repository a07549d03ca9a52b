"""Builds a model from a model function, which requests its modules by `get_module`."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._called import called, name_call, refuse
from jaxdist._compat import watch_made_variables
from jaxdist._strategies import Strategy, get_strategy
from jaxdist._validate import check_callable, check_text
from jaxdist.errors import ArgumentError, ContextError
from jaxdist.estimator._model.spec import EstimatorSpec, ModeKeys, check_spec, count_rows

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
        f"{name_call()} was called for the module {name!r}, and the model has "
        f"{', '.join(map(repr, sorted(frame.modules))) or 'none'}.\n\n"
        "A model function requests the same modules in all its calls for one mode.\n\n"
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


# Each module of a model has its own seed.
_SEED_STEP = 7919


@dataclasses.dataclass
class Built:
    """A model that is built for one mode and one strategy.

    Args:
        mode: One of `ModeKeys`.
        strategy: The strategy that it runs on.
        call: Calls the model function with features and labels.
        modules: The modules by name.
        spec: The spec that the model function returned for the first batch, without its arrays.
        optimizer: The optimizer; only for `TRAIN`.
    """

    mode: str
    strategy: Strategy
    call: Callable[[Any, Any], Any]
    modules: Any
    spec: EstimatorSpec
    optimizer: Any = None
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def call_model(
        self, modules: Any, features: Any, labels: Any, find_step: Callable[[], Any]
    ) -> EstimatorSpec:
        """Call the model function in a step, with the modules that the step got."""
        with enter_model_fn(Frame(modules, find_step, can_add=False)):
            rows = count_rows(features)
            return check_spec(self.call(features, labels), self.mode, rows)

    @property
    def state(self) -> dict[str, Any]:
        """The state that a checkpoint saves."""
        state = {"modules": self.modules}
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer}


def build(
    call: Callable[[Any, Any], Any],
    mode: str,
    strategy: Strategy,
    features: Any,
    labels: Any,
    seed: int,
) -> Built:
    """Build a model: trace its function with the shapes of a batch, and make what it requests.

    Args:
        call: Calls the model function with features and labels.
        mode: One of `ModeKeys`.
        strategy: The modules are made in its scope.
        features: The features of one replica, for their shapes.
        labels: The labels of one replica.
        seed: The seed of the modules.

    Raises:
        ArgumentError: The model function requests no module, so there is nothing to train.
    """
    modules = nnx.Dict()
    features, labels = jax.tree.map(_take_shape, (features, labels))
    while True:
        try:
            spec = _trace(call, mode, modules, features, labels)
            break
        except NeedsModule as needed:
            with strategy.scope():
                made = make_module(needed, seed + _SEED_STEP * len(modules))
            if isinstance(made, nnx.Module):
                made.train() if mode == ModeKeys.TRAIN else made.eval()
            modules[needed.name] = made
    if not nnx.to_flat_state(nnx.state(modules)):
        raise ArgumentError(
            f"estimator: model_fn requested no module when it was called for {mode!r}.\n\n"
            "A module that it makes in another way is made again in each trace, and is neither "
            "trained nor saved.\n\n"
            "Write model = jaxdist.estimator.get_module(lambda rngs: MyModel(rngs=rngs))."
        )
    optimizer = None
    if mode == ModeKeys.TRAIN and spec.train_op is not None:
        with strategy.scope():
            optimizer = nnx.Optimizer(modules, spec.train_op, wrt=nnx.Param)
    return Built(mode, strategy, call, modules, spec, optimizer)


def _take_shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


def _trace(
    call: Callable[[Any, Any], Any], mode: str, modules: Any, features: Any, labels: Any
) -> EstimatorSpec:
    graph, state = nnx.split(modules)
    found: list[EstimatorSpec] = []

    def replica(state: Any, features: Any, labels: Any) -> None:
        # Modules of another trace cannot be changed, and the model function may change them.
        inside = nnx.merge(graph, state)
        zero = lambda: jnp.zeros((), jnp.int32)  # noqa: E731
        with enter_model_fn(Frame(inside, zero, can_add=True)):
            rows = count_rows(features)
            spec = check_spec(call(features, labels), mode, rows)
        # The arrays belong to this trace.
        arrays = dict.fromkeys(("predictions", "loss", "eval_metric_ops", "export_outputs"))
        found.append(_without(spec, arrays))

    # Trace in a replica of the default strategy, so that all-reduces of the function have one.
    strategy = get_strategy()
    jax.eval_shape(lambda *given: strategy.run(replica, given), state, features, labels)
    return found[-1]


def _without(spec: EstimatorSpec, changes: dict[str, Any]) -> EstimatorSpec:
    """Return a copy with other fields, and skip the checks of the mode."""
    made = object.__new__(EstimatorSpec)
    for field in dataclasses.fields(spec):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(spec, field.name)))
    return made
