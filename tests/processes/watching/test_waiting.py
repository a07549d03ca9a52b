"""Waits, their errors, and what is said of an exception that ends a process."""

import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist import _processes, errors
from jaxdist._compat import is_ready
from jaxdist._processes import HERE, LocalStore, Process, Settings, Waiter, wait_until_ready
from jaxdist._processes.watching import waiting as limit_module
from jaxdist._processes.watching.current import get_doctor
from jaxdist._processes.watching.explain import explain_error, is_collective_error, is_time_limit
from jaxdist._processes.watching.observer import ProcessState, get_machine

CLOSED = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1"


class Pending:
    """An array that is never ready."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False


@pytest.fixture
def store() -> Iterator[LocalStore]:
    """The store of a job of two, in which this process is process 0."""
    store = LocalStore()
    _processes.start_watching(Process(0, 2), store, Settings())
    # A second call changes nothing.
    _processes.start_watching(Process(0, 2), LocalStore(), Settings())
    yield store
    _processes.stop_watching()
    HERE.blames = None


def _write(store: LocalStore, state: ProcessState) -> None:
    store.set(f"jaxdist/here/{state.index}", state.to_text(), overwrite=True)


def test_computed_and_deleted_arrays_are_not_waited_for() -> None:
    deleted = jnp.ones(2)
    deleted.delete()
    for seconds in (None, 10.0):
        wait_until_ready([jnp.ones(3) + 1, deleted], seconds, call="reduce", place="reduce")
    assert HERE.read().in_wait is False


def test_an_array_of_random_keys_is_waited_for() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    wait_until_ready([keys], 10.0, call="strategy.run", place="strategy.run")
    assert is_ready(keys)


def test_without_a_job_the_limit_counts_too() -> None:
    with pytest.raises(errors.DeadlineExceededError) as caught:
        wait_until_ready([Pending()], 0.1, call="reduce", place="reduce")
    assert caught.value.processes == ()
    assert str(caught.value).startswith("reduce has waited for 0.1 s: This process has joined no")


def test_a_limit_names_the_process_that_is_outside(store: LocalStore) -> None:
    store.set("jaxdist/left/1", "ValueError: no rows")
    with pytest.raises(errors.DeadlineExceededError) as caught:
        wait_until_ready([Pending()], 0.1, call="reduce", place="reduce (call 1)")
    assert caught.value.processes == (1,)
    assert HERE.blames == (1,)
    assert ProcessState.from_text(store.get("jaxdist/here/0") or "").blames == (1,)


def test_the_limit_also_counts_while_the_caller_is_inside_of_a_call(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = threading.Event()
    monkeypatch.setattr(limit_module, "cut_collectives", cut.set)
    store.set("jaxdist/left/1", "its program has ended")

    def fail_when_cut() -> None:
        # As a collective that XLA runs in the thread that dispatches it.
        with Waiter("reduce", "reduce (call 1)", seconds=0.2):
            assert cut.wait(30)
            raise ValueError(CLOSED)

    with pytest.raises(errors.DeadlineExceededError, match=r"process 1"):
        fail_when_cut()


def test_ctrl_c_stays_ctrl_c(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = threading.Event()
    monkeypatch.setattr(limit_module, "cut_collectives", cut.set)
    store.set("jaxdist/left/1", "its program has ended")

    def interrupt_when_cut() -> None:
        with Waiter("reduce", "reduce (call 1)", seconds=0.1):
            assert cut.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_when_cut()


def test_a_limit_that_is_over_expires_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_module, "cut_collectives", lambda: pytest.fail("was cut"))
    limit = limit_module.Limit(0.0)
    assert not limit.finish()
    limit.expire()


def test_a_store_that_does_not_answer_is_said(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise errors.UnavailableError("The service has gone.")

    doctor = get_doctor()
    assert doctor is not None
    monkeypatch.setattr(doctor.observer, "look", refuse)
    with pytest.raises(errors.DeadlineExceededError, match="did not answer: The service has gone"):
        wait_until_ready([Pending()], 0.1, call="reduce", place="reduce")
    with pytest.raises(errors.UnavailableError, match="did not answer: The service has gone"):
        with Waiter("reduce", "reduce"):
            raise jax.errors.JaxRuntimeError(CLOSED)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_lost_connection_names_the_process_that_has_ended(
    store: LocalStore, kind: type[Exception]
) -> None:
    store.set("jaxdist/left/1", "ValueError: no rows, at train.py:3 (main)")
    with pytest.raises(errors.UnavailableError) as caught, Waiter("reduce", "reduce (call 1)"):
        raise kind(CLOSED)
    assert caught.value.processes == (1,)
    first = str(caught.value).splitlines()[0]
    assert first == "reduce: process 1 has ended (ValueError: no rows, at train.py:3 (main))."
    assert CLOSED in str(caught.value)


def test_the_launcher_is_awaited_since_it_knows_the_signal(
    store: LocalStore, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_LAUNCHER", str(tmp_path))
    gone = ProcessState(1, machine=get_machine(), pid=2**22 + 1, started="1")
    _write(store, gone)
    error = jax.errors.JaxRuntimeError(CLOSED)
    without = explain_error("reduce", error, get_doctor())
    if get_machine():
        assert "process 1 has ended (its process is gone)" in str(without)
    note = threading.Timer(0.3, (tmp_path / "1.ended").write_text, ["signal SIGKILL"])
    note.start()
    explained = explain_error("reduce", error, get_doctor())
    note.join()
    assert explained.processes == (1,)
    assert str(explained).splitlines()[0] == "reduce: process 1 has ended (signal SIGKILL)."


def test_a_lost_connection_names_the_process_that_another_gave_up(store: LocalStore) -> None:
    _write(store, ProcessState(1, blames=(1,)))
    error = explain_error("reduce", jax.errors.JaxRuntimeError(CLOSED), get_doctor())
    assert (type(error), error.processes) == (errors.DeadlineExceededError, (1,))


def test_the_limit_of_xla_is_a_deadline(store: LocalStore) -> None:
    store.set("jaxdist/left/1", "its program has ended")
    error = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce: Timed out waiting 4000ms")
    assert is_time_limit(error)
    assert explain_error("reduce", error, get_doctor()).processes == (1,)
    without = explain_error("reduce", error, None)
    assert isinstance(without, errors.DeadlineExceededError)
    assert without.processes == ()


def test_other_errors_are_left_as_they_are(store: LocalStore) -> None:
    with pytest.raises(ValueError, match=r"^gloo$"), Waiter("reduce", "reduce"):
        raise ValueError("gloo")
    with pytest.raises(jax.errors.JaxRuntimeError), Waiter("reduce", "reduce"):
        raise jax.errors.JaxRuntimeError("INTERNAL: out of memory")
    assert HERE.blames is None
    with pytest.raises(errors.UnavailableError), Waiter("reduce", "reduce"):
        raise errors.UnavailableError("process 1 has ended", [1])
    assert HERE.blames == (1,)
    assert is_collective_error(jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed"))


def test_an_uncaught_exception_is_told_before_python_prints_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("no rows\nmore")

    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    said = store.get("jaxdist/left/0")
    assert said is not None
    assert said.startswith("ValueError: no rows, at test_waiting.py:")
    assert said.endswith("(fail)")
    assert "ValueError: no rows" in capsys.readouterr().err


def test_who_ends_because_of_others_says_so(store: LocalStore) -> None:
    for error, blames in (
        (errors.UnavailableError("process 1 has ended", [1]), (1,)),
        (jax.errors.JaxRuntimeError(CLOSED), ()),
    ):
        sys.excepthook(type(error), error, None)
        assert ProcessState.from_text(store.get("jaxdist/here/0") or "").blames == blames


def test_an_interpreter_that_goes_on_does_not_say_that_it_has_ended(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    error = ValueError("no rows")
    sys.excepthook(ValueError, error, None)
    assert store.get("jaxdist/left/0") is None
    assert "ValueError" in ProcessState.from_text(store.get("jaxdist/here/0") or "").raised


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_a_thread_is_told(store: LocalStore) -> None:
    def fail() -> None:
        raise KeyError("rows")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert "KeyError: 'rows'" in ProcessState.from_text(store.get("jaxdist/here/0") or "").raised


def test_hooks_of_python_are_set_back() -> None:
    before = sys.excepthook, threading.excepthook
    _processes.start_watching(Process(0, 2), LocalStore(), Settings())
    assert sys.excepthook != before[0]
    _processes.stop_watching()
    _processes.stop_watching()
    assert (sys.excepthook, threading.excepthook) == before


def test_hooks_that_others_set_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    _processes.start_watching(Process(0, 2), LocalStore(), Settings())

    def own(*_: Any) -> None:
        pass

    sys.excepthook = own
    _processes.stop_watching()
    assert sys.excepthook is own


def test_waiting_with_a_limit_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    x = jnp.ones(3)
    times: dict[float | None, float] = {}
    for seconds in (None, 60.0):
        began = time.perf_counter()
        for _ in range(200):
            wait_until_ready([x], seconds, call="reduce", place="reduce")
        times[seconds] = (time.perf_counter() - began) / 200
    with capsys.disabled():
        print("\nwait_until_ready:", {k: f"{v * 1e6:.1f} us" for k, v in times.items()})
    assert max(times.values()) < 0.01
