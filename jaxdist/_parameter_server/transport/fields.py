"""Fields of a message: checked, and as bytes."""

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from jaxdist._validate import show
from jaxdist.errors import ArgumentError, ArgumentTypeError

_PLAIN = (str, int, float, bool, type(None))
# Values that are always right. Of a hundred names, their places would take the most time.
_QUICK = frozenset((str, float, bool, type(None)))
_DEEPEST = 64


def check_fields(caller: str, fields: Mapping[str, Any]) -> None:
    """Raise if fields hold anything that would arrive as something else, or not at all.

    Raises:
        ArgumentTypeError: A value is none of the types that a message takes, or a key is no text.
        ArgumentError: An integer has more than 64 bits, or values are nested too deeply.
    """
    if type(fields) is not dict:
        _refuse(caller, "fields", fields)
    _check(caller, "fields", fields, 0)


def copy_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the receiver of these fields gets, where no bytes are sent."""
    copied: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(fields))
    return copied


def _check(caller: str, name: str, value: Any, depth: int) -> None:
    # Exact types: a subclass of int or str would arrive as the plain one.
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and not -(2**63) <= value < 2**64:
            raise ArgumentError(
                f"{caller} was given a message with {name}={show(value)}.\n\n"
                "An integer of a message has at most 64 bits.\n\n"
                "Pass it as a text: str(value)."
            )
        return
    if depth == _DEEPEST:
        raise ArgumentError(
            f"{caller} was given a message with {name}, which is {depth + 1} levels deep.\n\n"
            f"Fields have at most {_DEEPEST} levels.\n\nPass flatter lists and dicts."
        )
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ArgumentTypeError(
                    f"{caller} was given a message with the key {show(key)} in {name}.\n\n"
                    "Keys of a message are texts.\n\nPass for instance {'step': 1}."
                )
            if type(item) not in _QUICK:
                _check(caller, f"{name}[{key!r}]", item, depth + 1)
    elif kind is list:
        for number, item in enumerate(value):
            if type(item) not in _QUICK:
                _check(caller, f"{name}[{number}]", item, depth + 1)
    else:
        _refuse(caller, name, value)


def _refuse(caller: str, name: str, value: Any) -> NoReturn:
    raise ArgumentTypeError(
        f"{caller} was given a message with {name}={show(value)}.\n\n"
        "Fields of a message are a dict of texts, numbers, True, False, None, lists and dicts.\n\n"
        "Pass arrays in arrays, a tuple as a list, and a number of NumPy as value.item()."
    )
