"""Makes a placement group for the actors of a job, and starts an actor on each bundle."""

import contextlib
import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._launching.on_ray.actor import ProcessOnNode
from jaxdist._launching.output import say
from jaxdist._launching.signals import Signals
from jaxdist._processes import get_settings
from jaxdist.errors import LaunchError

_NAP = 0.2
SECONDS_UNTIL_NEWS = 5.0


def make_bundle(gpus: int) -> dict[str, int]:
    """Return the resources that one process needs."""
    return {"CPU": 1, **({"GPU": gpus} if gpus else {})}


def start_actors(
    ray: Any,
    bundles: Sequence[Mapping[str, int]],
    signals: Signals,
    stack: contextlib.ExitStack,
    options: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[Any], list[str]] | None:
    """Start an actor on each bundle of a placement group; the stack ends them.

    Args:
        ray: The module.
        bundles: The resources of each actor.
        signals: Signals to the launcher.
        stack: Ends the actors when it closes.
        options: Options of Ray for each actor, such as `name` and `max_restarts`.

    Returns:
        The actors, and an address for the process of each actor; None after a signal.

    Raises:
        LaunchError: The CPUs or GPUs do not become free in time, or an actor does not start.
    """
    group = _reserve(ray, bundles, signals, stack)
    if group is None:
        return None
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    actors = []
    for number, bundle in enumerate(bundles):
        place = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        made = ray.remote(ProcessOnNode).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=8,
            scheduling_strategy=place,
            **(options[number] if options is not None else {}),
        )
        actors.append(made.remote())
        stack.callback(ray.kill, actors[-1])
    try:
        found = ray.get(
            [actor.find_address.remote() for actor in actors],
            timeout=get_settings().join_seconds,
        )
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"jaxdist launch --on ray could not start its actors: {error}\n\n"
            "Every node of the cluster needs jaxdist, and the same Python.\n\n"
            "Install jaxdist on every node, or in the runtime environment of the Ray job."
        ) from error
    return actors, list(found)


def _reserve(
    ray: Any,
    bundles: Sequence[Mapping[str, int]],
    signals: Signals,
    stack: contextlib.ExitStack,
) -> Any | None:
    """Return a placement group with the bundles; None after a signal.

    Raises:
        LaunchError: The CPUs or GPUs do not become free in time.
    """
    placement: Any = importlib.import_module("ray.util.placement_group")
    group = placement.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    stack.callback(placement.remove_placement_group, group)
    ready = group.ready()
    began, seconds, has_said = time.monotonic(), get_settings().join_seconds, False
    while not ray.wait([ready], timeout=_NAP)[0]:
        waited = time.monotonic() - began
        if signals.received:
            return None
        if waited > seconds:
            raise LaunchError(
                f"jaxdist launch --on ray waited {waited:.0f} s for {_compare(ray, bundles)}.\n\n"
                "Each process is an actor with one CPU, and with its GPUs. All start "
                "together.\n\nStart fewer processes, add nodes, or wait longer with "
                "JAXDIST_JOIN_SECONDS. `ray status` shows who uses the others."
            )
        if waited > SECONDS_UNTIL_NEWS and not has_said:
            has_said = True
            say(f"waiting for {_compare(ray, bundles)}.")
    return group


def _compare(ray: Any, bundles: Sequence[Mapping[str, int]]) -> str:
    names = [name for name in ("CPU", "GPU") if any(bundle.get(name) for bundle in bundles)]
    needed = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
    free, all_ = ray.available_resources(), ray.cluster_resources()
    return " and ".join(
        f"{needed[name]} {name}s ({free.get(name, 0):g} of {all_.get(name, 0):g} in the cluster "
        "are free)"
        for name in names
    )


class Places:
    """The address of each task in TF_CONFIG, and its current address.

    Tasks name each other by the address in TF_CONFIG. When a current address changes, all tasks get
    it; see Note [Addresses that change].

    Args:
        addresses: The addresses in TF_CONFIG, by the names of the tasks.
        actors: The actors of all tasks, which get the changes.
    """

    def __init__(self, addresses: Mapping[str, str], actors: Sequence[Any]) -> None:
        self._names, self._actors = dict(addresses), list(actors)
        self._now = dict(addresses)
        self._taken = set(addresses.values())
        self._version = 1
        self._lock = threading.Lock()

    def find(self, task: str) -> str:
        """Return the current address of a task."""
        with self._lock:
            return self._now[task]

    def list_taken(self) -> list[str]:
        """Return all addresses that a task has had."""
        with self._lock:
            return sorted(self._taken)

    def describe(self) -> tuple[int, dict[str, str]]:
        """Return the version, and each current address by the address in TF_CONFIG."""
        with self._lock:
            return self._version, self._map()

    def move(self, task: str, address: str) -> None:
        """Set the address of a task, and send it to all tasks if it has changed."""
        with self._lock:
            if self._now[task] == address:
                return
            self._now[task] = address
            self._taken.add(address)
            self._version += 1
            version, addresses = self._version, self._map()
        for actor in self._actors:
            # An actor that is being restarted gets them when its process starts.
            actor.learn.remote(version, addresses)

    def _map(self) -> dict[str, str]:
        return {name: self._now[task] for task, name in self._names.items()}
