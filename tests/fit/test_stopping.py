"""Ctrl-C, and losses that are not finite."""

import re
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist import fit
from jaxdist.errors import NonFiniteLossError
from tests.fit.models import LOSS, Net, make_data, make_model, mirrored

DATA = make_data(20)


def _interrupt(method: str, k: int) -> fit.Callback:
    left = [k]

    def press(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    return fit.LambdaCallback(**{method: press})


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_ctrl_c_at_the_kth_step_leaves_the_state_after_a_complete_step(
    k: int, steps: int, capfd: Any
) -> None:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
    states: list[Any] = []
    whole = make_model(mirrored(2), steps_per_execution=steps)
    keep = fit.LambdaCallback(on_train_batch_end=lambda *_: states.append(whole.get_weights()))
    whole.fit(DATA.x, DATA.y, epochs=2, callbacks=[keep], **given)
    model = make_model(mirrored(2), steps_per_execution=steps)
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            DATA.x, DATA.y, epochs=2, callbacks=[_interrupt("on_train_batch_end", k)], **given
        )
    # The step in which it came is complete, and no other one ran.
    for one, other in zip(model.get_weights(), states[k - 1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(model.history.history.get("loss", [])) == k // (5 if steps == 1 else 3)
    assert "stopping after this step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(model.fit(DATA.x, DATA.y, **given).history["loss"]) == 1


@pytest.mark.parametrize("bad", [0, 7, 19])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_that_is_not_finite_stops_and_names_the_step_and_its_examples(
    bad: int, steps: int
) -> None:
    x = DATA.x.copy()
    x[bad] = np.inf
    model = make_model(mirrored(2), steps_per_execution=steps)
    with pytest.raises(NonFiniteLossError) as error:
        model.fit(x, DATA.y, 4, epochs=3, seed=1, verbose=0)
    message = str(error.value)
    rows = re.search(r"has the examples \[([^]]*)\]", message)
    assert rows is not None
    assert bad in [int(row) for row in rows[1].split(",")]
    step = re.search(r"the loss of step (\d+)", message)
    assert step is not None
    assert 1 <= int(step[1]) <= 5


class _Bad(nnx.Module):
    """A net with a layer whose output is not finite for large inputs."""

    def __init__(self) -> None:
        self.first = Net()
        self.exploding = _Exploding()

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        return self.exploding(self.first(x)) * (1.0 + training)


class _Exploding(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.log(10.0 - x)


def test_the_first_layer_that_is_not_finite_is_named_and_the_model_is_as_before_the_step() -> None:
    x = DATA.x.copy()
    x[9] *= 1e4
    model = make_model(mirrored(2), _Bad(), find_nonfinite=True)
    kept: list[Any] = []
    keep = fit.LambdaCallback(on_train_batch_begin=lambda *_: kept.append(model.get_weights()))
    with pytest.raises(NonFiniteLossError) as error:
        model.fit(x, DATA.y, 4, shuffle=False, verbose=0, callbacks=[keep])
    message = str(error.value)
    assert "the loss of step 3 of this epoch is nan" in message
    assert "[8, 9, 10, 11]" in message
    assert "The first layer whose output is not finite is exploding (_Exploding)." in message
    for one, other in zip(model.get_weights(), kept[2], strict=True):
        np.testing.assert_array_equal(one, other)
    # Without the example it goes on.
    assert np.isfinite(model.fit(DATA.x, DATA.y, verbose=0).history["loss"]).all()
    assert type(model.module) is _Bad


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, x: m.set_weights([w * np.nan for w in m.get_weights()]), "parameter"),
        (lambda m, x: x.__setitem__(0, np.nan), "The input x is not finite."),
    ],
)
def test_parameters_and_inputs_that_are_not_finite_are_named(make: Any, words: str) -> None:
    x = DATA.x.copy()
    model = make_model(mirrored(2), find_nonfinite=True)
    make(model, x)
    with pytest.raises(NonFiniteLossError, match=words):
        model.fit(x, DATA.y, verbose=0, shuffle=False)


def test_a_loss_function_that_is_not_finite_is_named() -> None:
    loss = lambda y_true, y_pred: LOSS(y_pred, y_true) / 0.0  # noqa: E731
    model = make_model(mirrored(2), loss=loss, optimizer=optax.sgd(0.1), find_nonfinite=True)
    with pytest.raises(NonFiniteLossError, match=r"so the value comes from the loss function"):
        model.fit(DATA.x, DATA.y, verbose=0)
