"""`ProcessOnNode`: the Ray actor that runs one process of a job on its node."""

import functools
import importlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxdist._launching.child import Child, End, write_end, write_whole
from jaxdist._launching.ports import find_free_ports, is_free
from jaxdist._launching.processes import Patience, Processes
from jaxdist._launching.signals import collect_signals
from jaxdist._processes import format_address

_PATIENCE = 1.0  # how long one call of `read` waits for news
_ADDRESSES = "addresses.json"


class ProcessOnNode:
    """Runs one process, and keeps its output until the launcher reads it.

    Ray makes it an actor, whose methods may run at the same time. When a process has ended, another
    one can be started.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._written: tuple[list[bytes], list[bytes]] = ([], [])
        self._end: End | None = None
        self._failed: Exception | None = None
        self._child: Child | None = None
        self._is_killed = False
        # See Note [Files between launcher and processes].
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxdist-"))
        # The version of the addresses, and the addresses.
        self._addresses: tuple[int, Mapping[str, str]] = (0, {})

    def find_address(self, wanted: str = "", taken: Collection[str] = ()) -> str:
        """Return an address at which the other nodes reach the process.

        Args:
            wanted: Its previous address, which it gets again on the same node if the port is free.
            taken: Addresses to avoid: others may still look for another task there.
        """
        util: Any = importlib.import_module("ray.util")
        host = str(util.get_node_ip_address())
        port = wanted.rpartition(":")[2]
        if port and wanted == format_address(host, int(port)) and is_free(int(port), host):
            return wanted
        while True:
            (found,) = find_free_ports(1, host)
            address = format_address(host, found)
            if address not in taken:
                return address

    def start(
        self,
        index: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        *,
        has_gpus: bool,
        name: str | None = None,
        addresses: tuple[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Start the process.

        Args:
            index: Its number in the job.
            arguments: The arguments after `python`, which is that of the node.
            environment: Its environment, to which Ray's choice of GPUs is added.
            folder: The working directory, if the node has such a folder.
            has_gpus: Whether Ray has chosen GPUs for it.
            name: The prefix of its lines; None for its number.
            addresses: Version and addresses of the tasks, if these may move; see `learn`.
        """
        with self._news:
            self._end = self._failed = self._child = None
            self._is_killed = False
            if not self._folder.is_dir():
                self._folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxdist-"))
        own = dict(environment)
        if addresses is not None:
            self.learn(*addresses)
            own["JAXDIST_ADDRESSES"] = str(self._folder / _ADDRESSES)
        if has_gpus:
            own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if os.path.isdir(folder):
            os.chdir(folder)
        command = [sys.executable, *arguments]
        # The process ends with the thread that starts it.
        running = (index, command, own, name)
        threading.Thread(target=self._run, args=running, daemon=True).start()

    def learn(self, version: int, addresses: Mapping[str, str]) -> None:
        """Write for the process where the tasks of its job are.

        Args:
            version: Later addresses have a larger number.
            addresses: The current address of each task, by its address in TF_CONFIG.
        """
        with self._news:
            # Calls may arrive in a different order from that in which they were made.
            self._addresses = max(self._addresses, (version, addresses), key=lambda a: a[0])
            if self._folder.is_dir():
                write_whole(self._folder / _ADDRESSES, json.dumps(self._addresses[1]))

    def read(self) -> tuple[bytes, bytes, End | None]:
        """Return what the process has written since the last call, and its end or None."""
        with self._news:
            self._news.wait_for(lambda: any(self._written) or self._is_over(), _PATIENCE)
            if self._failed is not None:
                raise self._failed
            out, err = (b"".join(parts) for parts in self._written)
            for parts in self._written:
                parts.clear()
            return out, err, self._end

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process, or to all processes of its group."""
        if self._child is not None:
            self._child.signal(number, to_group=to_group)

    def ask_to_end(self) -> None:
        """Ask the process to end because of another one; it may clean up."""
        if self._child is not None:
            self._child.ask_to_end()

    def kill(self) -> None:
        """End the process at once, even while it is being started."""
        with self._news:
            self._is_killed = True
            if self._child is not None:
                self._child.kill()

    def hear(self, end: End) -> None:
        """Write for the process how another one ended."""
        write_end(self._folder, end)

    def _is_over(self) -> bool:
        return self._end is not None or self._failed is not None

    def _run(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], name: str | None
    ) -> None:
        end: End | None = None
        failed: Exception | None = None
        try:
            write = (functools.partial(self._keep, 0), functools.partial(self._keep, 1))
            child = Child(index, command, environment, write, self._folder, name)
            with self._news:
                self._child = child
                if self._is_killed:
                    child.kill()
            with collect_signals(()) as signals, Processes(signals, Patience.grace) as processes:
                processes.add(child)
                while child.end is None:
                    list(processes.wait())
            end = child.end
        except Exception as error:
            failed = error
        with self._news:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._end, self._failed = end, failed
            self._news.notify_all()

    def _keep(self, stream: int, lines: bytes) -> None:
        with self._news:
            self._written[stream].append(lines)
            self._news.notify_all()
