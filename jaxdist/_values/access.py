"""Access to variables: their modes, the context of a call, and the methods for checkpoints."""

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


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    Members:
        AUTO: The strategy decides; it uses `ON_WRITE`.
        NONE: One copy. Only outside every strategy.
        ON_WRITE: All copies are always equal: one mirrored array.
        ON_READ: Every replica has its own value; reading across replicas combines the values.

    Example:
        >>> VariableSynchronization.ON_READ.name
        'ON_READ'

    Source:
        `tf.VariableSynchronization`.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas assign to one variable become one value.

    Members:
        NONE: The values must be equal already.
        SUM: The sum of the values.
        MEAN: The mean of the values; for floats only.
        ONLY_FIRST_REPLICA: The value of the first replica of the whole job.

    Example:
        >>> VariableAggregation.SUM.name
        'SUM'

    Source:
        `tf.VariableAggregation`.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class Assignable:
    """A base class of variables, which are saved as one plain array.

    A checkpoint saves `read_value()`, and restores by `assign(array)`. It does not record how the
    value is placed, so a variable may be restored onto other devices or another number of shards.
    """

    __slots__ = ()

    def read_value(self) -> Any:
        """Return the value as one array."""
        raise NotImplementedError

    def assign(self, value: Any) -> Any:
        """Replace the value with an array of the same shape."""
        raise NotImplementedError
