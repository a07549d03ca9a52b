"""What each process of a job runs in the tests of float16 and averages."""

from typing import Any

import numpy as np
import optax

import jaxdist
from jaxdist import fit, training
from tests.fit.models import make_data, make_model


def train(strategy: jaxdist.Strategy | None = None) -> list[Any]:
    """Train in float16 with an average; one example overflows in the second step."""
    strategy = jaxdist.MultiWorkerMirroredStrategy() if strategy is None else strategy
    data, held_out = make_data(20), make_data(9, seed=5)
    weight = np.ones(20, np.float32)
    weight[13] = 1e6
    optimizer = training.moving_average(optax.adam(0.05), 0.5)
    model = make_model(strategy, optimizer=optimizer, mixed_precision="float16")
    scales: list[Any] = []
    note = fit.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(model.loss_scale)
    )
    given: dict[str, Any] = {"sample_weight": weight, "shuffle": False, "verbose": 0}
    given |= {"validation_data": (held_out.x, held_out.y)}
    callbacks = [note, fit.SwapEMAWeights()]
    history = model.fit(data.x, data.y, 8, epochs=2, callbacks=callbacks, **given).history
    with training.use_average(model.module, model.optimizer):
        average = [w.tolist() for w in model.get_weights()]
    return [scales, history, [w.tolist() for w in model.get_weights()], average]
