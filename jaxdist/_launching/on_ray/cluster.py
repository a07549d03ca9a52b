"""`RayCluster`: attempts of a job on the nodes of a Ray cluster."""

import contextlib
import importlib
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxdist._compat import host_coordination_service
from jaxdist._launching.attempt import Attempt
from jaxdist._launching.child import Write
from jaxdist._launching.environment import check_devices, make_environment
from jaxdist._launching.job import Job, Outcome, make_outcome
from jaxdist._launching.on_ray.actor import ProcessOnNode
from jaxdist._launching.on_ray.child import RayChild
from jaxdist._launching.output import say
from jaxdist._launching.ports import find_free_ports
from jaxdist._launching.signals import Signals
from jaxdist._processes import get_settings
from jaxdist.errors import LaunchError, MissingExtraError

_NAP = 0.2
_SECONDS_UNTIL_NEWS = 5.0


@contextlib.contextmanager
def connect_to_ray() -> Iterator["RayCluster"]:
    """Connect to the cluster that `RAY_ADDRESS` names or that runs here; otherwise start one here.

    Raises:
        MissingExtraError: Ray is not installed.
        LaunchError: The launcher would not be on a node of the cluster.
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
    # What the processes print comes by the launcher, not by Ray.
    ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


class RayCluster:
    """A Ray cluster to which this process is connected.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def run_attempt(
        self,
        job: Job,
        write: tuple[Write, Write],
        signals: Signals,
        attempt: int = 1,
        places: Sequence[int] | None = None,
    ) -> Outcome:
        """Run processes of a job once, each on a bundle of a placement group.

        Raises:
            LaunchError: The cluster has not the CPUs or GPUs in time, or a node lacks jaxdist.
        """
        count = job.count if places is None else len(places)
        check_devices(job.caller, job.devices_per_process, os.environ)
        gpus = (job.devices_per_process or 1) if self._has_gpus() else 0
        with contextlib.ExitStack() as stack:
            group = self._reserve(count, gpus, signals, stack)
            if group is None:
                return make_outcome([], signals, ())
            actors, addresses = self._start_actors(count, gpus, group, stack)
            settings = get_settings()
            seconds = math.ceil(settings.heartbeat_seconds)
            host = self._ray.util.get_node_ip_address()
            (port,) = find_free_ports(1, host)
            service = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-"))
            hosted = host_coordination_service(
                service, count, heartbeat_seconds=seconds, shutdown_seconds=seconds
            )
            stack.callback(hosted.shutdown)
            folder = pathlib.Path(name)

            def start(index: int) -> RayChild:
                environment = make_environment(
                    index,
                    addresses,
                    service,
                    folder,
                    attempt,
                    devices=None if gpus else job.devices_per_process or 1,
                )
                actor = actors[index]
                arguments = list(job.command[1:])
                actor.start.remote(index, arguments, environment, os.getcwd(), has_gpus=bool(gpus))
                return RayChild(index, actor, self._ray.get, write)

            started = Attempt(count, start, folder, signals, job.patience)
            ends = started.run()
        return make_outcome(ends, signals, started.late)

    def _has_gpus(self) -> bool:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
            return False
        return bool(self._ray.cluster_resources().get("GPU", 0))

    def _reserve(
        self, count: int, gpus: int, signals: Signals, stack: contextlib.ExitStack
    ) -> Any | None:
        """Return a placement group with a bundle for each process; None after a signal."""
        bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
        placement: Any = importlib.import_module("ray.util.placement_group")
        group = placement.placement_group([bundle] * count, strategy="PACK")
        stack.callback(placement.remove_placement_group, group)
        ready = group.ready()
        began, seconds, has_said = time.monotonic(), get_settings().join_seconds, False
        while not self._ray.wait([ready], timeout=_NAP)[0]:
            waited = time.monotonic() - began
            if signals.received:
                return None
            if waited > seconds:
                needed = self._compare(count, gpus)
                raise LaunchError(
                    f"jaxdist launch --on ray waited {waited:.0f} s for {needed}.\n\n"
                    "Each process is an actor with one CPU, and with its GPUs. All start "
                    "together.\n\nStart fewer processes, add nodes, or wait longer with "
                    "JAXDIST_JOIN_SECONDS. `ray status` shows who uses the others."
                )
            if waited > _SECONDS_UNTIL_NEWS and not has_said:
                has_said = True
                say(f"waits for {self._compare(count, gpus)}.")
        return group

    def _compare(self, count: int, gpus: int) -> str:
        names = ("CPU", "GPU") if gpus else ("CPU",)
        needed = {"CPU": count, "GPU": count * gpus}
        free, all_ = self._ray.available_resources(), self._ray.cluster_resources()
        return " and ".join(
            f"{needed[name]} {name}s, of which {free.get(name, 0):g} are free and the cluster has "
            f"{all_.get(name, 0):g}"
            for name in names
        )

    def _start_actors(
        self, count: int, gpus: int, group: Any, stack: contextlib.ExitStack
    ) -> tuple[list[Any], list[str]]:
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        ray = self._ray
        make = ray.remote(ProcessOnNode)
        actors = []
        for bundle in range(count):
            place = strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
            options = make.options(
                num_cpus=1, num_gpus=gpus, max_concurrency=8, scheduling_strategy=place
            )
            actors.append(options.remote())
            stack.callback(ray.kill, actors[-1])
        try:
            addresses = ray.get(
                [actor.find_address.remote() for actor in actors],
                timeout=get_settings().join_seconds,
            )
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"jaxdist launch --on ray could not start its actors: {error}\n\n"
                "Every node of the cluster imports jaxdist, and has the same Python.\n\n"
                "Install jaxdist on every node, or in the runtime environment of the Ray job."
            ) from error
        return actors, addresses
