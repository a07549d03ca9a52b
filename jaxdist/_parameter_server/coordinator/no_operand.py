"""`NoOperand`: a result that is no array until it was fetched."""

from typing import Any, NoReturn

from jaxdist._values import Arithmetic
from jaxdist.errors import ArgumentTypeError, MissingNameError

_RULE = (
    "The function runs on a worker, and its result is here when it was fetched.\n\n"
    "Call value.fetch() or coordinator.fetch(value), which wait for the result."
)


class NoOperand(Arithmetic):
    """A base class whose operators, conversions and names of arrays are named errors."""

    __slots__ = ()

    def _operand(self) -> NoReturn:
        raise ArgumentTypeError(
            f"{self!r}, the result of a scheduled function, was used as an array or a number."
            f"\n\n{_RULE}"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._operand()

    def __float__(self) -> NoReturn:
        self._operand()

    def __int__(self) -> NoReturn:
        self._operand()

    def __index__(self) -> NoReturn:
        self._operand()

    def __complex__(self) -> NoReturn:
        self._operand()

    def __format__(self, spec: str) -> str:
        if spec:
            self._operand()
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingNameError(
            f"{self!r}, the result of a scheduled function, has no attribute {name!r}.\n\n{_RULE}",
            name=name,
            obj=self,
        )
