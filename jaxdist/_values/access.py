"""The two ways to get at a variable: from outside, and from inside a step that is being traced."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

from jaxdist._mesh import ReplicaMesh


class Change(enum.Enum):
    """What an assignment does with the value that the variable has."""

    ASSIGN = "assign"
    ADD = "assign_add"
    SUBTRACT = "assign_sub"

    def apply(self, before: Any, value: Any) -> Any:
        """The value after the change."""
        if self is Change.ASSIGN:
            return value
        return before + value if self is Change.ADD else before - value


class Access(Protocol):
    """Reads and changes variables from where the caller is."""

    def read(self, variable: Any) -> Any:
        """The value of `variable` as it is seen from here."""
        ...

    def update(self, variable: Any, change: Change, value: Any) -> None:
        """Change `variable`."""
        ...

    def scatter(self, variable: Any, kind: Any, slices: Any) -> None:
        """Change rows of `variable`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CallContext:
    """Where the caller is: the strategy that is current, and the step around it."""

    strategy: Any = None
    layout: ReplicaMesh | None = None
    in_step: Access | None = None
    in_replica: bool = False  # whether what is traced is what one replica sees


_NOWHERE = CallContext()
_finders: list[Callable[[], CallContext]] = []


def set_context_hook(finder: Callable[[], CallContext]) -> None:
    """Rooms below, which know of strategies and steps, say how to find out."""
    _finders[:] = [finder]


def site() -> CallContext:
    """Where the caller is."""
    return _finders[0]() if _finders else _NOWHERE
