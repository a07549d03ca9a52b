"""Every kind of result is the same at each call, of a function and of a step.

From the second call JAX repeats a program without Python, and flattens and builds results itself.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import jaxdist
from jaxdist import partition

pytestmark = pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")

_STRATEGY = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


class _Enum(enum.Enum):
    A = 1


class _Tuple(collections.namedtuple("_Tuple", "a b")):
    __slots__ = ()


class _List(list[Any]):
    pass


@struct.dataclass
class _Struct:
    a: Any
    b: Any = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class _Constant:
    a: Any


@jax.tree_util.register_pytree_node_class
class _Node:
    def __init__(self, a: Any) -> None:
        self.a = a

    def tree_flatten(self) -> Any:
        return (self.a,), None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> "_Node":
        return cls(*values)


def _find_replica() -> Any:
    context = jaxdist.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


@functools.cache
def _make() -> tuple[Any, Any, Any, Any]:
    """Return a variable, one that is read once a step, a model, and parameters with padding."""
    with _STRATEGY.scope():
        variable = jaxdist.Variable(1.0)
        on_read = jaxdist.Variable(
            0.0,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )
    rules = partition.Rules({"**": partition.Shard(pad=True)})
    padded: Any = partition.place(_STRATEGY, {"w": np.ones((7, 11), "float32")}, rules)
    return variable, on_read, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), padded


def _variable() -> Any:
    return _make()[0]


CONSTANTS: list[Any] = [
    *(None, "text", True, 3, -0.0, float("nan"), 1j, b"a", _Enum.A, len, int, ..., _Constant(3)),
    *(range(3), frozenset({1}), slice(1, 2), np.dtype("float32"), np.float32(2), [], ()),
    jnp.float32,
]
RESULTS: dict[str, Callable[[Any], Any]] = {
    **{f"constant {c!r}": lambda x, c=c: c for c in CONSTANTS},
    **{f"constant {c!r} beside": lambda x, c=c: [c, x, _variable()] for c in CONSTANTS},
    "array": lambda x: x,
    "NumPy array": lambda x: np.arange(3, dtype="int32"),
    "named tuple": lambda x: _Tuple(x, "text"),
    "list": lambda x: _List([x, "text", _variable()]),
    "ordered": lambda x: collections.OrderedDict(b=x, a=_variable()),
    "default": lambda x: collections.defaultdict(list, a=x),
    "counter": lambda x: collections.Counter(a=x),
    "chain": lambda x: collections.ChainMap({"a": x}),
    "containers": lambda x: collections.UserDict(a=x, b=collections.UserDict(c=_variable())),
    "dataclass": lambda x: _Struct(x, "text"),
    "dataclass with a variable": lambda x: _Struct(_variable(), "text"),
    "node": lambda x: _Node(x),
    "node with a variable": lambda x: _Node(_variable()),
    "key": lambda x: jax.random.key(0),
    "slices": lambda x: [jaxdist.IndexedSlices(x[None], jnp.array([0])), _variable()],
    "key beside a variable": lambda x: [jax.random.key(0), _variable()],
    "state": lambda x: (nnx.state(_make()[2]), _variable()),
    "parameter": lambda x: nnx.Param(x),
    "read once a step": lambda x: _make()[1],
    "value of a variable": lambda x: _variable().value(),
    "differs": lambda x: [_find_replica() + x, _variable()],
    "padded": lambda x: (_make()[3], _variable()),
    "partial": lambda x: jax.tree_util.Partial(jnp.add, x),
    "optimizer state": lambda x: optax.adam(1.0).init({"a": x}),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "function": jaxdist.function,
    "run": lambda fn: lambda x: _STRATEGY.run(fn, (x,)),
    "function of run": lambda fn: jaxdist.function(lambda x: _STRATEGY.run(fn, (x,))),
    "run of function": lambda fn: lambda x: _STRATEGY.run(jaxdist.function(fn), (x,)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_the_same_at_each_call(name: str, way: str) -> None:
    _make()  # outside of a step
    run = WAYS[way](RESULTS[name])
    x = np.ones(2, "float32")
    first, *others = [_describe(run(x)) for _ in range(4)]
    assert others == [first] * 3
    if name != "differs":
        assert first == _describe(RESULTS[name](jnp.asarray(x)))


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_beside_a_random_key_is_the_same_at_each_call(name: str) -> None:
    _make()  # outside of a step

    def step(x: Any) -> Any:
        return RESULTS[name](x), jax.random.key(0)

    x = np.ones(2, "float32")
    first, *others = [_describe(_STRATEGY.run(step, (x,))) for _ in range(4)]
    assert others == [first] * 3


def _describe(result: Any) -> Any:
    if isinstance(result, collections.UserDict | collections.ChainMap):
        return type(result), {k: _describe(v) for k, v in result.items()}
    leaves, structure = jax.tree.flatten(result, is_leaf=_is_whole)
    return str(structure), [_describe_leaf(x) for x in leaves]


def _is_whole(x: Any) -> bool:
    kinds = (jaxdist.Variable, jaxdist.PerReplica, jaxdist.Sharded, collections.UserDict)
    return isinstance(x, kinds)


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, collections.UserDict):
        return _describe(leaf)
    if isinstance(leaf, jaxdist.Variable):
        return id(leaf)
    if isinstance(leaf, jaxdist.PerReplica):
        return [np.asarray(x).tolist() for x in leaf.values]
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tolist()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jaxdist.Sharded):
        return str(leaf.dtype), np.asarray(leaf).tolist()
    return type(leaf), repr(leaf)
