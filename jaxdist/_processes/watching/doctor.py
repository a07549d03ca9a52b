"""`Doctor`: a thread that reports to the other processes what this one is doing.

Note [Stuck collectives]
~~~~~~~~~~~~~~~~~~~~~~~~
A collective between CPU processes cannot be cancelled, and every later computation on the device,
and the end of the interpreter, wait for it. XLA has one time limit for all collectives of a
process, in whole seconds. So when the limit of one call has passed, this process shuts down its
gloo connections to the other processes: the collective fails at once, and the device is free.

The connections are found by address. Each process publishes where its gloo listens, so a connection
is gloo's if it ends at one of these addresses, here or there. No other socket of the process is
touched, and the coordination service stays connected.
"""

import dataclasses
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from jaxdist._compat import get_gloo_addresses
from jaxdist._processes.connections import list_connections
from jaxdist._processes.process import Process
from jaxdist._processes.settings import Settings
from jaxdist._processes.store import Store
from jaxdist._processes.watching.hang import HangReports
from jaxdist._processes.watching.observer import (
    PREFIX,
    Observer,
    ProcessState,
    describe_this_machine,
)
from jaxdist._processes.watching.stacks import (
    ArrayWait,
    HeldStack,
    find_thread_in_dump,
    find_users_line,
    format_stack,
)
from jaxdist._processes.watching.whereabouts import HERE, OUTSIDE, Whereabouts


def cut_collectives() -> int:
    """Shut down gloo's connections, and return how many there were.

    Returns 0 if the processes do not use gloo, or the system does not list sockets.
    """
    return cut_connections(get_gloo_addresses())


def cut_connections(published: Iterable[bytes]) -> int:
    """Shut down this process's connections that end at a published address; return how many."""
    addresses = tuple(published)
    count = 0
    for number, inode, here, there in list_connections():
        ends = (_pack(here), _pack(there))
        if not any(end in address for end in ends for address in addresses):
            continue
        count += _shut_down(number, inode)
    return count


def _shut_down(number: int, inode: int) -> bool:
    """Shut down a socket, unless its file descriptor belongs to another file by now."""
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            if os.fstat(connection.fileno()).st_ino != inode:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        # It was closed in the meantime.
        return False


def _pack(address: str) -> bytes:
    """Return an address of `/proc/net/tcp` as the beginning of a `sockaddr`."""
    host, _, port = address.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    # The table shows each word of the address as a number in this machine's byte order.
    where = struct.pack(f"={len(words)}I", *words)
    number = struct.pack("!H", int(port, 16))
    if len(where) == 4:
        return struct.pack("=H", socket.AF_INET) + number + where
    flow = bytes(4)
    return struct.pack("=H", socket.AF_INET6) + number + flow + where


_LOG = logging.getLogger("jaxdist")
BEAT_SECONDS = 1.0
_STACK_AFTER_SECONDS = 2.0
_MOST_FAILURES = 3
_FREE_AFTER_SECONDS = 2.0
_ARRAY_WAIT = "a call that waits for an array, such as float(array)"


class Expiring(Protocol):
    """A wait with a time limit."""

    @property
    def ends_at(self) -> float:
        """When the limit passes, by `time.monotonic`."""
        ...

    def expire(self) -> None:
        """Note that the limit has passed."""


class Doctor:
    """Writes once a second what this process does, and reports hangs.

    Cost:
        Two requests to the store each second, about 1 ms, in a separate thread; up to six while
        this process waits. The thread that runs the steps makes none of them.

    Args:
        process: This process.
        store: The store of the job.
        settings: How long processes wait for each other.
        here: Where the threads of this process note what they do.
    """

    def __init__(
        self, process: Process, store: Store, settings: Settings, here: Whereabouts = HERE
    ) -> None:
        self.process = process
        self.observer = Observer(process, store)
        self.raised = ""
        self.here = here
        self._store = store
        self._hangs = HangReports(process, store, settings, self.observer)
        self._machine = describe_this_machine()
        self._array_wait = ArrayWait()
        self._last = ProcessState(process.index)
        self._news = 0
        self._held_text = ""
        self._stacks = ""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._limits: dict[int, Expiring] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="jaxdist-doctor", daemon=True)
        self._threads = [thread]
        thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended.

        A thread inside a request to the store when the interpreter ends would end the process with
        SIGABRT.
        """
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []

    def watch_limit(self, limit: Expiring) -> None:
        """Call `limit.expire` when its time has passed, unless `forget_limit` was called."""
        self._limits[id(limit)] = limit
        if limit.ends_at - time.monotonic() < BEAT_SECONDS:
            self._wake.set()

    def forget_limit(self, limit: Expiring) -> None:
        """Undo `watch_limit`."""
        self._limits.pop(id(limit), None)

    def publish(self) -> None:
        """Write the last state again, with the current `here.blames` and `raised`."""
        with self._lock:
            state = self._last
        self._send(state)

    def _run(self) -> None:
        # Made in this thread, since the signal of its timer goes to the thread that makes it.
        held = HeldStack()
        self._stacks = held.path or ""
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    self._beat(held)
                    failures = 0
                except Exception as error:  # The store is gone, or its answer cannot be read.
                    failures += 1
                    if failures == _MOST_FAILURES:
                        line = str(error).splitlines()[0] if str(error) else repr(error)
                        _LOG.info("This process is not watched any more: %s", line)
                        return
                self._sleep()
        finally:
            held.close()

    def _beat(self, held: HeldStack) -> None:
        dump = held.rearm()
        if dump:
            self._held_text = find_thread_in_dump(dump, self.here.read().thread)
        doing = self.here.read()
        seconds = time.monotonic() - doing.since
        waited: float | None = seconds if doing.in_wait else None
        place = doing.place
        if waited is None and doing.place == OUTSIDE:
            waited = self._array_wait.measure(doing)
            place = OUTSIDE if waited is None else _ARRAY_WAIT
        seconds = seconds if waited is None else waited
        self._send(
            ProcessState(
                index=self.process.index,
                place=place,
                line=find_users_line(doing.thread),
                step=doing.step,
                seconds=round(seconds, 1),
                in_wait=waited is not None,
                stack=format_stack(doing.thread) if seconds >= _STACK_AFTER_SECONDS else "",
                held=self._held_text,
                thread=doing.thread,
                stacks=self._stacks,
                **self._machine,
            )
        )
        self._hangs.check(doing, waited, place)
        if waited is not None and waited >= _FREE_AFTER_SECONDS:
            self._free_from_ended()

    def _free_from_ended(self) -> None:
        """End a collective that waits for a process that has ended.

        With several devices in a process, devices whose neighbours are alive would otherwise wait
        until XLA's limit. See Note [Stuck collectives].
        """
        own = self.process.index
        if any(seen.ended for i, seen in self.observer.look().items() if i != own):
            cut_collectives()

    def _send(self, state: ProcessState) -> None:
        with self._lock:
            self._news += 1
            self._last = state
            state = dataclasses.replace(
                state, news=self._news, blames=self.here.blames, raised=self.raised
            )
            self._store.set(f"{PREFIX}/{self.process.index}", state.to_text(), overwrite=True)

    def _sleep(self) -> None:
        """Sleep until the next beat; end the waits whose limit passes before then."""
        end = time.monotonic() + BEAT_SECONDS
        while not self._stopping.is_set() and (now := time.monotonic()) < end:
            for limit in list(self._limits.values()):
                if limit.ends_at <= now:
                    self.forget_limit(limit)
                    self._expire(limit)
            ends = [limit.ends_at for limit in list(self._limits.values())]
            self._wake.wait(max(0.0, min([end, *ends]) - time.monotonic()))
            self._wake.clear()

    def _expire(self, limit: Expiring) -> None:
        # In a separate thread: `expire` waits for the other processes, and this thread must
        # continue to send news.
        thread = threading.Thread(target=limit.expire, name="jaxdist-limit", daemon=True)
        self._threads.append(thread)
        thread.start()
