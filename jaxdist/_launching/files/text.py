"""Writes YAML."""

import json
import re
from typing import Any

# Any other string is written in quotes. Words such as `yes` and `null` would not be strings.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def write_yaml(value: Any) -> str:
    """Return dicts, lists, strings, numbers and booleans as a YAML document.

    Strings of several lines are written as blocks, which are easier to read.
    """
    return "\n".join(_write(value, 0)) + "\n"


def _write(value: Any, indent: int) -> list[str]:
    space = " " * indent
    lines: list[str] = []
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            lines += _write_entry(f"{space}{_write_text(key)}:", entry, indent)
    elif isinstance(value, list) and value:
        for entry in value:
            if _is_full(entry):
                first, *rest = _write(entry, indent + 2)
                lines += [f"{space}- {first[indent + 2 :]}", *rest]
            else:
                lines.append(f"{space}- {_write_scalar(entry, indent)}")
    else:
        lines.append(space + _write_scalar(value, indent))
    return lines


def _is_full(value: Any) -> bool:
    return bool(value) and not isinstance(value, str | int | float)


def _write_entry(start: str, entry: Any, indent: int) -> list[str]:
    if _is_full(entry):
        return [start, *_write(entry, indent + 2)]
    return [f"{start} {_write_scalar(entry, indent)}"]


def _write_scalar(value: Any, indent: int) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    lines = value.split("\n")
    if len(lines) > 1 and all(line.replace("\t", "").isprintable() for line in lines):
        # `2` is the indentation of the block: its first line may begin with spaces.
        end = "-" if lines[-1] else "+" if not lines[-2] else ""
        body = lines if lines[-1] else lines[:-1]
        space = " " * (indent + 2)
        return "\n".join([f"|2{end}", *(space + line if line else "" for line in body)])
    return _write_text(value)


def _write_text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    written = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in value)
    return '"' + "".join({'"': '\\"', "\\": "\\\\"}.get(c, c) for c in written) + '"'
