"""Saving, loading, and weights."""

import math
import pathlib
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxdist.errors import CheckpointError, ContextError, ShapeError
from jaxdist.fit import History
from tests.fit.models import Net, make_data, make_model, mirrored


def _fit(model: Any, **kwargs: Any) -> list[float]:
    data = make_data(20)
    return model.fit(data.x, data.y, 8, verbose=0, **kwargs).history["loss"]


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 3)])
def test_training_goes_on_from_a_saved_model_on_other_devices(
    tmp_path: pathlib.Path, before: int, after: int
) -> None:
    whole = make_model(mirrored(before), optimizer="adam")
    wanted = _fit(whole, epochs=4)
    first = make_model(mirrored(before), optimizer="adam")
    _fit(first, epochs=1)
    first.save(tmp_path)
    _fit(first, epochs=2, initial_epoch=1)
    first.save(tmp_path)
    second = make_model(mirrored(after), Net(seed=3), optimizer="adam")
    second.load(tmp_path)
    found = _fit(second, epochs=4, initial_epoch=2)
    np.testing.assert_allclose(found, wanted[2:], rtol=1e-4)
    assert [p.name for p in tmp_path.iterdir() if p.name.isdigit()] == ["1"]


def test_a_model_that_does_not_fit_is_an_error_and_changes_nothing(tmp_path: pathlib.Path) -> None:
    model = make_model(mirrored(2))
    model.save(tmp_path)
    other = make_model(mirrored(2), nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    before = other.get_weights()
    with pytest.raises(CheckpointError):
        other.load(tmp_path)
    for one, two in zip(before, other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(CheckpointError, match=r"which is not a directory"):
        model.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"which has no model"):
        model.load(tmp_path / "empty")


def test_weights_are_copied_and_set_together_or_not_at_all() -> None:
    model, other = make_model(mirrored(3)), make_model(mirrored(1), Net(seed=5))
    data = make_data(9)
    weights = other.get_weights()
    model.set_weights(weights)
    np.testing.assert_allclose(model.predict(data.x), other.predict(data.x), rtol=1e-5)
    wrong = [weights[0], weights[1].T, *weights[2:]]
    with pytest.raises(ShapeError, match=r"\['hidden'\]\['kernel'\].*: \[8, 4\] for \[4, 8\]"):
        model.set_weights(wrong)
    with pytest.raises(ShapeError, match=r"weights with 3 array\(s\) for 4"):
        model.set_weights(weights[:3])
    for one, two in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    weights[0][:] = 7
    assert not np.any(other.get_weights()[0] == 7)


def test_the_history_is_drawn(tmp_path: pathlib.Path) -> None:
    data = make_data(20)
    model = make_model(mirrored(1), metrics=["accuracy"])
    held_out: dict[str, Any] = {"validation_split": 0.2, "validation_freq": 2}
    history = model.fit(data.x, data.y, 8, epochs=4, verbose=0, **held_out)
    figure = history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): line.get_xdata() for line in figure.axes[0].get_lines()}
    assert list(lines["training"]) == [1, 2, 3, 4]
    assert list(lines["validation"]) == [2, 4]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    # A notebook that has not loaded pyplot shows this.
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert repr(history).startswith("History of 4 epochs: loss ")
    assert repr(model.fit(data.x, data.y, 8, verbose=0)).startswith("History of 1 epoch: loss ")
    assert repr(History()) == "History of 0 epochs"
    with pytest.raises(ContextError, match=r"no epoch is complete(.|\n)*a higher epochs"):
        History().plot()


@pytest.mark.parametrize(
    ("given", "epoch", "words"),
    [
        ({}, 2, "epoch 2: best val_loss"),
        ({"monitor": "val_mae", "best_epoch": 2}, 3, "epoch 3: best val_mae"),
        (
            {"monitor": "val_loss", "best_epoch": 1, "restored_epoch": 1},
            2,
            "epoch 2: best val_loss, restored",
        ),
        ({"monitor": "val_loss"}, None, ""),
    ],
)
def test_the_best_and_the_restored_epoch_are_marked(
    given: dict[str, Any], epoch: int | None, words: str
) -> None:
    values = {
        "loss": [3.0, 2.0, 1.0],
        "val_loss": [2.5, 1.5, math.nan],
        "mae": [1.0, 1.0, 1.0],
        "val_mae": [2.0, 2.0, 1.0],
    }
    for axes in History(values, [0, 1, 2], **given).plot().axes:
        marks = {line.get_label(): line.get_xdata()[0] for line in axes.get_lines()[2:]}
        assert marks == ({} if epoch is None else {words: epoch})
        assert {text.get_text() for text in axes.get_legend().get_texts()} >= {*marks}
