"""NumPy arrays that their owner overwrites as soon as jaxdist has taken them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from benchmarks._lines import CountLine, Line, NoteLine

_SIZES = (1 << 10, 1 << 18, 1 << 22)
_TIMES = 3

# Takes an array, and returns a function that reads what jaxdist has of it.
Way = Callable[[np.ndarray], Callable[[], Any]]


def host_memory(is_smoke: bool) -> Iterator[Line]:
    """Overwrite arrays after each way in, while the device is busy and while it is not."""
    strategy = jaxdist.MirroredStrategy(jax.devices()[:1])
    ways = {**_make_ways(strategy), "jax.device_put": _put}
    changed = dict.fromkeys(ways, 0)
    sizes = _SIZES[:1] if is_smoke else _SIZES
    for name, way in ways.items():
        for size in sizes:
            way(np.ones(size, "float32"))()  # it compiled
            for is_busy in (False, True) * _TIMES:
                given = np.ones(size, "float32")
                busy = _start_work() if is_busy else None
                read = way(given)
                given[:] = 2
                changed[name] += not np.all(np.asarray(read()) == 1)
                jax.block_until_ready(busy)
    tries = 2 * _TIMES * len(sizes)
    of_jax = changed.pop("jax.device_put")
    found = ", ".join(f"{name} {n}" for name, n in changed.items() if n) or "none"
    size = f"{len(changed)} ways in"
    yield CountLine("host-memory", size, "arrays that changed", "", found, "none")
    yield NoteLine("host-memory", f"jax.device_put alone: {of_jax} of {tries} arrays changed")


def _make_ways(strategy: jaxdist.Strategy) -> dict[str, Way]:
    """Return the ways in which a program gives arrays to jaxdist."""
    function = jaxdist.function(_take)

    def through_dataset(x: np.ndarray) -> Callable[[], Any]:
        def source() -> Iterator[np.ndarray]:
            held = x[None]
            yield held
            held[:] = 3

        got = list(strategy.experimental_distribute_dataset(source()))
        return lambda: got[0]

    def through_variable(x: np.ndarray) -> Callable[[], Any]:
        with strategy.scope():
            made = jaxdist.Variable(x)
        return made.value

    def through_assign(x: np.ndarray) -> Callable[[], Any]:
        with strategy.scope():
            made = jaxdist.Variable(jnp.zeros(x.shape))
        made.assign(x)
        return made.value

    def through_function(x: np.ndarray) -> Callable[[], Any]:
        made = strategy.experimental_distribute_values_from_function(lambda _: x)
        return lambda: strategy.experimental_local_results(made)[0]

    return {
        "run": lambda x: _hold(strategy.run(_take, (x,))),
        "function": lambda x: _hold(function(x)),
        "experimental_distribute_dataset": through_dataset,
        "Variable": through_variable,
        "assign": through_assign,
        "experimental_distribute_values_from_function": through_function,
    }


def _take(x: jax.Array) -> jax.Array:
    return x + 0


def _put(x: np.ndarray) -> Callable[[], Any]:
    return _hold(jax.device_put(x, jax.devices()[0]))


def _hold(value: Any) -> Callable[[], Any]:
    return lambda: value


def _start_work() -> jax.Array:
    """Dispatch work of some milliseconds."""
    x = jnp.ones((1024, 1024))
    for _ in range(8):
        x = _square(x)
    return x


@jax.jit
def _square(x: jax.Array) -> jax.Array:
    return x @ x * 1e-3
