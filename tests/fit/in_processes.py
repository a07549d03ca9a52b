"""What each process of a job runs in the tests of `fit`."""

import sys
from typing import Any

import jaxdist
from jaxdist import fit
from tests.fit.models import make_data, make_model


def train_and_write(folder: str) -> list[float]:
    """Train with callbacks that write files, and go on from the newest checkpoint."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    data = make_data(20)
    losses: list[float] = []
    for epochs in (2, 3):
        model = make_model(strategy)
        save = fit.ModelCheckpoint(folder + "/model", monitor="loss", resume=True)
        logs = [fit.CSVLogger(folder + "/log.csv", append=True), save]
        first = save.epochs_done()
        given: dict[str, Any] = {"epochs": epochs, "initial_epoch": first, "callbacks": logs}
        losses += model.fit(data.x, data.y, 8, verbose=2, **given).history["loss"]
        model.save(folder + "/whole")
    return losses


def train(counts: list[tuple[int, int, bool]]) -> list[Any]:
    """Train on several numbers of examples and batch sizes, and return all numbers."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    results: list[Any] = []
    for count, size, is_weighted in counts:
        data = make_data(count)
        weight = data.weight if is_weighted else None
        model = make_model(strategy, metrics=["accuracy"])
        given: dict[str, Any] = {"batch_size": size, "verbose": 0, "sample_weight": weight}
        history = model.fit(data.x, data.y, epochs=2, **given).history
        logs = model.evaluate(data.x, data.y, return_dict=True, **given)
        outputs = model.predict(data.x, size, verbose=0).tolist()
        weights = [w.tolist() for w in model.get_weights()]
        results.append([history, logs, outputs, weights])
    sys.stdout.flush()
    return results
