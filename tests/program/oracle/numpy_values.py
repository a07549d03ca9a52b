"""Operations on values of one replica, each for `jnp` and for `numpy`.

A value is a `float32[4]`. Wherever a number decides something (a branch, a whole number, a
comparison), NumPy refuses values near the decision with `OnEdge`, so that rounding decides nothing.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 4
Values = list[Any]  # what each replica has


class OnEdge(Exception):  # noqa: N818
    """Rounding might decide what this program does."""


def tame(xp: Any, x: Any) -> Any:
    """A moderate number in the place of any other; nan stays."""
    return xp.arctan(x)


def is_above(xp: Any, x: Any, threshold: float) -> Any:
    """Whether a number is larger than `threshold`."""
    if xp is np and np.any(np.abs(x - threshold) < 1e-3):
        raise OnEdge
    return x > threshold


def goes(xp: Any, y: Any) -> Any:
    """Whether a value takes the branch."""
    return is_above(xp, y[0], 0.0625)


def which(xp: Any, y: Any) -> Any:
    """0, 1 or 2."""
    return (goes(xp, y) + 0) + (is_above(xp, y[1], 0.0625) + 0)


def quarters(xp: Any, x: Any) -> Any:
    """Rounded to quarters, so that their sums are exact in half precision; nan stays."""
    if xp is np:
        with np.errstate(all="ignore"):
            if np.any(np.abs(np.abs(x * 4 - np.floor(x * 4)) - 0.5) < 1e-3):
                raise OnEdge
    return xp.round(x * 4) / 4


def whole(xp: Any, x: Any) -> Any:
    """Whole numbers, as floats."""
    return 4 * quarters(xp, xp.nan_to_num(x, nan=0.75, posinf=3.0, neginf=-3.0))


# Functions of one value.
LOCAL: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda xp, x: xp.sin(x),
    "tanh": lambda xp, x: xp.tanh(x),
    "cube": lambda xp, x: x * x * x,
    "turned": lambda xp, x: x[::-1],
    "rolled": lambda xp, x: xp.roll(x, 1),
    "sums": lambda xp, x: xp.cumsum(x),
    "total": lambda xp, x: x * 0 + xp.sum(x),
    "mean": lambda xp, x: x - xp.mean(x),
    "norm": lambda xp, x: x / xp.sqrt(xp.sum(x * x) + 1),
    "logarithm": lambda xp, x: xp.log(x * x + 0.5),
    "share": lambda xp, x: xp.exp(x) / xp.sum(xp.exp(x)),
    "product": lambda xp, x: xp.outer(x, x) @ x,
    "places": lambda xp, x: x + xp.arange(4) * 0.25,
    "root": lambda xp, x: xp.sqrt(x + 2.5),
    "largest": lambda xp, x: x + xp.max(x),
    "smallest": lambda xp, x: x - xp.min(x),
    "sorted": lambda xp, x: xp.sort(x),
    "without nan": lambda xp, x: xp.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0),
    "is nan": lambda xp, x: xp.where(xp.isnan(x), 2.0, x),
    "is finite": lambda xp, x: xp.where(xp.isfinite(x), x, 0.25),
    "whole": whole,
    "remainder": lambda xp, x: (whole(xp, x).astype("int32") % 3) * 0.5,
    "bits": lambda xp, x: (whole(xp, x).astype("int32") & 5) ^ 2,
    "truth": lambda xp, x: xp.logical_not(is_above(xp, x, 0.0625)) * 1.0,
    "float16": lambda xp, x: quarters(xp, x).astype("float16") * 2,
    "bfloat16": lambda xp, x: quarters(xp, x).astype(jnp.bfloat16) * 2,
    "int8": lambda xp, x: (whole(xp, x).astype("int8") * 2).astype("float32"),
}
# Those that have a derivative everywhere.
SMOOTH = list(LOCAL)[:13]
TWO: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda xp, x, y: x + y,
    "multiply": lambda xp, x, y: x * y,
    "divide": lambda xp, x, y: x / (1 + y * y),
    "halves": lambda xp, x, y: xp.concatenate([x[:2], y[2:]]),
    "larger": lambda xp, x, y: xp.where(is_above(xp, x - y, 0.125), x, -y),
    "maximum": lambda xp, x, y: xp.maximum(x, y),
}
SMOOTH_OF_TWO = list(TWO)[:4]


def _over_rows_in_jax(x: Any, rows: Any) -> Any:
    last, sums = lax.scan(lambda c, row: (jnp.tanh(c + row), c * 0.5), x, rows)
    return last + sums.sum(0)


def _over_rows_in_numpy(x: Any, rows: Any) -> Any:
    sums: Any = np.zeros(SIZE)
    for row in rows:
        sums, x = sums + x * 0.5, np.tanh(x + row)
    return x + sums


def _in_turn_in_jax(x: Any, rows: Any) -> Any:
    if not rows.shape[0]:  # JAX has no index into no rows
        return x
    return lax.fori_loop(0, rows.shape[0], lambda i, v: jnp.sin(v + rows[i]), x)


def _in_turn_in_numpy(x: Any, rows: Any) -> Any:
    for row in rows:
        x = np.sin(x + row)
    return x


# Functions of a value and of the rows of this replica, `[n, 4]`, of which there may be none.
ROWS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "sum": (
        lambda x, rows: jnp.sin(rows + x[None]).sum(0),
        lambda x, rows: np.sin(rows + x).sum(0),
    ),
    "product": (lambda x, rows: (rows @ x) @ rows, lambda x, rows: (rows @ x) @ rows),
    "number": (lambda x, rows: x * rows.shape[0], lambda x, rows: x * len(rows)),
    "largest": (
        lambda x, rows: jnp.max(rows, axis=0, initial=-1.0) + x,
        lambda x, rows: np.max(rows, axis=0, initial=-1.0) + x,
    ),
    "sorted": (
        lambda x, rows: (jnp.sort(rows, 0) * (jnp.arange(rows.shape[0])[:, None] + 1)).sum(0) + x,
        lambda x, rows: (np.sort(rows, 0) * (np.arange(len(rows))[:, None] + 1)).sum(0) + x,
    ),
    "sums": (
        lambda x, rows: jnp.cumsum(rows, 0).sum(0) * x,
        lambda x, rows: np.cumsum(rows, 0).sum(0) * x,
    ),
    "scan": (_over_rows_in_jax, _over_rows_in_numpy),
    "in turn": (_in_turn_in_jax, _in_turn_in_numpy),
    "map": (
        lambda x, rows: lax.map(lambda row: jnp.tanh(row) * x, rows).sum(0),
        lambda x, rows: (np.tanh(rows) * x).sum(0),
    ),
    "chosen": (
        lambda x, rows: jnp.where(rows.shape[0] > 2, x, -x),
        lambda x, rows: x if len(rows) > 2 else -x,
    ),
}
