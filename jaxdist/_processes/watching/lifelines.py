"""`Lifelines`: idle connections that show when a process on another host ends.

Note [Lifelines]
~~~~~~~~~~~~~~~~
The end of a process on this host shows in `/proc`, and a launcher writes a note. For a process on
another host there is neither, and the coordination service does not report it. So each process
keeps an idle connection to process 0. However a process ends, its operating system closes the
connection. A process that is stopped by a signal keeps it, and so does one behind a broken network.
A device in between can close idle connections, so a process counts as ended only if it has also
sent no news for some seconds.
"""

import contextlib
import json
import logging
import selectors
import socket
import threading
import time

from jaxdist._processes.addresses import listen
from jaxdist._processes.process import Process
from jaxdist._processes.store import Store
from jaxdist._processes.watching.observer import GONE, LEFT, PREFIX, SILENT_SECONDS, ProcessState
from jaxdist.errors import UnavailableError

_LOG = logging.getLogger("jaxdist")
_KEY = "jaxdist/lifelines"
_SECONDS_TO_CONNECT = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5
_MOST_BYTES = 32
# How often TCP sends a packet, so that devices in between keep the idle connection.
_IDLE_SECONDS = 60


class Lifelines:
    """A thread that notices the end of processes, and writes it to the store for them.

    Process 0 watches every other process, and each other process watches process 0.

    Args:
        process: This process.
        store: The store of the job.
        address: The address at which the others reach this machine.
    """

    def __init__(self, process: Process, store: Store, address: str) -> None:
        self._process, self._store, self._address = process, store, address
        self._server: socket.socket | None = None
        self._lines: dict[socket.socket, int | None] = {}
        # The last state of a process whose connection was closed, and when that was.
        self._lost: dict[int, tuple[str | None, float]] = {}
        self._stopping = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._others = "other processes" if process.index == 0 else "process 0"
        self._thread = threading.Thread(target=self._run, name="jaxdist-lifelines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._process.index == 0:
            try:
                self._server = listen(self._address, 0)
            except OSError as error:
                self._log(error)
        if self._server is not None:
            where = json.dumps([self._address, self._server.getsockname()[1]])
            self._store.set(_KEY, where, overwrite=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the connections, and wait until the thread has ended."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """Watch the other processes in process 0; elsewhere keep a connection to it."""
        try:
            if self._process.index != 0:
                line = self._connect()
                if line is None:
                    return
                self._lines[line] = 0
            self._watch_until_stopped()
        except (OSError, UnavailableError) as error:
            # The service or process 0 cannot be reached, or there are too many open files. The job
            # works, but then only a time limit shows that a process has ended.
            self._log(error)
        finally:
            self._close()

    def _log(self, error: Exception) -> None:
        _LOG.info("The end of %s will not be noticed at once: %s", self._others, error)

    def _connect(self) -> socket.socket | None:
        text = None
        while text is None and not self._stopping.is_set():
            text = self._store.wait_for(_KEY, _SECONDS_BETWEEN_LOOKS)
        if text is None:
            return None
        host, port = json.loads(text)
        line = socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT)
        line.sendall(f"{self._process.index}\n".encode())
        _keep_alive(line)
        return line

    def _watch_until_stopped(self) -> None:
        server = self._server
        with selectors.DefaultSelector() as selector:
            for one in [*self._lines, *([server] if server is not None else []), self._woken]:
                selector.register(one, selectors.EVENT_READ)
            while not self._stopping.is_set() and (server or self._lines or self._lost):
                for key, _ in selector.select(_SECONDS_BETWEEN_LOOKS):
                    one = key.fileobj
                    if one is server and server is not None:
                        line, _ = server.accept()
                        _keep_alive(line)
                        self._lines[line] = None
                        selector.register(line, selectors.EVENT_READ)
                    elif (
                        isinstance(one, socket.socket)
                        and one in self._lines
                        and not self._read(one)
                    ):
                        selector.unregister(one)
                        one.close()
                if self._lost:
                    self._judge()

    def _read(self, line: socket.socket) -> bool:
        """Read the number of a process from its connection; return whether to keep the latter."""
        try:
            said = line.recv(_MOST_BYTES)
            has_ended = not said
        except ConnectionResetError:
            said, has_ended = b"", True
        except OSError:
            # The network does not answer, so the process may still be alive.
            said, has_ended = b"", False
        index = self._lines[line]
        text = said.strip()
        if index is None and text.isdigit() and int(text) < self._process.count:
            self._lines[line] = int(text)
            return True
        del self._lines[line]
        if has_ended and index is not None:
            self._lost[index] = (self._store.get(f"{PREFIX}/{index}"), time.monotonic())
        return False

    def _judge(self) -> None:
        """Write which of the lost processes have ended: those that have sent no news since."""
        for index, (before, since) in list(self._lost.items()):
            now = self._store.get(f"{PREFIX}/{index}")
            if _read_news(now) != _read_news(before):
                _LOG.info("Process %d lives, and its idle connection was closed.", index)
                del self._lost[index]
            elif time.monotonic() - since > SILENT_SECONDS:
                del self._lost[index]
                # The process may have written itself why it ended.
                with contextlib.suppress(KeyError):
                    self._store.set(f"{LEFT}/{index}", GONE)

    def _close(self) -> None:
        for line in self._lines:
            line.close()
        if self._server is not None:
            self._server.close()
        self._wake.close()
        self._woken.close()


def _read_news(text: str | None) -> int:
    return -1 if text is None else ProcessState.from_text(text).news


def _keep_alive(line: socket.socket) -> None:
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
