"""A function that changes each copy of a variable by itself, without aggregation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdist._replica import Frame, entered, innermost_explicit_frame
from jaxdist._values import PerReplica, Variable, own_value
from jaxdist.errors import ContextError


@dataclasses.dataclass(frozen=True)
class UpdateOfCopies:
    """A step that calls `fn` with a variable; `fn` changes only the replica's own copy."""

    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(
        self, variable: Variable, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function on one replica, or in a merge function for all of them."""
        frame = innermost_explicit_frame()
        if frame is None or frame.variables is None:
            raise ContextError(
                "A function for the copies of a variable was called outside a step.\n\n"
                "Each copy belongs to one replica.\n\n"
                "Call it through strategy.extended.update(variable, fn, args)."
            )
        layout = frame.strategy.layout
        own_args, own_kwargs = jax.tree.map(
            lambda x: own_value(x, layout) if isinstance(x, PerReplica) else x,
            (tuple(args), dict(kwargs or {})),
            is_leaf=lambda x: isinstance(x, (PerReplica, Variable)),
        )
        inside = Frame(frame.strategy, in_merge=True, variables=frame.variables.own_copies())
        with entered(inside):
            return self.fn(variable, *own_args, **own_kwargs)
