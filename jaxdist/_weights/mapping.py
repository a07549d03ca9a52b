"""Which arrays of a weight file each array of a model is made of."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxdist._called import refuse, refuse_type
from jaxdist._validate import as_list, check_text, format_lines, show
from jaxdist._weights.weight import Weight, rename

Mapped: TypeAlias = Mapping[str, "str | Weight | Sequence[str | Weight] | None"]


@dataclasses.dataclass(frozen=True)
class Source:
    """What an array of a model is made of.

    Attributes:
        parts: Arrays of the file.
        is_stacked: Whether the parts are the rows of the model's array, along a new dim 0.
        is_given: Whether the mapping names them. Otherwise it is the one of the same name.
    """

    parts: tuple[Weight, ...]
    is_stacked: bool
    is_given: bool

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.parts))
        return f"[{shown}]" if self.is_stacked else shown


def find_sources(paths: Sequence[str], mapping: Any) -> dict[str, Source]:
    """Return the source of each array of the model, by path; none for a path mapped to None.

    Raises:
        ArgumentTypeError: The mapping is not a dict, or has a value of another type.
        ArgumentError: A pattern matches no path, or two match one; or a name has another number of
            `*` than its pattern.
    """
    pairs = _read(mapping)
    found: dict[str, list[tuple[str, Any, tuple[str, ...]]]] = {path: [] for path in paths}
    for pattern, value in pairs:
        compiled = _compile(pattern)
        matches = {path: match for path in paths if (match := compiled.fullmatch(path))}
        if not matches:
            raise refuse(
                f"mapping with the pattern {pattern!r}, which matches no array of the model.",
                "A pattern matches the end of at least one path. The paths are:\n"
                f"{format_lines(list(paths))}",
                "Correct the pattern, or leave it out.",
            )
        for path, match in matches.items():
            found[path].append((pattern, value, match.groups()))
    several = [f"{p}: {[x[0] for x in entries]}" for p, entries in found.items() if entries[1:]]
    if several:
        raise refuse(
            f"mapping with {len(several)} path(s) that two patterns match:\n"
            f"{format_lines(several)}",
            "Each array of the model has one source, and the order of a mapping does not matter.",
            "Make the patterns longer, so that each path matches one of them.",
        )
    sources = {}
    for path, entries in found.items():
        if not entries:
            sources[path] = Source((Weight(path.replace("/", ".")),), False, False)
        elif (value := entries[0][1]) is not None:
            pattern, _, groups = entries[0]
            is_list = isinstance(value, list)
            parts = tuple(_fill(pattern, x, groups) for x in (value if is_list else [value]))
            sources[path] = Source(parts, is_list, True)
    return sources


def _read(mapping: Any) -> list[tuple[str, Any]]:
    if not isinstance(mapping, Mapping):
        raise refuse_type(f"mapping={show(mapping)}.", "mapping is a dict.", _REMEDY)
    pairs: list[tuple[str, Any]] = []
    for pattern, value in mapping.items():
        if not isinstance(pattern, str) or not pattern.strip("/"):
            raise refuse_type(
                f"mapping with the key {show(pattern)}.",
                "A key is a pattern of paths of the model.",
                _REMEDY,
            )
        if isinstance(value, (list, tuple)):
            what = f"names and training.Weights for {pattern!r}"
            read = [_as_weight(pattern, x) for x in as_list("mapping", value, what, _REMEDY)]
            if not read:
                raise refuse(
                    f"mapping with an empty list for {pattern!r}.",
                    "A list has an array of the file for each row of the model's array.",
                    _REMEDY,
                )
            pairs.append((pattern, read))
        else:
            pairs.append((pattern, None if value is None else _as_weight(pattern, value)))
    return pairs


_REMEDY = 'Pass for instance {"layers/*/up/kernel": training.Weight("h.*.mlp.up.weight").T}.'


def _as_weight(pattern: str, value: Any) -> Weight:
    if isinstance(value, Weight):
        return value
    if isinstance(value, str) and value:
        return Weight(value)
    raise refuse_type(
        f"mapping with {show(value)} for {pattern!r}.",
        "A value is a name of the file, a training.Weight, a list of these, or None for an array "
        "that stays as it is.",
        _REMEDY,
    )


def _fill(pattern: str, value: Weight, groups: tuple[str, ...]) -> Weight:
    texts = value.name.split("*")
    if len(texts) == 1 and not groups:
        return value
    if len(texts) - 1 != len(groups):
        raise refuse(
            f"mapping with {str(value)!r} for {pattern!r}.",
            f"The name has {len(texts) - 1} `*`, and the pattern has {len(groups)} `*` or "
            "`{a,b}`. Each `*` of the name stands for what one of these matched.",
            "Write as many. For one array of the file that several arrays of the model share, "
            "write an entry for each path.",
        )
    filled = texts[0] + "".join(a + b for a, b in zip(groups, texts[1:], strict=True))
    return rename(value, filled)


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern of `partition.Rules`, with a group for `*` and `{a,b}`."""
    start = "" if pattern.startswith("/") else "(?:.*/)?"
    parts = []
    for token in _TOKENS.findall(pattern.strip("/")):
        if token in _EXPRESSIONS:
            parts.append(_EXPRESSIONS[token])
        elif token.startswith("{"):
            parts.append(f"({'|'.join(map(re.escape, token[1:-1].split(',')))})")
        else:
            parts.append(re.escape(token))
    return re.compile(start + "".join(parts))


_MANY = r"/\*\*(?=/|$)"
_TOKENS = re.compile(rf"{_MANY}|\*\*/|\*\*|\*|\?|\{{[^{{}}]*\}}|(?:(?!{_MANY})[^*?{{}}])+|[{{}}]")
_EXPRESSIONS = {
    "/**": "(?:/.*)?",
    "**/": "(?:.*/)?",
    "**": ".*",
    "*": "([^/]*)",
    "?": "[^/]",
}


def as_ignored(ignore: Any) -> list[str]:
    """Return the argument `ignore` as a list of patterns."""
    patterns = as_list("ignore", ignore, "a list of names", "Pass ['lm_head.weight'].")
    for pattern in patterns:
        check_text("ignore", pattern, "lm_head.weight")
    return patterns


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name of the file matches a pattern, in which `*` is any text."""
    return any(
        re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) for pattern in patterns
    )
