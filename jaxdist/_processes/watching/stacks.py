"""Reads the stacks of threads, and finds whether a thread waits for an array."""

import contextlib
import ctypes
import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType

import jax

from jaxdist._compat import PACKAGE
from jaxdist._processes.watching.whereabouts import Doing

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INTERNAL = (PACKAGE, _JAX)
_MOST_FRAMES = 16
_LEFT_OUT = "  (unknown: faulthandler writes the 100 newest threads, and this is an older one)\n"
_OF_ARRAYS = re.compile(r"block_until_ready\(|\basarray\(|\b(np|numpy|onp)\.array\(")


def get_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or None if it has ended."""
    return sys._current_frames().get(thread)


def format_stack(thread: int) -> str:
    """Return the stack of a thread, innermost call last, without frames of jaxdist and JAX.

    If all frames are of jaxdist and JAX, return all.
    """
    frame = get_frame(thread)
    if frame is None:
        return ""
    entries = traceback.extract_stack(frame)
    kept = [entry for entry in entries if not _is_internal(entry.filename)]
    return "".join(traceback.format_list((kept or list(entries))[-_MOST_FRAMES:]))


def find_users_line(thread: int) -> str:
    """Return `file:line (function)` of the innermost line of user code in a thread."""
    frame = innermost = get_frame(thread)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"


def is_in_array_wait(thread: int) -> bool:
    """Whether a thread is in a call that waits for an array, such as `float(array)`.

    The call may also be about to return: this does not check whether the thread sleeps.
    """
    frame = get_frame(thread)
    if frame is None:
        return False
    file = frame.f_code.co_filename
    if file.startswith(_JAX):
        # `float`, `numpy.asarray` and `jax.block_until_ready` end in one of these files.
        return os.path.basename(file) in ("array.py", "api.py")
    # These calls are C++ and have no Python frame.
    return _OF_ARRAYS.search(linecache.getline(file, frame.f_lineno)) is not None


def find_thread_in_dump(dump: str, thread: int) -> str:
    """Return the part of a faulthandler dump that shows one thread, or "".

    faulthandler writes only the 100 newest threads. If the thread is not among them, the returned
    string says so.
    """
    header = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n", re.MULTILINE)
    found = list(header.finditer(dump))
    for number, match in enumerate(found):
        if int(match[1], 16) == thread:
            end = found[number + 1].start() if number + 1 < len(found) else len(dump)
            lines = dump[match.end() : end].strip().splitlines()
            return "".join(f"{line}\n" for line in lines if not _has_internal_file(line))
    return _LEFT_OUT if found and re.search(r"^\.\.\.$", dump, re.MULTILINE) else ""


def find_line_in_dump(dump: str) -> str:
    """Return `file:line (function)` of the innermost line of user code in a dump, or ""."""
    for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (.+)', dump):
        if _is_users(file):
            return f"{os.path.basename(file)}:{line} ({function})"
    return ""


def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL) or file.startswith("<frozen ")


def _is_users(file: str) -> bool:
    other = f"{os.sep}site-packages{os.sep}" in file or file.startswith(_STANDARD)
    return not (other or _is_internal(file))


def _has_internal_file(line: str) -> bool:
    match = re.search(r'File "([^"]+)"', line)
    return match is not None and _is_internal(match[1])


_NAP = 0.03
_Rest = tuple[str, str] | None


class ArrayWait:
    """Measures how long a thread has waited for an array, outside of jaxdist.

    A step returns its arrays before they are computed, so a stuck collective often shows in the
    user's own `float(array)`. A thread that sleeps in one such call uses no processor time and does
    not wake; a thread that repeats the call does.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._since = 0.0

    def measure(self, doing: Doing) -> float | None:
        """Return the seconds that the thread has waited, or None if it does not wait.

        Cost:
            30 ms of sleep while the thread is in such a call.
        """
        rest = self._read_rest(doing.thread)
        key = (doing.thread, doing.since, rest)
        if key == self._key:
            if is_in_array_wait(doing.thread):
                return time.monotonic() - self._since
        elif is_in_array_wait(doing.thread):
            time.sleep(_NAP)
            if self._read_rest(doing.thread) == rest and is_in_array_wait(doing.thread):
                self._key, self._since = key, time.monotonic() - _NAP
                return _NAP
        self._key = None
        return None

    def _read_rest(self, thread: int) -> _Rest:
        """Return values that stay equal while a thread sleeps; None if the system has none."""
        native = next((t.native_id for t in threading.enumerate() if t.ident == thread), None)
        try:
            with open(f"/proc/self/task/{native}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/self/task/{native}/status") as file:
                switches = [line for line in file if "voluntary_ctxt" in line]
        except OSError:
            return None
        # Processor time in user and kernel mode.
        return " ".join(fields[11:13]), " ".join(switches)


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
        self._file = -1
        self._timer: ctypes.c_void_p | None = None
        self._opened = contextlib.ExitStack()
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
            self._opened.callback(os.close, self._file)
            faulthandler.register(free, file=self._file, all_threads=True)
            self._opened.callback(faulthandler.unregister, free)
        event = _SigEvent(signo=free, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        timer = ctypes.c_void_p()
        clock = 1  # CLOCK_MONOTONIC
        if self._libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) != 0:
            self.close()
            return
        self._timer = timer
        self._opened.callback(self._libc.timer_delete, timer)
        self._set_time(self._seconds)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def rearm(self) -> str:
        """Restart the timer, and return what was written since the last call."""
        if self._timer is None:
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
        self._opened.close()
        self._timer = self.path = None

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
