"""Where each array of a model is in a weight file; all that does not fit is one error."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist._buckets import Place
from jaxdist._called import name_call
from jaxdist._validate import format_lines
from jaxdist._weights.files import Stored
from jaxdist._weights.leaves import ModelWeight
from jaxdist._weights.mapping import Source, is_ignored
from jaxdist._weights.slices import Parts, find_part
from jaxdist.errors import CheckpointError


def match(
    place: Place,
    weights: Sequence[ModelWeight],
    sources: Mapping[str, Source],
    stored: Mapping[str, Stored],
    ignore: Sequence[str],
) -> dict[str, Parts]:
    """Return where the arrays of the model are in the file, or raise one error for all names."""
    found: dict[str, Parts] = {}
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    owners: dict[str, str] = {}
    for weight in weights:
        source = sources[weight.path]
        names = [part.name for part in source.parts]
        if not source.is_given and names[0] not in stored and weight.path in stored:
            names = [weight.path]
        used.update(names)
        if not source.is_given and owners.setdefault(names[0], weight.path) != weight.path:
            problems.append(f"{weight.path}: {owners[names[0]]} has the name {names[0]!r}, too")
            continue
        absent = [name for name in names if name not in stored]
        if absent:
            problems.append(f"{weight.path}: the file has no {_describe_missing(absent, stored)}")
            missing.append(weight.path)
            continue
        made = _find_parts(weight, source, [stored[name] for name in names])
        if isinstance(made, str):
            problems.append(f"{weight.path}: {made}")
        else:
            found[weight.path] = made
    unknown = sorted(name for name in stored.keys() - used if not is_ignored(name, ignore))
    if problems or unknown:
        more = [f"Not used of the file: {_join(unknown)}."] if unknown else []
        count = len(problems) + len(unknown)
        raise CheckpointError(
            f"{name_call()}: {count} array(s) do not match those of {place}.\n"
            f"{format_lines([*problems, *more], most=20)}\n\n"
            "Each array of the model is made of arrays of the file, and each of these is used. "
            "Without a mapping, the path a/b is the name a.b.\n\n"
            f"{_make_remedy(missing, unknown)}"
        )
    return found


def _join(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _describe_missing(missing: Sequence[str], stored: Mapping[str, Stored]) -> str:
    nearest = difflib.get_close_matches(missing[0], stored, n=1, cutoff=0.5)
    return f"{missing[0]!r}" + (f"; the nearest name is {nearest[0]!r}" if nearest else "")


def _make_remedy(missing: Sequence[str], unknown: Sequence[str]) -> str:
    ways = []
    if missing:
        name = unknown[0] if unknown else "NAME"
        ways.append(
            f"Pass mapping={{{missing[0]!r}: {name!r}}}, or {{{missing[0]!r}: None}} for an array "
            "that stays as it is."
        )
    if unknown:
        ways.append(f"Pass ignore=[{unknown[0]!r}] for an array that the model does not have.")
    return " ".join(ways) or "Pass a mapping with training.Weight: .T, .reshape or an index."


def _find_parts(weight: ModelWeight, source: Source, stored: Sequence[Stored]) -> Parts | str:
    """Return the parts of an array of the model, or what does not fit."""
    parts = []
    for array, change in zip(stored, source.parts, strict=True):
        try:
            parts.append(find_part(array, change))
        except (ValueError, IndexError) as error:
            return f"{change} of {list(array.shape)}: {error}"
    shapes = [part.shape for part in parts]
    if len(set(shapes)) > 1:
        return f"the rows of {source} have the shapes {[list(s) for s in shapes]}"
    shape = (len(parts), *shapes[0]) if source.is_stacked else shapes[0]
    if shape != weight.shape:
        turned = shape[::-1] == weight.shape and not source.is_stacked
        hint = ": add .T" if turned else ""
        return f"{list(weight.shape)}, and {source} is {list(shape)}{hint}"
    kinds = {find_kind(array.dtype) for array in stored}
    if kinds != {find_kind(weight.dtype)}:
        return f"{weight.dtype}, and {source} is {stored[0].dtype}"
    return Parts(parts, source.is_stacked)


def find_kind(dtype: np.dtype) -> Any:
    """Return the kind within which numbers are converted: floats, integers, bools or complex."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)
