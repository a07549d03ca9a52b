"""`Estimator.train`: what it trains, where it goes on, and when it ends."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    NonFiniteLossError,
    ShapeError,
)
from tests.estimator.models import (
    Line,
    Record,
    X,
    Y,
    batches,
    descend,
    model_fn,
    read_weights,
)

STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "one device": lambda: jaxdist.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: jaxdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "servers": lambda: jaxdist.compat.v1.experimental.ParameterServerStrategy(),
}


def _make(folder: Any, strategy: Any = None, **config: Any) -> est.Estimator:
    return est.Estimator(model_fn, folder, est.RunConfig(train_distribute=strategy, **config))


def _group(replicas: int, size: int, rows: int = len(X)) -> list[tuple[Any, Any]]:
    """The batches of each step, all replicas together."""
    read = batches(size, rows)()
    steps = [read[n : n + replicas] for n in range(0, len(read), replicas)]
    return [
        (np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step]))
        for step in steps
        if len(step) == replicas
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_replica_takes_a_batch_and_a_step_is_that_of_all_rows(
    name: str, tmp_path: pathlib.Path
) -> None:
    strategy = STRATEGIES[name]()
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    estimator = _make(tmp_path, strategy).train(batches(5))
    expected = _group(replicas, 5)
    assert estimator.latest_checkpoint() == str(tmp_path / "checkpoints" / str(len(expected)))
    np.testing.assert_allclose(read_weights(estimator), descend(expected), rtol=1e-5)


def test_a_short_last_batch_of_one_replica_counts(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path).train(batches(7, 10))
    np.testing.assert_allclose(read_weights(estimator), descend(_group(1, 7, 10)), rtol=1e-5)


def test_a_second_call_goes_on_where_the_first_ended(tmp_path: pathlib.Path) -> None:
    whole = _make(tmp_path / "a").train(batches(5))
    parts = _make(tmp_path / "b").train(batches(5, 20))
    assert read_weights(parts).tolist() != read_weights(whole).tolist()
    # Another object, as in another process.
    parts = _make(tmp_path / "b").train(lambda: batches(5)()[4:])
    np.testing.assert_array_equal(read_weights(parts), read_weights(whole))


def test_steps_are_those_of_the_call_and_max_steps_those_of_all_calls(
    tmp_path: pathlib.Path,
) -> None:
    estimator = _make(tmp_path)
    seen = []
    for arguments in ({"steps": 3}, {"max_steps": 5}, {"max_steps": 5}, {"steps": 1}):
        estimator.train(batches(5), **arguments)  # type: ignore[arg-type]
        seen.append(pathlib.Path(str(estimator.latest_checkpoint())).name)
    assert seen == ["3", "5", "5", "6"]


def test_checkpoints_are_saved_after_steps_and_old_ones_are_deleted(
    tmp_path: pathlib.Path,
) -> None:
    estimator = _make(tmp_path, save_checkpoints_steps=3, keep_checkpoint_max=2)
    estimator.train(batches(4))
    assert _list_steps(tmp_path) == [9, 10]
    everything = _make(tmp_path / "all", save_checkpoints_steps=3, keep_checkpoint_max=None)
    everything.train(batches(4))
    assert _list_steps(tmp_path / "all") == [0, 3, 6, 9, 10]


def _list_steps(folder: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


class _Age(est.CheckpointSaverListener):
    """Makes each checkpoint an hour younger than the one before."""

    def after_save(self, session: Any, global_step_value: int) -> None:
        for step in _list_steps(self.folder):
            path = self.folder / "checkpoints" / str(step)
            if not (path / "kept_for_ever").exists():
                os.utime(path, (1e9 + 3600 * step, 1e9 + 3600 * step))

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder


def test_one_checkpoint_in_some_hours_is_kept_for_ever(tmp_path: pathlib.Path) -> None:
    config: dict[str, Any] = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 1}
    estimator = _make(tmp_path, keep_checkpoint_every_n_hours=4, **config)
    estimator.train(batches(4), saving_listeners=[_Age(tmp_path)])
    kept = _list_steps(tmp_path)
    assert kept[-1] == 10
    assert 4 in kept
    assert len(kept) < 6
    # They can be restored.
    estimator.evaluate(batches(8), checkpoint_path=tmp_path / "checkpoints" / "4")


def test_a_checkpoint_whose_deletion_was_interrupted_is_removed(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path).train(batches(4), steps=1)
    (tmp_path / "checkpoints" / "deleted.0").mkdir()
    estimator.train(batches(4), steps=1)
    assert not (tmp_path / "checkpoints" / "deleted.0").exists()


def test_checkpoints_are_saved_by_the_clock(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path, save_checkpoints_secs=1e-9, keep_checkpoint_max=None)
    estimator.train(batches(10))
    assert _list_steps(tmp_path) == [0, 1, 2, 3, 4]
    never = _make(tmp_path / "b", save_checkpoints_secs=None, save_checkpoints_steps=None)
    never.train(batches(10))
    assert _list_steps(tmp_path / "b") == [0, 4]


def test_summaries_have_the_loss_of_some_steps_and_of_the_last(tmp_path: pathlib.Path) -> None:
    record = Record()
    _make(tmp_path, save_summary_steps=4).train(batches(5), hooks=[record])
    lines = [json.loads(x) for x in (tmp_path / "summaries.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 8]
    assert [line["loss"] for line in lines] == [record.losses[n] for n in (0, 4, 7)]


def test_a_module_is_trained_as_a_clone(tmp_path: pathlib.Path) -> None:
    module = Line(nnx.Rngs(0))
    estimator = est.Estimator(
        module,
        tmp_path,
        loss=lambda predictions, labels: (predictions - labels) ** 2,
        optimizer=optax.sgd(0.1),
        metrics={"error": lambda predictions, labels: abs(predictions - labels)},
    ).train(batches(5))
    assert module.weights[...].tolist() == [0, 0, 0]
    np.testing.assert_allclose(read_weights(estimator), descend(_group(1, 5)), rtol=1e-5)
    found = estimator.evaluate(batches(7))
    errors = X @ read_weights(estimator) - Y
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-4)
    np.testing.assert_allclose(found["error"], abs(errors).mean(), rtol=1e-4)
    assert len(list(estimator.predict(batches(7)))) == len(X)


def test_state_of_a_module_is_trained_and_saved(tmp_path: pathlib.Path) -> None:
    def count(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        model = est.get_module(lambda rngs: Counting(rngs))
        assert model.is_training is (mode == est.ModeKeys.TRAIN)
        loss = jnp.mean((model(features) - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    class Counting(Line):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.is_training = True

        def set_attributes(self, *args: Any, **kwargs: Any) -> None:
            super().set_attributes(*args, **kwargs)

        def train(self, **kwargs: Any) -> None:
            self.is_training = True

        def eval(self, **kwargs: Any) -> None:
            self.is_training = False

        def __call__(self, features: Any) -> Any:
            if self.is_training:
                self.calls[...] += 1
            return super().__call__(features)

    estimator = est.Estimator(count, tmp_path).train(batches(5))
    assert int(estimator.get_variable_value("modules.model.calls")) == 8
    estimator.evaluate(batches(5))


def test_the_global_step_is_known_in_the_model_function(tmp_path: pathlib.Path) -> None:
    seen = Record()

    def by_step(features: Any, labels: Any, mode: str, params: Any, config: Any) -> Any:
        model = est.get_module(lambda rngs: Line(rngs), "line")
        assert params == {"scale": 2}
        assert config.save_summary_steps == 7
        loss = est.get_global_step() * params["scale"] + 0 * model(features).sum()
        return est.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    config = est.RunConfig(tmp_path, save_summary_steps=7)
    estimator = est.Estimator(by_step, config=config, params={"scale": 2})
    assert estimator.params == {"scale": 2}
    estimator.train(batches(10), hooks=[seen])
    assert seen.losses == [0, 2, 4, 6]
    assert estimator.evaluate(batches(10))["loss"] == 8


def test_the_input_function_gets_what_it_asks_for(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []

    def input_fn(mode: str, params: Any, config: Any, input_context: Any) -> Any:
        seen.append((mode, params, config.model_dir, input_context.num_input_pipelines))
        return batches(10)()

    def with_params(features: Any, labels: Any, mode: str, params: Any) -> Any:
        return model_fn(features, labels, mode)

    estimator = est.Estimator(with_params, tmp_path, params={"a": 1}).train(input_fn)
    estimator.evaluate(input_fn)
    list(estimator.predict(input_fn))
    assert [mode for mode, *_ in seen] == ["train", "eval", "infer"]
    assert {tuple(map(str, rest)) for _, *rest in seen} == {("{'a': 1}", str(tmp_path), "1")}


def test_seeds_make_the_first_values(tmp_path: pathlib.Path) -> None:
    def two(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        one = est.get_module(lambda rngs: nnx.Linear(3, 3, rngs=rngs), "one")
        other = est.get_module(lambda rngs: nnx.Linear(3, 3, rngs=rngs), "other")
        loss = jnp.mean(other(one(features)))
        return est.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.0))

    def read(seed: int | None, name: str) -> list[float]:
        folder = tmp_path / f"{seed}_{len(list(tmp_path.iterdir()))}"
        config = est.RunConfig(folder, tf_random_seed=seed)
        estimator = est.Estimator(two, config=config).train(batches(10), steps=1)
        found: list[float] = estimator.get_variable_value(f"modules.{name}.kernel").tolist()
        return found

    assert read(None, "one") == read(0, "one") != read(1, "one")
    assert read(0, "one") != read(0, "other")


def test_a_warm_start_takes_values_of_another_model(tmp_path: pathlib.Path) -> None:
    first = _make(tmp_path / "a").train(batches(5))
    second = est.Estimator(model_fn, tmp_path / "b", warm_start_from=tmp_path / "a")
    second.train(batches(5), steps=1)
    expected = descend(_group(1, 5)[:1], read_weights(first))
    np.testing.assert_allclose(read_weights(second), expected, rtol=1e-5)
    # Only a new model is warm-started.
    second.train(batches(5), steps=1)
    expected = descend(_group(1, 5)[:1], expected)
    np.testing.assert_allclose(read_weights(second), expected, rtol=1e-5)
    settings = est.WarmStartSettings(
        first.latest_checkpoint(), r"model\..*", {"model.weights": "model.weights"}
    )
    third = est.Estimator(model_fn, tmp_path / "c", warm_start_from=settings)
    third.train(batches(5), steps=1)
    np.testing.assert_allclose(
        read_weights(third), descend(_group(1, 5)[:1], read_weights(first)), rtol=1e-5
    )


def test_a_loss_that_is_not_finite_ends_the_training_and_no_checkpoint_has_it(
    tmp_path: pathlib.Path,
) -> None:
    def diverge(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        spec = model_fn(features, labels, mode)
        loss = jnp.where(est.get_global_step() == 2, jnp.nan, 1.0) * spec.loss
        return est.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    config = est.RunConfig(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=None)
    with pytest.raises(NonFiniteLossError, match="step 3 is nan"):
        est.Estimator(diverge, config=config).train(batches(5))
    assert _list_steps(tmp_path) == [0, 1, 2]


def test_calls_that_do_not_fit_are_named_errors(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path)
    with pytest.raises(ArgumentError, match="steps=1 and max_steps=2"):
        estimator.train(batches(5), steps=1, max_steps=2)
    with pytest.raises(ArgumentError, match="steps=0"):
        estimator.train(batches(5), steps=0)
    with pytest.raises(ShapeError, match="does not have a batch for each of 1 replica"):
        estimator.train(list)
    with pytest.raises(ArgumentError, match="input_fn, which returned None"):
        estimator.train(lambda: None)
    with pytest.raises(ArgumentError, match=r"input_fn, which takes \(rows\)"):
        estimator.train(lambda rows: [])
    with (
        jaxdist.MirroredStrategy(["cpu:0"]).scope(),
        pytest.raises(ContextError, match="in the scope"),
    ):
        estimator.train(batches(5))
    two = _make(tmp_path / "b", jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]))
    with pytest.raises(ShapeError, match="none of which the replicas can share"):
        two.train(batches(40))
    with pytest.raises(ShapeError, match="gave the features"):
        estimator.train(lambda: [np.int32(7)])


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (lambda features, labels, mode: None, ArgumentTypeError, "model_fn returned None"),
        (
            lambda features, labels, mode: est.EstimatorSpec("eval", loss=1.0),
            ArgumentError,
            "of the mode 'eval'",
        ),
        (
            lambda features, labels, mode: est.EstimatorSpec(
                mode, loss="x", train_op=optax.sgd(1.0)
            ),
            ArgumentTypeError,
            "loss='x'",
        ),
        (
            lambda features, labels, mode: est.EstimatorSpec(
                mode, loss=jnp.ones((2, 2)), train_op=optax.sgd(1.0)
            ),
            ShapeError,
            r"loss of shape \[2, 2\], for a batch of 5",
        ),
        (
            lambda features, labels, mode: est.EstimatorSpec(
                mode, loss=features.sum(), train_op=optax.sgd(1.0)
            ),
            ArgumentError,
            "requested no module",
        ),
        (
            lambda features, labels, mode: est.get_module(lambda rngs: 7),
            ArgumentError,
            "returned int",
        ),
        (lambda features, mode: None, ArgumentError, "yields labels, and model_fn takes"),
    ],
)
def test_what_a_model_function_returns_is_checked(
    function: Any, kind: type[Exception], said: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(kind, match=said):
        est.Estimator(function, tmp_path).train(batches(5))


def test_a_module_that_depends_on_the_batch_is_an_error(tmp_path: pathlib.Path) -> None:
    def choose(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        model = est.get_module(lambda rngs: Line(rngs), f"of_{len(features)}")
        return est.EstimatorSpec(mode, loss=jnp.mean(model(features)), train_op=optax.sgd(1.0))

    with pytest.raises(
        ContextError, match="was called for the module 'of_3', and the model has 'of_7'"
    ):
        est.Estimator(choose, tmp_path).train(batches(7, 10))


def test_modules_and_the_global_step_belong_to_a_model_function() -> None:
    with pytest.raises(ContextError, match="get_module was called outside"):
        est.get_module(lambda rngs: Line(rngs))
    with pytest.raises(ContextError, match="get_global_step was called outside"):
        est.get_global_step()


_SETTINGS: Any = est.WarmStartSettings


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"model_fn": 7}, ArgumentTypeError, "model_fn=7"),
        ({"model_fn": lambda x: x}, ArgumentError, r"takes \(x\)"),
        ({"model_fn": lambda features, extra: 1}, ArgumentError, r"takes \(features, extra\)"),
        ({"params": 3}, ArgumentTypeError, "params=3"),
        ({"params": {}}, ArgumentError, "params={}"),
        (
            {"model_fn": lambda features: 1, "params": {"a": 2}},
            ArgumentError,
            r"params=\{'a': 2\}, of type dict, and model_fn takes \(features\)",
        ),
        ({"config": 3}, ArgumentTypeError, "config=3"),
        ({"loss": abs}, ArgumentError, "a model function and loss="),
        ({"warm_start_from": 3}, ArgumentTypeError, "warm_start_from=3"),
        (
            {"warm_start_from": est.WarmStartSettings("a", "(")},
            ArgumentError,
            "vars_to_warm_start='\\('",
        ),
        (
            {"warm_start_from": _SETTINGS("a", "x", 3)},
            ArgumentTypeError,
            "prev_var_name=3",
        ),
        ({"config": est.RunConfig("other")}, ArgumentError, "config.model_dir is 'other'"),
        ({"model_fn": Line(nnx.Rngs(0))}, ArgumentError, "a module, and no loss"),
        ({"model_fn": Line(nnx.Rngs(0)), "loss": abs}, ArgumentError, "a module, and no optimizer"),
        (
            {"model_fn": Line(nnx.Rngs(0)), "loss": abs, "optimizer": 3},
            ArgumentTypeError,
            "optimizer=3",
        ),
        (
            {
                "model_fn": Line(nnx.Rngs(0)),
                "loss": abs,
                "optimizer": optax.sgd(1.0),
                "metrics": {"a": 1},
            },
            ArgumentTypeError,
            r"metrics\['a'\]=1",
        ),
    ],
)
def test_an_estimator_that_cannot_be_made_is_a_named_error(
    arguments: dict[str, Any], kind: type[Exception], said: str, tmp_path: pathlib.Path
) -> None:
    given: dict[str, Any] = {"model_fn": model_fn, "model_dir": tmp_path, **arguments}
    with pytest.raises(kind, match=said):
        est.Estimator(**given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (est.WarmStartSettings("nowhere"), "no checkpoint in nowhere"),
        (("FIRST", r"model\..*", {"model.weights": "model.w"}), "has no variable 'model.w'"),
        (("FIRST", "nothing"), "matches no variable"),
        (("WIDE",), r"float32\[3\], and 'model.weights'"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_a_named_error(
    settings: Any, said: str, tmp_path: pathlib.Path
) -> None:
    _make(tmp_path / "FIRST").train(batches(5), steps=1)

    class Wide(Line):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.weights = nnx.Param(jnp.zeros((3, 1)))

    module = Wide(nnx.Rngs(0))
    wide = est.Estimator(
        module, tmp_path / "WIDE", loss=lambda p, y: (p[:, 0] - y) ** 2, optimizer=optax.sgd(0.1)
    )
    wide.train(batches(5), steps=1)
    name, *rest = settings
    found = est.WarmStartSettings(tmp_path / name if name != "nowhere" else name, *rest)
    estimator = est.Estimator(model_fn, tmp_path / "c", warm_start_from=found)
    with pytest.raises((ArgumentError, jaxdist.errors.CheckpointError, ShapeError), match=said):
        estimator.train(batches(5))


def test_a_module_with_a_loss_needs_labels_and_arrays(tmp_path: pathlib.Path) -> None:
    module = Line(nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="features without labels"):
        est.Estimator(module, tmp_path, loss=abs, optimizer=optax.sgd(0.1)).train(lambda: [X])  # type: ignore[arg-type]
    broken: Any = est.Estimator(module, tmp_path, loss=lambda p, y: "x", optimizer=optax.sgd(0.1))
    with pytest.raises(ArgumentTypeError, match="loss, which returned 'x'"):
        broken.train(batches(5))


def test_without_a_folder_the_model_is_in_a_temporary_one(caplog: pytest.LogCaptureFixture) -> None:
    estimator = est.Estimator(model_fn)
    assert estimator.model_dir in caplog.text
    assert estimator.config.model_dir == estimator.model_dir
    assert estimator.latest_checkpoint() is None
