"""`HeldStack`: the stack of a process in which no Python thread can run."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading

_SIGEV_THREAD_ID = 4
_MOST_BYTES = 100_000
# Two threads that choose a free signal at the same time would take the same one.
_CHOOSING = threading.Lock()


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("pad", ctypes.c_int * 11),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class HeldStack:
    """Writes the stacks of all threads when the calling thread cannot run for some seconds.

    A thread cannot run while C code holds the GIL. A timer of the operating system then sends a
    signal, which faulthandler handles without the GIL. The timer of
    `faulthandler.dump_traceback_later` stays free for the user (and pytest), and only the thread
    that makes this object gets the signal, so no system call of another thread is interrupted.

    The file is in memory. Another process of the same user and host can read it by `path`, even
    while C code holds the GIL of this process.

    Args:
        seconds: How long after `rearm` the stacks are written.

    Attributes:
        path: Where other processes read the stacks; None if the system has no such timers.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds = seconds
        self._file: int | None = None
        self._timer: ctypes.c_void_p | None = None
        self._signal = 0
        self.path: str | None = None
        # Without a timer, the others still see that this process sends no news.
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._open()

    def _open(self) -> None:
        if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return
        self._libc = _load_libc()
        with _CHOOSING:
            free = _find_free_signal()
            if free is None:
                return
            self._file = os.memfd_create("jaxdist-stacks")
            faulthandler.register(free, file=self._file, all_threads=True)
            self._signal = free
        event = _SigEvent(signo=free, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        timer = ctypes.c_void_p()
        clock = 1  # CLOCK_MONOTONIC
        if self._libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) != 0:
            self.close()
            return
        self._timer = timer
        self._set_time(self._seconds)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def rearm(self) -> str:
        """Restart the timer, and return what was written since the last call."""
        if self._timer is None or self._file is None:
            return ""
        self._set_time(self._seconds)
        if os.fstat(self._file).st_size == 0:
            return ""
        text = os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        return text

    def close(self) -> None:
        """Stop the timer, and free the signal and the file."""
        if self._timer is not None:
            self._libc.timer_delete(self._timer)
            self._timer = None
        if self._signal:
            faulthandler.unregister(self._signal)
            self._signal = 0
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.path = None

    def _set_time(self, seconds: float) -> None:
        whole = int(seconds)
        spec = _TimerSpec(0, 0, whole, int((seconds - whole) * 1e9))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)


def read_held_stacks(path: str) -> str:
    """Return what the process that owns `path` has written, or "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    # Before glibc 2.34, timers are in a separate library.
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")


def _find_free_signal() -> int | None:
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1):
        if signal.getsignal(number) == signal.SIG_DFL and not _has_handler(number):
            return number
    return None


def _has_handler(number: int) -> bool:
    # Python does not know the handlers of C libraries and of faulthandler.
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("SigCgt:", "SigIgn:")) and int(line[7:], 16) >> (number - 1) & 1:
                return True
    return False
