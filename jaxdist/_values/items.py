"""Item assignment, `x[0] = 1`, on values that are changed by methods or not at all."""

from typing import Any, NamedTuple, NoReturn

from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError


class Instead(NamedTuple):
    """Why elements cannot be assigned, and what to call."""

    rule: str
    remedy: str


class NoItemAssignment:
    """A base class that refuses `x[index] = value` and `del x[index]` by name."""

    __slots__ = ()

    _instead = Instead(
        "It stands for an array of JAX, whose elements do not change.",
        "Make another array: jnp.asarray(value).at[index].set(new).",
    )

    def _name_with_items(self) -> str:
        """Return what errors call this object."""
        return type(self).__name__

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_item(f"[{index!r}] = {show(value)}")

    def __delitem__(self, index: Any) -> None:
        self._refuse_item(f"del [{index!r}]")

    def _refuse_item(self, statement: str) -> NoReturn:
        raise ArgumentTypeError(
            f"{self._name_with_items()} was changed by index: {statement}.\n\n"
            f"{self._instead.rule}\n\n{self._instead.remedy}"
        )
