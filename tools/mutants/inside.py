"""Runs something in namespaces of Linux, where files are read-only and there is no network.

`sandbox` runs this file as a program; `warm` loads it. It imports nothing of this project.
"""

import ctypes
import fcntl
import os
import pathlib
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence

_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
# No set-user-id, no devices, no programs.
_KEPT = 2 | 4 | 8
_NO_FILES = ("/proc", "/sys", "/dev")
_NEW_FILES, _NEW_USER, _NEW_PIDS, _NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
# The exit status where the namespaces could not be made.
NOT_CONTAINED = 99
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def contain(writable: str, needed: Sequence[str], run: Callable[[], int]) -> int:
    """Run a function in a process of its own, and return its exit status, or `NOT_CONTAINED`.

    It can write in one folder only, which it sees as `/tmp`. `needed` are paths that a mount over
    `/tmp` must not hide. When it ends, so do all processes that it started; when this process is
    killed, so are they.
    """
    end_with_parent()
    try:
        _enter_namespaces()
    except OSError:
        traceback.print_exc()
        return NOT_CONTAINED
    first = os.fork()
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    os._exit(_be_first(writable, needed, run))


def _be_first(writable: str, needed: Sequence[str], run: Callable[[], int]) -> int:
    try:
        end_with_parent()
        here = os.getcwd()
        _close_files(writable, needed)
        _start_loopback()
        # Again: the folder may be below a mount that was made after it was entered.
        os.chdir(here)
    except OSError:
        traceback.print_exc()
        return NOT_CONTAINED
    child = os.fork()
    return _reap(child) if child else _try(run)


def _try(run: Callable[[], int]) -> int:
    try:
        return run()
    except BaseException:
        traceback.print_exc()
        return 1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    _libc().prctl(_END_WITH_PARENT, signal.SIGKILL)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what} failed")


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    spaces = _NEW_FILES | _NEW_PIDS | _NEW_NET
    _check(_libc().unshare(spaces | (_NEW_USER if user else 0)), "unshare")
    if user:
        here = pathlib.Path("/proc/self")
        (here / "setgroups").write_text("deny")
        (here / "uid_map").write_text(f"0 {user} 1")
        (here / "gid_map").write_text(f"0 {group} 1")


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    texts = [text.encode() for text in (source, target, kind)]
    result = _libc().mount(*texts, ctypes.c_ulong(flags), None)
    _check(result, f"mount of {source} at {target}")


def _close_files(writable: str, needed: Sequence[str]) -> None:
    """Make everything read-only but the writable folder, which becomes `/tmp`."""
    _mount("none", "/", flags=_PRIVATE | _RECURSIVE)
    hidden = [path for path in needed if pathlib.Path(path).is_relative_to("/tmp")]
    opened = [os.open(path, os.O_PATH) for path in hidden]
    places = [
        line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()
    ]
    # A mount of its own, which the next ones leave as it is.
    _mount(writable, writable, flags=_BIND)
    for place in dict.fromkeys(places):
        if not place.startswith(_NO_FILES):
            # The kernel refuses a change of the other flags to those who are not root.
            kept = os.statvfs(place).f_flag & _KEPT
            _mount("none", place, flags=_BIND | _REMOUNT | _READ_ONLY | kept)
    _mount(writable, "/tmp", flags=_BIND)
    for path, number in zip(hidden, opened, strict=True):
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{number}", path, flags=_BIND)
        _mount("none", path, flags=_BIND | _REMOUNT | _READ_ONLY)
        os.close(number)
    # Memory that processes share, and the processes of this namespace only.
    _mount("tmpfs", "/dev/shm", "tmpfs")
    _mount("proc", "/proc", "proc")


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(one, _GET_FLAGS, request))[1]
        fcntl.ioctl(one, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def _reap(child: int) -> int:
    """Wait for a process, as the one that gets all processes whose parents have ended."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> None:
    """Run a command: the arguments are the writable folder, needed paths, and the command."""
    writable, needed, *command = sys.argv[1:]

    def start() -> int:
        os.execvp(command[0], command)

    sys.exit(contain(writable, needed.split(os.pathsep), start))


if __name__ == "__main__":
    main()
