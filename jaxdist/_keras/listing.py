"""Lists variables of Keras for `partition.place` and `explain`, and those of users' layers."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxdist import _replica
from jaxdist._called import called, refuse
from jaxdist._keras.models import name_of, remember_strategy, strategy_of
from jaxdist._keras.place import (
    drop_copies,
    keep_copies,
    mesh_of_one,
    read_copies,
    set_spec,
    take_own,
)
from jaxdist._keras.source import WITH_VARIABLES, is_keras_imported, keras_module
from jaxdist._keras.variables import is_held
from jaxdist.errors import ContextError, MixedStrategyError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class Named:
    """A variable of Keras.

    Args:
        path: Its path. The path of an optimizer's slot ends with the path of its variable.
        role: "parameter", "optimizer" or "other".
        variable: The variable itself.
    """

    path: str
    role: str
    variable: Any

    @property
    def array(self) -> Any:
        """Its value, on all devices that have a copy; None while `fit` holds it."""
        return read_copies(self.variable)


def is_keras_object(value: Any) -> bool:
    """Whether a value is a layer, an optimizer, a metric or a variable of Keras."""
    # In Flax NNX mode, objects of Keras are NNX objects.
    if not is_keras_imported() or isinstance(value, nnx.Pytree):
        return False
    return any(isinstance(value, getattr(keras_module(m), kind)) for m, kind in WITH_VARIABLES)


def list_variables(node: Any) -> Iterator[Named]:
    """Yield the variables of an object of Keras, including those of a model's optimizer."""
    if isinstance(node, keras_module("backend.common.variables").Variable):
        yield Named(node.path, "parameter" if node.trainable else "other", node)
        return
    if isinstance(node, keras_module("optimizers.base_optimizer").BaseOptimizer):
        yield from _list_slots(node)
        return
    if not isinstance(node, keras_module("layers.layer").Layer):
        held = [node.state] if hasattr(node, "state") else node.variables
        yield from (Named(v.path, "other", v) for v in held)
        return
    # A frozen layer also keeps its variables in this list.
    layers = node._flatten_layers()
    own = {id(v) for layer in layers for v in layer._trainable_variables}
    for variable in node.variables:
        yield Named(variable.path, "parameter" if id(variable) in own else "other", variable)
    optimizer = getattr(node, "optimizer", None)
    if optimizer is not None:
        yield from _list_slots(optimizer)
    if isinstance(node, keras_module("trainers.trainer").Trainer):
        yield from (Named(v.path, "other", v) for v in node.metrics_variables)


def _list_slots(optimizer: Any) -> Iterator[Named]:
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [optimizer] if inner is None else [optimizer, inner]
    known = [v for part in parts for v in part._trainable_variables]
    for slot in optimizer.variables:
        # Keras names a slot after its variable, with underscores in its path.
        fitting = [
            (len(v.path), v)
            for v in known
            if slot.name.startswith(_flatten(v.path)) and slot.shape == v.shape
        ]
        if not fitting:
            yield Named(slot.path, "optimizer", slot)
            continue
        _, variable = max(fitting, key=lambda pair: pair[0])
        kind = slot.name.removeprefix(_flatten(variable.path))
        yield Named(f"{optimizer.name}/{kind}/{variable.path}", "optimizer", slot)


def _flatten(path: str) -> str:
    return path.replace("/", "_") + "_"


def _assign(strategy: Any, node: Any, variable: Any, array: jax.Array) -> None:
    """Set the value and the layout of a variable to an array that `partition.place` placed."""
    if isinstance(node, keras_module("trainers.trainer").Trainer):
        with _replica.enter_frame(_replica.Frame(strategy)):
            remember_strategy(node, "placed")
    sharding: Any = array.sharding  # on the mesh of the strategy
    set_spec(variable, sharding.spec, strategy.layout)
    drop_copies(variable)
    variable._value = take_own(variable, array)
    keep_copies([variable], [array])


@called("partition.place")
def list_for_rules(
    strategy: Any, node: Any, seen: set[int]
) -> list[tuple[str, str, Any, Callable[[Any], None]]]:
    """Return the path, the role, the value and the setter of each variable of an object of Keras.

    Args:
        strategy: The strategy that places them.
        node: The object.
        seen: The identities of variables to skip; those of this object are added.

    Raises:
        ArgumentError: A layer is not built, or a step of `strategy.run` already uses the variables.
        MixedStrategyError: The model has another strategy.
        ContextError: The model is being trained.
        UnsupportedError: The strategy has parameter servers, or a replica has devices of several
            processes.
    """
    name = f"{type(node).__name__} {name_of(node)!r}"
    _check_strategy(strategy, node, name)
    if isinstance(node, keras_module("layers.layer").Layer) and not node.built:
        raise refuse(
            f"the Keras {name}, which is not built: its variables do not exist yet.",
            "Rules place variables, and Keras makes them when it knows the shape of the inputs.",
            "Build it first: model.build((None, num_features)), or call it on a batch.",
        )
    found: list[tuple[str, str, Any, Callable[[Any], None]]] = []
    for each in list_variables(node):
        if id(each.variable) in seen:
            continue
        seen.add(id(each.variable))
        if is_held(each.variable):
            raise refuse(
                f"the Keras {name}, whose variable {each.path!r} a step of strategy.run has used.",
                "The step keeps the variable on the devices, and was compiled for its layout.",
                "Place the model before its first step.",
            )
        if each.array is None:
            raise refuse(
                f"the Keras {name} while it trains: fit has the value of {each.path!r}.",
                "The variables get their values back after an epoch.",
                "Place the model before or after fit, and not in a callback.",
                kind=ContextError,
            )
        assign = functools.partial(_assign, strategy, node, each.variable)
        found.append((each.path, each.role, each.array, assign))
    return found


def _check_strategy(strategy: Any, node: Any, name: str) -> None:
    kind = type(strategy).__name__
    if strategy._has_servers:
        raise refuse(
            f"a {kind} and the Keras {name}.",
            "The variables of such a strategy are on its parameter servers.",
            "Use a strategy with logical devices: jaxdist.MirroredStrategy(mesh=mesh, "
            'replica_axes=("data",)).',
            kind=UnsupportedError,
        )
    known = (
        strategy_of(node) if isinstance(node, keras_module("trainers.trainer").Trainer) else None
    )
    if known is not None and known is not strategy:
        raise refuse(
            f"{strategy!r} and the Keras {name}.",
            f"The model was made in the scope of {known!r}, and trains on its devices.",
            "Pass the strategy in whose scope the model was made.",
            kind=MixedStrategyError,
        )
    if strategy.layout.num_logical > 1 and strategy.layout.described is None:
        mesh_of_one(strategy.layout)


# Methods of a layer that do not compute its state.
_HARMLESS = frozenset({"__init__", "get_config", "from_config", "compute_output_shape"})


def find_aggregations(model: Any) -> dict[int, str]:
    """Return the aggregation of each non-trainable variable that does not belong to a Keras layer.

    Args:
        model: The model.

    Returns:
        "none", "sum", "mean" or "only_first_replica", by the number of the variable.
    """
    layers = model._flatten_layers()
    known = {id(g.state) for layer in layers for g in layer._seed_generators}
    statistics: set[int] = set()
    batch_norm = keras_module("layers.normalization.batch_normalization").BatchNormalization
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if _is_of_keras(type(layer)):
            known.update(id(v) for v in own)
        elif isinstance(layer, batch_norm):
            statistics.update(id(v) for v in (layer.moving_mean, layer.moving_variance))
    found: dict[int, str] = {}
    for n, variable in enumerate(model.non_trainable_variables):
        if id(variable) in known:
            continue
        aggregation = variable.aggregation or "none"
        is_moving = aggregation == "none" and id(variable) in statistics
        found[n] = "mean" if is_moving else aggregation
    return found


def _is_of_keras(kind: type) -> bool:
    """Whether a class computes the same as its base class in Keras."""
    base = next((b for b in kind.__mro__ if b.__module__.partition(".")[0] == "keras"), object)
    own = kind.__mro__[: kind.__mro__.index(base)]
    methods = {n for each in own for n, x in vars(each).items() if _is_method(x)}
    return base is not object and not any(hasattr(base, n) for n in methods - _HARMLESS)


def _is_method(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
