"""State that a step reads and writes: variables and NNX objects, in JAX and in NumPy."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import Variable, VariableAggregation, VariableSynchronization
from tests.program.oracle.numpy_collectives import mean
from tests.program.oracle.numpy_values import SIZE, Values, is_above, quarters, whole

NONE, SUM, MEAN, FIRST = VariableAggregation
ON_WRITE = VariableSynchronization.ON_WRITE
ON_READ = VariableSynchronization.ON_READ
RATE, DECAY = 0.125, 0.5


@dataclasses.dataclass(frozen=True)
class Kept:
    """How one variable is made, and what a step assigns to it."""

    aggregation: VariableAggregation
    synchronization: VariableSynchronization
    call: str = "assign"
    dtype: Any = "float32"

    def value(self, xp: Any, x: Any) -> Any:
        """The value that a replica assigns."""
        if self.dtype == "int32":
            return whole(xp, x).astype("int32")
        if self.dtype == "bool":
            return is_above(xp, x, 0.0625)
        if self.dtype == "bfloat16":
            return quarters(xp, x).astype(jnp.bfloat16)
        return x * 0.5

    @property
    def is_equal(self) -> bool:
        """Whether all replicas have the same copy."""
        return self.synchronization is ON_WRITE


VARIABLES: dict[str, Kept] = {
    f"{sync.name} {aggregation.name} {call}": Kept(aggregation, sync, call)
    for sync in (ON_WRITE, ON_READ)
    for aggregation in (NONE, SUM, MEAN, FIRST)
    for call in ("assign", "assign_add", "assign_sub")
} | {
    "ON_WRITE SUM int32": Kept(SUM, ON_WRITE, "assign_add", "int32"),
    "ON_READ SUM int32": Kept(SUM, ON_READ, "assign_add", "int32"),
    "ON_WRITE ONLY_FIRST_REPLICA bool": Kept(FIRST, ON_WRITE, "assign", "bool"),
    "ON_READ ONLY_FIRST_REPLICA bool": Kept(FIRST, ON_READ, "assign", "bool"),
    "ON_WRITE SUM bfloat16": Kept(SUM, ON_WRITE, "assign", "bfloat16"),
    "ON_WRITE MEAN bfloat16": Kept(MEAN, ON_WRITE, "assign", "bfloat16"),
}


class Net(nnx.Module):
    """A module with a parameter, a norm, dropout's stream of keys, and metrics."""

    def __init__(self, weight: Any) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(
            2, momentum=DECAY, epsilon=0.5, use_bias=False, use_scale=False, rngs=rngs
        )
        self.rngs = nnx.Rngs(noise=7)
        self.average = nnx.metrics.Average()
        self.spread = nnx.metrics.Welford()


@dataclasses.dataclass
class State:
    """What a step has besides its pool, in JAX."""

    rows: Any
    net: Any = None
    optimizer: Any = None
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)


def new_state(weight: Any, names: list[str]) -> State:
    """State of the strategy in whose scope this is called; `rows` come with each step."""
    made = {
        n: Variable(
            jnp.zeros(SIZE, VARIABLES[n].dtype),
            aggregation=VARIABLES[n].aggregation,
            synchronization=VARIABLES[n].synchronization,
            name=n,
        )
        for n in names
    }
    net = Net(weight)
    optimizer = nnx.Optimizer(net, optax.sgd(RATE, momentum=DECAY), wrt=nnx.Param)
    return State(None, net, optimizer, made)


class Known:
    """The same in NumPy, for all replicas: `rows` are those of each."""

    def __init__(self, weight: np.ndarray, rows: Values, names: list[str]) -> None:
        count = len(rows)
        self.rows = [r.astype("float64") for r in rows]
        self.weight, self.momentum = weight.astype("float64"), np.zeros(SIZE)
        self.mean, self.var = np.zeros(2), np.ones(2)
        self.draws = 0
        self.total, self.number = 0.0, 0
        self.seen: list[np.ndarray] = []  # by the Welford metric
        self.variables: dict[str, Any] = {
            n: np.zeros(SIZE) if VARIABLES[n].is_equal else [np.zeros(SIZE)] * count for n in names
        }

    def having_rows(self, xs: Values) -> Values:
        """What the replicas with rows have; the others take no part in statistics."""
        return [x for x, rows in zip(xs, self.rows, strict=True) if len(rows)]

    def copy(self) -> "Known":
        """It as it is now."""
        return copy.deepcopy(self)


# Variables


def assign(name: str, state: State, x: Any) -> Any:
    """Assign a value of this replica, and read what the variable has then."""
    kept, variable = VARIABLES[name], state.variables[name]
    value = kept.value(jnp, x)
    if kept.is_equal and kept.aggregation is NONE:
        value = mean(value)
    getattr(variable, kept.call)(value)
    return variable.read_value().astype("float32")


def assign_in_numpy(name: str, known: Known, xs: Values) -> Values:
    """The same for all replicas."""
    kept = VARIABLES[name]
    given = [np.asarray(kept.value(np, x), "float64") for x in xs]
    after: dict[str, Callable[[Any, Any], Any]] = {
        "assign": lambda old, v: v,
        "assign_add": lambda old, v: old + v,
        "assign_sub": lambda old, v: old - v,
    }
    old = known.variables[name]
    if not kept.is_equal:
        known.variables[name] = [after[kept.call](o, v) for o, v in zip(old, given, strict=True)]
        return list(known.variables[name])
    together = {
        NONE: np.mean(given, axis=0),
        SUM: np.sum(given, axis=0),
        MEAN: np.mean(given, axis=0),
        FIRST: given[0],
    }[kept.aggregation]
    known.variables[name] = after[kept.call](old, together)
    if kept.dtype == "bfloat16":
        known.variables[name] = known.variables[name].astype(jnp.bfloat16).astype("float64")
    return [known.variables[name]] * len(xs)


def can_be_read(name: str) -> bool:
    """Whether a variable has one value outside of steps."""
    return VARIABLES[name].is_equal or VARIABLES[name].aggregation is not NONE


def read_across(name: str, known: Known) -> Any:
    """What a variable is outside of steps."""
    kept, value = VARIABLES[name], known.variables[name]
    if kept.is_equal:
        return value
    return {
        SUM: np.sum(value, axis=0),
        MEAN: np.mean(value, axis=0),
        FIRST: value[0],
    }[kept.aggregation]


# NNX


def _descend(state: State, x: Any) -> Any:
    def loss(net: Any) -> Any:
        return jnp.sum(net.weight[...] * x)

    grads = nnx.grad(loss)(state.net)
    state.optimizer.update(state.net, mean(grads))
    return x * state.net.weight[...]


def _descend_in_numpy(known: Known, xs: Values) -> Values:
    known.momentum = DECAY * known.momentum + np.mean(xs, axis=0)
    known.weight = known.weight - RATE * known.momentum
    return [x * known.weight for x in xs]


def _normalize(state: State, x: Any) -> Any:
    return state.net.norm(x.reshape(2, 2)).reshape(-1)


def _normalize_in_numpy(known: Known, xs: Values) -> Values:
    pairs = [x.reshape(2, 2) for x in xs]
    means, variances = [p.mean(0) for p in pairs], [p.var(0) for p in pairs]
    for name, found in (("mean", means), ("var", variances)):
        grown = [DECAY * getattr(known, name) + (1 - DECAY) * v for v in known.having_rows(found)]
        setattr(known, name, np.mean(grown, axis=0))
    rows = zip(pairs, means, variances, strict=True)
    return [((p - m) / np.sqrt(v + 0.5)).reshape(-1) for p, m, v in rows]


def _average(state: State, x: Any) -> Any:
    state.net.average.update(values=x)
    return x


def _average_in_numpy(known: Known, xs: Values) -> Values:
    for x in known.having_rows(xs):
        known.total, known.number = known.total + x.sum(), known.number + SIZE
    return xs


def _spread(state: State, x: Any) -> Any:
    state.net.spread.update(values=x)
    return x


def _spread_in_numpy(known: Known, xs: Values) -> Values:
    known.seen += known.having_rows(xs)
    return xs


def _noise(state: State, x: Any) -> Any:
    return x + jax.random.uniform(state.net.rngs.noise(), x.shape)


def _noise_in_numpy(known: Known, xs: Values) -> Values:
    found = []
    for i, x in enumerate(xs):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), i), known.draws)
        found.append(x + np.asarray(jax.random.uniform(key, (SIZE,)), "float64"))
    known.draws += 1
    return found


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step does with NNX objects."""

    of_one: Callable[[State, Any], Any]
    of_all: Callable[[Known, Values], Values]
    keeps_equal: bool = True


NNX: dict[str, Update] = {
    "Optimizer": Update(_descend, _descend_in_numpy),
    "BatchNorm": Update(_normalize, _normalize_in_numpy),
    "Average": Update(_average, _average_in_numpy),
    "Welford": Update(_spread, _spread_in_numpy),
    "Rngs": Update(_noise, _noise_in_numpy, keeps_equal=False),
}
