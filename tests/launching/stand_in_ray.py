"""The part of Ray that a launcher sees of a cluster which does not start its actors."""

import sys
import types
from typing import Any

import pytest


class RayError(Exception):
    """What Ray raises for an actor that does not start."""


class StandIn:
    """A cluster with 3 CPUs, two of them in use, whose nodes lack jaxdist.

    Args:
        has_room: Whether the placement group gets its CPUs.
    """

    def __init__(self, has_room: bool) -> None:
        self.has_room = has_room
        self.killed = 0
        self.removed = 0
        self.has_left = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import ray` return it."""
        modules = {
            "ray": {
                "init": lambda **_: None,
                "shutdown": self._leave,
                "cluster_resources": lambda: {"CPU": 3.0},
                "available_resources": lambda: {"CPU": 1.0},
                "wait": lambda refs, timeout: (refs, []) if self.has_room else ([], refs),
                "remote": lambda _: self,
                "get": _fail,
                "kill": self._kill,
                "exceptions": types.SimpleNamespace(RayError=RayError),
            },
            "ray.util": {},
            "ray.util.placement_group": {
                "placement_group": lambda bundles, strategy: self,
                "remove_placement_group": self._remove,
            },
            "ray.util.scheduling_strategies": {
                "PlacementGroupSchedulingStrategy": lambda **_: None,
            },
        }
        for name, members in modules.items():
            module: Any = types.ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)

    def ready(self) -> str:
        """Return what `ray.wait` waits for."""
        return "the placement group"

    def options(self, **_: Any) -> "StandIn":
        """Return the class of the actor."""
        return self

    def remote(self) -> "StandIn":
        """Return an actor, or the result of one of its methods."""
        return self

    @property
    def find_address(self) -> "StandIn":
        """A method of the actor."""
        return self

    def _leave(self) -> None:
        self.has_left = True

    def _kill(self, _: Any) -> None:
        self.killed += 1

    def _remove(self, _: Any) -> None:
        self.removed += 1


def _fail(*_: Any, **__: Any) -> None:
    raise RayError("No module named 'jaxdist'")
