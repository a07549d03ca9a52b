"""Hooks and listeners: when they are called, and what is left when one fails."""

import pathlib
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import ArgumentError, ArgumentTypeError, UnknownError
from tests.estimator.models import Record, batches, model_fn, read_weights

_STEP = ["before_run", "after_run"]


class _Listen(est.CheckpointSaverListener):
    """Records its calls, and fails in one of them."""

    def __init__(self, fails: str = "", stop_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self._fails, self._stop_at = fails, stop_at

    def _note(self, name: str, *found: int) -> None:
        self.calls.append((name, *found))
        if name == self._fails:
            raise ValueError("the listener failed")

    def begin(self) -> None:
        self._note("begin")

    def before_save(self, session: Any, global_step_value: int) -> None:
        self._note("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> bool | None:
        self._note("after_save", global_step_value)
        return global_step_value == self._stop_at

    def end(self, session: Any, global_step_value: int) -> None:
        self._note("end", global_step_value)


def _make(folder: pathlib.Path, every: int = 2) -> est.Estimator:
    config = est.RunConfig(folder, save_checkpoints_steps=every, keep_checkpoint_max=None)
    return est.Estimator(model_fn, config=config)


def test_hooks_are_called_in_order(tmp_path: pathlib.Path) -> None:
    one = Record()
    _make(tmp_path).train(batches(5), steps=3, hooks=[one])
    assert one.calls == ["begin", "after_create_session", *_STEP * 3, "end"]
    assert len(one.losses) == 3


@pytest.mark.parametrize(
    ("method", "at", "left"),
    [
        ("begin", 1, None),
        ("after_create_session", 1, None),
        ("before_run", 4, 2),
        ("after_run", 4, 4),
        ("end", 1, 8),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_that_fails_is_named_and_the_newest_checkpoint_is_complete(
    method: str, at: int, left: int | None, replicas: int, tmp_path: pathlib.Path
) -> None:
    whole = _make(tmp_path / "whole").train(batches(5))
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    config = est.RunConfig(
        tmp_path / "a",
        train_distribute=strategy,
        save_checkpoints_steps=2,
        keep_checkpoint_max=None,
    )
    estimator = est.Estimator(model_fn, config=config)
    # Both replicas get the same batch, so the steps are those of one replica.
    read = lambda skip: lambda: [b for b in batches(5)()[skip:] for _ in range(replicas)]  # noqa: E731
    record, other = Record(method, at), Record()
    with pytest.raises(ValueError, match="the hook failed") as caught:
        estimator.train(read(0), hooks=[other, record])
    [note] = caught.value.__notes__
    assert f"raised by Record.{method}" in note
    assert "end" not in record.calls[:-1]
    assert other.calls.count("end") == (1 if method == "end" else 0)
    latest = estimator.latest_checkpoint()
    assert latest == (None if left is None else str(tmp_path / "a" / "checkpoints" / str(left)))
    # The next call goes on from there, and ends where it would have ended.
    if left != 8:
        estimator.train(read(left or 0))
    np.testing.assert_allclose(read_weights(estimator), read_weights(whole), rtol=1e-6)


@pytest.mark.parametrize("method", ["begin", "before_save", "after_save", "end"])
def test_a_listener_that_fails_is_named(method: str, tmp_path: pathlib.Path) -> None:
    listener = _Listen(method)
    with pytest.raises(ValueError, match="the listener failed") as caught:
        _make(tmp_path).train(batches(5), saving_listeners=[listener])
    assert f"raised by _Listen.{method}" in caught.value.__notes__[0]
    # The folder is free.
    _make(tmp_path).train(batches(5), steps=1)


def test_listeners_are_called_around_each_checkpoint(tmp_path: pathlib.Path) -> None:
    listener = _Listen()
    estimator = _make(tmp_path, 3)
    estimator.train(batches(5), saving_listeners=[listener])
    saves = [(name, step) for step in (0, 3, 6, 8) for name in ("before_save", "after_save")]
    assert listener.calls == [("begin",), *saves, ("end", 8)]
    # What is in a checkpoint is not saved again.
    again = _Listen()
    estimator.train(batches(5), steps=1, saving_listeners=[again])
    assert again.calls == [("begin",), ("before_save", 9), ("after_save", 9), ("end", 9)]


def test_a_listener_and_a_hook_can_end_a_training(tmp_path: pathlib.Path) -> None:
    class Stop(est.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            assert not coord.should_stop()
            assert session.modules["model"].weights.shape == (3,)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_values.results["global_step"] == 3:
                run_context.request_stop()
                assert run_context.stop_requested
                assert run_context.session.global_step == 3

    estimator = _make(tmp_path).train(batches(5), hooks=[Stop()])
    assert str(estimator.latest_checkpoint()).endswith("/3")
    estimator.train(batches(5), saving_listeners=[_Listen(stop_at=5)])
    assert str(estimator.latest_checkpoint()).endswith("/5")


def test_hooks_of_other_kinds_are_named_errors(tmp_path: pathlib.Path) -> None:
    class Fetch(est.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return "loss"

    class Ends(est.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            raise StopIteration

    estimator = _make(tmp_path)
    with pytest.raises(ArgumentTypeError, match=r"Fetch\.before_run returned 'loss'"):
        estimator.train(batches(5), hooks=[Fetch()])
    with pytest.raises(UnknownError, match=r"Ends\.after_run"):
        estimator.train(batches(5), hooks=[Ends()])
    with pytest.raises(ArgumentTypeError, match="hooks=3"):
        estimator.train(batches(5), hooks=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="saving_listeners=<"):
        estimator.train(batches(5), saving_listeners=[Record()])  # type: ignore[list-item]


_RESULTS = {5: 3.0, 10: 2.0, 15: 2.5, 20: 2.5, 25: 2.5}


def _write_results(estimator: est.Estimator) -> None:
    folder = pathlib.Path(estimator.eval_dir())
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'{{"step": {s}, "time": 1.0, "loss": {v}}}\n' for s, v in _RESULTS.items()]
    # The last line was cut when the process was killed.
    (folder / "summaries.jsonl").write_text("".join(lines) + '{"step": 30, "lo')


@pytest.mark.parametrize(
    ("make", "arguments", "stops"),
    [
        ("stop_if_higher_hook", {"threshold": 2.9}, True),
        ("stop_if_higher_hook", {"threshold": 3.0}, False),
        ("stop_if_higher_hook", {"threshold": 2.9, "min_steps": 6}, False),
        ("stop_if_lower_hook", {"threshold": 2.1}, True),
        ("stop_if_lower_hook", {"threshold": 2.0}, False),
        ("stop_if_no_decrease_hook", {"max_steps_without_decrease": 15}, True),
        ("stop_if_no_decrease_hook", {"max_steps_without_decrease": 16}, False),
        ("stop_if_no_increase_hook", {"max_steps_without_increase": 20}, True),
        ("stop_if_no_increase_hook", {"max_steps_without_increase": 11, "min_steps": 10}, False),
    ],
)
def test_evaluations_end_a_training_early(
    make: str, arguments: dict[str, Any], stops: bool, tmp_path: pathlib.Path
) -> None:
    estimator = _make(tmp_path)
    _write_results(estimator)
    assert est.experimental.read_eval_metrics(estimator.eval_dir()) == {
        step: {"loss": value} for step, value in _RESULTS.items()
    }
    hook = getattr(est.experimental, make)(
        estimator, "loss", **arguments, run_every_secs=None, run_every_steps=2
    )
    estimator.train(batches(5), hooks=[hook])
    assert str(estimator.latest_checkpoint()).endswith("/1" if stops else "/8")


def test_an_early_stopping_hook_asks_at_its_times(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path)
    asked: list[int] = []

    def ask() -> bool:
        asked.append(1)
        return False

    make = est.experimental.make_early_stopping_hook
    estimator.train(batches(5), hooks=[make(estimator, ask, None, 3)])
    assert len(asked) == 3
    estimator.train(batches(5), hooks=[make(estimator, ask, 3600)])
    assert len(asked) == 4
    for seconds, steps in ((None, None), (1, 1)):
        with pytest.raises(ArgumentError, match="run_every_secs="):
            make(estimator, ask, seconds, steps)
    _write_results(estimator)
    hook = est.experimental.stop_if_lower_hook(estimator, "accuracy", 1.0, run_every_secs=0)
    with pytest.raises(ArgumentError, match="metric_name='accuracy', and an evaluation has loss"):
        estimator.train(batches(5), hooks=[hook])
