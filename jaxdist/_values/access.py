"""Access to variables, and the context of the call: outside a step, or inside a traced one."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

from jaxdist._mesh import ReplicaMesh


class Change(enum.Enum):
    """How an assignment combines the old value of a variable with the given one."""

    ASSIGN = "assign"
    ADD = "assign_add"
    SUBTRACT = "assign_sub"

    def apply(self, before: Any, value: Any) -> Any:
        """Return the value after the change."""
        if self is Change.ASSIGN:
            return value
        return before + value if self is Change.ADD else before - value


class Access(Protocol):
    """Reads and changes variables in the way that the context of the caller needs."""

    def read(self, variable: Any) -> Any:
        """Return the value of `variable` as the caller sees it."""
        ...

    def update(self, variable: Any, change: Change, value: Any) -> None:
        """Change `variable`."""
        ...

    def scatter(self, variable: Any, kind: Any, slices: Any) -> None:
        """Change rows of `variable`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CallContext:
    """The context of the caller: the current strategy, and the step that is being traced."""

    strategy: Any = None
    layout: ReplicaMesh | None = None
    in_step: Access | None = None
    in_replica: bool = False  # whether a step is traced around the caller: values are one replica's


_NOWHERE = CallContext()
# A list, so that setting the hook needs no `global`; it has at most one entry.
_hook: list[Callable[[], CallContext]] = []


def set_context_hook(hook: Callable[[], CallContext]) -> None:
    """Install the callback through which higher layers report the current strategy."""
    _hook[:] = [hook]


def get_call_context() -> CallContext:
    """Return the context of the caller; outside every strategy before a hook is set."""
    return _hook[0]() if _hook else _NOWHERE
