"""Patterns for paths of leaves."""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable

TABLE = "embedding"  # the parameter of `nnx.Embed`: [rows, columns]
_BRACES = re.compile(r"\{([^{}]*)\}")


def is_match(pattern: str, path: str) -> bool:
    """Whether a pattern matches the end of a path, or the whole path if it starts with `/`.

    A pattern is matched segment by segment. `*` and `?` are wildcards as for file names, `{a,b}`
    matches any of several strings, and `**` any number of segments.
    """
    own = tuple(path.split("/"))
    return any(_is_match(p, own) for p in _expand_braces(pattern))


@functools.lru_cache(maxsize=4096)
def _expand_braces(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Return the patterns without braces, as segments; `**` is in front unless `/` anchors them."""
    found = _BRACES.search(pattern)
    if found is None:
        anchored = pattern.startswith("/")
        parts = tuple(pattern.strip("/").split("/"))
        return (parts if anchored else ("**", *parts),)
    # The regular expression finds innermost braces, so recursion also expands nested ones.
    before, after = pattern[: found.start()], pattern[found.end() :]
    options = (_expand_braces(before + option + after) for option in found[1].split(","))
    return tuple(p for option in options for p in option)


# Every leaf is matched against every rule, and `**` tries all splits of a path. The cache keeps
# the results for ends of paths, which different layers have in common.
@functools.lru_cache(maxsize=65536)
def _is_match(parts: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not parts:
        return not path
    head, *rest = parts
    if head == "**":
        return any(_is_match(tuple(rest), path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], head) and _is_match(tuple(rest), path[1:])


def find_nearest(wanted: str, known: Iterable[str]) -> str | None:
    """Return the path or pattern in `known` most like `wanted`, for messages; None if empty."""
    # Compare the last segments as well as all segments: a pattern matches the end of a path.
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
