"""Trackers get the logs of `fit`, with steps that continue, and are always closed."""

import pathlib
from collections.abc import Mapping
from typing import Any, cast

import pytest

from jaxdist import fit
from jaxdist.errors import ArgumentError, ArgumentTypeError
from jaxdist.fit._callbacks.base import CallbackList
from tests.fit import in_processes
from tests.fit.models import make_data, make_model, mirrored
from tests.processes.job import run_job

DATA = make_data(20)  # in batches of 8, 8 and 4 rows


class _Noted:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def close(self, completed: bool) -> None:
        self.closed.append(completed)

    def by_step(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for step, metrics in self.lines:
            found.setdefault(step, {}).update(metrics)
        return found


def _fit(model: fit.Model, *callbacks: fit.Callback, **kwargs: Any) -> fit.History:
    given: dict[str, Any] = {"batch_size": 8, "epochs": 3, "verbose": 0, **kwargs}
    return model.fit(DATA.x, DATA.y, callbacks=list(callbacks), **given)


def test_a_tracker_gets_the_values_of_each_epoch_and_is_closed() -> None:
    noted = _Noted()
    history = _fit(make_model(mirrored(2)), fit.TrackerLogger(lambda: noted), validation_split=0.2)
    names = ("loss", "val_loss")
    wanted = [(i, {n: history.history[n][i] for n in names}) for i in range(3)]
    assert noted.lines == wanted
    assert noted.closed == [True]


def test_logs_of_epochs_do_not_wait_for_each_batch() -> None:
    for frequency, waits in ("epoch", False), (1, True):
        callback = fit.TrackerLogger(_Noted, frequency)
        callbacks = CallbackList([callback], make_model(mirrored(1)), {})
        assert callbacks.has("on_train_batch_end") == waits


class _Batches(fit.Callback):
    """Keeps the logs of each batch."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize("every", [1, 2, 3, 4, 100])
def test_with_a_number_the_steps_of_the_training_are_logged(every: int) -> None:
    noted, batches = _Noted(), _Batches()
    model = make_model(mirrored(2))
    history = _fit(model, fit.TrackerLogger(lambda: noted, every), batches, validation_split=0.2)
    # 16 of the 20 rows are trained on: two steps of an epoch.
    held_out = history.history["val_loss"]
    wanted = {step + 1: logs for step, logs in enumerate(batches.logs) if (step + 1) % every == 0}
    for epoch in range(3):
        last = 2 * (epoch + 1)
        wanted[last] = {**batches.logs[last - 1], "val_loss": held_out[epoch]}
    assert noted.by_step() == wanted
    # No value is logged twice for one step.
    assert sum(len(metrics) for _, metrics in noted.lines) == sum(map(len, wanted.values()))
    assert [step for step, _ in noted.lines] == sorted(step for step, _ in noted.lines)


def test_a_dispatch_of_several_steps_is_logged_after_its_last_one() -> None:
    noted = _Noted()
    model = make_model(mirrored(2), steps_per_execution=2)
    _fit(model, fit.TrackerLogger(lambda: noted, 3), batch_size=4, epochs=2)
    # Of five steps of an epoch: dispatches end at 2, 4, 5, 7, 9 and 10.
    assert [step for step, _ in noted.lines] == [4, 5, 7, 9, 10]


class _Killed(BaseException):
    """Stands for the end of the process."""


class _Kill(fit.Callback):
    def __init__(self, after: int, error: type[BaseException] = _Killed) -> None:
        self._left, self._error = after, error

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error


@pytest.mark.parametrize("save_freq", ["epoch", 2])
@pytest.mark.parametrize("frequency", ["epoch", 2])
@pytest.mark.parametrize("after", [2, 3, 5, 7])
def test_a_training_that_resumes_has_the_steps_of_one_without_a_break(
    after: int, frequency: str | int, save_freq: str | int, tmp_path: pathlib.Path
) -> None:
    whole, parts = _Noted(), _Noted()
    _fit(make_model(mirrored(2)), fit.TrackerLogger(lambda: whole, frequency))

    def train(*more: fit.Callback) -> None:
        save = fit.ModelCheckpoint(tmp_path, resume=True, save_freq=save_freq)
        _fit(make_model(mirrored(2)), fit.TrackerLogger(lambda: parts, frequency), save, *more)

    with pytest.raises(_Killed):
        train(_Kill(after))
    train()
    assert parts.by_step() == whole.by_step()
    assert parts.closed == [False, True]


def test_steps_continue_where_the_training_before_logged_epochs(tmp_path: pathlib.Path) -> None:
    whole, parts = _Noted(), _Noted()
    _fit(make_model(mirrored(2)), fit.TrackerLogger(lambda: whole, 2))
    save: dict[str, Any] = {"resume": True, "save_freq": 1}
    first = fit.TrackerLogger(_Noted)
    with pytest.raises(_Killed):
        _fit(make_model(mirrored(2)), first, fit.ModelCheckpoint(tmp_path, **save), _Kill(5))
    second = fit.TrackerLogger(lambda: parts, 2)
    _fit(make_model(mirrored(2)), second, fit.ModelCheckpoint(tmp_path, **save))
    assert list(parts.by_step()) == [6, 8, 9]
    assert parts.by_step().items() <= whole.by_step().items()


def test_steps_continue_with_initial_epoch() -> None:
    model, noted = make_model(mirrored(2)), _Noted()
    callback = fit.TrackerLogger(lambda: noted, 100)
    _fit(model, callback, epochs=1)
    _fit(model, callback, epochs=3, initial_epoch=1)
    assert [step for step, _ in noted.lines] == [3, 6, 9]
    assert noted.closed == [True, True]


class _Stream:
    """A dataset of four batches that does not know its length."""

    def __iter__(self) -> Any:
        for _ in range(4):
            yield DATA.x[:4], DATA.y[:4]


def test_steps_continue_with_initial_epoch_where_the_length_is_unknown() -> None:
    model, noted = make_model(mirrored(2)), _Noted()
    callback = fit.TrackerLogger(lambda: noted, 2)

    def train(first: int, epochs: int) -> list[int]:
        noted.lines.clear()
        given: dict[str, Any] = {"initial_epoch": first, "epochs": epochs, "verbose": 0}
        model.fit(_Stream(), callbacks=[callback], **given)
        return [step for step, _ in noted.lines]

    assert train(0, 2) == [2, 4, 6, 8]
    assert train(2, 4) == [10, 12, 14, 16]
    # Epochs that nobody has trained are not counted.
    assert train(6, 7) == [18, 20]
    # An epoch is trained again, and later ones after it.
    assert train(1, 2) == [6, 8]
    assert train(4, 5) == [10, 12]
    assert train(0, 1) == [2, 4]


def test_steps_that_were_counted_win_over_the_length_of_a_later_dataset() -> None:
    model, noted = make_model(mirrored(2)), _Noted()
    callback = fit.TrackerLogger(lambda: noted, 100)
    _fit(model, callback, epochs=2)
    # Before: 2, below the 6 steps that are logged.
    _fit(model, callback, epochs=3, initial_epoch=2, batch_size=20)
    _fit(model, callback, epochs=6, initial_epoch=5, batch_size=20)
    assert [step for step, _ in noted.lines] == [3, 6, 7, 10]


def test_a_training_with_no_epoch_left_makes_no_tracker(tmp_path: pathlib.Path) -> None:
    made: list[_Noted] = []

    def make() -> _Noted:
        made.append(_Noted())
        return made[-1]

    for _ in range(2):
        save = fit.ModelCheckpoint(tmp_path, resume=True)
        _fit(make_model(mirrored(1)), fit.TrackerLogger(make), save)
    assert len(made) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_tracker_is_closed_after_an_error(error: type[BaseException]) -> None:
    noted = _Noted()
    with pytest.raises(error):
        _fit(make_model(mirrored(2)), fit.TrackerLogger(lambda: noted), _Kill(4, error))
    assert [step for step, _ in noted.lines] == [0]
    assert noted.closed == [False]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_training_is_not_completed_if_a_later_callback_fails_at_its_end(
    error: type[BaseException],
) -> None:
    class FailOnce(fit.Callback):
        is_left = True

        def on_train_end(self, logs: Any) -> None:
            if self.is_left:
                self.is_left = False
                raise error

    noted, callback = _Noted(), FailOnce()
    callbacks = [fit.TrackerLogger(lambda: noted), callback]
    model = make_model(mirrored(1))
    with pytest.raises(error):
        _fit(model, *callbacks)
    assert noted.closed == [False]
    _fit(model, *callbacks)
    callback.is_left = True
    with pytest.raises(error):
        _fit(model, *callbacks)
    assert noted.closed == [False, True, False]


def test_a_tracker_is_closed_after_another_one_cannot_be() -> None:
    class Broken(_Noted):
        def close(self, completed: bool) -> None:
            super().close(completed)
            raise OSError("no network")

    first, second = Broken(), _Noted()
    callbacks = [fit.TrackerLogger(lambda: first), fit.TrackerLogger(lambda: second)]
    model = make_model(mirrored(2))
    for closed in ([True], [True, True]):
        with pytest.raises(OSError, match="no network"):
            _fit(model, *callbacks)
        assert first.closed == second.closed == closed


def test_what_is_no_tracker_is_refused_and_nothing_is_trained() -> None:
    model = make_model(mirrored(1))
    before = [w.tolist() for w in model.get_weights()]
    with pytest.raises(ArgumentTypeError, match=r"make=<.*_Noted"):
        fit.TrackerLogger(cast(Any, _Noted()))
    with pytest.raises(ArgumentTypeError, match=r"fit\.TrackerLogger .*make that returned 3"):
        _fit(model, fit.TrackerLogger(lambda: cast(Any, 3)))
    for wrong in ("batch", 0, 1.5):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="log_freq="):
            fit.TrackerLogger(_Noted, cast(Any, wrong))
    assert before == [w.tolist() for w in model.get_weights()]


def test_a_method_that_is_set_on_a_callback_is_called() -> None:
    seen: list[int] = []
    callback: Any = fit.Callback()
    callback.on_train_batch_end = lambda batch, logs: seen.append(batch)
    _fit(make_model(mirrored(1)), callback, epochs=1)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("frequency", ["epoch", 1])
def test_methods_of_a_subclass_are_called_with_any_frequency(frequency: str | int) -> None:
    seen: list[tuple[str, int]] = []

    class Own(fit.TrackerLogger):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            super().on_train_batch_begin(batch, logs)
            seen.append(("begin", batch))

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            super().on_train_batch_end(batch, logs)
            seen.append(("end", batch))

    noted = _Noted()
    _fit(make_model(mirrored(1)), Own(lambda: noted, frequency), epochs=1)
    assert seen == [(name, batch) for batch in range(3) for name in ("begin", "end")]
    # They add to the logs of steps, and replace none.
    assert [step for step, _ in noted.lines] == ([0] if frequency == "epoch" else [1, 2, 3])


@pytest.mark.slow
def test_one_process_of_a_job_makes_a_tracker() -> None:
    outcomes = run_job(in_processes.train_with_tracker, 2, devices=2)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
    whole = _Noted()
    _fit(make_model(mirrored(4)), fit.TrackerLogger(lambda: whole, 2), epochs=2)
    (first,), second = (outcome.result for outcome in outcomes)
    assert second == []
    assert [step for step, _ in first] == [step for step, _ in whole.lines]
    for (_, found), (_, wanted) in zip(first, whole.lines, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
