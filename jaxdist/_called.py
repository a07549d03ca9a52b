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
from collections.abc import Callable, Mapping
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
    name: Name | None
    replaces: tuple[Name, ...]
    arguments: Mapping[str, Name]


# By identity: code objects of two files are equal where their lines, names and bytecode are.
_CALLS: dict[int, _Call] = {}


def called(
    name: Name | None,
    replaces: Name | tuple[Name, ...] = (),
    arguments: Mapping[str, Name] | None = None,
) -> Callable[[_Function], _Function]:
    """Register a function under the name that its users know.

    It stands next to the function, below `classmethod` and the like, which wrap it.

    Args:
        name: The name, or a function that makes it from arguments or variables of the registered
            function with the same names, such as `lambda self: type(self).__name__`. None is for
            a function with `replaces` that has the name of its caller.
        replaces: The names of other public functions, which this one calls. All errors below this
            call that would have such a name get the name of this one. Objects that are made below
            it and keep `name_call()` keep the name of this one, too.
        arguments: Names of arguments that this function passes to those under other names. Errors
            whose argument begins with a key begin with its value.
    """
    replaced = replaces if isinstance(replaces, tuple) else (replaces,)

    def register(fn: _Function) -> _Function:
        code: types.CodeType = fn.__code__
        known = _CALLS.get(id(code))
        if known is not None and isinstance(name, str) and known.name != name:
            # Functions that one `def` makes share their code, and so their name.
            raise RuntimeError(f"{fn.__qualname__} is registered as {known.name!r} and {name!r}")
        _CALLS[id(code)] = _Call(code, name, replaced, arguments or {})
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
    return _find_call(sys._getframe(1)).name


def name_argument(path: str, of: str | None = None) -> str:
    """Return the path of an argument with the name that the user gave it; see `called`.

    Args:
        path: The path, which begins with the name of the argument.
        of: The name of the function that was called with it; None for that of `name_call`.
    """
    return _find_call(sys._getframe(1), of).rename(path)


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
    call = _find_call(sys._getframe(1))
    return kind(f"{call.name} was given {call.rename(found)}\n\n{rule}\n\n{remedy}")


def refuse_type(found: str, rule: str, remedy: str) -> ArgumentTypeError:
    """Return the error of a call that got an argument of a wrong type; see `refuse`."""
    call = _find_call(sys._getframe(1))
    return ArgumentTypeError(f"{call.name} was given {call.rename(found)}\n\n{rule}\n\n{remedy}")


@dataclasses.dataclass(frozen=True)
class _Found:
    name: str
    # From the inner function to the outer one.
    renames: tuple[Mapping[str, str], ...]

    def rename(self, path: str) -> str:
        for names in self.renames:
            for inner, outer in names.items():
                if path.startswith(inner):
                    path = outer + path.removeprefix(inner)
                    break
        return path


def _find_call(inner: types.FrameType, name: str | None = None) -> _Found:
    known = inner.f_code.co_qualname
    renames: list[Mapping[str, str]] = []
    frame: types.FrameType | None = inner
    while frame is not None:
        call = _CALLS.get(id(frame.f_code))
        if call is not None:
            is_replaced = name is not None and any(name == _read(r, frame) for r in call.replaces)
            if is_replaced:
                renames.append({a: _read(b, frame) for a, b in call.arguments.items()})
            if is_replaced or name is None:
                known = known if name is None else name
                name = None if call.name is None else _read(call.name, frame)
        frame = frame.f_back
    return _Found(known if name is None else name, tuple(renames))


def _read(name: Name, frame: types.FrameType) -> str:
    if isinstance(name, str):
        return name
    code = name.__code__
    given = frame.f_locals
    return name(*(given[n] for n in code.co_varnames[: code.co_argcount]))
