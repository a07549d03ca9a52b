"""Reads the batches that Keras takes out of arrays."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._keras.source import keras_module


def read_batches(adapter: Any) -> Iterator[Any]:
    """Return the batches of a data adapter of Keras, on the host.

    Keras would copy each batch to the default device first.

    Cost:
        Shuffled rows of NumPy arrays: one copy on the host, and no further copy before the step.
        Other batches: as in Keras.
    """
    adapters = keras_module("trainers.data_adapters")
    if type(adapter) is not adapters.array_data_adapter.ArrayDataAdapter:
        batches: Iterator[Any] = adapter.get_jax_iterator()
        return batches
    slicing = keras_module("trainers.data_adapters.array_slicing")
    arrays = slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    sources, structure = jax.tree.flatten(arrays)
    # A number instead of the arrays: Keras' handling of structures costs more than the rows.
    places = adapter._get_iterator(_return_indices, 0)
    return (structure.unflatten([_take_rows(s, i) for s in sources]) for i in places)


def _return_indices(_: Any, *, indices: Any) -> Any:
    return indices


def _take_rows(source: Any, indices: Any) -> Any:
    array = source.array
    if type(array) is not np.ndarray or isinstance(indices, slice):
        return source.convert_to_jax_compatible(source[indices])
    # For short rows, `take` needs a third of the time of `array[indices]`, which Keras uses.
    rows = array.take(indices, 0)
    # No one else uses this array. See Note [Who owns host memory]
    rows.flags.writeable = False
    return rows
