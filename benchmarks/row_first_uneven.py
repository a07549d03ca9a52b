"""The first uneven step of a training loop does not make it stand still.

Claim: the first step on a batch that lacks one row takes at most 3 times the first step on the
whole batch: trace, compilation and run, with parameters and batch on the devices. The last replica
has one row fewer than the others, so there are two groups of replicas.

Every step is a new function, so no cache helps. As at the end of an epoch, the function of the
uneven step has run on a whole batch before; that is not timed.
"""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._models import Batch, model
from benchmarks._steps import Step, api_step, strategy

ROW = "first"


def api(name: str, n: int, missing: int) -> Loop:
    """The first step of a new function on a batch that lacks so many rows."""
    params, batch, loss_fn = model(name)
    chosen = strategy(n)
    params = jax.device_put(params, chosen.replicated_sharding)

    def placed(batch: Batch) -> Any:
        with iter(chosen.experimental_distribute_dataset([batch])) as batches:
            return jax.block_until_ready(next(batches))

    whole = placed(batch)
    given = placed(jax.tree.map(lambda x: x[: len(x) - missing], batch))
    fresh: list[Step] = []

    def prepare(steps: int) -> None:
        fresh[:] = [api_step(loss_fn) for _ in range(steps)]
        if missing:
            for step in fresh:
                jax.block_until_ready(chosen.run(step, (params, whole)))

    def loop(_: int) -> None:
        for step in fresh:
            jax.block_until_ready(chosen.run(step, (params, given)))

    return Loop(loop, prepare)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    for name in ("mlp", "transformer") if options.is_full else ("mlp",):
        for n in options.sizes(8, full=(4, 8)):
            arms = {
                "first uneven step": arm(api, name=name, n=n, missing=1),
                "first even step": arm(api, name=name, n=n, missing=0),
            }
            # Each step is a compilation.
            race = bench.race(f"{name}, N={n}", arms, 1)
            yield race.line("first uneven step", "first even step", Need(3))
