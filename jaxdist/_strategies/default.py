"""The strategy where no other is current."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, final

import jax

from jaxdist import _mesh, _replica
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.where_called import refuse_mixing
from jaxdist.errors import ContextError


@final
class DefaultStrategy(Strategy):
    """One replica on JAX's default device; `get_strategy()` outside every scope."""

    @property
    def _unwraps(self) -> bool:
        return True

    def __init__(self) -> None:
        self._set_up(_mesh.build([jax.local_devices()[0]]))

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[Strategy]:
        """A block in which nothing changes; refused under another strategy's scope."""
        frame = _replica.current_frame()
        if frame is not None and frame.strategy is not self:
            refuse_mixing(self, "scope", frame)
        yield self

    def __copy__(self) -> NoReturn:
        raise _is_one("copy.copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise _is_one("copy.deepcopy")


def _is_one(copy: str) -> ContextError:
    return ContextError(
        f"{copy} was called on the DefaultStrategy.\n\n"
        "The default strategy is one object for the whole process.\n\n"
        "Use jaxdist.get_strategy() wherever it is needed."
    )
