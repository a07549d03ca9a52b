"""Finds which non-trainable variables a Keras model computes from their own old values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._keras import (
    OnlyReplica,
    Rows,
    count_rows,
    find_aggregations,
    keras_module,
    name_of,
    use_rows,
)
from jaxdist._program import Dependence, DependenceAnalysis, growth
from jaxdist.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """The numbers of variables whose next value depends on the previous one.

    Args:
        numbers: The numbers of all these variables.
        added: The float variables among them that a step only adds to.
    """

    numbers: frozenset[int]
    added: frozenset[int]


def find_accumulated(
    strategy: Any, model: Any, state: Any, batch: Any, *, training: bool
) -> Accumulated:
    """Return the variables whose next value depends on the previous one.

    A moving average does, but a value that a layer only records does not. This traces a call of
    the model once, and computes nothing.

    Args:
        strategy: The strategy of the model.
        model: The model.
        state: The values of its variables: the trainable ones, then the others.
        batch: A batch of Keras.
        training: Whether the model is called for training.

    Raises:
        UnsupportedError: A layer of the user changes such a variable other than by adding to it,
            and the variable is not an average.
    """
    utils = keras_module("trainers.data_adapters.data_adapter_utils")
    x, _, _ = utils.unpack_x_y_sample_weight(batch)
    kwargs = {"training": training} if model._call_has_training_arg else {}

    def call(fixed: Any, trainable: Any, x: Any) -> list[Any]:
        _, after = model.stateless_call(trainable, fixed, x, **kwargs)
        return list(after)

    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)),
        (list(state[1]), list(state[0]), x),
    )
    count = count_rows(batch)
    with use_rows(Rows(count, count, OnlyReplica(strategy), has_shares=False)):
        closed = jax.make_jaxpr(call)(*shapes)
    numbers = range(len(state[1]))
    found = frozenset(n for n in numbers if n in _compat.drop_unused(closed, [n])[1])
    _check_can_be_added_up(model, closed.jaxpr, found)
    variables = model.non_trainable_variables
    floats = [n for n in found if jnp.issubdtype(variables[n].dtype, jnp.inexact)]
    jaxpr = closed.jaxpr
    added = [n for n in floats if growth(jaxpr, jaxpr.invars[n], n) is Dependence.SUM]
    return Accumulated(found, frozenset(added))


def _check_can_be_added_up(model: Any, jaxpr: Any, numbers: frozenset[int]) -> None:
    # Workers send the change of a variable. If two workers read the same value and compute a
    # maximum, their changes do not add up to the change of the maximum.
    aggregations = find_aggregations(model)
    strange = [
        model.non_trainable_variables[n].path
        for n in sorted(numbers)
        if n in aggregations and not _adds_up(jaxpr, n, aggregations[n])
    ]
    if strange:
        raise UnsupportedError(
            f"The Keras model {name_of(model)!r} is on parameter servers, and layers of its own "
            f"compute the new value of {strange} from the old one in another way than by adding "
            "to it.\n\n"
            "Workers read the same old value and send by how much it has changed, so the changes "
            "of all workers must add up.\n\n"
            "Assign only a value that does not depend on the old one, or add to it: "
            "variable.assign_add(more). Pass aggregation='mean' to add_weight for a moving "
            "average, decay * old + (1 - decay) * value. Or train on a strategy whose replicas are "
            "in step, such as MirroredStrategy."
        )


def _adds_up(jaxpr: Any, number: int, aggregation: str) -> bool:
    grown = growth(jaxpr, jaxpr.invars[number], number)
    if grown is not Dependence.OTHER or aggregation != "mean":
        return grown is not Dependence.OTHER
    given = [Dependence.SAME if n == number else Dependence.FREE for n in range(len(jaxpr.invars))]
    return WeightedSums().run(jaxpr, given)[number] is not Dependence.OTHER


class WeightedSums(DependenceAnalysis):
    """Dependence analysis in which a sum may scale the variable, as an average does."""

    def operation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        name, free = eqn.primitive.name, inputs.count(Dependence.FREE)
        is_known = Dependence.OTHER not in inputs
        is_sum = name in ("add", "add_any", "sub", "neg")
        is_scaled = name == "mul" and free == 1
        is_divided = name == "div" and inputs[1] is Dependence.FREE
        if is_known and (is_sum or is_scaled or is_divided):
            return [Dependence.SUM]
        return super().operation(eqn, inputs)
