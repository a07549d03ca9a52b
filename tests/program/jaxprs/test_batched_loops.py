"""While loops with collectives under `jax.vmap`, with every executor of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdist
from jaxdist import PerReplica

TURNS = (1, 3, 0)
OWN = [np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)]


def _step(x: Any, rows: Any) -> Any:
    context = jaxdist.get_replica_context()

    def turn(state: Any) -> Any:
        number, v, added = state
        return number + 1, context.all_reduce("sum", v + rows.sum()) * 0.5, added + v

    def one(turns: Any, v: Any) -> Any:
        return lax.while_loop(lambda state: state[0] < turns, turn, (0, v, v))

    return jax.vmap(one)(jnp.array(TURNS), jnp.stack([x, x + 1, x + 2]))


def _in_numpy(rows: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the final values of the replicas for each number of iterations."""
    found = []
    for more, turns in enumerate(TURNS):
        values = [x + more for x in OWN]
        added = list(values)
        for _ in range(turns):
            added = [a + v for a, v in zip(added, values, strict=True)]
            parts = [v + r.sum() for v, r in zip(values, rows, strict=True)]
            values = [np.mean(parts, axis=0)] * len(OWN)
        found.append([np.stack(values), np.stack(added)])
    return found


@pytest.mark.parametrize(
    ("sizes", "num_devices", "eagerly"),
    [
        ((2, 2), 2, False),
        ((2, 2), 2, True),
        ((2, 3), 2, False),
        ((0, 3), 2, True),
        ((2, 2), 1, False),
    ],
    ids=["compiled", "op by op", "uneven", "uneven op by op", "virtual"],
)
def test_each_row_of_a_loop_ends_by_itself(
    sizes: tuple[int, ...], num_devices: int, eagerly: bool
) -> None:
    devices = [f"cpu:{i}" for i in range(num_devices)]
    exact: dict[str, Any] = {} if num_devices == 2 else {"deterministic": 2}
    strategy = jaxdist.MirroredStrategy(devices, **exact)
    rows = [np.ones((n, 3), np.float32) for n in sizes]

    with jaxdist.config.run_eagerly(eagerly):
        number, values, added = strategy.run(_step, (PerReplica(OWN), PerReplica(rows)))

    assert number.tolist() == list(TURNS)
    for i, wanted in enumerate(_in_numpy(rows)):
        for found, rows_wanted in zip((values, added), wanted, strict=True):
            each = [np.asarray(v)[i] for v in found.values]
            np.testing.assert_allclose(each, rows_wanted, rtol=1e-5)
