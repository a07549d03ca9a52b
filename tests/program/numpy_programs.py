"""Random steps that are written twice: in JAX for one replica, and in NumPy for all of them.

A step is a list of instructions on a pool of `float32[4]` values. In NumPy a value is the list of
what the replicas have. Both stay within moderate size by `tame`, which leaves nan what it is.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxdist

SIZE = 4
Values = list[Any]  # what each replica has


def tame(xp: Any, x: Any) -> Any:
    """A moderate number in the place of a large one."""
    return x / (1 + xp.abs(x) / 4)


# Functions of one value, by `jnp` or `numpy`.
LOCAL: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda xp, x: xp.sin(x),
    "tanh": lambda xp, x: xp.tanh(x),
    "cube": lambda xp, x: x * x * x,
    "turned": lambda xp, x: x[::-1],
    "rolled": lambda xp, x: xp.roll(x, 1),
    "sums": lambda xp, x: xp.cumsum(x),
    "total": lambda xp, x: x * 0 + xp.sum(x),
    "largest": lambda xp, x: x + xp.max(x),
    "smallest": lambda xp, x: x - xp.min(x),
    "mean": lambda xp, x: x - xp.mean(x),
    "norm": lambda xp, x: x / xp.sqrt(xp.sum(x * x) + 1),
    "logarithm": lambda xp, x: xp.log(x + 2.5),
    "root": lambda xp, x: xp.sqrt(x + 2.5),
    "share": lambda xp, x: xp.exp(x) / xp.sum(xp.exp(x)),
    "sorted": lambda xp, x: xp.sort(x),
    "product": lambda xp, x: xp.outer(x, x) @ x,
    "places": lambda xp, x: x + xp.arange(4) * 0.25,
    "without nan": lambda xp, x: xp.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0),
    "is nan": lambda xp, x: xp.where(xp.isnan(x), 2.0, x),
}
TWO: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda xp, x, y: x + y,
    "multiply": lambda xp, x, y: x * y,
    "divide": lambda xp, x, y: x / (1 + y * y),
    "larger": lambda xp, x, y: xp.where(x - y > 0.125, x, -y),
    "halves": lambda xp, x, y: xp.concatenate([x[:2], y[2:]]),
}


@dataclasses.dataclass
class State:
    """What a step reads and writes besides its arguments: in JAX, or in NumPy."""

    net: Any = None
    total: Any = None
    own: Any = None


class Net(nnx.Module):
    """A module with a parameter and statistics."""

    def __init__(self, weight: Any) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))
        self.mean = nnx.BatchStat(jnp.zeros(SIZE))


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction; `inner` are those of a body."""

    kind: str
    name: str
    operands: tuple[int, ...]
    inner: tuple["Op", ...] = ()

    def __str__(self) -> str:
        inner = f" {{{'; '.join(map(str, self.inner))}}}" if self.inner else ""
        return f"{self.kind} {self.name}{list(self.operands)}{inner}"


class Program:
    """The step of a seed.

    Args:
        seed: Decides everything.
        count: How many replicas there are.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        drawn = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.is_uneven = drawn.random() < 0.3
        self.has_state = drawn.random() < 0.5 and not self.is_uneven
        self.ops = self._block(drawn, 4, drawn.randint(4, 9), depth=0)
        least = 1 if self.is_uneven else 3
        rows = [drawn.randint(least, 5) if self.is_uneven else 3 for _ in range(count)]
        self.same = [self._array() for _ in range(2)]
        self.own = [self._array() for _ in range(count)]
        self.rows = [self.rng.normal(size=(n, SIZE)).astype("float32") for n in rows]
        special = drawn.choice([None, None, np.nan, np.inf, -np.inf])
        if special is not None:
            self.own[drawn.randrange(count)][drawn.randrange(SIZE)] = special
        self.weight = self._array()

    def _array(self) -> np.ndarray:
        return self.rng.normal(size=SIZE).astype("float32")

    def __str__(self) -> str:
        rows = [len(x) for x in self.rows]
        return "\n".join([f"seed {self.seed}, rows {rows}", *map(str, self.ops)])

    def _block(
        self, drawn: random.Random, inputs: int, length: int, depth: int, *, local: bool = False
    ) -> tuple[Op, ...]:
        ops: list[Op] = []
        kinds = ["local"] * 5 + ["two"] * 4
        if not local:
            kinds += ["collective"] * 4 + ["state"] * 2 * (depth == 0 and self.has_state)
        if depth < 2:
            kinds += ["same branch", "own branch", "loop", "own loop", "scan", "jit", "grad"]
        for i in range(length):
            kind = drawn.choice(kinds)
            operands = tuple(drawn.randrange(inputs + i) for _ in range(2))
            inner: tuple[Op, ...] = ()
            name = ""
            if kind == "local":
                name = drawn.choice(sorted(LOCAL))
            elif kind == "two":
                name = drawn.choice(sorted(TWO))
            elif kind == "collective":
                name = drawn.choice(sorted(COLLECTIVE))
            elif kind == "state":
                name = drawn.choice(sorted(STATE))
            else:
                # Only where all replicas go the same way may they meet.
                alone = local or kind in ("own branch", "own loop", "grad")
                inner = self._block(drawn, 2, drawn.randint(1, 3), depth + 1, local=alone)
            ops.append(Op(kind, name, operands, inner))
        return tuple(ops)

    # In JAX, what one replica does.

    def step(self, same: Any, own: Any, rows: Any, net: Any, total: Any, held: Any) -> Any:
        """Every value that the step makes."""
        pool = [*same, own, tame(jnp, jnp.sum(rows, axis=0) / 3)]
        state = State(net, total, held)
        for op in self.ops:
            pool.append(tame(jnp, _in_jax(op, [pool[i] for i in op.operands], state)))
        return tuple(pool)

    # In NumPy, what all of them do.

    def in_numpy(self, state: State) -> list[Values]:
        """The same for all replicas, in turn; `state` is changed."""
        count = self.count
        with np.errstate(all="ignore"):
            pool: list[Values] = [[x.astype("float64")] * count for x in self.same]
            pool.append([x.astype("float64") for x in self.own])
            pool.append([tame(np, x.astype("float64").sum(0) / 3) for x in self.rows])
            for op in self.ops:
                found = _in_numpy(op, [pool[i] for i in op.operands], state)
                pool.append([tame(np, x) for x in found])
        return pool


def _body_in_jax(op: Op, x: Any, y: Any) -> Any:
    pool = [x, y]
    for inner in op.inner:
        pool.append(tame(jnp, _in_jax(inner, [pool[i] for i in inner.operands], State())))
    return pool[-1]


def _body_in_numpy(op: Op, x: Values, y: Values) -> Values:
    pool = [x, y]
    for inner in op.inner:
        found = _in_numpy(inner, [pool[i] for i in inner.operands], State())
        pool.append([tame(np, v) for v in found])
    return pool[-1]


def _in_jax(op: Op, given: list[Any], state: State) -> Any:
    x, y = given
    match op.kind:
        case "local":
            return LOCAL[op.name](jnp, x)
        case "two":
            return TWO[op.name](jnp, x, y)
        case "collective":
            return COLLECTIVE[op.name][0](x)
        case "state":
            return STATE[op.name][0](state, x)
        case "same branch":
            return lax.cond(_goes(_mean(y)), lambda: _body_in_jax(op, x, y), lambda: x - y)
        case "own branch":
            return lax.cond(_goes(y), lambda: _body_in_jax(op, x, y), lambda: x - y)
        case "loop":
            return lax.fori_loop(0, 3, lambda _, v: _body_in_jax(op, v, y), x)
        case "own loop":
            turns = jnp.where(_goes(y), 3, 1)
            return lax.while_loop(
                lambda c: c[0] < turns, lambda c: (c[0] + 1, _body_in_jax(op, c[1], y)), (0, x)
            )[1]
        case "scan":
            return lax.scan(lambda c, row: (_body_in_jax(op, c, row), c[0]), x, jnp.stack([y, -y]))[
                0
            ]
        case "jit":
            return jax.jit(lambda a, b: _body_in_jax(op, a, b))(x, y)
    # A gradient of what NumPy has one for.
    return jax.grad(lambda a: jnp.sum(jnp.sin(a) * y))(x) + _body_in_jax(op, x, y)


def _in_numpy(op: Op, given: list[Values], state: State) -> Values:
    xs, ys = given
    match op.kind:
        case "local":
            return [LOCAL[op.name](np, x) for x in xs]
        case "two":
            return [TWO[op.name](np, x, y) for x, y in zip(xs, ys, strict=True)]
        case "collective":
            return COLLECTIVE[op.name][1](xs)
        case "state":
            return STATE[op.name][1](state, xs)
        case "same branch":
            goes = _goes(np.mean(ys, axis=0))
            other = [x - y for x, y in zip(xs, ys, strict=True)]
            return _body_in_numpy(op, xs, ys) if goes else other
        case "own branch":
            made = _body_in_numpy(op, xs, ys)
            rows = zip(made, xs, ys, strict=True)
            return [m if _goes(y) else x - y for m, x, y in rows]
        case "loop":
            for _ in range(3):
                xs = _body_in_numpy(op, xs, ys)
            return xs
        case "own loop":
            once = _body_in_numpy(op, xs, ys)
            thrice = _body_in_numpy(op, _body_in_numpy(op, once, ys), ys)
            return [t if _goes(y) else o for t, o, y in zip(thrice, once, ys, strict=True)]
        case "scan":
            for sign in (1, -1):
                xs = _body_in_numpy(op, xs, [sign * y for y in ys])
            return xs
        case "jit":
            return _body_in_numpy(op, xs, ys)
    made = _body_in_numpy(op, xs, ys)
    return [np.cos(x) * y + m for x, y, m in zip(xs, ys, made, strict=True)]


def _goes(y: Any) -> Any:
    return y[0] > 0.0625


def _context() -> Any:
    return jaxdist.get_replica_context()


def _mean(x: Any) -> Any:
    return _context().all_reduce("mean", x)


def _all(fn: Callable[[np.ndarray], Any]) -> Callable[[Values], Values]:
    """What all replicas get of what all of them have."""
    return lambda xs: [fn(np.stack(xs))] * len(xs)


def _gathered(x: Any) -> Any:
    whole = _context().all_gather(x[None], axis=0)
    return jnp.tanh(whole).sum(0) + whole[-1]


COLLECTIVE: dict[str, tuple[Callable[[Any], Any], Callable[[Values], Values]]] = {
    "sum": (lambda x: _context().all_reduce("sum", x), _all(lambda v: v.sum(0))),
    "mean": (_mean, _all(lambda v: v.mean(0))),
    "in a tree": (
        lambda x: sum(_context().all_reduce("sum", {"a": x, "b": x[:1]}).values()),
        _all(lambda v: v.sum(0) + v.sum(0)[:1]),
    ),
    "gather": (_gathered, _all(lambda v: np.tanh(v).sum(0) + v[-1])),
    "own number": (
        lambda x: x + _context().replica_id_in_sync_group,
        lambda xs: [x + i for i, x in enumerate(xs)],
    ),
    "psum": (lambda x: lax.psum(x, "replica"), _all(lambda v: v.sum(0))),
    "pmax": (
        lambda x: lax.pmax(jnp.nan_to_num(x), "replica"),
        _all(lambda v: np.nan_to_num(v.astype("float32")).max(0)),
    ),
    "neighbour": (
        lambda x: lax.ppermute(
            x,
            "replica",
            [(i, (i + 1) % lax.axis_size("replica")) for i in range(lax.axis_size("replica"))],
        ),
        lambda xs: [xs[-1], *xs[:-1]],
    ),
}


def _add_to_total(state: State, x: Any) -> Any:
    state.total.assign_add(x * 0.5)
    return state.total.read_value()


def _add_to_total_in_numpy(state: State, xs: Values) -> Values:
    state.total = state.total + np.sum(xs, axis=0) * 0.5
    return [state.total] * len(xs)


def _add_to_own(state: State, x: Any) -> Any:
    state.own.assign_add(x)
    return state.own.read_value() * 0.5


def _add_to_own_in_numpy(state: State, xs: Values) -> Values:
    state.own = [a + x for a, x in zip(state.own, xs, strict=True)]
    return [a * 0.5 for a in state.own]


def _descend(state: State, x: Any) -> Any:
    state.net.weight[...] = state.net.weight[...] - 0.1 * _mean(
        jnp.nan_to_num(x, posinf=1, neginf=1)
    )
    return x * state.net.weight[...]


def _descend_in_numpy(state: State, xs: Values) -> Values:
    clean = [np.nan_to_num(x, posinf=1, neginf=1) for x in xs]
    state.net["weight"] = state.net["weight"] - 0.1 * np.mean(clean, axis=0)
    return [x * state.net["weight"] for x in xs]


# What they do to state is read back in the same step, and in the next one.
STATE: dict[str, Any] = {
    "total": (_add_to_total, _add_to_total_in_numpy),
    "own": (_add_to_own, _add_to_own_in_numpy),
    "parameter": (_descend, _descend_in_numpy),
}
