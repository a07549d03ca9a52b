"""Names the public call that an error is about.

A public function is registered with the name that its users know; functions below it that check
arguments do not pass that name along. When one of them refuses an argument, the name is that of
the innermost registered function among its callers. A registered function is the function itself,
without a wrapper, so registering costs nothing at a call. `name_call` looks at all callers, about
0.1 us for each: it is for errors.

A function that runs later, in a thread or as a callback, has other callers by then. So its maker
keeps the name (`caller = name_call()`), and it calls `call_as(caller, ...)`.
"""

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from jaxdist.errors import ArgumentError, ArgumentTypeError, JaxdistError

Name: TypeAlias = str | Callable[..., str]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Error = TypeVar("_Error", bound=JaxdistError)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class _Call:
    code: types.CodeType
    name: Name
    replaces: Name | None


# By identity: code objects of two files are equal where their lines, names and bytecode are.
_CALLS: dict[int, _Call] = {}


def called(name: Name, replaces: Name | None = None) -> Callable[[_Function], _Function]:
    """Register a function under the name that its users know.

    It stands next to the function, below `classmethod` and the like, which wrap it.

    Args:
        name: The name, or a function that makes it from arguments or variables of the registered
            function with the same names, such as `lambda self: type(self).__name__`.
        replaces: The name of another public function, which this one calls. All errors below this
            call that would have that name get the name of this one. Objects that are made below
            it and keep `name_call()` keep the name of this one, too.
    """

    def register(fn: _Function) -> _Function:
        code: types.CodeType = fn.__code__
        known = _CALLS.get(id(code))
        if known is not None and isinstance(name, str) and known.name != name:
            # Functions that one `def` makes share their code, and so their name.
            raise RuntimeError(f"{fn.__qualname__} is registered as {known.name!r} and {name!r}")
        _CALLS[id(code)] = _Call(code, name, replaces)
        return fn

    return register


@called(lambda name: name)
def call_as(name: str, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call `fn`, and name this call `name` in its errors.

    It is for one call of several in a function, such as a check of a part of an argument.
    """
    return fn(*args, **kwargs)


def name_call() -> str:
    """Return the name of the innermost registered function that is being called.

    Where none is registered, it is the name of the function that calls this one.
    """
    return _find_name(sys._getframe(1))


@overload
def refuse(found: str, rule: str, remedy: str) -> ArgumentError: ...
@overload
def refuse(found: str, rule: str, remedy: str, kind: type[_Error]) -> _Error: ...
def refuse(
    found: str, rule: str, remedy: str, kind: type[JaxdistError] = ArgumentError
) -> JaxdistError:
    """Return the error of a call that got a wrong argument.

    Args:
        found: What the call was given, with the period or the list that ends the sentence.
        rule: What the argument has to be.
        remedy: What to pass instead.
        kind: The class of the error.
    """
    name = _find_name(sys._getframe(1))
    return kind(f"{name} was given {found}\n\n{rule}\n\n{remedy}")


def refuse_type(found: str, rule: str, remedy: str) -> ArgumentTypeError:
    """Return the error of a call that got an argument of a wrong type; see `refuse`."""
    name = _find_name(sys._getframe(1))
    return ArgumentTypeError(f"{name} was given {found}\n\n{rule}\n\n{remedy}")


def _find_name(inner: types.FrameType) -> str:
    name: str | None = None
    frame: types.FrameType | None = inner
    while frame is not None:
        call = _CALLS.get(id(frame.f_code))
        if call is not None and (name is None or name == _read(call.replaces, frame)):
            name = _read(call.name, frame)
        frame = frame.f_back
    return inner.f_code.co_qualname if name is None else name


def _read(name: Name | None, frame: types.FrameType) -> str | None:
    if name is None or isinstance(name, str):
        return name
    code = name.__code__
    given = frame.f_locals
    return name(*(given[n] for n in code.co_varnames[: code.co_argcount]))
