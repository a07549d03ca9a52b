"""Reading the data hides behind the training step.

Claim: the MLP's training step on batches of a NumPy source, two of them read ahead, takes at most
1.10 times the same step on one batch that lies on the devices.

The source picks the rows of every batch out of 16 times as many, as a loader that shuffles does;
the batches are equal, so that both arms come to the same loss.
"""

from collections.abc import Iterator

import jax
import numpy as np

import jaxdist
from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._models import Batch, Params, model
from benchmarks._steps import DONATE, api_step, api_training, strategy, training_loop
from benchmarks.row_06_step_parity import same_loss

ROW = "21"

BATCHES_PER_EPOCH = 16


def shuffled(batch: Batch) -> Iterator[Batch]:
    """`batch` for ever, each time gathered from other rows of a larger set."""
    size = len(batch[0])
    order = np.random.default_rng(0).permutation(BATCHES_PER_EPOCH * size)
    held = jax.tree.map(lambda x: x[order % size], batch)
    # Where the rows of each batch have gone.
    places = np.argsort(order).reshape(BATCHES_PER_EPOCH, size)
    while True:
        for rows in places:
            yield jax.tree.map(lambda x, rows=rows: x[rows], held)


def api(name: str, n: int) -> Loop:
    """Training on what `next` gives, two batches ahead."""
    params, batch, loss_fn = model(name)
    chosen, step = strategy(n), api_step(loss_fn)
    params = jax.device_put(params, chosen.replicated_sharding)
    options = jaxdist.InputOptions(experimental_per_replica_buffer_size=2)
    batches = iter(chosen.experimental_distribute_dataset(shuffled(batch), options))

    def call(params: Params, _: Batch) -> tuple[Params, jax.Array]:
        result: tuple[Params, jax.Array] = chosen.run(step, (params, next(batches)), options=DONATE)
        return result

    return training_loop(call, params, batch, wait_every=None)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    name = "tiny" if options.is_smoke else "mlp"
    for n in options.sizes(1, 8, full=(1, 2, 4, 8)):
        arms = {
            "run(next)": arm(api, name=name, n=n),
            "run(resident)": arm(api_training, name=name, n=n),
        }
        race = bench.race(f"{name}, N={n}", arms, options.steps(40))
        yield race.line("run(next)", "run(resident)", Need(1.10))
        yield same_loss(race, "run(next)", "run(resident)")
