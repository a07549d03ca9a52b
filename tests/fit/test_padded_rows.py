"""Any number of examples where replicas have several devices, or are virtual.

Replicas need equally many rows there, so `fit` pads the last batch. The oracle is that of
`test_any_rows`: plain JAX on one array.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxdist
from jaxdist import fit, partition
from jaxdist.errors import ShapeError
from tests.fit.models import LOSS, mirrored
from tests.fit.test_any_rows import (
    AXIS,
    EXACT,
    OF_A_REPLICA,
    _Counted,
    _data,
    _train_plainly,
    _variables_of,
    train_and_compare,
)
from tests.tables import sampled


def _make_grid() -> Any:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, (AXIS, "model"))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=(AXIS,))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "4 replicas of 2 devices": _make_grid,
    "8 virtual replicas": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True),
}
# Dropout by example has the numbers of rows with padding: those of one array only without it.
NAMES = [name for name in (*EXACT, *OF_A_REPLICA) if name != "dropout by example"]
SIZES = [(8, rows) for rows in (1, 3, 5, 8, 9, 11, 16, 23)] + [(32, rows) for rows in (7, 33, 60)]
ROWS = [(kind, name, *size) for kind in STRATEGIES for name in NAMES for size in SIZES]


@pytest.mark.parametrize(
    "row", sampled(ROWS, 8, name=lambda row: f"{row[1]} on {row[0]}, {row[2]}, {row[3]}")
)
def test_training_on_padded_batches_is_that_of_one_array(row: Any) -> None:
    kind, name, size, rows = row
    train_and_compare(STRATEGIES[kind](), name, size, rows)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7])
def test_statistics_of_a_replica_are_those_of_its_rows_without_padding(rows: int) -> None:
    x, y = _data(rows)
    models = []
    for strategy in (_make_grid(), mirrored(4)):
        with strategy.scope():
            models.append(fit.Model(OF_A_REPLICA["conv and batch norm"](AXIS)))
        models[-1].compile(optax.sgd(0.2), LOSS)
        models[-1].fit(x, y, 8, shuffle=False, verbose=0)
    # On replicas of one device nothing is padded.
    for have, want in zip(*(_variables_of(m.module) for m in models), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_parameters_in_pieces_train_on_padded_batches() -> None:
    x, y = _data(11)
    strategy = _make_grid()
    with strategy.scope():
        module = EXACT["dense"](AXIS)
        partition.place(strategy, module, partition.fsdp(min_bytes=0))
        model = fit.Model(module)
    model.compile(optax.sgd(0.2, momentum=0.9), LOSS)
    model.fit(x, y, 8, shuffle=False, verbose=0, epochs=1)
    wanted, _ = _train_plainly("dense", 8, 11)
    for have, want in zip(_variables_of(model.module), wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_several_steps_in_one_dispatch_take_padded_batches() -> None:
    x, y = _data(11)
    with _make_grid().scope():
        model = fit.Model(EXACT["dense"](AXIS))
    model.compile(optax.sgd(0.2, momentum=0.9), LOSS, steps_per_execution=2)
    model.fit(x, y, 8, shuffle=False, verbose=0)
    wanted, _ = _train_plainly("dense", 8, 11)
    for have, want in zip(_variables_of(model.module), wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_batches_of_a_list_may_grow() -> None:
    x, y = _data(28)
    batches = [(x[:8], y[:8]), (x[8:24], y[8:24]), (x[24:], y[24:])]
    with _make_grid().scope():
        model = fit.Model(EXACT["dense"](AXIS))
    model.compile(optax.sgd(0.2), LOSS, metrics=[_Counted("counted")])
    found = model.fit(batches, verbose=0).history
    assert found["counted"] == [28 * 1000 + y.sum()]
    assert model.evaluate(batches, verbose=0)[1] == 28 * 1000 + y.sum()


class _Folded(nnx.Module):
    """Normalizes rows and sides as one dim."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.norm(x.reshape(-1, 4))
        return self.out(normed.reshape(x.shape[0], -1))


def test_statistics_over_a_folded_dim_of_padded_rows_are_an_error() -> None:
    x, y = _data(11)
    with _make_grid().scope():
        model = fit.Model(_Folded())
    model.compile(optax.sgd(0.2), LOSS)
    with pytest.raises(ShapeError, match=r"\[8, 4\] over dim 0, and this replica has 2 rows"):
        model.fit(x, y, 8, shuffle=False, verbose=0)


def test_norms_of_features_do_not_see_the_padding() -> None:
    class Normed(EXACT["dense"]):  # type: ignore[misc]
        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = nnx.LayerNorm(4, rngs=nnx.Rngs(0))(x[:, 0])
            hidden = nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(hidden)
            return self.out(nnx.tanh(self.hidden(hidden)))

    x, y = _data(11)
    models = []
    for strategy in (_make_grid(), mirrored(1)):
        with strategy.scope():
            models.append(fit.Model(Normed(AXIS)))
        models[-1].compile(optax.sgd(0.2), LOSS)
        models[-1].fit(x, y, 8, shuffle=False, verbose=0)
    for have, want in zip(*(_variables_of(m.module) for m in models), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_a_mask_of_the_user_and_the_padding_are_both_left_out() -> None:
    class Masked(EXACT["conv and batch norm over replicas"]):  # type: ignore[misc]
        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = self.conv(x[..., None])
            normed = self.norm(hidden, mask=(x > 0)[..., None])
            return self.out(jax.numpy.mean(nnx.tanh(normed), axis=(1, 2)))

    x, y = _data(11)
    models = []
    for strategy in (_make_grid(), mirrored(4), mirrored(1)):
        with strategy.scope():
            models.append(fit.Model(Masked(AXIS)))
        models[-1].compile(optax.sgd(0.2), LOSS)
        models[-1].fit(x, y, 8, shuffle=False, verbose=0)
    for other in models[:2]:
        pairs = zip(_variables_of(other.module), _variables_of(models[2].module), strict=True)
        for have, want in pairs:
            np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-5)


@nnx.jit
def _norm_jitted(module: Any, x: jax.Array) -> Any:
    return module.norm(module.conv(x[..., None]))


@nnx.remat
def _norm_again(module: Any, x: jax.Array) -> Any:
    return module.norm(module.conv(x[..., None]))


@pytest.mark.parametrize("call", [_norm_jitted, _norm_again])
@pytest.mark.parametrize("rows", [11, 15])
def test_a_transformed_layer_is_traced_for_each_mask(rows: int, call: Any) -> None:
    class Transformed(EXACT["conv and batch norm over replicas"]):  # type: ignore[misc]
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(jax.numpy.mean(nnx.tanh(call(self, x)), axis=(1, 2)))

    x, y = _data(rows)
    models = []
    for strategy in (mirrored(1), _make_grid(), mirrored(4), _make_grid()):
        with strategy.scope():
            models.append(fit.Model(Transformed(AXIS)))
        models[-1].compile(optax.sgd(0.2), LOSS)
        models[-1].fit(x, y, 8, shuffle=False, verbose=0)
    for other in models[1:]:
        pairs = zip(_variables_of(other.module), _variables_of(models[0].module), strict=True)
        for have, want in pairs:
            np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-5)


class _OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        normed = linen.BatchNorm(not train, momentum=0.7, axis_name=AXIS)(x[:, 0])
        return linen.Dense(3)(normed)


@pytest.mark.parametrize("make", [_make_grid, lambda: mirrored(4)])
def test_statistics_of_linen_are_those_of_all_rows(make: Callable[[], Any]) -> None:
    x, y = _data(11)
    models = []
    for strategy in (make(), mirrored(1)):
        with strategy.scope():
            module = nnx.bridge.ToNNX(_OfLinen(), rngs=nnx.Rngs(0))
            built: Any = nnx.bridge.lazy_init(module, x[:1])
            models.append(fit.Model(built))
        models[-1].compile(optax.sgd(0.2), LOSS)
        models[-1].fit(x, y, 8, shuffle=False, verbose=0)
    for have, want in zip(*(_variables_of(m.module) for m in models), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


class _RelativeError(fit.Metric):
    """Is nan for an example of zeros."""

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        size = jax.numpy.linalg.norm(y_pred, axis=-1)
        ratios = jax.numpy.abs(y_pred[:, 0]) / size
        return {"sum": jax.numpy.sum(weight * ratios), "rows": jax.numpy.sum(weight)}

    def result(self, sums: Any) -> float:
        return float(sums["sum"] / sums["rows"])


@pytest.mark.parametrize("make", [_make_grid, lambda: mirrored(4)])
@pytest.mark.parametrize("rows", [1, 3, 9, 11])
def test_a_metric_of_the_user_that_is_nan_on_zeros_is_that_of_the_examples(
    rows: int, make: Callable[[], Any]
) -> None:
    class Biasless(nnx.Module):
        def __init__(self) -> None:
            self.out = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x[:, 0])

    x, y = _data(rows)
    found = []
    for strategy in (make(), mirrored(1)):
        with strategy.scope():
            model = fit.Model(Biasless())
        model.compile(optax.sgd(0.0), LOSS, metrics=[_RelativeError("relative")])
        trained = model.fit(x, y, 8, shuffle=False, verbose=0).history["relative"]
        found.append([*trained, *model.evaluate(x, y, 8, verbose=0)])
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
