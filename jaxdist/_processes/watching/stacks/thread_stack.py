"""Reads the Python stack of a thread, reduced to the frames that a user wants to see."""

import linecache
import os
import re
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
