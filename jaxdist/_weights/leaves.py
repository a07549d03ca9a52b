"""The arrays of a model by path, and how new ones get into it, all or none."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.meta import Partitioned
from jax.experimental.multihost_utils import process_allgather
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._integers import check_not_masked
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import (
    Sharded,
    from_state,
    is_assignable,
    is_nnx_object,
    is_sharded_leaf,
    refuse_ref,
)

# What a module computes or draws anew. All else is a weight: parameters, statistics, and variables
# of the user's own classes.
NO_WEIGHTS = (nnx.RngState, nnx.OptState, nnx.Intermediate, nnx.Cache, nnx.Perturbation)


@dataclasses.dataclass(frozen=True)
class ModelWeight:
    """An array of a model.

    Attributes:
        path: Its path, with slashes.
        value: An array of JAX or NumPy, a `Sharded`, or a `jax.ShapeDtypeStruct`.
    """

    path: str
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array, without padding."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.value.dtype)

    @property
    def held(self) -> Any:
        """The array, with padding if it is in pieces."""
        return self.value.held if isinstance(self.value, Sharded) else self.value

    @property
    def spans_processes(self) -> bool:
        """Whether other processes have parts of it."""
        sharding = getattr(self.held, "sharding", None)
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            raise refuse(
                f"model with {self.path} on an abstract mesh.",
                "Arrays are on devices, and an abstract mesh has none.",
                "Place the shapes: partition.place(strategy, model, rules).",
            )
        return sharding is not None and not sharding.is_fully_addressable


def list_weights(
    model: PyTree,
) -> tuple[list[ModelWeight], Callable[[Mapping[str, Any]], PyTree]]:
    """Return the weights of a model, and a function that puts new values in.

    The function takes values by path, and returns the model: the same objects with new arrays, and
    new arrays in pytrees. If it raises, nothing has changed.

    Raises:
        ArgumentError: The model has no weights, or two of them have one path.
        ArgumentTypeError: A value is a number or a container, and not an array.
    """
    found, tree = tree_flatten_with_path(model, is_leaf=_is_leaf)
    leaves = [(path, _copy_state(x) if isinstance(x, nnx.State) else x) for path, x in found]
    values: dict[str, Any] = {}
    setters: dict[str, Callable[[Any], None]] = {}  # of objects, which stay the same ones
    places: dict[str, int] = {}  # of leaves, which are replaced
    seen: set[int] = set()

    def add(name: str, value: Any) -> None:
        if name in values:
            raise refuse(
                f"model with two arrays at the path {name}.",
                "A path is the name of one array in a file.",
                "Rename one of the keys: a slash in a key looks like a level.",
            )
        refuse_ref(f"{name_call()} was given model at {name}", value)
        check_not_masked(f"model at {name}", value)
        if isinstance(value, (bool, int, float, complex, dict, list, tuple)):
            raise refuse_type(
                f"model with {show(value)} at {name}.",
                "Weights are arrays, and it would be left out.",
                "Make it an array, jnp.asarray(value), or leave it out of the model.",
            )
        values[name] = value

    for number, (path, leaf) in enumerate(leaves):
        if is_nnx_object(leaf) or isinstance(leaf, nnx.State):
            is_state = isinstance(leaf, nnx.State)
            for inner, variable in nnx.to_flat_state(leaf) if is_state else nnx.iter_graph(leaf):
                # Objects may share a variable.
                if isinstance(variable, nnx.Variable) and id(variable) not in seen:
                    seen.add(id(variable))
                    if isinstance(variable, NO_WEIGHTS):
                        continue
                    name, value = _join(path, inner), _unbox(variable)
                    add(name, value)
                    setters[name] = value.assign if is_assignable(value) else variable.set_raw_value
        elif not isinstance(leaf, NO_WEIGHTS):
            name = _join(path)
            add(name, _unbox(leaf))
            if is_assignable(leaf):
                setters[name] = leaf.assign
            else:
                places[name] = number
    # The value of an NNX variable on a parameter server is itself a variable.
    plain = {n: x.read_value() if is_assignable(x) else x for n, x in values.items()}
    weights = [ModelWeight(name, value) for name, value in plain.items() if _is_array(value)]
    if not weights:
        raise refuse(
            f"model={show(model)}, in which no array is a weight.",
            "A model is an NNX module, or a pytree of arrays such as the params of Linen.",
            "Pass the module. A model of Keras has methods of its own: model.load_weights(path).",
        )

    def put(new: Mapping[str, Any]) -> PyTree:
        found = [leaf for _, leaf in leaves]
        for name in places.keys() & new.keys():
            found[places[name]] = _rebox(found[places[name]], new[name])
        changed: list[str] = []
        try:
            for name in setters.keys() & new.keys():
                changed.append(name)
                setters[name](new[name])
        # Also Ctrl-C: the model must not consist of two.
        except BaseException:
            for name in changed:
                setters[name](plain[name])
            raise
        return jax.tree.unflatten(tree, found)

    return weights, put


def _is_leaf(x: Any) -> bool:
    kinds = (nnx.State, Partitioned)
    return is_nnx_object(x) or is_assignable(x) or is_sharded_leaf(x) or isinstance(x, kinds)


def _copy_state(state: Any) -> Any:
    """Return a state with variables of its own, as a pytree is not changed in place."""
    return jax.tree.map(
        lambda x: x.replace(_compat.get_held(x)),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _join(path: tuple[Any, ...], inner: Sequence[Any] = ()) -> str:
    parts = [keystr(path, simple=True, separator="/"), *map(str, inner)]
    return "/".join(part for part in parts if part) or "value"


def _unbox(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return from_state(_compat.get_held(leaf))
    return leaf.value if isinstance(leaf, Partitioned) else from_state(leaf)


def _rebox(leaf: Any, value: Any) -> Any:
    return leaf.replace_boxed(value) if isinstance(leaf, Partitioned) else value


def _is_array(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return hasattr(value, "shape") and isinstance(dtype, np.dtype) and dtype.kind not in "OSUMm"


def fetch_weight(weight: ModelWeight, row: int | None = None) -> np.ndarray:
    """Return a copy of an array of the model, or of a row of it, on the host.

    Cost:
        An all-gather if other processes hold parts of it; then all of them call this function.
    """
    held, shape = weight.held, weight.shape
    if row is not None:
        held, shape = held[row], shape[1:]
    if not isinstance(held, jax.Array):
        whole = np.array(held)
    elif held.is_fully_addressable or held.is_fully_replicated:
        whole = np.empty(held.shape, weight.dtype)
        # JAX keeps a copy on the host of an array that is read as a whole.
        parts = {str(shard.index): shard for shard in held.addressable_shards}
        for shard in parts.values():
            whole[shard.index] = np.asarray(shard.data)
    else:
        whole = process_allgather(held, tiled=True)
    # Without padding.
    return whole[(*(slice(0, n) for n in shape), ...)]
