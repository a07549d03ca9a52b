"""`PreemptionCheckpointHandler` in one process, with what TensorFlow does as the oracle."""

import functools
import gc
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import training
from jaxdist._called import called
from jaxdist._preemption import handler as handler_module
from jaxdist._preemption import notices
from jaxdist._processes import Process
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ContextError,
    InvalidArgumentError,
    UnsupportedError,
)
from jaxdist.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig


class Model(nnx.Module):
    """One number."""

    def __init__(self) -> None:
        self.x = nnx.Param(jnp.zeros(()))

    def step(self, by: float = 1.0) -> float:
        """Add to the number."""
        self.x[...] = self.x[...] + by
        return float(self.x[...])


@pytest.fixture(autouse=True)
def _sigterm_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def handlers() -> Iterator[Callable[..., PreemptionCheckpointHandler]]:
    """Makes handlers, and closes them."""
    made: list[PreemptionCheckpointHandler] = []

    def make(*args: Any, **kwargs: Any) -> PreemptionCheckpointHandler:
        made.append(PreemptionCheckpointHandler(*args, **kwargs))
        return made[-1]

    yield make
    for handler in made:
        handler.close()


Make = Callable[..., PreemptionCheckpointHandler]


def _repeat(times: int, call: Callable[[], Any]) -> None:
    for _ in range(times):
        call()


def _run_until_exit(handler: PreemptionCheckpointHandler, step: Callable[[], Any]) -> int:
    """Run until the handler ends the program, and return the exit code."""
    with pytest.raises(SystemExit) as caught:
        _repeat(10000, lambda: handler.run(step))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_run_after_the_notice_still_runs_then_all_is_saved_as_in_tensorflow(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    """TensorFlow: two runs, SIGTERM, the third runs (4.0 after steps of 1, 1 and 2), exit 42."""
    model = Model()
    handler = handlers(None, model, tmp_path)
    assert (handler.total_run_calls, handler.restored) == (0, None)
    assert [handler.run(model.step) for _ in range(2)] == [1.0, 2.0]
    signal.raise_signal(signal.SIGTERM)
    assert handler.run(model.step, 2.0) == 4.0
    ran: list[int] = []
    with pytest.raises(SystemExit) as caught:
        handler.run(lambda: ran.append(1))
    assert (caught.value.code, ran) == (42, [])
    handler.close()
    other = Model()
    again = handlers(None, other, tmp_path)
    assert (float(other.x[...]), again.total_run_calls) == (4.0, 3)
    assert again.restored is not None
    assert again.restored.step == 3


def test_a_second_notice_changes_nothing(tmp_path: pathlib.Path, handlers: Make) -> None:
    model = Model()
    handler = handlers(None, model, tmp_path)
    handler.run(model.step)
    signal.raise_signal(signal.SIGTERM)
    handler.run(model.step)
    signal.raise_signal(signal.SIGTERM)
    assert _run_until_exit(handler, model.step) == 42
    assert handler.total_run_calls == 2


def test_a_run_that_raises_is_not_counted(tmp_path: pathlib.Path, handlers: Make) -> None:
    model = Model()
    handler = handlers(None, model, tmp_path)

    def fail() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        handler.run(fail)
    assert handler.total_run_calls == 0
    signal.raise_signal(signal.SIGTERM)
    handler.run(model.step)
    assert _run_until_exit(handler, model.step) == 42
    assert handler.total_run_calls == 1


def test_results_and_arguments_of_run_are_those_of_the_function(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    handler = handlers(None, Model(), tmp_path)
    assert handler.run(lambda a, *, b: (a, b), 1, b=2) == (1, 2)


def test_with_a_grace_period_training_goes_on_and_a_second_save_is_before_the_end(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    saves: list[tuple[int, float]] = []
    model = Model()
    config = TerminationConfig(
        grace_period=4.0,
        save_fn=lambda: saves.append((handler.total_run_calls, time.monotonic())),
    )
    handler = handlers(None, model, tmp_path, config)

    def step() -> None:
        model.step()
        time.sleep(0.02)

    handler.run(step)
    signal.raise_signal(signal.SIGTERM)
    noticed = time.monotonic()
    assert _run_until_exit(handler, step) == 42
    (first, first_at), (last, last_at) = saves
    assert first == 2
    assert last > 10
    assert first_at < last_at
    assert 1.0 < last_at - noticed < 4.0
    assert handler.total_run_calls == last


def test_the_exit_function_is_called_and_training_goes_on_if_it_returns(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    calls: list[int] = []
    model = Model()
    config = TerminationConfig(exit_fn=lambda: calls.append(1))
    handler = handlers(None, model, tmp_path, config)
    signal.raise_signal(signal.SIGTERM)
    assert [handler.run(model.step) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert calls == [1]
    # Whoever sends SIGTERM now means it.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert handler.total_run_calls == 4
    assert training.Checkpoints(tmp_path).steps() == (1,)


def test_the_save_function_gets_the_arguments_of_the_call(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    saves: list[tuple[Any, ...]] = []
    config = TerminationConfig(save_fn=lambda *args, **kwargs: saves.append((args, kwargs)))
    handler = handlers(None, Model(), tmp_path, config)
    handler.save_checkpoint_if_preempted(1, b=2)
    signal.raise_signal(signal.SIGTERM)
    handler.save_checkpoint_if_preempted(3, b=4)
    with pytest.raises(SystemExit):
        handler.save_checkpoint_if_preempted(5, b=6)
    assert saves == [((5,), {"b": 6})]
    assert handler.total_run_calls == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_save_function_notes_are_saved_and_other_arguments_refused(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    handler = handlers(None, Model(), tmp_path)
    with pytest.raises(ArgumentTypeError, match="Pass notes="):
        handler.save_checkpoint_if_preempted(7)
    signal.raise_signal(signal.SIGTERM)
    handler.save_checkpoint_if_preempted(notes={"epoch": 0})
    with pytest.raises(SystemExit):
        handler.save_checkpoint_if_preempted(notes={"epoch": 1})
    handler.close()
    restored = handlers(None, Model(), tmp_path).restored
    assert restored is not None
    assert restored.notes["epoch"] == 1


def test_a_function_gives_state_of_plain_arrays_and_its_own_step(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    state = {"w": jnp.zeros(2)}
    done = 0

    def step() -> None:
        nonlocal state, done
        state, done = {"w": state["w"] + 1}, done + 10

    checkpoints = training.Checkpoints(tmp_path, keep=5)
    handler = handlers(None, (checkpoints, lambda: (done, state)))
    handler.run(step)
    signal.raise_signal(signal.SIGTERM)
    assert _run_until_exit(handler, step) == 42
    assert checkpoints.steps() == (20,)
    handler.close()
    checkpoints.close()
    get_state = functools.partial(lambda x: (0, x), {"w": jnp.zeros(2)})
    again = handlers(None, get_state, tmp_path)
    assert again.restored is not None
    assert again.restored.state["w"].tolist() == [2.0, 2.0]
    assert (again.restored.step, again.total_run_calls) == (20, 2)


def test_checkpoints_of_the_user_are_restored_and_the_same_step_is_not_written_twice(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    model = Model()
    with training.Checkpoints(tmp_path) as checkpoints:
        handler = handlers(None, (checkpoints, model))
        signal.raise_signal(signal.SIGTERM)
        handler.run(model.step)
        checkpoints.save(1, model, {"mine": True})
        assert _run_until_exit(handler, model.step) == 42
        handler.close()
        again = handlers(None, (checkpoints, Model()))
        assert again.restored is not None
        assert again.restored.notes == {"mine": True}
        assert again.total_run_calls == 1


def test_variables_of_a_strategy_are_saved_and_restored(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = jaxdist.Variable(1.0)
    handler = handlers(strategy.cluster_resolver, {"v": variable}, tmp_path)
    signal.raise_signal(signal.SIGTERM)
    assert _run_until_exit(handler, lambda: variable.assign_add(1.0)) == 42
    handler.close()
    variable.assign(0.0)
    assert handlers(None, {"v": variable}, tmp_path).total_run_calls == 1
    assert float(variable) == 2.0


def test_a_function_of_the_user_gives_the_notice_and_sigterm_keeps_its_meaning(
    tmp_path: pathlib.Path, handlers: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices.Questions.__init__, "__defaults__", (0.01,))
    answers = iter([False, False, True])
    model = Model()
    config = TerminationConfig(lambda: next(answers))
    handler = handlers(None, model, tmp_path, config)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def step() -> None:
        model.step()
        time.sleep(0.01)

    assert _run_until_exit(handler, step) == 42
    assert float(model.x[...]) == handler.total_run_calls > 1


def test_an_error_of_the_users_function_is_raised_by_the_next_run(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    def watch() -> bool:
        raise KeyError("planted")

    handler = handlers(None, Model(), tmp_path, TerminationConfig(watch))
    with pytest.raises(KeyError, match="planted"):
        _repeat(10000, lambda: handler.run(time.sleep, 0.001))


def test_the_thread_that_asks_ends_with_the_handler(tmp_path: pathlib.Path) -> None:
    def names() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("jaxdist-term")]

    config = TerminationConfig(lambda: False)
    handler = PreemptionCheckpointHandler(None, Model(), tmp_path, config)
    assert len(names()) == 1
    del handler
    gc.collect()
    assert names() == []


def test_a_notice_in_the_last_step_is_handled_at_the_end_of_the_scope(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    model = Model()
    handler = handlers(None, model, tmp_path)

    def train() -> None:
        with handler.watch_preemption_scope():
            handler.run(model.step)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 42
    handler.close()
    assert handlers(None, Model(), tmp_path).total_run_calls == 1


def test_a_scope_without_a_notice_or_with_an_error_saves_nothing(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    handler = handlers(None, Model(), tmp_path, TerminationConfig(exit_fn=lambda: None))
    with handler.watch_preemption_scope():
        pass
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyError, match="planted"), handler.watch_preemption_scope():
        raise KeyError("planted")
    assert list(tmp_path.iterdir()) == []
    with handler.watch_preemption_scope():
        handler.run(lambda: 1)
        handler.run(lambda: 2)
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["1"]


def test_a_handler_cannot_be_made_in_another_thread(tmp_path: pathlib.Path) -> None:
    errors: list[BaseException] = []

    def make() -> None:
        try:
            PreemptionCheckpointHandler(None, Model(), tmp_path)
        except ContextError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_handler_of_a_function_is_made_in_any_thread(tmp_path: pathlib.Path) -> None:
    results: list[int] = []

    def make() -> None:
        config = TerminationConfig(lambda: False)
        handler = PreemptionCheckpointHandler(None, Model(), tmp_path, config)
        results.append(handler.run(lambda: 3))
        handler.close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert results == [3]


@pytest.mark.parametrize(
    ("given", "directory", "kind", "words"),
    [
        ("model", None, InvalidArgumentError, "needs a directory"),
        ("checkpoints", None, ArgumentTypeError, "(checkpoints, state)"),
        ("pair", "there", ArgumentError, "Leave checkpoint_dir out"),
        ("array", "there", ArgumentError, "state['w']"),
        ("arrays", "there", ArgumentError, "and 1 more"),
        ("empty", "there", ArgumentError, "has no arrays"),
        ("function", "there", ArgumentTypeError, "a function that returned 7"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(
    given: str, directory: str | None, kind: type[Exception], words: str, tmp_path: pathlib.Path
) -> None:
    checkpoints = training.Checkpoints(tmp_path / "other")
    checkpoints.close()
    states: dict[str, Any] = {
        "model": Model(),
        "checkpoints": checkpoints,
        "pair": (checkpoints, Model()),
        "array": {"w": jnp.zeros(2)},
        "arrays": {str(i): jnp.zeros(2) for i in range(4)},
        "empty": {},
        "function": lambda: 7,
    }
    where = None if directory is None else tmp_path / directory
    with pytest.raises(kind) as caught:
        PreemptionCheckpointHandler(None, states[given], where)
    assert words in str(caught.value)


def _resolver(tasks: dict[str, list[str]], kind: str = "worker") -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(tasks), task_type=kind, task_id=0)


def test_clusters_that_were_not_joined_and_parameter_servers_are_refused(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    workers = ["a:1", "b:1"]
    with pytest.raises(UnsupportedError, match="parameter servers"):
        PreemptionCheckpointHandler(_resolver({"worker": workers, "ps": ["c:1"]}), Model())
    with pytest.raises(ContextError, match="Make the strategy first"):
        PreemptionCheckpointHandler(_resolver({"worker": workers}), Model(), tmp_path)
    evaluator = _resolver({"worker": workers, "evaluator": ["c:1"]}, "evaluator")
    assert handlers(evaluator, Model(), tmp_path).run(lambda: 3) == 3
    alone = _resolver({"worker": ["a:1"]})
    assert handlers(alone, Model(), tmp_path).run(lambda: 3) == 3


@called("")
def test_a_cluster_of_other_processes_than_those_that_were_joined_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_module, "get_process_of_job", lambda: Process(0, 3))
    with pytest.raises(ArgumentError, match=r"cluster of 2 tasks, and this process has joined 3"):
        PreemptionCheckpointHandler(_resolver({"worker": ["a:1", "b:1"]}), Model(), tmp_path)
    for resolver in (None, _resolver({"chief": ["a:1"], "worker": ["b:1", "c:1"]})):
        assert handler_module.find_members(resolver) == Process(0, 3)


@pytest.mark.parametrize("period", [-1, float("inf"), float("nan")])
def test_a_period_without_meaning_is_refused(period: float) -> None:
    with pytest.raises(ArgumentError, match=r"from 0 up|finite number"):
        TerminationConfig(grace_period=period)


def test_the_watcher_knows_of_sigterm_and_gives_it_back() -> None:
    watcher = PreemptionWatcher()
    assert watcher.preemption_message is None
    watcher.block_until_worker_exit()
    signal.raise_signal(signal.SIGTERM)
    assert watcher.preemption_message == "process 0 received SIGTERM"
    watcher.block_until_worker_exit()
    watcher.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_dropped_in_another_thread_gives_sigterm_back_to_the_one_before(
    tmp_path: pathlib.Path,
) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        handlers = [PreemptionCheckpointHandler(None, Model(), tmp_path)]
        thread = threading.Thread(target=handlers.clear)
        thread.start()
        thread.join()
        gc.collect()
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_handlers_that_are_closed_in_any_order_give_sigterm_back(tmp_path: pathlib.Path) -> None:
    first, second = (PreemptionCheckpointHandler(None, Model(), tmp_path) for _ in range(2))
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_notice_nothing_is_computed_or_written(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    handler = handlers(None, Model(), tmp_path)
    began = time.perf_counter()
    for _ in range(1000):
        handler.run(lambda: None)
    # 20 times what was measured.
    assert (time.perf_counter() - began) / 1000 < 1e-3
    assert list(tmp_path.iterdir()) == []


def test_a_function_whose_steps_begin_again_is_refused_before_the_first_run(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, {"w": jnp.ones(2)})
    step, state = 2, {"w": jnp.zeros(2)}
    handler = handlers(None, lambda: (step, state), tmp_path)
    assert handler.restored is not None
    ran: list[int] = []
    with pytest.raises(CheckpointError, match=r"returned step 2 (.|\n)*of step 6(.|\n)*after\(2\)"):
        handler.run(lambda: ran.append(1))
    assert ran == []
    step, state = handler.restored.step, handler.restored.state
    handler.run(lambda: ran.append(1))
    assert ran == [1]


def test_own_saves_with_other_numbers_do_not_hide_the_checkpoint_of_the_handler(
    tmp_path: pathlib.Path, handlers: Make
) -> None:
    model = Model()
    with training.Checkpoints(tmp_path) as checkpoints:
        handler = handlers(None, (checkpoints, model))
        handler.run(model.step)
        # The user counts examples.
        checkpoints.save(100, model)
        handler.run(model.step)
        signal.raise_signal(signal.SIGTERM)
        assert _run_until_exit(handler, model.step) == 42
        assert checkpoints.steps() == (100, 101)
    other = Model()
    again = handlers(None, other, tmp_path)
    assert (float(other.x[...]), again.total_run_calls) == (3.0, 3)
