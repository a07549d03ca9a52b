"""`RayCluster`: runs attempts of a job on the nodes of a Ray cluster."""

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxdist._called import called
from jaxdist._launching.child import Write
from jaxdist._launching.cluster import ClusterJob
from jaxdist._launching.environment import check_devices, make_environment
from jaxdist._launching.gpus import uses_gpus
from jaxdist._launching.job import Job, Outcome, run_together
from jaxdist._launching.on_ray.child import RayChild
from jaxdist._launching.on_ray.placement import make_bundle, start_actors
from jaxdist._launching.on_ray.task import run_tasks_on_ray
from jaxdist._launching.ports import find_free_ports
from jaxdist._launching.signals import Signals
from jaxdist._processes import format_address
from jaxdist.errors import LaunchError, MissingExtraError


@contextlib.contextmanager
def connect_to_ray() -> Iterator["RayCluster"]:
    """Connect to the cluster that `RAY_ADDRESS` names or that runs here; otherwise start one here.

    Raises:
        MissingExtraError: Ray is not installed.
        LaunchError: This process is not on a node of the cluster, or cannot connect to it.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise LaunchError(
            f"jaxdist launch --on ray was called with RAY_ADDRESS={address}.\n\n"
            "The launcher hosts a service that all processes reach, so it runs on a node of the "
            "cluster, not on a client of it.\n\n"
            "Start it there: ray job submit -- jaxdist launch --on ray -n 2 script.py"
        )
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError(
            "jaxdist launch --on ray needs the package ray, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            "Install it with: pip install ray"
        ) from None
    # The launcher prints the output of the processes, not Ray.
    with _print_to_standard_error():
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except ConnectionError as error:
            raise _describe_refusal(error, address) from error
    try:
        yield RayCluster(ray)
    finally:
        with _print_to_standard_error():
            ray.shutdown()


def _describe_refusal(error: ConnectionError, address: str) -> LaunchError:
    """Return the error for a cluster to which Ray cannot connect."""
    found = f"jaxdist launch --on ray cannot connect to the Ray cluster at {address or 'auto'}"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any("InvalidAuthToken" in str(cause) for cause in causes):
        return LaunchError(
            f"{found}: the cluster asks for a token, and RAY_AUTH_MODE is "
            f"{os.environ.get('RAY_AUTH_MODE') or 'not set'}.\n\n"
            "`ray start` turns tokens on where it finds ~/.ray/auth_token. Programs need the same "
            "token, and send it only with RAY_AUTH_MODE=token.\n\n"
            "Set RAY_AUTH_MODE=token here, with the token of the cluster in ~/.ray/auth_token, or "
            "start all nodes with RAY_AUTH_MODE=disabled."
        )
    return LaunchError(
        f"{found}: {error}\n\n"
        "RAY_ADDRESS is the address of the head, as HOST:PORT, and the launcher runs on a node of "
        "the cluster.\n\n"
        "`ray status` shows whether the cluster runs. Without RAY_ADDRESS, Ray starts on this "
        "machine."
    )


def _print_to_standard_error() -> contextlib.AbstractContextManager[Any]:
    """Keep Ray's own lines, such as those of its autoscaler, out of the output of the job.

    The output of the processes goes to the stream that the launcher opened before.
    """
    return contextlib.redirect_stdout(sys.stderr)


class RayCluster:
    """A Ray cluster to which this process is connected.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    @called(lambda job: job.caller)
    def run_attempt(
        self,
        job: Job,
        write: tuple[Write, Write],
        signals: Signals,
        attempt: int = 1,
        places: Sequence[int] | None = None,
    ) -> Outcome:
        """Run the processes of a job once, each on a bundle of a placement group.

        Raises:
            LaunchError: The CPUs or GPUs do not become free in time, or a node lacks jaxdist.
        """
        count = job.count if places is None else len(places)
        gpus = self._count_gpus(job.devices_per_process)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_print_to_standard_error())
            started = start_actors(self._ray, [make_bundle(gpus)] * count, signals, stack)
            if started is None:
                return Outcome((), None, signals.received[0], ())
            actors, addresses = started
            host = self._ray.util.get_node_ip_address()
            (port,) = find_free_ports(1, host)
            service = format_address(host, port)

            def start(index: int, folder: pathlib.Path) -> RayChild:
                devices = None if gpus else job.devices_per_process or 1
                environment = make_environment(index, addresses, service, attempt, devices=devices)
                actor = actors[index]
                arguments = list(job.command[1:])
                actor.start.remote(index, arguments, environment, os.getcwd(), has_gpus=bool(gpus))
                return RayChild(index, actor, self._ray.get, write)

            return run_together(job, count, service, start, signals)

    @called("jaxdist launch")
    def run_tasks(self, job: ClusterJob, write: tuple[Write, Write], signals: Signals) -> int:
        """Run parameter servers, workers and a chief, each as an actor that Ray starts again.

        Raises:
            LaunchError: The CPUs or GPUs do not become free in time, a node lacks jaxdist, or
                other nodes could not read the snapshots.
        """
        gpus = self._count_gpus(job.devices_per_process)
        with _print_to_standard_error():
            return run_tasks_on_ray(self._ray, job, gpus, write, signals)

    def _count_gpus(self, devices: int | None) -> int:
        """Return the number of GPUs of each process; 0 for CPU devices."""
        check_devices(devices, os.environ)
        has_gpus = uses_gpus(os.environ) and self._ray.cluster_resources().get("GPU", 0)
        return (devices or 1) if has_gpus else 0
