"""`fit` on every kind of strategy: the numbers are those of one device."""

import contextlib
import logging
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import fit
from tests.fit.models import Net, make_data, make_model, mirrored
from tests.parameter_server.strategy import version_1
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies_under_test import STRATEGIES

DATA = make_data(20)
GIVEN: dict[str, Any] = {"batch_size": 8, "verbose": 0, "sample_weight": DATA.weight}


def _train(model: fit.Model, **kwargs: Any) -> tuple[Any, ...]:
    history = model.fit(DATA.x, DATA.y, epochs=2, shuffle=False, **GIVEN, **kwargs).history
    result = model.evaluate(DATA.x, DATA.y, return_dict=True, **GIVEN)
    return history, result, model.predict(DATA.x, 8, verbose=0)


def _make(strategy: Any, **kwargs: Any) -> fit.Model:
    return make_model(strategy, metrics=["accuracy"], **kwargs)


def _check(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[0][name], wanted[0][name], rtol=1e-5)
        np.testing.assert_allclose(found[1][name], wanted[1][name], rtol=1e-5)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["alone", "in a scope", "with a strategy", "of one device"])
def test_a_model_without_a_strategy_says_that_it_trains_on_one_device(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {"with a strategy": mirrored(2), "of one device": mirrored(1)}.get(how)
    scope = mirrored(2).scope() if how == "in a scope" else contextlib.nullcontext()
    with caplog.at_level(logging.WARNING, logger="jaxdist"), scope:
        model = fit.Model(Net(), chosen)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == (how == "alone"), lines
    assert all(f"one of {jax.device_count()} devices" in line for line in lines)
    # The line is about the choice of a strategy, so training adds none.
    model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        model.fit(DATA.x, np.zeros((20, 3), "float32"), batch_size=10, verbose=0)
    assert len(caplog.records) == len(lines)


# Batches of 8 on several devices of a replica: replicas have equal numbers of rows there.
_EVEN = [row for row in STRATEGIES if row.num_logical > 1]


@pytest.mark.parametrize(
    "row", [row for row in STRATEGIES if row.num_logical == 1], ids=lambda row: row.name
)
def test_every_strategy_trains_as_one_device(row: Any) -> None:
    _check(_train(_make(row.make())), _train(_make(mirrored(1))))


@pytest.mark.parametrize("row", _EVEN, ids=lambda row: row.name)
def test_replicas_of_several_devices_train_as_one_device(row: Any) -> None:
    model, other = _make(row.make()), _make(mirrored(1))
    x, y = DATA.x[:16], DATA.y[:16]
    for one in (model, other):
        one.fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.predict(x, 8), other.predict(x, 8), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_worker_of_parameter_servers_trains_as_one_device(steps: int) -> None:
    strategy = make_strategy(servers=2, workers=1)
    model = _make(strategy, steps_per_execution=steps)
    _check(_train(model), _train(_make(mirrored(1))))


def test_workers_of_parameter_servers_count_each_step_once_and_learn() -> None:
    data = make_data(400)
    model = _make(make_strategy(servers=1, workers=3))
    seen: list[Any] = []
    note = fit.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    history = model.fit(data.x, data.y, 20, epochs=3, verbose=0, callbacks=[note]).history
    assert history["loss"][-1] < history["loss"][0]
    assert seen == [*range(20)] * 3
    assert int(model.optimizer.step[...]) == 60


def test_version_1_workers_train_one_model_by_steps_of_their_own() -> None:
    def script(strategy: Any, number: int) -> Any:
        model = _make(strategy)
        history = model.fit(DATA.x, DATA.y, 10, epochs=3, verbose=0).history["loss"]
        return history, int(model.optimizer.step[...])

    results = version_1.run_workers(script, version_1.make_spec(workers=2, chief=True))
    assert all(np.isfinite(loss).all() and len(loss) == 3 for loss, _ in results)
    assert max(steps for _, steps in results) == 2 * 3 * 2


def test_a_model_of_one_strategy_in_the_scope_of_another_is_an_error() -> None:
    model = _make(mirrored(2))
    with (
        mirrored(3).scope(),
        pytest.raises(jaxdist.errors.MixedStrategyError),
    ):
        model.fit(DATA.x, DATA.y, verbose=0)
