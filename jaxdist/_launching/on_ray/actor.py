"""`ProcessOnNode`: the Ray actor that runs one process of a job on its node."""

import importlib
import os
import pathlib
import selectors
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._launching.child import Child
from jaxdist._launching.ends import End, write_end
from jaxdist._launching.ports import find_free_ports

_NAP = 0.05
_PATIENCE = 1.0  # of one question for news


class ProcessOnNode:
    """Runs one process, and keeps what it writes until the launcher asks for it.

    Ray makes an actor of it. Several of its methods run at a time.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._written: tuple[list[bytes], list[bytes]] = ([], [])
        self._end: End | None = None
        self._failed: Exception | None = None
        self._child: Child | None = None
        # As a launcher's on one machine; see Note [Files between launcher and processes].
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxdist-"))

    def find_address(self) -> str:
        """Return an address for the process, at which the other nodes reach it."""
        util: Any = importlib.import_module("ray.util")
        host = str(util.get_node_ip_address())
        (port,) = find_free_ports(1, host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(
        self,
        index: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        *,
        has_gpus: bool,
    ) -> None:
        """Start the process.

        Args:
            index: Its number in the job.
            arguments: What follows `python`; the Python is that of the node.
            environment: Of the process. Ray's choice of GPUs is added.
            folder: Where it runs, if the node has such a folder.
            has_gpus: Whether Ray has chosen GPUs for it.
        """
        own = {**environment, "JAXDIST_LAUNCHER": str(self._folder)}
        if has_gpus:
            own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if os.path.isdir(folder):
            os.chdir(folder)
        command = [sys.executable, *arguments]
        # The process ends with the thread that starts it.
        threading.Thread(target=self._run, args=(index, command, own), daemon=True).start()

    def read(self) -> tuple[bytes, bytes, End | None]:
        """Return what the process has written since the last call, and its end if it has ended."""
        with self._news:
            self._news.wait_for(lambda: any(self._written) or self._is_over(), _PATIENCE)
            if self._failed is not None:
                raise self._failed
            out, err = (b"".join(parts) for parts in self._written)
            for parts in self._written:
                parts.clear()
            return out, err, self._end

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process."""
        if self._child is not None:
            self._child.signal(number, to_group=to_group)

    def ask_to_end(self) -> None:
        """End the process because of another one; it may clean up."""
        if self._child is not None:
            self._child.ask_to_end()

    def kill(self) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.kill()

    def hear(self, end: End) -> None:
        """Tell the process how another one ended."""
        write_end(self._folder, end)

    def _is_over(self) -> bool:
        return self._end is not None or self._failed is not None

    def _run(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            end = self._follow(index, command, environment)
        except Exception as error:
            with self._news:
                self._failed = error
                self._news.notify_all()
        else:
            with self._news:
                self._end = end
                self._news.notify_all()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _follow(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> End:
        child = Child(index, command, environment, (self._keep_out, self._keep_err))
        self._child = child
        with selectors.DefaultSelector() as selector:
            for pipe in child.streams:
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_NAP):
                    pipe = key.fileobj
                    if not isinstance(pipe, int) and not child.read(pipe):  # type: ignore[arg-type]
                        selector.unregister(pipe)
                end = child.collect(self._folder)
                if end is not None:
                    return end
                if not selector.get_map():
                    threading.Event().wait(_NAP)

    def _keep_out(self, lines: bytes) -> None:
        self._keep(0, lines)

    def _keep_err(self, lines: bytes) -> None:
        self._keep(1, lines)

    def _keep(self, stream: int, lines: bytes) -> None:
        with self._news:
            self._written[stream].append(lines)
            self._news.notify_all()
