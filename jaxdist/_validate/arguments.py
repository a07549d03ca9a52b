"""Checks of arguments that are not arrays."""

import collections
import contextlib
import difflib
import logging
import math
import numbers
import operator
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxdist._called import name_argument, name_call, refuse, refuse_type
from jaxdist.errors import ArgumentError, ArgumentTypeError, CallArgumentsError, JaxdistError

_LOG = logging.getLogger("jaxdist")
_LOGGED: set[tuple[str, str]] = set()


def log_without_effect(argument: str, why: str) -> None:
    """Log that an argument has no effect, once for each caller and argument."""
    caller = name_call()
    if (caller, argument) not in _LOGGED:
        _LOGGED.add((caller, argument))
        _LOG.info("%s: %s has no effect: %s.", caller, argument, why)


def check_call_arguments(args: Any, kwargs: Any, more: Sequence[Any] = ()) -> None:
    """Check that `args` is a list or tuple, `kwargs` is a dict, and no further arguments follow.

    Args:
        args: Its argument `args`.
        kwargs: Its argument `kwargs`.
        more: The arguments after these, if they are more than the options.
    """
    if more:
        count = 2 + len(more)
        names = ", ".join("abcdefghij"[:count]) if count <= 10 else "a, b, ..."
        raise refuse(
            f"{count} positional arguments after the step: {show(args)}, {show(kwargs)}, ...",
            "The arguments of the step are one argument of the call, a list or tuple.",
            f"Pass all of them in one tuple: args=({names}), not {names}.",
            kind=CallArgumentsError,
        )
    # An array is iterable too: `args=x` would pass its rows as separate arguments.
    if not isinstance(args, (list, tuple)):
        way = "Wrap a single argument: args=(value,)."
        if kwargs is not None and not isinstance(kwargs, dict):
            # The user passed the arguments of the function one after the other, as in a call.
            way = "Pass all of them in one tuple: args=(a, b), not a, b."
        raise refuse(
            f"args={show(args)}.",
            "args is a list or tuple of arguments.",
            way,
            kind=CallArgumentsError,
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise refuse(
            f"kwargs={show(kwargs)}.",
            "kwargs is a dict of keyword arguments.",
            "Pass kwargs={'name': value}. Positional arguments are in one tuple: args=(a, b).",
            kind=CallArgumentsError,
        )


_PASS_THE_FUNCTION = (
    "Pass the function itself, and its arguments in args: "
    "strategy.run(step, args=(state, batch)), not strategy.run(step(state, batch))."
)


def check_callable(fn: Any, name: str = "fn", remedy: str | None = None) -> None:
    """Check that `fn` can be called; `name` is the name of the parameter."""
    # The usual mistake is to call the function and pass its result, hence the remedies.
    if not callable(fn):
        way = remedy or (
            _PASS_THE_FUNCTION if name == "fn" else f"Pass the function itself: {name}=f, not f()."
        )
        raise refuse_type(f"{name}={show(fn)}.", f"{name} is a function.", way)


def show(value: Any) -> str:
    """Return a value as error messages show it: its `repr`, shortened to one line, and its type."""
    # The `repr` of a user's class may raise an error, which would hide the one to be raised.
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    text = " ".join(text.split())
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
    return f"{text}, of type {type(value).__name__}"


MAX_SHOWN = 80


def format_lines(lines: list[str], most: int = 10) -> str:
    """Join the first `most` lines to one string, and add the number of lines left out."""
    more = len(lines) - most
    return "\n".join([*lines[:most], *([f"... and {more} more."] if more > 0 else [])])


def as_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; raise an error if it is not one."""
    # Every object has a truth value, so a misplaced argument would silently count as True.
    # Compare by name: NumPy's bool is not a subclass of Python's.
    if type(value).__name__ not in ("bool", "bool_"):
        raise refuse_type(
            f"{name}={show(value)}.",
            f"{name} is either True or False.",
            f"Pass {name}=True or {name}=False.",
        )
    return bool(value)


def refuse_choice(name: str, value: Any, known: Iterable[str]) -> ArgumentError:
    """Return the error for an unknown string, with the nearest known one."""
    choices = list(known)
    [near] = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    return refuse(
        f"{name}={show(value)}.", f"{name} is one of {choices}.", f"Pass {name}={near!r}."
    )


def as_integer(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    example: int | None = None,
    remedy: str | None = None,
    wrong_type: type[JaxdistError] = ArgumentTypeError,
) -> int:
    """Return `value` as an int between `least` and `most`; a bool raises `wrong_type`."""
    rule = f"{name} is one integer{_describe_range(least, most)}."
    shows = example if example is not None else least if least is not None else 0
    way = remedy or f"Pass for instance {name}={shows}."
    # `operator.index` accepts integers of NumPy and JAX and rejects floats, but accepts bools.
    try:
        if type(value).__name__ in ("bool", "bool_"):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise refuse(f"{name}={show(value)}.", rule, way, kind=wrong_type) from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise refuse(f"{name}={number}.", rule, way)
    return number


def as_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    is_finite: bool = True,
    example: float | None = None,
) -> float:
    """Return `value` as a float that is not nan, from `least` up."""
    rule = f"{name} is a {'finite ' if is_finite else ''}number{_describe_range(least, None)}."
    way = f"Pass for instance {name}={least if example is None else example}."
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse_type(f"{name}={show(value)}.", rule, way)
    wrong = math.isnan(value) or (is_finite and math.isinf(value))
    if wrong or (least is not None and value < least):
        raise refuse(f"{name}={value!r}.", rule, way)
    return float(value)


def _describe_range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" up to {most}"
    return f" from {least}" + (" up" if most is None else f" to {most}")


def check_instance(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str, remedy: str
) -> None:
    """Check that `value` is an instance of `kinds`, which the message describes as `what`."""
    if not isinstance(value, kinds):
        raise refuse_type(f"{name}={show(value)}.", f"{name} is {what}.", remedy)


def spell_dtype(dtype: Any) -> Any:
    """Return `dtype`, or `"bfloat16"` for the short name `"bf16"`, which NumPy does not know."""
    return "bfloat16" if isinstance(dtype, str) and dtype == "bf16" else dtype


def respell(name: Any, names: Iterable[Any]) -> Any:
    """Return the element of `names` that is a spelling of the dtype `name`, else `name`."""
    alike = (n for n in names if isinstance(name, str) and spell_dtype(n) == spell_dtype(name))
    return next(alike, name)


def check_text(name: str, value: Any, example: str) -> None:
    """Check that `value` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        kind = ArgumentError if isinstance(value, str) else ArgumentTypeError
        raise refuse(
            f"{name}={show(value)}.",
            f"{name} is a string that is not empty.",
            f"Pass for instance {name}={example!r}.",
            kind=kind,
        )


def as_path(name: str, value: Any, example: str) -> str:
    """Return `value` as a string with a path of the local file system.

    Raises:
        ArgumentTypeError: `value` is neither a string nor an `os.PathLike`.
        ArgumentError: The path is empty, has a null character, or a scheme other than `file`.
    """
    caller = name_call()
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise refuse_type(
            f"{name}={show(value)}.",
            f"{name} is a path: a string or a pathlib.Path.",
            f"Pass for instance {name}={example!r}.",
        )
    path = os.fspath(value)
    # `open` would reject both too, but only when the file is used, perhaps hours later.
    if not path or "\0" in path:
        raise refuse(
            f"{name}={path!r}, which names no file.",
            f"{name} is a path with at least one character, and no null character.",
            f"Pass for instance {name}={example!r}.",
        )
    return as_local_path(f"{caller} was given {name}={path!r}", path)


# `pathlib.Path("gs://bucket/run")` has one slash. A scheme of one letter is a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_MOUNTS = {"gs": "gcsfuse", "gcs": "gcsfuse", "s3": "mount-s3", "s3a": "mount-s3"}
# Without slashes or after a space, an address would become a local folder of that name.
_MISTYPED = re.compile(
    rf"(?P<space>\s+)[A-Za-z][A-Za-z0-9+.-]+:/|(?:{'|'.join((*_MOUNTS, 'file'))}):(?!/)",
    re.IGNORECASE,
)


def split_scheme(path: str) -> tuple[str, str]:
    """Return the scheme of a path in lower case, or "", and the path after the colon."""
    match = _SCHEME.match(path)
    return ("", path) if match is None else (match[1].lower(), path[match.end() - 1 :])


def as_local_path(found: str, path: str) -> str:
    """Return a path of the local file system; `file:///folder` is `/folder`.

    Args:
        found: The beginning of the error: the function and the path that it got.
        path: The path.

    Raises:
        ArgumentError: The path has another scheme, such as that of a bucket, or is an address that
            begins with a space or lacks its slashes.
    """
    if mistyped := _MISTYPED.match(path):
        space = mistyped["space"] is not None
        scheme, _, name = path.lstrip().partition(":")
        meant = f"{scheme}:{'' if space else '///' if scheme.lower() == 'file' else '//'}{name}"
        fault = "begins with a space" if space else f"has no // after {scheme}:"
        raise ArgumentError(
            f"{found}, which {fault}.\n\n"
            "An address is gs://BUCKET/FOLDER, s3://BUCKET/FOLDER or file:///folder.\n\n"
            f"Write {meant!r}, or './{path}' for a local file of this name."
        )
    # `urlsplit` would cut a name off at `#` or `?`.
    scheme, rest = split_scheme(path)
    if not scheme:
        return path
    host, slash, name = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if scheme == "file" and host in ("", "localhost") and slash:
        return urllib.parse.unquote(f"/{name}")
    mount = _MOUNTS.get(scheme)
    by = "" if mount is None else f", with {mount} for instance,"
    raise ArgumentError(
        f"{found}, which has the scheme {path[: len(scheme)]!r}.\n\n"
        "A path is one of the local file system, or file:///folder. Only directories of "
        "checkpoints and of runs can be in buckets, with gs:// or s3://.\n\n"
        f"Mount it{by} and pass the folder where it is mounted. Or pass a local folder, and copy "
        "that."
    )


def as_iterator(name: str, value: Any, what: str, remedy: str) -> Iterator[Any]:
    """Return `iter(value)`; raise an error for strings, dicts and values that are not iterable."""
    if not isinstance(value, (str, bytes, dict)) and getattr(value, "ndim", 1):
        with contextlib.suppress(TypeError):
            return iter(value)
    raise refuse_type(f"{name}={show(value)}.", f"{name} is {what}.", remedy)


def as_list(name: str, value: Any, what: str, remedy: str, kind: type = object) -> list[Any]:
    """Return `value` as a list of `kind`; strings, dicts, sets and single values raise an error."""
    # A set has no order, so its elements could belong to any replica.
    if isinstance(value, (set, frozenset)):
        raise refuse_type(f"{name}={show(value)}.", f"{name} is {what}.", remedy)
    listed = list(as_iterator(name, value, what, remedy))
    for entry in listed:
        check_instance(name, entry, kind, what, remedy)
    return listed


def check_keys(found: str, name: str, tree: Any) -> None:
    """Check that JAX can sort the keys of all dicts in a pytree; its own error names no path."""
    # JAX does not sort an OrderedDict, and other subclasses of dict are leaves.
    if type(tree) in (dict, collections.defaultdict):
        try:
            sorted(tree)
        except TypeError as error:
            raise ArgumentError(
                f"{found} {name_argument(name)}, a dict with the keys "
                f"{', '.join(map(repr, tree))}: {error}.\n\n"
                "JAX sorts the keys of each dict, so they can be compared with each other.\n\n"
                "Use strings as keys, or numbers, in one dict."
            ) from error
    if type(tree) in (dict, collections.defaultdict, collections.OrderedDict, list, tuple):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            check_keys(found, f"{name}[{key!r}]", part)


def check_size(name: str, value: Any) -> float | None:
    """Return a number of bytes as a float; None, which means the cost model's, is unchanged."""
    if value is None:
        return None
    rule = f"{name} is a number of bytes, from 0 up, or None for that of the cost model."
    shows = f"{rule}\n\nPass for instance {name}=0, which cuts every array that can be cut."
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name_call()} was given {name}={show(value)}.\n\n{shows}")
    # `not value >= 0` also rejects nan.
    if not value >= 0:
        raise ArgumentError(f"{name_call()} was given {name}={value!r}.\n\n{shows}")
    return float(value)


class ErrorNote:
    """A context manager that adds a note to an error, on where the user passed the wrong value.

    It is for messages about the content of files; the commands print such notes.
    """

    __slots__ = ("_note",)

    def __init__(self, note: str) -> None:
        self._note = note

    def __enter__(self) -> None:
        """Do nothing on entry."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, JaxdistError):
            error.add_note(self._note)
