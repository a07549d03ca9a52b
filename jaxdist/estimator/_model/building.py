"""`build`: makes modules, an optimizer and programs from a model function and a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._strategies import Strategy, get_strategy
from jaxdist.errors import ArgumentError
from jaxdist.estimator._model.model_fn import count_rows
from jaxdist.estimator._model.modules import Frame, NeedsModule, enter_model_fn, make_module
from jaxdist.estimator._model.spec import EstimatorSpec, ModeKeys, check_spec

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
            f"estimator: model_fn made no module by get_module when it was called for {mode!r}.\n\n"
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
