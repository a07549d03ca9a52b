"""`load_weights`: from a file of safetensors into a model, each process its own slices."""

import concurrent.futures
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxdist import _compat
from jaxdist._buckets import Place, as_place
from jaxdist._called import called, name_call
from jaxdist._checkpoints import agree_on_result, find_group
from jaxdist._typing import PyTree
from jaxdist._values import Sharded
from jaxdist._weights.files import ENDING, open_weights
from jaxdist._weights.leaves import ModelWeight, list_weights
from jaxdist._weights.mapping import Mapped, Source, as_ignored, find_sources
from jaxdist._weights.matching import Parts, match
from jaxdist._weights.slices import Index, read_slices
from jaxdist.errors import CheckpointError

_SMALL = 1 << 20  # arrays with fewer elements are read several at once
_READERS = 8


@called("training.load_weights")
def load_weights(
    model: PyTree,
    path: str | Place,
    mapping: Mapped | None = None,
    *,
    ignore: Sequence[str] = (),
) -> PyTree:
    """Load weights of a file of safetensors into a model, by name.

    The path `layers/0/up/kernel` of the model is the name `layers.0.up.kernel` of the file. A
    mapping says where the names, the order of dims or the arrays differ.

    Shapes:
        Each array of the file has the shape of the model's array, after the changes of the mapping.
        The arrays of the model keep their placement: whole, in pieces, or over logical devices.

    Cost:
        No communication. A process reads the bytes of its slices, and the gaps between them where
        more reads would take longer. On the host it has at most one large array at a time beside
        its own slices; arrays of less than a million elements are read 8 at once.

    Guarantees:
        Either all arrays are loaded, or the model is unchanged. Each array has a source, and each
        array of the file is used, unless it is ignored.

    Args:
        model: An NNX module; or a pytree of arrays, `Sharded`s and variables. Leaves may be
            `jax.ShapeDtypeStruct`s with a sharding: then no array exists before.
        path: A file; or a folder with `model.safetensors.index.json` or `model.safetensors`. It may
            be in a bucket: `gs://` or `s3://`.
        mapping: Patterns of paths, as in `partition.Rules`, with what each path is made of: a name
            of the file, a `training.Weight`, a list of these for the rows of a stacked array, or
            None for an array that stays as it is.
        ignore: Names of the file that the model does not have; `*` is any text.

    Returns:
        The model: the same NNX object, or a pytree with new arrays.

    Raises:
        CheckpointError: Names are missing or unknown, or shapes or dtypes do not fit (all are
            listed); a number does not fit into the dtype of the model; or a file is damaged.
        ArgumentError: The mapping does not fit the model.
        BucketError: The bucket cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "linear.safetensors")
        >>> training.export_weights(model, path)
        >>> other = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
        >>> training.load_weights(other, path) is other
        True
        >>> bool(jnp.array_equal(model.kernel[...], other.kernel[...]))
        True

    Source:
        `keras.Model.load_weights`, and the files of https://huggingface.co/docs/safetensors.
    """
    place = as_place("path", path, f"weights{ENDING}")
    patterns = as_ignored(ignore)
    weights, put = list_weights(model)
    sources = find_sources([w.path for w in weights], {} if mapping is None else mapping)

    def read() -> dict[str, Any]:
        return _read_all(place, weights, sources, patterns)

    spans = any(weight.spans_processes for weight in weights)
    group = find_group(None) if spans else None
    values = read() if group is None else agree_on_result(group, name_call(), read)
    return put(values)


def _read_all(
    place: Place,
    weights: Sequence[ModelWeight],
    sources: Mapping[str, Source],
    ignore: Sequence[str],
) -> dict[str, Any]:
    stored = open_weights("path", place).arrays
    wanted = [weight for weight in weights if weight.path in sources]
    found = match(place, wanted, sources, stored, ignore)
    targets = [(weight, found[weight.path], _list_slices(weight)) for weight in wanted]

    def read(weight: ModelWeight, parts: Parts, slices: Mapping[str, Index]) -> list[np.ndarray]:
        return list(read_slices(weight, parts, list(slices.values())))

    values = {}
    small = [target for target in targets if target[1].count_elements(target[0]) < _SMALL]
    # Threads only read: settings of JAX such as `jax.enable_x64` are those of this thread.
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        for target, pieces in zip(small, pool.map(read, *zip(*small, strict=True)), strict=True):
            values[target[0].path] = _place(target[0], target[2], pieces)
    # One at a time, since the host may not have memory for two.
    for weight, parts, slices in targets:
        if weight.path not in values:
            pieces = read_slices(weight, parts, list(slices.values()))
            values[weight.path] = _place(weight, slices, pieces)
    return values


def _is_free(weight: ModelWeight) -> bool:
    """Return whether an array is in no fixed place, so that it may move to another device."""
    held = weight.held
    if getattr(held, "sharding", None) is None:
        return True
    return isinstance(held, jax.Array) and not _compat.is_committed(held)


def _list_slices(weight: ModelWeight) -> dict[str, Index]:
    """Return the slices that this process needs; replicas that hold the same one need it once."""
    shape = weight.held.shape
    if _is_free(weight):
        return {"": _as_slices((), shape)}
    indices = weight.held.sharding.addressable_devices_indices_map(shape).values()
    return {str(index): _as_slices(index, shape) for index in indices}


def _place(weight: ModelWeight, slices: Mapping[str, Index], pieces: Iterable[np.ndarray]) -> Any:
    """Return a new value for an array of the model, with its placement."""
    held = weight.held
    sharding: Any = getattr(held, "sharding", None)
    if _is_free(weight):
        [values] = pieces
        new: Any = values
        if not isinstance(held, (np.ndarray, np.generic)):
            devices = [None] if sharding is None else sharding.device_set
            with jax.default_device(next(iter(devices))):
                new = jnp.asarray(values)
    else:
        devices = sharding.addressable_devices_indices_map(held.shape)
        arrays = {}
        for key, values in zip(slices, pieces, strict=True):
            for device in (d for d, index in devices.items() if str(index) == key):
                one = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                arrays[device] = jax.device_put(values, one)
        new = jax.make_array_from_single_device_arrays(
            held.shape, sharding, [arrays[device] for device in devices], dtype=weight.dtype
        )
    if new.dtype != weight.dtype:
        raise CheckpointError(
            f"{weight.path} is {weight.dtype} in the model, and JAX has made {new.dtype} of it.\n\n"
            "JAX has 64 bits only with jax_enable_x64.\n\n"
            "Load in a block of jax.enable_x64(True), or make the model with 32 bits."
        )
    return Sharded(new, *weight.value.cut) if isinstance(weight.value, Sharded) else new


def _as_slices(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return an index of JAX with a start and a stop for each dim."""
    whole = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(slice(*i.indices(n)[:2]) for i, n in zip(whole, shape, strict=True))
