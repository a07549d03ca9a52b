"""Optimizers that reduce gradients themselves, and learning rates that a schedule sets."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit, training
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from tests.fit.models import make_data, make_model, mirrored

DATA = make_data(29)
WRAPPERS = [jaxdist.sharded_update, jaxdist.compressed_update]


def _train(replicas: int, optimizer: Any, rows: int = 29, **compile_args: Any) -> list[np.ndarray]:
    model = make_model(mirrored(replicas), optimizer=optimizer, **compile_args)
    model.fit(DATA.x[:rows], DATA.y[:rows], 8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def _check(found: list[np.ndarray], wanted: list[np.ndarray], rtol: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("reduce_op", ["mean", "sum"])
def test_an_optimizer_that_reduces_gradients_trains_as_the_one_that_it_wraps(
    reduce_op: Any,
) -> None:
    wanted = _train(3, optax.sgd(0.1, momentum=0.9))
    found = _train(3, jaxdist.sharded_update(optax.sgd(0.1, momentum=0.9), reduce_op=reduce_op))
    _check(found, wanted, 1e-5)
    compressed = jaxdist.compressed_update(
        optax.sgd(0.1, momentum=0.9), "bf16", workers=1, reduce_op=reduce_op
    )
    _check(_train(3, compressed), wanted, 1e-5)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_one_inside_another_transformation_takes_the_mean(wrap: Any) -> None:
    wanted = _train(2, optax.sgd(0.1), 24, gradient_accumulation_steps=2)
    _check(_train(2, wrap(optax.sgd(0.1)), 24, gradient_accumulation_steps=2), wanted, 1e-5)
    chained = optax.chain(optax.scale(1.0), wrap(optax.sgd(0.1)))
    _check(_train(2, chained, 24), _train(2, optax.sgd(0.1), 24), 1e-5)
    chained = optax.chain(optax.scale(1.0), wrap(optax.sgd(0.1), reduce_op="sum"))
    with pytest.raises(ArgumentError, match=r"would be multiplied by the number of replicas"):
        _train(2, chained)


@pytest.mark.parametrize(
    "around",
    [lambda o: optax.chain(optax.clip(0.02), o), lambda o: optax.MultiSteps(o, 2)],
    ids=["chain", "steps"],
)
def test_one_inside_another_transformation_is_exact_on_uneven_batches_without_a_warning(
    around: Any,
) -> None:
    # The gradients that it gets are equal on all replicas, so their mean is that of all examples.
    wanted = _train(3, around(optax.sgd(0.1)))
    _check(_train(3, around(jaxdist.sharded_update(optax.sgd(0.1)))), wanted, 1e-5)


def test_a_learning_rate_that_a_schedule_sets_cannot_be_set() -> None:
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    model = make_model(mirrored(2), optimizer=optimizer)
    model.fit(DATA.x, DATA.y, 16, verbose=0)
    assert model.learning_rate == pytest.approx(0.05)
    with pytest.raises(ArgumentError, match=r"a schedule of optax sets it"):
        model.learning_rate = 1.0


def test_a_learning_rate_set_between_batches_is_that_of_the_next_dispatch() -> None:
    class Freeze(fit.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.model.learning_rate = 0.0

    found = []
    for steps, rows in ((2, 16), (1, 8)):
        model = make_model(mirrored(2), optimizer="sgd", steps_per_execution=steps)
        model.fit(DATA.x, DATA.y, 8, shuffle=False, verbose=0, callbacks=[Freeze()])
        other = make_model(mirrored(2), optimizer="sgd")
        other.fit(DATA.x[:rows], DATA.y[:rows], 8, shuffle=False, verbose=0)
        found.append((model.get_weights(), other.get_weights()))
    for one, wanted in found:
        _check(one, wanted, 1e-5)


def test_a_schedule_returns_a_number_or_an_array_of_one() -> None:
    def train(schedule: Any) -> fit.Model:
        model = make_model(mirrored(2), optimizer="sgd")
        scheduler = fit.LearningRateScheduler(schedule)
        model.fit(DATA.x, DATA.y, verbose=0, callbacks=[scheduler])
        return model

    assert train(optax.constant_schedule(0.25)).learning_rate == 0.25
    assert train(optax.exponential_decay(0.5, 1, 0.5)).learning_rate == 0.5
    with pytest.raises(ArgumentTypeError, match=r"a schedule that returned, for epoch 0,=None"):
        train(lambda epoch: None)


@pytest.mark.parametrize(
    "callback",
    [
        lambda folder: fit.EarlyStopping(),
        lambda folder: fit.ReduceLROnPlateau(),
        lambda folder: fit.ModelCheckpoint(folder, save_best_only=True),
    ],
)
def test_epochs_without_validation_do_not_count(callback: Any, tmp_path: Any) -> None:
    given: dict[str, Any] = {"epochs": 4, "verbose": 0}
    model = make_model(mirrored(2), optimizer="sgd")
    made = callback(tmp_path)
    data = (DATA.x, DATA.y)
    history = model.fit(
        *data, validation_data=data, validation_freq=2, callbacks=[made], **given
    ).history
    assert (len(history["loss"]), len(history["val_loss"])) == (4, 2)
    with pytest.raises(ArgumentError, match=r"monitor='val_loss', and fit has neither"):
        model.fit(*data, callbacks=[callback(tmp_path / "another")], **given)


def test_arguments_of_an_update_are_named() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    def update(**given: Any) -> Any:
        def step(model: Any, optimizer: Any) -> Any:
            found: dict[str, Any] = {"grads": nnx.state(model, nnx.Param), "count": 1, **given}
            return training.reduce_and_update(model, optimizer, sums={}, **found)

        return strategy.run(step, (model, optimizer))

    for count, kind in ((-1, ArgumentError), (np.nan, ArgumentError), ([1, 2], ArgumentTypeError)):
        with pytest.raises(kind, match=r"reduce_and_update was given count="):
            update(count=count)
    with pytest.raises(ShapeError, match=r"\['kernel'\].*: none for \[1, 1\]"):
        update(grads={"bias": np.zeros(1, np.float32)})


def test_a_dataset_of_the_validation_has_its_own_batches() -> None:
    data = (DATA.x, DATA.y)
    with pytest.raises(ArgumentError, match=r"Leave out validation_batch_size"):
        make_model(mirrored(2)).fit(*data, validation_data=[data], validation_batch_size=4)
    with pytest.raises(ArgumentTypeError, match=r"validation_data=array"):
        make_model(mirrored(2)).fit(*data, validation_data=DATA.x)
    with pytest.raises(ArgumentTypeError, match=r"sample_weight=\{'a'"):
        make_model(mirrored(2)).fit(*data, sample_weight={"a": DATA.weight})
    with pytest.raises(ArgumentTypeError, match=r"y=\{\}.*, which has no arrays"):
        make_model(mirrored(2)).fit(DATA.x, {})
    with pytest.raises(ArgumentTypeError, match=r"fit.Model was given no y"):
        make_model(mirrored(2)).fit([(DATA.x,)], verbose=0)


def test_weights_are_real_numbers() -> None:
    model = make_model(mirrored(2))
    before = model.get_weights()
    with pytest.raises(ArgumentTypeError, match=r"arrays of real numbers"):
        model.set_weights([*before[:-1], np.array(["a"])])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_an_update_is_made_inside_a_replica() -> None:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    with mirrored(2).scope(), pytest.raises(ContextError, match=r"called across replicas"):
        training.reduce_and_update(model, optimizer, nnx.state(model, nnx.Param), 1, {})


def test_a_checkpoint_is_restored_into_a_model(tmp_path: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"restore was given model=3"):
        fit.ModelCheckpoint(tmp_path).restore(3)


def test_the_best_weights_are_restored_on_all_replicas() -> None:
    best: list[Any] = []

    class Keep(fit.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            best.append((logs["val_loss"], self.model.get_weights()))
            self.model.learning_rate = 0.1 if epoch < 2 else 50.0

    model = make_model(mirrored(8), optimizer="sgd")
    stop = fit.EarlyStopping(patience=1, restore_best_weights=True)
    data = (DATA.x, DATA.y)
    model.fit(*data, 8, epochs=9, validation_data=data, verbose=0, callbacks=[Keep(), stop])
    value, weights = min(best, key=lambda entry: entry[0])
    assert stop.stopped_epoch is not None
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert model.evaluate(*data, 8, verbose=0) == pytest.approx(value, rel=1e-6)
    # The copies of all replicas, and not only that of the first one.
    for leaf in jax.tree.leaves(nnx.state(model.module)):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == 8
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])
