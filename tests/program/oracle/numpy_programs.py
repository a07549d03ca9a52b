"""Random steps that are written twice: in JAX for one replica, and in NumPy for all of them.

A step is a list of instructions on a pool of `float32[4]` values. In NumPy a value is the list of
what the replicas have. Both stay within moderate size by `tame`, which leaves nan what it is.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.program.oracle.numpy_blocks import run_in_jax, run_in_numpy
from tests.program.oracle.numpy_collectives import COLLECTIVE, context
from tests.program.oracle.numpy_state import NNX, VARIABLES, Known, State
from tests.program.oracle.numpy_values import (
    LOCAL,
    ROWS,
    SIZE,
    SMOOTH,
    SMOOTH_OF_TWO,
    TWO,
    OnEdge,
    Values,
    is_above,
    quarters,
    tame,
    whole,
)

# How each value of the pool leaves the step: the function, and the dtype of the result.
FORMS: dict[str, tuple[Any, Any]] = {
    "float32": (lambda xp, x: x, "float32"),
    "float16": (lambda xp, x: quarters(xp, x).astype("float16"), "float16"),
    "bfloat16": (lambda xp, x: quarters(xp, x).astype(jnp.bfloat16), jnp.bfloat16),
    "int32": (lambda xp, x: whole(xp, x).astype("int32"), "int32"),
    "bool": (lambda xp, x: is_above(xp, x, 0.0625), "bool"),
    "scalar": (lambda xp, x: xp.sum(x), "float32"),
    "matrix": (lambda xp, x: xp.outer(x, xp.arange(3) + 1.0), "float32"),
}

# Instructions with blocks. Replicas may go different ways in those that are called `own`.
SAME = ["cond", "switch", "fori", "fori dynamic", "while", "until", "scan", "scan back"]
OWN = ["own cond", "own switch", "own fori", "own while"]
AROUND = ["jit", "remat", "vmap", "grad"]
DIFFERENTIABLE = ["cond", "switch", "fori", "scan", "scan back", "own cond", "own switch", "jit"]


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction; `blocks` are its bodies."""

    kind: str
    name: str
    operands: tuple[int, ...]
    blocks: tuple[tuple["Op", ...], ...] = ()

    def __str__(self) -> str:
        inner = "".join(f" {{{'; '.join(map(str, b))}}}" for b in self.blocks)
        return f"{self.kind} {self.name}{list(self.operands)}{inner}"

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple["Op", tuple[str, ...]]]:
        """It and all within it, each with the kinds of those around it."""
        yield self, path
        for block in self.blocks:
            for op in block:
                yield from op.walk((*path, self.kind))


@dataclasses.dataclass(frozen=True)
class _Place:
    """What may be in a block."""

    depth: int = 0
    has_collectives: bool = True
    has_state: bool = True
    is_smooth: bool = False
    is_batched: bool = False


class Program:
    """The step of a seed.

    Args:
        seed: Decides everything.
        count: How many replicas there are.
        can_be_uneven: Whether replicas may have different numbers of rows.
        num_steps: How often it is run.
    """

    def __init__(
        self, seed: int, count: int, *, can_be_uneven: bool = True, num_steps: int = 2
    ) -> None:
        self.seed, self.count = seed, count
        for attempt in range(100):
            self._draw(seed + 1_000_000 * attempt, can_be_uneven)
            try:
                self._run_in_numpy(num_steps)
            except OnEdge:
                continue
            return
        raise RuntimeError(f"Every program of seed {seed} is decided by rounding.")

    def _draw(self, number: int, can_be_uneven: bool) -> None:
        drawn = random.Random(number)
        self.rng = np.random.default_rng(number)
        self.is_uneven = drawn.random() < 0.35 and can_be_uneven
        # Replicas without rows are a rarer kind of uneven.
        least = drawn.choice([0, 0, 1]) if self.is_uneven else 3
        rows = [drawn.randint(least, 5) if self.is_uneven else 3 for _ in range(self.count)]
        rows[drawn.randrange(self.count)] = 3
        self.has_state = drawn.random() < 0.8
        self.variables: list[str] = drawn.sample(sorted(VARIABLES), 3) if self.has_state else []
        self.ops = self._block(drawn, 4, drawn.randint(3, 6), _Place(has_state=self.has_state))
        self.forms = [
            drawn.choice(sorted(FORMS)) if drawn.random() < 0.4 else "float32"
            for _ in range(4 + len(self.ops))
        ]
        self.same = [self._array() for _ in range(2)]
        self.own = [self._array() for _ in range(self.count)]
        self.rows = [self.rng.normal(size=(n, SIZE)).astype("float32") for n in rows]
        self.special = drawn.choice([None, None, np.nan, np.inf, -np.inf])
        if self.special is not None:
            self.own[drawn.randrange(self.count)][drawn.randrange(SIZE)] = self.special
            mine = self.rows[drawn.randrange(self.count)]
            if drawn.random() < 0.5 and len(mine):
                mine[-1, drawn.randrange(SIZE)] = self.special
        self.weight = self._array()

    @property
    def has_uneven_rows(self) -> bool:
        """Whether replicas have different numbers of rows."""
        return len({len(rows) for rows in self.rows}) > 1

    def _array(self) -> np.ndarray:
        return self.rng.normal(size=SIZE).astype("float32")

    def __str__(self) -> str:
        rows = [len(x) for x in self.rows]
        lines = [f"seed {self.seed}, rows {rows}, {self.special}, {self.forms}"]
        return "\n".join([*lines, *map(str, self.ops)])

    def _block(
        self, drawn: random.Random, inputs: int, length: int, place: _Place
    ) -> tuple[Op, ...]:
        kinds = ["local"] * 4 + ["two"] * 3
        blocks = DIFFERENTIABLE if place.is_smooth else [*SAME, *OWN, *AROUND]
        if not place.is_smooth:
            kinds += ["rows"] * 2
        if place.has_collectives:
            kinds += ["collective"] * 7
        if place.has_state:
            kinds += ["variable"] * 6 + ["nnx"] * 6 * (place.depth == 0)
        if place.depth < 2:
            kinds += [k for k in blocks if place.has_collectives or k not in SAME] * (
                2 - place.depth
            )
        ops: list[Op] = []
        for i in range(length):
            kind = drawn.choice(kinds)
            operands = tuple(drawn.randrange(inputs + i) for _ in range(2))
            found: tuple[tuple[Op, ...], ...] = ()
            names = self._names(kind, place)
            if not names:
                own = kind in OWN
                inner = _Place(
                    place.depth + 1,
                    has_collectives=place.has_collectives and not own,
                    has_state=place.has_state and kind in (*SAME, "jit"),
                    is_smooth=place.is_smooth or kind == "grad",
                    is_batched=place.is_batched or kind == "vmap",
                )
                found = tuple(
                    self._block(drawn, 2, drawn.randint(1, 2), inner)
                    for _ in range(1 + (kind in ("switch", "own switch")))
                )
            ops.append(Op(kind, drawn.choice(names) if names else "", operands, found))
        return tuple(ops)

    def _names(self, kind: str, place: _Place) -> list[str]:
        """What an instruction of a kind may be called; none if it has blocks."""
        match kind:
            case "local":
                return SMOOTH if place.is_smooth else sorted(LOCAL)
            case "two":
                return SMOOTH_OF_TWO if place.is_smooth else sorted(TWO)
            case "rows":
                return sorted(ROWS)
            case "collective":
                return [
                    n
                    for n, c in sorted(COLLECTIVE.items())
                    if ((c.has_gradient and not c.of_rows) or not place.is_smooth)
                    and (c.has_batching or not place.is_batched)
                ]
            case "variable":
                return self.variables
            case "nnx":
                return sorted(NNX)
        return []

    # In JAX, what one replica does.

    def step(self, same: Any, own: Any, state: State) -> Any:
        """Every value that the step makes, and its rows."""
        if not all(map(len, self.rows)):
            own = own[context().replica_id_in_sync_group]
        pool = [*same, own, tame(jnp, jnp.sum(state.rows, axis=0) / 3)]
        run_in_jax(self.ops, pool, state)
        found = [FORMS[f][0](jnp, x) for f, x in zip(self.forms, pool, strict=True)]
        return {"pool": found, "rows": state.rows * pool[-1][None]}

    # In NumPy, what all of them do.

    def _run_in_numpy(self, num_steps: int) -> None:
        """The results of each step, in `expected`, and the state after each, in `after`."""
        known = Known(self.weight, self.rows, self.variables)
        self.expected: list[tuple[list[Values], Values]] = []
        self.after: list[Known] = []
        with np.errstate(all="ignore"):
            for _ in range(num_steps):
                pool: list[Values] = [[x.astype("float64")] * self.count for x in self.same]
                pool.append([x.astype("float64") for x in self.own])
                pool.append([tame(np, rows.sum(0) / 3) for rows in known.rows])
                run_in_numpy(self.ops, pool, known)
                found = [
                    [FORMS[f][0](np, x) for x in xs] for f, xs in zip(self.forms, pool, strict=True)
                ]
                rows = [r * x for r, x in zip(known.rows, pool[-1], strict=True)]
                self.expected.append((found, rows))
                self.after.append(known.copy())
