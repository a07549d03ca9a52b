"""What an early stop prints, and what the history says of it."""

import math
import pathlib
from typing import Any

import pytest

from jaxdist import fit
from jaxdist.errors import ArgumentError
from tests.fit.models import make_data, make_model, mirrored


class _SetLosses(fit.Callback):
    """Replaces the loss of each epoch."""

    def __init__(self, losses: list[float]) -> None:
        self._losses = losses

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs["loss"] = self._losses[epoch]


_STAYS = "The weights of epoch 4 stay (restore_best_weights=False)."
_WORSE = [3.0, 0.51234, 1.0, 2.0, 0.1]


@pytest.mark.parametrize(
    ("losses", "restores", "stop", "words"),
    [
        (
            _WORSE,
            True,
            4,
            "the best is loss 0.5123 of epoch 2. The weights of epoch 2 are restored.",
        ),
        (_WORSE, False, 4, f"the best is loss 0.5123 of epoch 2. {_STAYS}"),
        (
            [math.nan, math.inf, 1.0],
            True,
            2,
            "loss was never a finite number. No weights are restored.",
        ),
        (
            [3.0, 2.0, 1.0, 0.5, 0.75],
            True,
            None,
            "The best is loss 0.5 of epoch 4. The weights of epoch 4 are restored.",
        ),
        ([3.0, 2.0, 1.0, 0.5, 0.75], False, None, ""),
        ([5.0, 4.0, 3.0, 2.0, 1.0], True, None, ""),
    ],
)
def test_an_early_stop_says_what_was_best_and_restored(
    losses: list[float],
    restores: bool,
    stop: int | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopping = fit.EarlyStopping("loss", patience=2, restore_best_weights=restores)
    model = make_model(mirrored(1))
    data = make_data(8)
    given: dict[str, Any] = {"callbacks": [_SetLosses(losses), stopping]}
    history = model.fit(data.x, data.y, 8, epochs=5, **given)
    said = words if stop is None else f"Early stop after epoch {stop}: {words}"
    assert capsys.readouterr().out.splitlines()[len(history.epoch) :] == [said][: len(said)]
    assert len(history.epoch) == (stop or 5)
    seen = losses[: len(history.epoch)]
    best = None if "never" in words else seen.index(min(seen))
    assert (history.monitor, history.best_epoch) == ("loss", best)
    assert history.restored_epoch == (best if restores else None)


def test_an_early_stop_says_when_the_checkpoint_has_no_weights_to_restore(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_model(mirrored(1)), make_data(8)
    for epochs, restores in ((2, False), (9, True)):
        stopping = fit.EarlyStopping("loss", patience=3, restore_best_weights=restores)
        save = fit.ModelCheckpoint(tmp_path, resume=True)
        losses = _SetLosses([3.0, 1.0, *[2.0] * 7])
        callbacks = [losses, stopping, save]
        history = model.fit(data.x, data.y, 8, epochs=epochs, callbacks=callbacks, verbose=2)
    assert history.restored_epoch is None
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Early stop after epoch 5: the best is loss 1 of epoch 2. The weights of epoch 5 stay (the "
        "checkpoint does not have those of epoch 2)."
    )


@pytest.mark.parametrize(
    ("own", "of_fit", "says"),
    [("auto", 0, False), ("auto", 2, True), (0, 2, False), (1, 0, True), (True, 0, True)],
)
def test_verbose_decides_whether_an_early_stop_prints(
    own: Any, of_fit: int, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = fit.EarlyStopping("loss", patience=1, verbose=own)
    losses, data = _SetLosses([1.0, 2.0]), make_data(8)
    make_model(mirrored(1)).fit(
        data.x, data.y, 8, epochs=2, verbose=of_fit, callbacks=[losses, stopping]
    )
    assert ("Early stop after epoch 2" in capsys.readouterr().out) == says
    with pytest.raises(ArgumentError, match="verbose=3"):
        fit.EarlyStopping(verbose=3)
