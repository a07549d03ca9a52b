"""Stacks of threads, also of a process in which C code holds the GIL."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._processes.watching.stacks import (
    ArrayWait,
    HeldStack,
    find_line_in_dump,
    find_thread_in_dump,
    find_users_line,
    format_stack,
    is_in_array_wait,
    read_held_stacks,
)
from jaxdist._processes.watching.whereabouts import Doing


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The identifier of a thread that sleeps in `wait_here`."""
    end = threading.Event()

    def wait_here() -> None:
        end.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    assert thread.ident is not None
    while "wait_here" not in format_stack(thread.ident):
        time.sleep(0.001)
    yield thread.ident
    end.set()
    thread.join()


def test_the_line_is_the_innermost_that_a_user_wrote(sleeper: int) -> None:
    line = find_users_line(sleeper)
    assert line.startswith("test_stacks.py:")
    assert line.endswith("(wait_here)")


def test_a_stack_ends_with_the_innermost_call_and_has_no_frames_of_jax() -> None:
    found: list[str] = []

    def note(x: np.ndarray) -> np.ndarray:
        found.append(format_stack(threading.get_ident()))
        return x

    jax.jit(lambda x: jax.pure_callback(note, x, x))(jnp.ones(2)).block_until_ready()
    assert "note" in found[0]
    assert f"{os.sep}jax{os.sep}_src" not in found[0]


def test_a_thread_that_has_ended_has_no_stack() -> None:
    assert format_stack(1) == ""
    assert find_users_line(1) == "an unknown line"
    assert not is_in_array_wait(1)
    assert ArrayWait().measure(Doing(1, "", None, 0.0, False)) is None


@jax.jit
def _compute_long(x: jax.Array) -> jax.Array:
    """Compute for about a second, in a thread of XLA."""
    return jax.lax.fori_loop(0, 300, lambda _, y: (y @ x) / 512, x).sum()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x),
        lambda x: np.asarray(x),
        lambda x: jax.block_until_ready(x),
        lambda x: x.block_until_ready(),
    ],
    ids=["float", "asarray", "block_until_ready", "method"],
)
def test_a_thread_that_waits_for_an_array_is_found(wait: Callable[[jax.Array], object]) -> None:
    square = jnp.ones((512, 512))
    _compute_long.lower(square).compile()
    thread = threading.Thread(target=lambda: wait(_compute_long(square)))
    thread.start()
    assert thread.ident is not None
    doing = Doing(thread.ident, "", None, 0.0, False)
    waiting = ArrayWait()
    found = []
    while thread.is_alive():
        found.append(waiting.measure(doing))
        time.sleep(0.01)
    waited = [seconds for seconds in found if seconds is not None]
    # It grows while the thread waits in one call.
    assert len(waited) > 1
    assert max(waited) > waited[0]


def test_a_thread_that_calls_float_again_and_again_does_not_wait() -> None:
    ended = threading.Event()

    def convert() -> None:
        x = jnp.ones(())
        while not ended.is_set():
            float(x + 1)

    thread = threading.Thread(target=convert)
    thread.start()
    assert thread.ident is not None
    waiting = ArrayWait()
    measured = [waiting.measure(Doing(thread.ident, "", None, 0.0, False)) for _ in range(50)]
    ended.set()
    thread.join()
    assert not any(seconds is not None and seconds > 0.1 for seconds in measured)


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="timers of Linux")
def test_the_stack_of_a_process_that_holds_its_gil_is_written() -> None:
    held: list[HeldStack] = []
    dumps: list[str] = []
    made, ended = threading.Event(), threading.Event()

    def rearm() -> None:
        held.append(HeldStack(0.3))
        made.set()
        while not ended.wait(0.05):
            dumps.append(held[0].rearm())
        held[0].close()

    def find_main() -> str:
        return find_thread_in_dump("".join(dumps), threading.main_thread().ident or 0)

    thread = threading.Thread(target=rearm)
    thread.start()
    made.wait()
    path = held[0].path
    assert path is not None
    end = time.monotonic() + 60
    while "holds_its_gil" not in find_main() and time.monotonic() < end:
        # A signal that another test has left a handler for ends this early: then again.
        ctypes.PyDLL(None).usleep(1_000_000)
        # As another process reads it, in the moment in which this one is free again.
        time.sleep(0.2)
    ended.set()
    thread.join()
    dump = "".join(dumps)
    stack = find_thread_in_dump(dump, threading.get_ident())
    assert "test_the_stack_of_a_process_that_holds_its_gil_is_written" in stack
    assert find_line_in_dump(stack).startswith("test_stacks.py:")
    assert read_held_stacks(path) == ""
    assert find_thread_in_dump(dump, 1) == ""
    assert find_line_in_dump("") == ""


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="timers of Linux")
def test_the_signal_is_given_back() -> None:
    def list_caught() -> str:
        with open("/proc/self/status") as file:
            return next(line for line in file if line.startswith("SigCgt"))

    before = list_caught()
    held = HeldStack(10.0)
    assert held.rearm() == ""
    assert list_caught() != before
    held.close()
    assert list_caught() == before
    assert held.path is None
    assert held.rearm() == ""


def test_without_a_free_signal_there_is_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    held = HeldStack()
    assert (held.path, held.rearm()) == (None, "")
    held.close()
