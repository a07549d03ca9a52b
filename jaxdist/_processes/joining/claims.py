"""Claims: while the job starts, each process answers at its own address which task it is.

See Note [Roll call] in `roll_call.py`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib

from jaxdist._called import name_call
from jaxdist._processes.addresses import listen, split_address
from jaxdist.errors import ClusterError, DuplicateTaskError

_MARK = "jaxdist-claim "
# A process on the same machine answers in less than a millisecond; this is for slow networks.
_ANSWER_SECONDS = 2.0
_NAP_SECONDS = 0.005


class Answers:
    """A thread that answers every connection to a socket, until `close`.

    Args:
        server: A socket that listens; `close` closes it. None if the address belongs to another
            machine: then others cannot ask here.
        said: The answer; `say` can change it later.
    """

    def __init__(self, server: socket.socket | None, said: Mapping[str, Any]) -> None:
        self._said = dict(said)
        self.can_answer = server is not None
        if server is not None:
            server.settimeout(0.2)
            self._server = server
            self._thread = threading.Thread(target=self._answer, name="jaxdist-claim", daemon=True)
            self._thread.start()

    def say(self, **what: Any) -> None:
        """Change the answer."""
        self._said = {**self._said, **what}

    def close(self) -> None:
        """Stop answering, and free the port; a second call does nothing."""
        if not self.can_answer:
            return
        self.can_answer = False
        # On Linux this ends the wait of the thread; elsewhere the thread wakes now and then.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _answer(self) -> None:
        while self.can_answer:
            try:
                asker, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                # The socket was shut down, or the process has too many open files at the moment.
                time.sleep(_NAP_SECONDS)
                continue
            # An asker that has closed its connection needs no answer.
            with contextlib.suppress(OSError), asker:
                asker.settimeout(_ANSWER_SECONDS)
                asker.sendall((_MARK + json.dumps(self._said) + "\n").encode())


def claim(address: str, said: Mapping[str, Any]) -> Answers:
    """Answer at the address of this process in the cluster.

    Args:
        address: The address.
        said: The answer.

    Raises:
        DuplicateTaskError: Another process answers there, as the same task of the same cluster.
        ClusterError: Another program listens there.
    """
    host, port = split_address(address)
    try:
        server = listen(host, port)
    except OSError as error:
        raise _explain_used_port(address, said, error) from None
    return Answers(server, said)


@dataclasses.dataclass(frozen=True)
class Silence:
    """No process of jaxdist answers at an address.

    Attributes:
        reason: What was found there instead, for errors.
        is_listening: Whether something accepts connections there, such as JAX's service.
    """

    reason: str
    is_listening: bool


_OTHER_PROGRAM = Silence("another program listens there", is_listening=True)


def ask(address: str, seconds: float = _ANSWER_SECONDS) -> dict[str, Any] | Silence:
    """Ask which process is at an address.

    Waits at most `seconds` for a connection, and as long again for an answer.

    Returns:
        The answer of a process of jaxdist, or why there is none.
    """
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except TimeoutError:
        # A firewall, a broken network, or a host that is down.
        return Silence(f"no answer to a connection within {seconds:.0f} s", is_listening=False)
    except ConnectionRefusedError:
        return Silence("nothing listens there (connection refused)", is_listening=False)
    except OSError as error:
        return Silence(error.strerror or str(error), is_listening=False)
    with connection:
        connection.settimeout(seconds)
        try:
            return _read(connection)
        except TimeoutError:
            return Silence("something that does not answer listens there", is_listening=True)
        except OSError:
            return Silence("the connection is closed immediately", is_listening=False)


def _read(connection: socket.socket) -> dict[str, Any] | Silence:
    received = b""
    while not received.endswith(b"\n") and len(received) < 65536:
        part = connection.recv(4096)
        if not part:
            break
        received += part
        if not _MARK.encode().startswith(received[: len(_MARK)]):
            return _OTHER_PROGRAM
    text = received.decode(errors="replace")
    if not text.startswith(_MARK) or not text.endswith("\n"):
        return _OTHER_PROGRAM
    said: dict[str, Any] = json.loads(text.removeprefix(_MARK))
    return said


def _explain_used_port(address: str, said: Mapping[str, Any], error: OSError) -> ClusterError:
    other = ask(address)
    same = isinstance(other, dict) and all(other[k] == said[k] for k in ("cluster", "index"))
    if isinstance(other, dict) and same:
        return DuplicateTaskError(
            f"{name_call()}: this process (pid {said['pid']}) and the process with pid "
            f"{other['pid']} on {other['host']} are both task {said['index']} of the job, "
            f"{address}.\n\nEach of the {said['count']} tasks of a cluster is one process, with "
            "an index of its own.\n\nGive each process another index: TF_CONFIG's task.index, or "
            "task_id of the resolver."
        )
    who = "a process of another job" if isinstance(other, dict) else "another program"
    return ClusterError(
        f"{name_call()} could not use {address}, the address of this process: {error.strerror}; "
        f"{who} uses the port.\n\n"
        "A process must be able to listen at its own address.\n\n"
        "Choose another port for this task, in the cluster of every process; or end what uses it "
        f"(`ss -ltnp` shows it)."
    )


def describe_this_process(index: int, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the number, host, versions and cluster of this process."""
    return {
        "index": index,
        "count": len(addresses),
        "cluster": hash_cluster(addresses),
        "addresses": list(addresses) if len(addresses) <= 64 else [],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def hash_cluster(addresses: Sequence[str]) -> str:
    """Return a string that is equal only for equal lists of addresses."""
    return hashlib.sha256(json.dumps(list(addresses)).encode()).hexdigest()[:16]
