"""State of a model besides parameters: statistics, dropout, precision, accumulated gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit
from jaxdist.errors import NoRowsError
from tests.fit.models import CLASSES, FEATURES, HIDDEN, LOSS, Net, make_data, make_model, mirrored


class _Normalized(nnx.Module):
    """Dense, BatchNorm, dropout, dense."""

    def __init__(self, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class _Told(nnx.Module):
    """A module that is told whether it trains, by an argument."""

    def __init__(self) -> None:
        self.net = Net()

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        return self.net(x) * (2.0 if training else 1.0)


class _ToldTheOpposite(_Told):
    """The same, by the argument of Flax Linen."""

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:  # type: ignore[override]
        return self.net(x) * (1.0 if deterministic else 2.0)


def test_batch_statistics_are_those_of_each_replica_and_used_in_an_evaluation() -> None:
    data = make_data(16)
    model = make_model(mirrored(2), _Normalized(), optimizer=optax.sgd(0.0))
    net: Any = model.module
    hidden = np.asarray(net.hidden(data.x))
    parts = hidden.reshape(2, 8, HIDDEN)
    wanted = 0.5 * np.mean([part.mean(0) for part in parts], axis=0)
    model.fit(data.x, data.y, 16, shuffle=False, verbose=0)
    np.testing.assert_allclose(np.asarray(net.norm.mean[...]), wanted, rtol=1e-4, atol=1e-6)
    # In an evaluation the statistics of training count, and they do not change.
    before = np.asarray(net.norm.mean[...])
    model.evaluate(data.x, data.y, 5, verbose=0)
    np.testing.assert_array_equal(np.asarray(net.norm.mean[...]), before)
    spread = np.sqrt(np.asarray(net.norm.var[...]) + net.norm.epsilon)
    normed = (hidden - before) / spread * np.asarray(net.norm.scale[...])
    outputs = net.out(nnx.relu(normed + np.asarray(net.norm.bias[...])))
    np.testing.assert_allclose(model.predict(data.x), outputs, rtol=1e-4, atol=1e-5)
    # The user's module has the attributes that it had.
    assert net.norm.use_running_average is False


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_replicas_without_examples_take_no_part_in_batch_statistics(eagerly: bool) -> None:
    data = make_data(3)
    model = make_model(mirrored(8), _Normalized())
    net: Any = model.module
    wanted = 0.5 * np.asarray(net.hidden(data.x)).mean(0)
    jaxdist.config.run_eagerly(eagerly)
    try:
        model.fit(data.x, data.y, 3, verbose=0)
    finally:
        jaxdist.config.run_eagerly(False)
    np.testing.assert_allclose(np.asarray(net.norm.mean[...]), wanted, rtol=1e-4, atol=1e-6)
    assert np.isfinite(np.asarray(net.norm.scale[...])).all()


def test_a_mean_that_the_module_takes_over_replicas_is_refused_where_one_has_no_examples() -> None:
    class Centred(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x - jax.lax.pmean(x.mean(0, keepdims=True), "replica"))

    data = make_data(3)
    with pytest.raises(NoRowsError):
        make_model(mirrored(8), Centred()).fit(data.x, data.y, 3, verbose=0)


def test_dropout_drops_in_training_and_not_in_an_evaluation() -> None:
    data = make_data(64)
    runs = []
    for rate in (0.0, 0.9):
        model = make_model(mirrored(4), _Normalized(rate), optimizer=optax.sgd(0.0))
        first = model.evaluate(data.x, data.y, verbose=0)
        assert model.evaluate(data.x, data.y, verbose=0) == first
        loss = model.fit(data.x, data.y, 64, epochs=2, verbose=0, shuffle=False).history["loss"]
        runs.append(loss)
    assert runs[0][0] == pytest.approx(runs[0][1], rel=1e-5)
    # Two epochs drop different units, and what they drop changes the loss.
    assert runs[1][0] != pytest.approx(runs[1][1], rel=1e-4)
    assert runs[1][0] != pytest.approx(runs[0][0], rel=1e-4)


@pytest.mark.parametrize("kind", [_Told, _ToldTheOpposite])
def test_a_module_with_an_argument_for_training_is_told(kind: Any) -> None:
    data = make_data(8)
    twice = lambda y_true, y_pred: y_pred.sum(axis=-1)  # noqa: E731
    model = make_model(mirrored(2), kind(), loss=twice, optimizer=optax.sgd(0.0))
    trained = model.fit(data.x, data.y, verbose=0).history["loss"][0]
    assert trained == pytest.approx(2 * model.evaluate(data.x, data.y, verbose=0), rel=1e-5)


class _Seen(nnx.Module):
    """Notes the dtypes in which it computes."""

    def __init__(self) -> None:
        self.net = _Normalized()
        self.dtypes: Any = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        _DTYPES.append((x.dtype, self.net.hidden.kernel[...].dtype))
        return self.net(x)


_DTYPES: list[Any] = []


def test_mixed_precision_computes_in_bfloat16_and_keeps_the_state_in_float32() -> None:
    data = make_data(32)
    _DTYPES.clear()
    model = make_model(mirrored(2), _Seen(), mixed_precision="bfloat16")
    plain = make_model(mirrored(2), _Normalized())
    found = model.fit(data.x, data.y, 16, epochs=3, verbose=0).history["loss"]
    assert {dtype for pair in _DTYPES for dtype in pair} == {jnp.dtype("bfloat16")}
    wanted = plain.fit(data.x, data.y, 16, epochs=3, verbose=0).history["loss"]
    np.testing.assert_allclose(found, wanted, rtol=2e-2)
    net: Any = model.module
    state = jax.tree.leaves(nnx.state(net, (nnx.Param, nnx.BatchStat)))
    assert {leaf.dtype for leaf in state} == {jnp.dtype("float32")}
    # Statistics of the copy in bfloat16 came back.
    assert np.abs(np.asarray(net.net.norm.mean[...])).max() > 0
    assert model.predict(data.x).dtype == np.float32


@pytest.mark.parametrize("replicas", [1, 3])
def test_accumulated_gradients_update_after_k_steps_with_their_mean(replicas: int) -> None:
    data = make_data(32)
    model = make_model(mirrored(replicas), gradient_accumulation_steps=4)
    before = model.get_weights()
    history = model.fit(data.x, data.y, 8, shuffle=False, verbose=0, steps_per_epoch=3)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(history.history["loss"]) == 1
    model = make_model(mirrored(replicas), gradient_accumulation_steps=4)
    whole = make_model(mirrored(replicas))
    model.fit(data.x, data.y, 8, shuffle=False, verbose=0)
    whole.fit(data.x, data.y, 32, shuffle=False, verbose=0)
    for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_float64_is_kept_where_jax_has_it() -> None:
    data = make_data(21)
    with jax.enable_x64(True):
        runs = []
        for replicas in (1, 8):
            module = Net()
            nnx.update(module, jax.tree.map(lambda v: v.astype(jnp.float64), nnx.state(module)))
            model = make_model(mirrored(replicas), module, optimizer=optax.adam(1e-2))
            x = data.x.astype(np.float64)
            runs.append(model.fit(x, data.y, 8, epochs=3, verbose=0).history["loss"])
        np.testing.assert_allclose(runs[0], runs[1], rtol=1e-12)


def test_the_summary_lists_shapes_parameters_and_bytes_of_a_device() -> None:
    model = make_model(mirrored(4), Net(), optimizer=optax.adam(1e-3))
    data = make_data(8)
    model.fit(data.x, data.y, verbose=0)
    summary = model.summary()
    sizes = {"hidden.kernel": 32, "hidden.bias": 8, "out.kernel": 24, "out.bias": 3}
    assert {row.path: row.elements for row in summary.rows} == sizes
    assert summary.parameters == sum(sizes.values()) == 67
    # Two moments of Adam in float32, its count, and that of the optimizer.
    assert summary.optimizer_bytes == 2 * 67 * 4 + 4 + 4
    assert summary.bytes_per_device == 67 * 4 + summary.optimizer_bytes
    for word in ("hidden.kernel", "Linear", "[4, 8]", "67 parameters"):
        assert word in str(summary)
    assert summary._repr_html_().count("hidden.kernel") == 1


def test_the_summary_of_sharded_parameters_counts_the_part_of_a_device() -> None:
    strategy = mirrored(4)
    model = fit.Model(Net(), strategy)
    whole = model.summary().bytes_per_device
    axis = strategy.mesh.axis_names[0]
    sharding = jax.sharding.NamedSharding(strategy.mesh, jax.P(None, axis))
    net: Any = model.module
    net.hidden.kernel[...] = jax.device_put(net.hidden.kernel[...], sharding)
    row = next(row for row in model.summary().rows if row.path == "hidden.kernel")
    assert row.bytes_per_device == 32 * 4 // 4
    assert axis in row.sharding
    assert model.summary().bytes_per_device == whole - 32 * 3
    assert jaxdist.get_strategy() is not strategy


def test_a_loss_of_a_pytree_of_targets() -> None:
    data = make_data(12)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return LOSS(y_pred, y_true["label"]) + jnp.square(y_true["extra"])

    extra = np.arange(12, dtype=np.float32)
    found = make_model(mirrored(3), loss=loss).evaluate(
        data.x, {"label": data.y, "extra": extra}, 5, verbose=0
    )
    plain = make_model(mirrored(3)).evaluate(data.x, data.y, 5, verbose=0)
    assert found == pytest.approx(plain + np.mean(extra**2), rel=1e-5)
