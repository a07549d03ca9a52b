"""Access to variables, and the context of the call: outside a step, or inside a traced one."""

import dataclasses
import enum
from typing import Any, Protocol

from jaxdist._hooks import GET_CALL_CONTEXT
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

    def update(self, variable: Any, change: Change, value: Any, *, read_value: bool) -> Any:
        """Change `variable`, and return its new value if `read_value`."""
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


def get_call_context() -> CallContext:
    """Return the context of the caller."""
    return GET_CALL_CONTEXT.call()
