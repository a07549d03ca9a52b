"""Numbers of the device in float32, bfloat16 and float16, against NumPy in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._lines import CountLine, Line, NoteLine

_SIZE = 256


def _matmul(precision: str | None) -> Callable[[Any], Any]:
    return lambda x: jnp.matmul(x, x.T, precision=precision, preferred_element_type=x.dtype)


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Operation, its reference, and how many units in the last place of the largest value it may differ.
_OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], float]] = {
    "sum": (lambda x: jnp.sum(x, -1), lambda x: x.sum(-1), 4),
    "mean": (lambda x: jnp.mean(x, -1), lambda x: x.mean(-1), 4),
    "softmax": (jax.nn.softmax, _softmax, 8),
    "exp": (jnp.exp, np.exp, 4),
    "tanh": (jnp.tanh, np.tanh, 4),
    "matmul, highest": (_matmul("highest"), lambda x: x @ x.T, 8),
}


def numerics(is_smoke: bool) -> Iterator[Line]:
    """How far each operation is from float64, in units in the last place."""
    del is_smoke
    device = jax.devices()[0]
    drawn = np.random.default_rng(0).normal(size=(_SIZE, _SIZE))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        given = jax.device_put(jnp.asarray(drawn, dtype), device)
        exact = np.asarray(given, "float64")
        unit = float(jnp.finfo(dtype).eps)
        name = jnp.dtype(dtype).name
        beyond = []
        for what, (fn, reference, most) in _OPERATIONS.items():
            off = _units(jax.jit(fn)(given), reference(exact), unit)
            if not off <= most:
                beyond.append(f"{what} {off:.1f} > {most:g}")
        found = ", ".join(beyond) or "all near enough"
        arm = f"{len(_OPERATIONS)} operations"
        yield CountLine("numerics", name, arm, "float64", found, "all near enough")
        off = _units(jax.jit(_matmul(None))(given), exact @ exact.T, unit)
        yield NoteLine(
            "numerics", f"{name} matmul at JAX's own precision: {off:.1f} units in the last place"
        )
        specials = jnp.asarray([1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0], dtype)
        got = [bool(jnp.isnan(f(jax.device_put(specials, device)))) for f in (jnp.max, jnp.sum)]
        yield CountLine("numerics", name, "max and sum of nan", "NumPy", str(got), "[True, True]")


def _units(found: Any, exact: Any, unit: float) -> float:
    """The largest difference, in units in the last place of the largest value."""
    scale = float(np.abs(exact).max()) * unit
    return float(np.abs(np.asarray(found, "float64") - exact).max()) / scale
