"""Stacks of threads, also of a process in which C code holds the GIL."""

import os
import pathlib
import signal
import subprocess
import sys
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


HOLDING = """
import ctypes, sys, threading, time
from jaxdist._processes.watching.stacks import *

dumps, made, ended = [], threading.Event(), threading.Event()

def rearm():
    held = HeldStack(0.3)
    made.set()
    while not ended.wait(0.05):
        dumps.append(held.rearm())
    path = held.path
    held.close()
    assert read_held_stacks(path) == ""

def hold():
    ctypes.PyDLL(None).usleep(1_000_000)

main = threading.get_ident()
newer = [threading.Thread(target=ended.wait) for _ in range(int(sys.argv[1]))]
thread = threading.Thread(target=rearm)
thread.start()
for one in newer:
    one.start()
made.wait()
end = time.monotonic() + 60
while not any(dumps) and time.monotonic() < end:
    hold()
    # The other thread reads it in the moment in which this one is free again.
    time.sleep(0.2)
ended.set()
thread.join()
stack = find_thread_in_dump("".join(dumps), main)
print(stack, end="")
print("line:", find_line_in_dump(stack))
assert find_thread_in_dump("", main) == ""
"""


def hold_the_gil(folder: pathlib.Path, newer_threads: int) -> str:
    """What a process of its own prints: other tests leave threads and handlers of signals."""
    script = folder / "holds.py"
    script.write_text(HOLDING)
    command = [sys.executable, str(script), str(newer_threads)]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=100).stdout


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="timers of Linux")
def test_the_stack_of_a_process_that_holds_its_gil_is_written(tmp_path: pathlib.Path) -> None:
    printed = hold_the_gil(tmp_path, 0)
    assert "in hold\n" in printed
    assert "line: holds.py:" in printed


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="timers of Linux")
def test_a_thread_that_is_not_among_the_newest_100_is_said_to_be_left_out(
    tmp_path: pathlib.Path,
) -> None:
    printed = hold_the_gil(tmp_path, 120)
    assert printed.startswith("  (unknown: faulthandler writes the 100 newest")
    assert "line: \n" in printed


def test_a_thread_that_a_dump_does_not_have_has_no_stack_and_no_line() -> None:
    assert find_thread_in_dump('Thread 0x2 (most recent call first):\n  File "a.py"\n', 1) == ""
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
