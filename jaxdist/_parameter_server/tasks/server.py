"""`Server`: one task of a cluster with parameter servers."""

import contextlib
import ctypes
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.tasks.announcer import Announcer, read_announce
from jaxdist._parameter_server.tasks.server_def import CALLER, ServerDef, read_server_def
from jaxdist._parameter_server.tasks.worker_service import WorkerService
from jaxdist._parameter_server.transport import Handler, Listener, Message, serve
from jaxdist._parameter_server.worker.functions import check_modules
from jaxdist._validate import as_flag, as_local_path, as_number, as_path, log_without_effect, show
from jaxdist.errors import ContextError, JaxdistError, UnsupportedError

# Numbers of `mallopt` of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 4 * 2**20
_MOST_KEPT = 16 * 2**20
_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_LOG = logging.getLogger("jaxdist")
_DIRECTORY = "JAXDIST_SNAPSHOT_DIRECTORY"


def keep_freed_memory() -> None:
    """Let this process use freed memory of arrays of up to 4 MiB again.

    Each step of a worker makes arrays of the same sizes, which live for this step only. By default
    their memory goes back to the system, and taking it again is a page fault for each 4 KiB. For
    3.3 MB a server was in the system for 3.0 ms of a step, and is for 1.5 ms.

    Nothing happens with another C library, or where the user has set this with a variable.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


@final
class Server:
    """One task of a cluster: a parameter server, or a worker.

    A task of the job `ps` holds variables, and one of the job `worker` runs functions that a
    coordinator schedules. Tasks of other jobs only report that they are alive. The variables
    `JAXDIST_SECRET_FILE`, `JAXDIST_SECRET` and `JAXDIST_TLS_...` say who may call it; at an address
    that other machines reach it does not start without.

    Args:
        server_or_cluster_def: A `ClusterSpec`, a dict from jobs to addresses, or a `ServerDef`.
        job_name: The job of this task; None if the cluster has only one.
        task_index: The number of this task; None if the job has only one.
        protocol: `grpc`, which None means too.
        config: Must be None: jaxdist has no sessions to configure.
        start: Whether it starts at once.
        snapshot_directory: A folder for the snapshots of a parameter server. One that is started
            again begins with the newest. None means `JAXDIST_SNAPSHOT_DIRECTORY`, which `jaxdist
            launch` sets, or no snapshots.
        snapshot_seconds: How often a snapshot is written, if something has changed.
        modules: Modules with dataset functions, which workers may call by name, besides those of
            the script that this process runs.
        announce: Whether a worker announces itself to the first parameter server every 2 s. A
            training that runs already, and whose cluster does not list the worker, then lets it
            take part. The coordinator reaches it at its address in the cluster. `join` returns when
            the process of that coordinator ends. None means yes for a worker if the environment
            variable `JAXDIST_ANNOUNCE` is 1.

    Raises:
        ArgumentTypeError: `server_or_cluster_def` is none of these.
        ArgumentError: The cluster has several jobs or tasks, and none was chosen; or the address is
            not valid; or one of `modules` does not exist.
        NotFoundError: The cluster has no such task.
        ClusterError: The address is in use.
        UnauthenticatedError: Other machines reach the address, and there is no TLS and no secret.
        CheckpointError: The snapshot cannot be used.

    Cost:
        A worker uses the devices of this process, and a parameter server its memory and CPU.

    Example:
        >>> server = jaxdist.Server({"ps": ["127.0.0.1:0"]})
        >>> server.target.startswith("grpc://127.0.0.1:")
        True
        >>> server.stop()

    Source:
        `tf.distribute.Server`.
    """

    @called(CALLER)
    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        snapshot_directory: str | pathlib.Path | None = None,
        snapshot_seconds: float = 60.0,
        modules: Sequence[str] = (),
        announce: bool | None = None,
    ) -> None:
        self._def = read_server_def(server_or_cluster_def, job_name, task_index, protocol)
        _check_config(config)
        _check_modules(modules)
        self._modules = tuple(modules)
        if announce is None:
            self._announces = self._def.job_name == "worker" and read_announce()
        else:
            self._announces = as_flag("announce", announce)
        if self._announces:
            self._check_can_announce()
        if modules and self._def.job_name != "worker":
            why = f"a task of the job {self._def.job_name!r} calls no dataset functions"
            log_without_effect("modules", why)
        if snapshot_directory is not None:
            snapshot_directory = as_path("snapshot_directory", snapshot_directory, "snapshots")
        if snapshot_directory is not None and self._def.job_name != "ps":
            why = f"a task of the job {self._def.job_name!r} has no variables"
            log_without_effect("snapshot_directory", why)
        given = os.environ.get(_DIRECTORY)
        if given:
            given = as_local_path(f"The environment variable {_DIRECTORY} is {given!r}", given)
        self._directory = snapshot_directory or given or None
        self._seconds = as_number("snapshot_seconds", snapshot_seconds, least=0.0)
        self._variables: VariableServer | None = None
        self._listener: Listener | None = None
        # The work of `stop`, last entry first.
        self._parts = contextlib.ExitStack()
        self._is_stopped = threading.Event()
        # Why a worker that announced itself has ended without its coordinator saying so.
        self._error: JaxdistError | None = None
        if as_flag("start", start):
            self.start()

    def start(self) -> None:
        """Start answering. A server that is already running continues.

        Source:
            `tf.distribute.Server.start`.
        """
        if self._listener is not None:
            return
        self._is_stopped.clear()
        self._error = None
        keep_freed_memory()
        try:
            handlers = self._make_handlers()
            self._parts.callback(self._is_stopped.set)
            self._listener = serve(self._def.address, handlers, layer="grpc")
            self._parts.callback(self._listener.stop)
            if self._announces:
                self._parts.callback(self._announce(self._listener).stop)
        except BaseException:
            self.stop()
            raise

    def join(self) -> None:
        """Wait until another thread calls `stop`, or forever.

        A SIGTERM stops the server, which writes a last snapshot, and then ends the process. A
        worker that announced itself stops, and this returns, when the process of the coordinator
        that it works for ends. After a SIGKILL of that process it waits for the next coordinator.

        Raises:
            ContextError: The server was not started.
            ClusterError: This worker announces itself, and the first parameter server has not
                answered for `JAXDIST_JOIN_SECONDS`.

        Source:
            `tf.distribute.Server.join`.
        """
        self._check_started("join")
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            self._is_stopped.wait()
            self._end_alone()
            return
        received: list[int] = []

        def end(number: int, _: Any) -> None:
            received.append(number)
            self._is_stopped.set()

        signal.signal(signal.SIGTERM, end)
        try:
            self._is_stopped.wait()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            self.stop()
            os.kill(os.getpid(), signal.SIGTERM)
        self._end_alone()

    def stop(self) -> None:
        """Stop answering, and free the address. A parameter server writes a last snapshot.

        Raises:
            CheckpointError: The snapshot cannot be written.
        """
        self._listener = self._variables = None
        self._parts.close()
        self._is_stopped.set()

    def snapshot(self) -> dict[str, Any]:
        """Write a snapshot of a parameter server now.

        Returns:
            Its number (`step`), and how many changes it has (`applied`).

        Raises:
            ContextError: The task is not a parameter server, or has no snapshot directory.
            CheckpointError: It cannot be written.
        """
        if self._variables is None:
            raise ContextError(
                f"Server.snapshot was called on a task of the job {self._def.job_name!r}"
                f"{'' if self._listener is not None else ', which was not started'}.\n\n"
                "Only a parameter server that runs has variables.\n\n"
                "Call it on a server with job_name='ps', or save on the chief with "
                "jaxdist.training.Checkpoints."
            )
        return self._variables.snapshot()

    @property
    def target(self) -> str:
        """The address, as `grpc://host:port`.

        Raises:
            ContextError: The server was not started.

        Source:
            `tf.distribute.Server.target`.
        """
        return f"grpc://{self._check_started('target').address}"

    @property
    def server_def(self) -> ServerDef:
        """The cluster of this server, and its task there.

        Source:
            `tf.distribute.Server.server_def`.
        """
        return self._def

    @staticmethod
    @called(f"{CALLER}.create_local_server")
    def create_local_server(config: Any = None, start: bool = True) -> "Server":
        """Return a server of the job `local`, at a free port of this machine.

        Args:
            config: None.
            start: Whether it starts at once.

        Example:
            >>> server = jaxdist.Server.create_local_server()
            >>> server.server_def.job_name
            'local'
            >>> server.stop()

        Source:
            `tf.distribute.Server.create_local_server`.
        """
        _check_config(config)
        return Server({"local": ["127.0.0.1:0"]}, start=as_flag("start", start))

    @called(CALLER)
    def _make_handlers(self) -> dict[str, Handler]:
        job, index = self._def.job_name, self._def.task_index
        task = f"{job}:{index}"
        if job == "ps":
            self._variables = VariableServer(
                task, snapshot_directory=self._directory, snapshot_seconds=self._seconds
            )
            self._parts.callback(self._variables.close)
            return make_handlers(self._variables)
        if job == "worker":
            check_modules(self._modules)
            # Start JAX now, not while a coordinator waits.
            jax.local_devices()
            tasks = self._def.cluster.as_dict().get("ps", [])
            servers = tasks if isinstance(tasks, list) else []
            worker = WorkerService(index, servers, self._modules, self._end_with_chief)
            self._parts.callback(worker.close)
            return worker.make_handlers()
        return {"hello": lambda request: Message("hello", {"task": task})}

    def _check_can_announce(self) -> None:
        cluster = self._def.cluster
        has_server = "ps" in cluster.jobs and 0 in cluster.task_indices("ps")
        if self._def.job_name != "worker" or not has_server:
            found = (
                f"a task of the job {self._def.job_name!r}"
                if self._def.job_name != "worker"
                else "a cluster without the task 0 of the job 'ps'"
            )
            raise refuse(
                f"announce=True, and {found}.",
                "A worker announces itself to the first parameter server of its cluster.",
                "Pass announce=True for workers only, and list the parameter servers in the "
                "cluster.",
            )

    def _announce(self, listener: Listener) -> Announcer:
        host, _, port = self._def.address.rpartition(":")
        # Others reach the address in the cluster, unless its port is 0.
        address = self._def.address if port != "0" else f"{host}:{listener.address.split(':')[-1]}"
        server = self._def.cluster.task_address("ps", 0)
        return Announcer(server, self._def.task_index, address, self._give_up)

    def _end_with_chief(self) -> None:
        # The cluster lists the other workers, and the job ends them.
        if self._announces:
            _LOG.warning("%r ends: the training that it took part in has ended.", self)
            self._is_stopped.set()

    def _give_up(self, error: JaxdistError) -> None:
        self._error = error
        self._is_stopped.set()

    def _end_alone(self) -> None:
        """Stop, if this worker has ended by itself, and not because of `stop`."""
        if self._listener is not None:
            self.stop()
        if self._error is not None:
            raise self._error

    def _check_started(self, method: str) -> Listener:
        if self._listener is None:
            raise ContextError(
                f"Server.{method} was used, and the server does not run.\n\n"
                "A server that was made with start=False answers from start() on, until stop().\n\n"
                "Call server.start() first."
            )
        return self._listener

    def __repr__(self) -> str:
        return f"Server({self._def.job_name}:{self._def.task_index}, {self._def.address})"


def _check_config(config: Any) -> None:
    if config is not None:
        raise refuse(
            f"config={show(config)}.",
            "It configures sessions and devices of TensorFlow, which jaxdist does not have.",
            "Leave it out. JAX is configured by jax.config and by environment variables.",
            kind=UnsupportedError,
        )


def _check_modules(modules: Any) -> None:
    if not isinstance(modules, (list, tuple)) or not all(isinstance(x, str) for x in modules):
        raise refuse_type(
            f"modules={show(modules)}.",
            "It is a list of names of modules with dataset functions.",
            "Pass for instance modules=['my_data'].",
        )
