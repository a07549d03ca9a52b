"""Instructions of random steps, run in JAX for one replica and in NumPy for all of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.program.oracle.numpy_collectives import COLLECTIVE, mean
from tests.program.oracle.numpy_state import NNX, Known, State, assign, assign_in_numpy
from tests.program.oracle.numpy_values import LOCAL, ROWS, SIZE, TWO, Values, goes, tame, which


def run_in_jax(ops: Sequence[Any], pool: list[Any], state: State) -> None:
    """Run the instructions; their values join the pool."""
    for op in ops:
        pool.append(tame(jnp, jnp.asarray(_in_jax(op, *_operands(op, pool), state), "float32")))


def run_in_numpy(ops: Sequence[Any], pool: list[Values], known: Known) -> None:
    """The same for all replicas; `known` is changed."""
    for op in ops:
        found = _in_numpy(op, *_operands(op, pool), known)
        pool.append([tame(np, np.asarray(x, "float64")) for x in found])


def _operands(op: Any, pool: list[Any]) -> tuple[Any, Any]:
    x, y = (pool[i] for i in op.operands)
    return x, y


def _clean(xp: Any, x: Any) -> Any:
    """Numbers that have a derivative."""
    return xp.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0)


def _in_jax(op: Any, x: Any, y: Any, state: State) -> Any:
    def block(x: Any, y: Any, number: int = 0) -> Any:
        pool = [x, y]
        run_in_jax(op.blocks[number], pool, state)
        return pool[-1]

    def repeated(turns: Any) -> Any:
        return lax.fori_loop(0, turns, lambda _, v: block(v, y), x)

    def counted(turns: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, block(c[1], y)), (0, x))[
            1
        ]

    def turn(carry: Any, row: Any) -> Any:
        return block(carry, row), carry * 0.5

    kind = op.kind
    match kind.removeprefix("own "):
        case "local":
            return LOCAL[op.name](jnp, x)
        case "two":
            return TWO[op.name](jnp, x, y)
        case "rows":
            return ROWS[op.name][0](x, state.rows)
        case "collective":
            of_rows = COLLECTIVE[op.name].of_rows
            return COLLECTIVE[op.name].of_one(x, *[state.rows] * of_rows)
        case "variable":
            return assign(op.name, state, x)
        case "nnx":
            return NNX[op.name].of_one(state, x)
        case "jit":
            return jax.jit(block)(x, y)
        case "remat":
            return jax.checkpoint(block)(x, y)
        case "vmap":
            return jax.vmap(block, in_axes=(0, None))(jnp.stack([x, y]), y).sum(0)
        case "grad":
            x, y = _clean(jnp, x), _clean(jnp, y)
            return jax.grad(lambda a: jnp.sum(block(a, y) * y))(x)
        case "fori":
            return repeated(which(jnp, y) if kind == "own fori" else 2)
        case "scan" | "scan back":
            rows = jnp.stack([y, -y])
            last, sums = lax.scan(turn, x, rows, reverse=kind == "scan back")
            return last + sums.sum(0)
        case "until":
            return lax.while_loop(
                lambda c: (c[0] < 2) & goes(jnp, mean(c[1])),
                lambda c: (c[0] + 1, block(c[1], y)),
                (0, x),
            )[1]
    # What decides is the same on all replicas, or a value of this one.
    decides = y if kind.startswith("own ") else mean(y)
    match kind.removeprefix("own "):
        case "cond":
            return lax.cond(goes(jnp, decides), lambda: block(x, y), lambda: x - y)
        case "switch":
            branches = [lambda: block(x, y), lambda: block(y, x, 1), lambda: x - y]
            return lax.switch(which(jnp, decides), branches)
        case "fori dynamic":
            return repeated(which(jnp, decides))
    return counted(1 + goes(jnp, decides))


def _in_numpy(op: Any, xs: Values, ys: Values, known: Known) -> Values:
    def block(xs: Values, ys: Values, number: int = 0) -> Values:
        pool = [xs, ys]
        run_in_numpy(op.blocks[number], pool, known)
        return pool[-1]

    def repeated(turns: int) -> Values:
        made = xs
        for _ in range(turns):
            made = block(made, ys)
        return made

    def chosen(numbers: list[Any], ways: dict[int, Any]) -> Values:
        """What each replica gets that goes its own way; replicas do not meet there."""
        made = {n: ways[n]() for n in sorted(set(numbers))}
        return [made[n][i] for i, n in enumerate(numbers)]

    def rest() -> Values:
        return [x - y for x, y in zip(xs, ys, strict=True)]

    kind = op.kind
    match kind.removeprefix("own "):
        case "local":
            return [LOCAL[op.name](np, x) for x in xs]
        case "two":
            return [TWO[op.name](np, x, y) for x, y in zip(xs, ys, strict=True)]
        case "rows":
            return [ROWS[op.name][1](x, r) for x, r in zip(xs, known.rows, strict=True)]
        case "collective":
            of_rows = COLLECTIVE[op.name].of_rows
            return COLLECTIVE[op.name].of_all(xs, *[known.rows] * of_rows)
        case "variable":
            return assign_in_numpy(op.name, known, xs)
        case "nnx":
            return NNX[op.name].of_all(known, xs)
        case "jit" | "remat":
            return block(xs, ys)
        case "vmap":
            parts = [block(v, ys) for v in (xs, ys)]
            return [sum(rows) for rows in zip(*parts, strict=True)]
        case "grad":
            return _gradient(block, [_clean(np, x) for x in xs], [_clean(np, y) for y in ys])
        case "scan" | "scan back":
            made, sums = xs, [np.zeros(SIZE)] * len(xs)
            scales = (1, -1)
            for scale in scales[::-1] if kind == "scan back" else scales:
                sums = [s + m * 0.5 for s, m in zip(sums, made, strict=True)]
                made = block(made, [scale * y for y in ys])
            return [m + s for m, s in zip(made, sums, strict=True)]
        case "until":
            made = xs
            for _ in range(2):
                if not goes(np, np.mean(made, axis=0)):
                    break
                made = block(made, ys)
            return made
    if kind == "fori":
        return repeated(2)
    is_own = kind.startswith("own ")
    decides = ys if is_own else [np.mean(ys, axis=0)] * len(ys)
    match kind.removeprefix("own "):
        case "cond":
            numbers = [int(goes(np, y)) for y in decides]
            return chosen(numbers, {1: lambda: block(xs, ys), 0: rest})
        case "switch":
            numbers = [int(which(np, y)) for y in decides]
            ways = {0: lambda: block(xs, ys), 1: lambda: block(ys, xs, 1), 2: rest}
            return chosen(numbers, ways)
        case "fori dynamic":
            return repeated(int(which(np, decides[0])))
    extra = 0 if kind == "own fori" else 1
    turns = [int(goes(np, y)) + 1 if extra else int(which(np, y)) for y in decides]
    return chosen(turns, {n: lambda n=n: repeated(n) for n in range(3)})


def _gradient(block: Any, xs: Values, ys: Values) -> Values:
    """By differences, of what the losses of all replicas are together."""
    step = 1e-4

    def total(i: int, place: int, by: float) -> float:
        moved = [x.copy() for x in xs]
        moved[i][place] += by
        made = block(moved, ys)
        return float(sum(np.sum(m * y) for m, y in zip(made, ys, strict=True)))

    return [
        np.array([(total(i, p, step) - total(i, p, -step)) / (2 * step) for p in range(SIZE)])
        for i in range(len(xs))
    ]
