"""Elements and blocks of a variable, addressed by index vectors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import call_as, name_call
from jaxdist._integers import check_not_masked
from jaxdist._validate import as_array, show
from jaxdist._values.indexed_slices import as_indexed_slices
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.variable.arguments import name_method, refuse_in_method
from jaxdist._values.variable.checks import check_value, parameter_name
from jaxdist._values.words import widen_integers
from jaxdist.errors import ArgumentError, ShapeError


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of an array: `values` `[n, ...]` at the indices `[n, k]` of its first `k` dims."""

    values: Any
    indices: Any


def check_blocks(variable: Any, indices: Any, updates: Any) -> Blocks:
    """Check indices and blocks, and return them in the dtype of the variable.

    Raises:
        ShapeError: The indices have more dims than the variable, or the blocks have another shape.
        ArgumentError: An index is out of bounds.
    """
    places = _check_places(variable, indices)
    lead, depth = tuple(places.shape[:-1]), int(places.shape[-1])
    values = call_as(name_method(variable.label), _as_values, variable, "updates", updates)
    wanted = (*lead, *variable.shape[depth:])
    check_value(variable.label, "updates", values, wanted, variable.dtype)
    count = int(np.prod(lead))
    rows = jnp.asarray(values).astype(variable.dtype).reshape((count, *variable.shape[depth:]))
    return Blocks(rows, jnp.asarray(places).reshape((count, depth)))


def locate_batch_rows(variable: Any, sparse_delta: Any) -> tuple[Any, Any]:
    """Return indices and blocks for `IndexedSlices` whose indices count rows within each batch."""
    # `IndexedSlices` has one dim of indices, so several batch dims can only come as a pair.
    if isinstance(sparse_delta, tuple) and len(sparse_delta) == 2:
        values, rows = sparse_delta[0], jnp.asarray(sparse_delta[1])
    else:
        slices = as_indexed_slices(variable.label, sparse_delta)
        values, rows = slices.values, jnp.asarray(slices.indices)
    # The number of a batch may be too large for the dtype of the given indices.
    rows = widen_integers(rows)
    grid = jnp.meshgrid(*(jnp.arange(n, dtype=rows.dtype) for n in rows.shape), indexing="ij")
    return jnp.stack([*grid[:-1], rows], axis=-1), values


def locate_elements(variable: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """Return the indices of the elements of `variable[index]`, and the values for them."""
    if not variable.shape:
        raise ArgumentError(
            f"Variable {variable.label!r}[...].{name_call()} was called, and the variable is a "
            "scalar.\n\nAn index chooses elements of an array, and a scalar has no dim.\n\nUse "
            f"variable.{name_call()}({parameter_name()})."
        )
    # Indexing an array of element numbers lets JAX interpret every form of index. A traced one may
    # be out of bounds; then the number is one too large, and so is the place.
    numbers = jnp.arange(variable.size).reshape(variable.shape).at[index]
    numbers = numbers.get(mode="fill", fill_value=variable.size)
    name = f"{variable.label}[...]"
    parameter = parameter_name()
    given = call_as(name_method(name), _as_values, variable, parameter, value)
    check_value(name, parameter, given, tuple(numbers.shape), variable.dtype)
    places: list[jax.Array] = []
    left = numbers
    for size in reversed(variable.shape[1:]):
        left, place = jnp.divmod(left, size)
        places.append(place)
    return jnp.stack([left, *reversed(places)], axis=-1), given


def gather_blocks(variable: Any, indices: Any) -> jax.Array:
    """Return the blocks of the variable's value at these indices.

    Traced indices that are out of bounds give nan.
    """
    places = jnp.asarray(_check_places(variable, indices))
    value: jax.Array = variable.value()
    at = value.at[tuple(places[..., k] for k in range(places.shape[-1]))]
    return at.get(mode="fill", wrap_negative_indices=False)


def _as_values(variable: Any, name: str, value: Any) -> Any:
    """Return `value` as an array; Python numbers get the variable's dtype if it can hold them."""
    if hasattr(value, "dtype"):
        check_not_masked(name, value)
        return value
    given = as_array(name, value)
    fits = jnp.promote_types(variable.dtype, given.dtype) == variable.dtype
    return given.astype(variable.dtype) if fits else given


def _check_places(variable: Any, indices: Any) -> Any:
    if isinstance(indices, PerReplica):
        raise refuse_in_method(
            variable.label,
            f"indices={show(indices)}.",
            "Outside of strategy.run indices are the same for all replicas.",
            f"Call {name_call()} in the function that strategy.run runs, where each replica has "
            "its own.",
        )
    places = indices if hasattr(indices, "dtype") else np.asarray(indices)
    if not jnp.issubdtype(places.dtype, np.integer):
        raise refuse_in_method(
            variable.label,
            f"indices of dtype {places.dtype}.",
            "They are places in the variable: integers.",
            "Pass indices.astype('int32').",
        )
    if not places.ndim or not 0 < places.shape[-1] <= variable.ndim:
        raise refuse_in_method(
            variable.label,
            f"indices of shape {list(places.shape)}, and the variable is {variable.dtype}"
            f"{list(variable.shape)}.",
            "The last dim of indices is one place: up to as many numbers as the variable has dims.",
            f"Pass indices [..., {max(variable.ndim, 1)}] for single elements.",
            kind=ShapeError,
        )
    # Traced indices are unknown; for those, updates that are out of bounds are dropped.
    if not isinstance(places, jax.core.Tracer):
        sizes = np.asarray(variable.shape[: places.shape[-1]])
        found = np.asarray(places)
        wrong = ((found < 0) | (found >= sizes)).any(axis=-1)
        if wrong.any():
            raise refuse_in_method(
                variable.label,
                f"indices with the place {found[wrong][0].tolist()}, and the variable is "
                f"{variable.dtype}{list(variable.shape)}.",
                "Places are numbered from 0.",
                f"Pass places up to {(sizes - 1).tolist()}.",
                kind=ArgumentError,
            )
    return places
