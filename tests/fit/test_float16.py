"""float16 with a loss scale: Flax's own on one device, and one decision on all replicas."""

import itertools
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import jaxdist
from jaxdist import fit, partition, training
from jaxdist.errors import ArgumentError, NonFiniteLossError, UnsupportedError
from tests.fit.models import LOSS, Net, make_data, make_model, mirrored
from tests.parameter_server.strategy.making import make_strategy

DATA = make_data(20)
SIZE = 8
STEPS = 3  # of an epoch: 8, 8 and 4 rows


class _Record(fit.Callback):
    """Keeps the scale, and the state of model and optimizer, after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.scales.append(self.model.loss_scale)
        objects = self.model.objects().items()
        state = {name: nnx.to_pure_dict(nnx.state(value)) for name, value in objects}
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        self.states.append({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


def _scaled(strategy: Any, module: Any = None, **given: Any) -> fit.Model:
    optimizer = {"optimizer": optax.adam(0.05)}
    return make_model(strategy, module, mixed_precision="float16", **{**optimizer, **given})


def _fit(model: fit.Model, *callbacks: fit.Callback, **given: Any) -> dict[str, list[float]]:
    options: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False, **given}
    return model.fit(DATA.x, DATA.y, SIZE, callbacks=callbacks, **options).history


def _train_with_flax(scale: DynamicScale, epochs: int) -> tuple[list[float], list[Any], Any]:
    """Train on one device by the loop in the documentation of Flax, with the sum of the losses."""
    graph, params = nnx.split(Net())
    tx = optax.adam(0.05)
    state: Any = tx.init(params)
    scales, losses = [], []

    @jax.jit
    def step(scale: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
        def total(params: Any) -> jax.Array:
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            outputs = nnx.merge(graph, half)(x.astype(jnp.float16)).astype(jnp.float32)
            return jnp.sum(LOSS(outputs, y))

        scale, is_finite, loss, grads = scale.value_and_grad(total)(params)
        grads = jax.tree.map(lambda g: g / len(y), grads)
        updates, after = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        chosen = jax.tree.map(
            lambda a, b: jnp.where(is_finite, a, b), (new, after), (params, state)
        )
        return scale, *chosen, loss

    for _ in range(epochs):
        total = 0.0
        for first in range(0, 20, SIZE):
            x, y = DATA.x[first : first + SIZE], DATA.y[first : first + SIZE]
            scale, params, state, loss = step(scale, params, state, x, y)
            scales.append(float(scale.scale))
            total += float(loss)
        losses.append(total / 20)
    return scales, losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("steps", [1, 2])
def test_on_one_device_it_is_the_loop_of_flax(steps: int) -> None:
    # Both skips and growth.
    first = DynamicScale(scale=2.0**17, growth_interval=2, minimum_scale=1.0)
    scales, losses, weights = _train_with_flax(first, epochs=4)
    assert min(scales) < scales[0] < 2.0**17
    assert any(b > a for a, b in itertools.pairwise(scales))
    model, record = _scaled(mirrored(1), loss_scale=first, steps_per_execution=steps), _Record()
    history = _fit(model, record, epochs=4)
    # With two steps in a dispatch: after steps 2, 3, 5, 6 and so on.
    seen = [s for n, s in enumerate(scales) if steps == 1 or n % STEPS != 0]
    assert record.scales == seen
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-3)
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


def _in_pieces() -> fit.Model:
    strategy = mirrored(4)
    with strategy.scope():
        module = _Normed()
        partition.place(strategy, module, partition.fsdp(min_bytes=0))
        model = fit.Model(module)
        model.compile(optax.adam(0.05), LOSS, mixed_precision="float16")
    return model


class _Normed(nnx.Module):
    """A module with statistics."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(DATA.x.shape[1], 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x))))


MODELS: dict[str, Any] = {
    "one device": lambda: _scaled(mirrored(1), _Normed()),
    "three replicas": lambda: _scaled(mirrored(3), _Normed()),
    "virtual replicas": lambda: _scaled(
        jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4), _Normed()
    ),
    "several workers": lambda: _scaled(jaxdist.MultiWorkerMirroredStrategy(), _Normed()),
    "parameters in pieces": _in_pieces,
    "state in pieces": lambda: _scaled(
        mirrored(4), _Normed(), optimizer=jaxdist.sharded_update(optax.adam(0.05), min_bytes=0)
    ),
    "compressed gradients": lambda: _scaled(
        mirrored(4), _Normed(), optimizer=jaxdist.compressed_update(optax.adam(0.05), "int8")
    ),
    "averages": lambda: _scaled(
        mirrored(2), _Normed(), optimizer=training.moving_average(optax.adam(0.05), 0.5)
    ),
    "accumulated gradients": lambda: _scaled(mirrored(2), _Normed(), gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_overflow_skip_exactly_one_update_on_all_replicas(name: str) -> None:
    model, record = MODELS[name](), _Record()
    # The second batch has one example whose gradient is not a number of float16, and whose loss is
    # one of float32. It is on one replica.
    weight = np.ones(20, np.float32)
    weight[SIZE + 5] = 1e6
    history = _fit(model, record, epochs=1, sample_weight=weight)
    assert record.scales == [4096.0, 2048.0, 2048.0]
    first, skipped, last = record.states
    of_scale = {"['optimizer']['scale']", "['optimizer']['finite_steps']"}
    assert of_scale <= first.keys()
    for path in first.keys() - of_scale:
        # Each step takes the mean of the statistics: that of three equal numbers may be rounded.
        rtol = 2e-7 if "'norm'" in path and "'module'" in path else 0
        np.testing.assert_allclose(skipped[path], first[path], rtol=rtol, err_msg=path)
    changed = {path for path in first if not np.array_equal(last[path], skipped[path])}
    assert any("'last'" in path and "'module'" in path for path in changed)
    assert any("mean" in path for path in changed)
    counts = [int(s["['optimizer']['finite_steps']"]) for s in record.states]
    assert counts == [1, 0, 1]
    assert int(last["['optimizer']['step']"]) == 2
    # The loss of the skipped step counts, and is not scaled.
    assert 1e4 < history["loss"][0] < 1e6
    for leaf in jax.tree.leaves(nnx.state(model.module, nnx.BatchStat)):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])


@pytest.mark.parametrize("name", ["three replicas", "several workers", "parameters in pieces"])
def test_replicas_have_the_numbers_of_one_device_and_of_float32(name: str) -> None:
    model = MODELS[name]()
    found = _fit(model, epochs=3)["loss"]
    plain = make_model(model.strategy, _Normed(), optimizer=optax.adam(0.05))
    np.testing.assert_allclose(found, _fit(plain, epochs=3)["loss"], rtol=2e-2)
    state = jax.tree.leaves(nnx.state(model.module, (nnx.Param, nnx.BatchStat)))
    assert {leaf.dtype for leaf in state} == {jnp.dtype("float32")}
    assert model.predict(DATA.x).dtype == np.float32
    # The gradients of pieces are summed over the replicas in float16.
    assert model.loss_scale in (2048.0, 4096.0)
    assert plain.loss_scale is None
    assert type(plain.optimizer) is nnx.Optimizer


def test_layers_compute_in_float16() -> None:
    seen: set[Any] = set()

    class Seen(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            seen.update({x.dtype, self.hidden.kernel[...].dtype})
            return super().__call__(x)

    _fit(_scaled(mirrored(2), Seen()), epochs=1)
    assert seen == {jnp.dtype("float16")}


def _spoil(step: int) -> np.ndarray:
    """Return examples of which one, in one step of an epoch, is not a number of float16."""
    x = DATA.x.copy()
    x[SIZE * step] = 1e6
    return x


def test_a_step_whose_loss_is_not_finite_counts_in_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, record = _scaled(mirrored(2), metrics=["accuracy"]), _Record()
    given: dict[str, Any] = {"verbose": 0, "shuffle": False}
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        spoiled = model.fit(_spoil(1), DATA.y, SIZE, callbacks=[record], **given).history
    [line] = [r.getMessage() for r in caplog.records]
    assert "the loss of step 2 of this epoch is not finite in float16" in line
    assert record.scales == [4096.0, 2048.0, 2048.0]
    rows = np.r_[0:8, 16:20]
    batches = [(DATA.x[r], DATA.y[r]) for r in (rows[:8], rows[8:])]
    other = _scaled(mirrored(2), metrics=["accuracy"])
    history = other.fit(batches, **given).history
    assert spoiled == history
    for one, wanted in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize("looks", [False, True])
def test_a_loss_that_is_not_finite_is_an_error_once_the_scale_is_at_its_minimum(
    looks: bool,
) -> None:
    first = DynamicScale(scale=2.0, minimum_scale=1.0)
    model = _scaled(mirrored(2), loss_scale=first, find_nonfinite=looks)
    before = model.get_weights()
    x, y = np.tile(_spoil(0)[:SIZE], (3, 1)), np.tile(DATA.y[:SIZE], 3)
    words = "is hidden" if looks else "a lower loss scale would not change that"
    with pytest.raises(NonFiniteLossError, match=rf"(?s)the loss.* of step 2 .*{words}"):
        model.fit(x, y, SIZE, shuffle=False, verbose=0)
    assert model.loss_scale == 1.0
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_label_that_is_not_a_class_is_an_error_with_any_scale() -> None:
    # Its gradient is finite, so no scale is to blame.
    with pytest.raises(NonFiniteLossError, match=r"the loss, or .* of step 1 "):
        _scaled(mirrored(2)).fit(DATA.x, np.full(20, 7), SIZE, verbose=0)


class _Killed(BaseException):
    """Stands for the end of the process."""


def test_a_training_that_is_killed_and_resumed_has_the_same_scales(tmp_path: pathlib.Path) -> None:
    first = DynamicScale(scale=2.0**17, growth_interval=2, minimum_scale=1.0)

    def train(folder: str, kill: int | None) -> tuple[Any, ...]:
        record = _Record()

        def end(batch: int, logs: Any) -> None:
            if len(record.scales) == kill:
                raise _Killed

        save = fit.ModelCheckpoint(tmp_path / folder, resume=True, save_freq=1)
        model = _scaled(mirrored(2), _Normed(), loss_scale=first)
        _fit(model, save, record, fit.LambdaCallback(on_train_batch_end=end), epochs=3)
        return record.scales, record.states[-1]

    with pytest.raises(_Killed):
        train("killed", 4)
    scales, state = train("killed", None)
    wanted_scales, wanted = train("whole", None)
    assert scales == wanted_scales[-len(scales) :]
    assert len(set(wanted_scales)) > 2
    for path, value in wanted.items():
        np.testing.assert_array_equal(state[path], value, err_msg=path)


def test_parameter_servers_have_no_loss_scale() -> None:
    with pytest.raises(UnsupportedError, match=r"mixed_precision='float16' and parameter servers"):
        _scaled(make_strategy(servers=1, workers=1))


class _Slope(nnx.Module):
    """Its loss is finite, and a gradient is not: the norm has no slope at 0."""

    def __init__(self) -> None:
        self.out = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.shift = nnx.Param(jnp.zeros(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x) + jnp.linalg.norm(self.shift[...])


@pytest.mark.parametrize("scale", [None, DynamicScale(scale=64.0)])
def test_gradients_that_are_never_finite_are_an_error(scale: DynamicScale | None) -> None:
    model = fit.Model(_Slope(), mirrored(2))
    model.compile(optax.sgd(0.1), "mse", mixed_precision="float16", loss_scale=scale)
    x = np.ones((64, 2), np.float32)
    with pytest.raises(NonFiniteLossError, match="or a gradient at the lowest loss scale"):
        model.fit(x, x[:, :1], batch_size=2, epochs=3, verbose=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": float("nan")},
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": float("inf")},
        {"backoff_factor": 2.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_factor": 1.0},
        {"growth_interval": 0},
        {"minimum_scale": -1.0},
        {"minimum_scale": 1e6},
    ],
)
def test_a_rule_of_the_scale_that_cannot_work_is_named(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ArgumentError, match=f"loss_scale with .*{name}={value}"):
        _scaled(mirrored(1), loss_scale=DynamicScale(**wrong))


def test_parameters_in_float16_are_refused() -> None:
    model = fit.Model(nnx.Linear(2, 1, param_dtype=jnp.float16, rngs=nnx.Rngs(0)), mirrored(1))
    with pytest.raises(ArgumentError, match=r"2 parameter\(s\) in float16: bias, kernel"):
        model.compile("sgd", "mse", mixed_precision="float16")
