"""The ops by which collectives combine values, and the dtypes of operands and results."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse
from jaxdist._integers import find_cut_off
from jaxdist._validate import find_not_of_jax, show
from jaxdist._values import (
    VariableAggregation,
    explain_too_large,
    mean_dtype,
    mean_of_shares,
    refuse_ref,
    share_of_mean,
)
from jaxdist.errors import ArgumentTypeError, ReplicaValueError


class ReduceOp(enum.Enum):
    """The op that combines the values of the replicas.

    Every `reduce_op` argument accepts the name as a string too, in any case.

    Example:
        >>> ReduceOp.SUM.value
        'SUM'

    Source:
        `tf.distribute.ReduceOp`.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    @called("ReduceOp.from_variable_aggregation")
    def from_variable_aggregation(aggregation: VariableAggregation) -> "ReduceOp":
        """Return the op that combines the values that replicas assign to a variable.

        Args:
            aggregation: `VariableAggregation.SUM` or `MEAN`.

        Raises:
            ArgumentError: `aggregation` is anything else: no such op exists.

        Example:
            >>> ReduceOp.from_variable_aggregation(VariableAggregation.MEAN).name
            'MEAN'

        Source:
            `tf.distribute.ReduceOp.from_variable_aggregation`.
        """
        known = ReduceOp.__members__
        if isinstance(aggregation, VariableAggregation) and aggregation.name in known:
            return known[aggregation.name]
        raise refuse(
            f"{aggregation!r}.",
            "A ReduceOp is a sum or a mean, and only two aggregations name one: NONE combines "
            "nothing, and ONLY_FIRST_REPLICA takes one value.",
            "Pass VariableAggregation.SUM or VariableAggregation.MEAN.",
        )


def reduce_op(op: Any) -> ReduceOp:
    """Return the `ReduceOp` that `op` names, or raise an error that lists the valid ones."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise refuse(
        f"reduce_op={show(op)}.",
        "reduce_op is a jaxdist.ReduceOp, or the name of one.",
        f"Pass {' or '.join(f'{o.value!r}' for o in ReduceOp)}.",
    )


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype of a reduction over replicas.

    Floats and complex numbers keep theirs. Booleans are counted (int32). The mean of integers or
    booleans is true division in JAX's default float: float32, or float64 with x64 on.
    """
    if op is ReduceOp.MEAN:
        return mean_dtype(dtype)
    # A sum in dtype bool would be a logical or.
    if dtype == np.bool_:
        return np.dtype(np.int32)
    return dtype


def prepare_summands(op: ReduceOp, array: Any, count: int) -> Any:
    """Return the array to add up for the reduction of `count` arrays of this dtype."""
    if op is ReduceOp.MEAN:
        return share_of_mean(array, count)
    return array.astype(result_dtype(op, array.dtype))


def finish_sum(op: ReduceOp, total: Any, dtype: Any, count: int) -> Any:
    """Return the reduction, from the sum of the results of `prepare_summands`."""
    if op is ReduceOp.MEAN:
        return mean_of_shares(total, dtype, count)
    return total.astype(result_dtype(op, dtype))


def reduce_one_value(op: ReduceOp, value: Any) -> Any:
    """Return the reduction of one value, which is the value in the dtype of the result.

    Args:
        op: The reduce op.
        value: The only value, or for a mean the value of every replica: an array or a number.
            Anything else is returned unchanged.
    """
    own = _dtype_of(value)
    if not (own == np.bool_ or jnp.issubdtype(own, np.integer)):
        return value
    dtype = result_dtype(op, own)
    if dtype == own:
        return value
    # NumPy converts the values first: JAX would reduce 64 bits to 32 before it divides.
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return jnp.asarray(array.astype(dtype))


def check_numeric(name: str, leaf: Any) -> None:
    """Refuse a leaf without a sum: random keys, strings, objects, and dtypes that JAX lacks."""
    # A Python integer that fits no integer dtype is an object to NumPy. Checked first, it gets the
    # better message.
    check_integer(f"cannot reduce {name}", leaf)
    dtype = _dtype_of(leaf)
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    # NumPy counts timedelta64 ("m") among the signed integers.
    is_number = dtype == np.bool_ or (jnp.issubdtype(dtype, np.number) and dtype.kind != "m")
    if extended or not is_number:
        raise ArgumentTypeError(
            f"{name_call()} cannot reduce {name}: it is {type(leaf).__name__} of dtype {dtype}.\n\n"
            "Only numbers and booleans have a sum or a mean.\n\n"
            "Take it out of the structure, or gather it instead."
        )
    check_supported(f"cannot reduce {name}", leaf)


def check_supported(refused: str, leaf: Any) -> None:
    """Refuse a leaf of a dtype that JAX has no arrays of.

    Args:
        refused: What the call cannot do to which leaf.
        leaf: An array, or a value that NumPy can make an array of.
    """
    dtype = _dtype_of(leaf)
    why = find_not_of_jax(leaf, dtype)
    if why is not None:
        found = why.found if isinstance(leaf, np.ma.MaskedArray) else _describe(leaf, dtype)
        rule = why.rule
        remedy = why.remedy or (
            "Take it out of the structure; outside of a step, "
            "strategy.experimental_local_results(value) gives the values of the replicas."
        )
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        found = "a jax.ShapeDtypeStruct, a shape without numbers"
        rule = "A collective needs the numbers of an array."
        remedy = "Pass an array of this shape."
    elif isinstance(dtype, np.dtype) and is_below_a_byte(dtype):
        found = _describe(leaf, dtype)
        rule = "XLA has no collectives of numbers of less than a byte."
        wider = "float16" if jnp.issubdtype(dtype, np.floating) else "int8"
        remedy = f"Cast it first: value.astype({wider!r})."
    else:
        return
    raise ArgumentTypeError(f"{name_call()} {refused}: it is {found}.\n\n{rule}\n\n{remedy}")


def _describe(leaf: Any, dtype: Any) -> str:
    return f"{type(leaf).__name__} of dtype {dtype}"


def is_below_a_byte(dtype: np.dtype[Any]) -> bool:
    """Whether several numbers share one byte (`int4`, `float4_e2m1fn`)."""
    if dtype.kind == "m":  # NumPy counts timedelta64 among the integers
        return False
    if jnp.issubdtype(dtype, np.integer):
        return bool(jnp.iinfo(dtype).bits < 8)
    return bool(jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 8)


def check_integer(refused: str, leaf: Any) -> None:
    """Refuse a Python integer that does not fit into JAX's integer dtype, and a `jax.Ref`.

    Args:
        refused: As for `check_supported`.
        leaf: Anything.
    """
    if _compat.is_mutable(leaf):
        refuse_ref(f"{name_call()} {refused}", leaf)
    if not isinstance(leaf, int) or isinstance(leaf, bool):
        found = find_cut_off(leaf)
        if found is not None:
            raise ReplicaValueError(f"{name_call()} {refused}: it is {found.explain()}")
        return
    bounds = np.iinfo(jax.dtypes.canonicalize_dtype(int))
    if not bounds.min <= leaf <= bounds.max:
        raise ReplicaValueError(
            f"{name_call()} {refused}: it is the Python integer {leaf}, and "
            f"{explain_too_large(leaf, bounds)}"
        )


def _dtype_of(leaf: Any) -> Any:
    """Return the dtype of a leaf, as NumPy reads it."""
    dtype = getattr(leaf, "dtype", None)
    return np.asarray(leaf).dtype if dtype is None else dtype
