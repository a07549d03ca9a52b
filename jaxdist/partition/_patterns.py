"""Patterns over the paths of leaves."""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable

_BRACES = re.compile(r"\{([^{}]*)\}")


def is_match(pattern: str, path: str) -> bool:
    """Whether a pattern matches the end of a path, or all of it where it starts with `/`.

    Segment by segment: `*` and `?` as in file names, `{a,b}` one of several, `**` any number of
    segments.
    """
    own = tuple(path.split("/"))
    return any(_is_match(p, own) for p in _expand_braces(pattern))


@functools.lru_cache(maxsize=4096)
def _expand_braces(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The pattern without braces, as segments; one that matches the end starts with `**`."""
    found = _BRACES.search(pattern)
    if found is None:
        anchored = pattern.startswith("/")
        parts = tuple(pattern.strip("/").split("/"))
        return (parts if anchored else ("**", *parts),)
    before, after = pattern[: found.start()], pattern[found.end() :]
    options = (_expand_braces(before + option + after) for option in found[1].split(","))
    return tuple(p for option in options for p in option)


@functools.lru_cache(maxsize=65536)
def _is_match(parts: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not parts:
        return not path
    head, *rest = parts
    if head == "**":
        return any(_is_match(tuple(rest), path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], head) and _is_match(tuple(rest), path[1:])


def find_nearest(wanted: str, known: Iterable[str]) -> str | None:
    """Of these paths or patterns, the one most like another; None where there are none."""
    plain = re.sub(r"[{}*/]+", "/", wanted).strip("/")
    depth = wanted.strip("/").count("/") + 1

    def likeness(other: str) -> tuple[float, str]:
        end = "/".join(other.split("/")[-depth:])
        ratios = (
            difflib.SequenceMatcher(None, plain, re.sub(r"[{}*/]+", "/", x).strip("/")).ratio()
            for x in (end, other)
        )
        return (-max(ratios), other)

    return min(known, key=likeness, default=None)
