"""Values that are wrong for almost every parameter, by name; each call makes them anew."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdist


class _Anything:
    """Takes every argument, and is nothing that jaxdist knows."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "<an object>"


def _nothing(*_: Any, **__: Any) -> None:
    return None


BAD_VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "zero": lambda: 0,
    "minus_one": lambda: -1,
    "huge": lambda: 10**30,
    "minus_huge": lambda: -(10**30),
    "half": lambda: 2.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1j,
    "empty_text": lambda: "",
    "text": lambda: "nonsense",
    "bytes": lambda: b"nonsense",
    "empty_list": list,
    "list_of_none": lambda: [None],
    "list_of_text": lambda: ["nonsense"],
    "list_of_huge": lambda: [10**30, -(10**30)],
    "empty_dict": dict,
    "dict": lambda: {"nonsense": None},
    "empty_tuple": lambda: (),
    "set": lambda: {1, "nonsense"},
    "object": _Anything,
    "class": lambda: _Anything,
    "function": lambda: _nothing,
    "module": lambda: math,
    "generator": lambda: (x for x in ()),
    "array_int": lambda: np.arange(3),
    "array_nan": lambda: np.array(math.nan),
    "array_empty": lambda: np.zeros((0,), np.float32),
    "array_of_objects": lambda: np.array([None, "nonsense"], object),
    "array_of_text": lambda: np.array(["nonsense"]),
    "jax_array": lambda: jnp.ones((2, 3)),
    "per_replica": lambda: jaxdist.PerReplica([1.0, 2.0, 3.0]),
    "strategy": lambda: jaxdist.OneDeviceStrategy("cpu:5"),
    "enum": lambda: jaxdist.VariableAggregation.ONLY_FIRST_REPLICA,
}
