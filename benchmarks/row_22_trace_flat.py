"""Tracing and lowering a step does not get slower with more devices.

Claim: trace and lowering of the API's MLP step at 256 replicas takes at most 1.15 times that at
one, and at most 1.15 times that of the hand-written step. Every trace is of a new function, so
no cache helps.

On CPU devices `all_reduce` packs small gradients into one vector, which JAX traces and lowers, too;
one replica needs none. So a third hand-written step has the same packing. What is left against that
one is what `run` proves about a step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._models import mlp
from benchmarks._steps import AXIS, DONATE, P, api_step, hand_step, mesh, per_replica, strategy

ROW = "22"


def api(n: int) -> Loop:
    """Through `strategy.lower`."""
    params, batch, loss_fn = mlp()
    split = jax.tree.map(lambda x: per_replica(n, x), batch)
    chosen = strategy(n)

    def lower() -> object:
        # The parameters stay on the host: 256 copies of them would be most of a gigabyte.
        return chosen.lower(api_step(loss_fn), (params, split), options=DONATE).lowered()

    return Loop(_times(lower))


def hand(n: int, is_packed: bool = False) -> Loop:
    """By hand."""
    params, batch, loss_fn = mlp()
    batch = jax.device_put(batch, NamedSharding(mesh(n), P(AXIS)))

    def lower() -> object:
        return hand_step(loss_fn, n, is_packed=is_packed).lower(params, batch)

    return Loop(_times(lower))


def _times(function: Callable[[], object]) -> Callable[[int], None]:
    def loop(steps: int) -> None:
        for _ in range(steps):
            function()

    return loop


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    many = 4 if bench.options.is_smoke else 256
    arms: dict[str, Any] = {
        f"lower at {many}": arm(api, n=many),
        "lower at 1": arm(api, n=1),
        f"hand at {many}": arm(hand, n=many),
        f"packed at {many}": arm(hand, n=many, is_packed=True),
        "hand at 1": arm(hand, n=1),
    }
    race = bench.race(f"N={many}", arms, bench.options.steps(3), devices=max(many, 8))
    yield race.line(f"lower at {many}", "lower at 1", Need(1.15))
    yield race.line(f"lower at {many}", f"hand at {many}", Need(1.15))
    yield race.line(f"lower at {many}", f"packed at {many}", Need())
    yield race.line("lower at 1", "hand at 1", Need())
    yield race.line(f"hand at {many}", "hand at 1", Need())
