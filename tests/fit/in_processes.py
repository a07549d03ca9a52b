"""What each process of a job runs in the tests of `fit`."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

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
        given: dict[str, Any] = {"epochs": epochs, "callbacks": logs}
        losses += model.fit(data.x, data.y, 8, verbose=2, **given).history["loss"]
        model.save(folder + "/whole")
    return losses


class Interrupt(fit.Callback):
    """Raises after a number of steps."""

    def __init__(self, after: int) -> None:
        self._left = after

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


class OfThisProcess(fit.Callback):
    """Keeps an array and a number that differ between processes."""

    def __init__(self) -> None:
        self.seen = np.full(2 + jax.process_index(), jax.process_index())

    def get_state(self) -> Any:
        return {"seen": self.seen, "process": jax.process_index()}

    def set_state(self, state: Any) -> None:
        assert state["seen"].tolist() == [0, 0], state
        assert state["process"] == 0


def train_with_interrupts(folder: str, after: list[int], every_process: bool) -> list[Any]:
    """Train without a break, and with one after some numbers of steps; return both results."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    data = make_data(20)
    results: list[Any] = []
    for name, breaks in ("whole", []), ("interrupted", after):
        history: dict[str, list[float]] = {}
        for left in [*breaks, None]:
            model = make_model(strategy, optimizer="adam")
            stop = fit.EarlyStopping("loss", patience=9, restore_best_weights=True)
            save = fit.ModelCheckpoint(f"{folder}/{name}", resume=True, save_freq=1)
            callbacks: list[fit.Callback] = [
                stop,
                save,
                *([] if left is None else [Interrupt(left)]),
            ]
            if every_process or jax.process_index() == 0:
                callbacks.append(OfThisProcess())
            try:
                model.fit(data.x, data.y, 8, 3, verbose=0, callbacks=callbacks)
            except KeyboardInterrupt:
                assert left is not None
            for key, values in model.history.history.items():
                history.setdefault(key, []).extend(values)
        results.append((history, [w.tolist() for w in model.get_weights()]))
    return results


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


class _Lines:
    """A tracker."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def close(self, completed: bool) -> None:
        assert completed


def train_with_tracker() -> list[Any]:
    """Train with a tracker; return the lines of those that this process has made."""
    made: list[_Lines] = []

    def make() -> _Lines:
        made.append(_Lines())
        return made[-1]

    data = make_data(20)
    model = make_model(jaxdist.MultiWorkerMirroredStrategy())
    callbacks = [fit.TrackerLogger(make, 2)]
    model.fit(data.x, data.y, 8, 2, verbose=0, callbacks=callbacks)
    return [tracker.lines for tracker in made]


def call_differently(folder: str) -> list[str]:
    """Call `fit` in one process as in no other one, and then in the same way; return the errors."""
    strategy, data = jaxdist.MultiWorkerMirroredStrategy(), make_data(20)
    is_odd = jax.process_index() == 1
    model = make_model(strategy)
    same: dict[str, Any] = {"batch_size": 8, "verbose": 0}
    others: list[dict[str, Any]] = [
        {"epochs": 2},
        {"initial_epoch": 1, "epochs": 2},
        {"steps_per_epoch": np.int64(2)},
        {"validation_data": (data.x, data.y)},
        {"callbacks": [fit.ModelCheckpoint(folder)]},
    ]
    found = []
    for other in others:
        given = {"epochs": other.get("epochs", 1), **same} if "initial_epoch" in other else same
        try:
            model.fit(data.x, data.y, **{**given, **(other if is_odd else {})})
        except jaxdist.errors.ProgramMismatchError as error:
            found.append(str(error))
    return [*found, str(model.fit(data.x, data.y, **same).epoch)]
