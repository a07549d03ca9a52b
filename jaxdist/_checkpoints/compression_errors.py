"""Compression errors of `compressed_update`, restored on another number of replicas.

`compressed_update` keeps what it has not sent yet in two arrays, `given` and `summed`. Their shapes
depend on the number of replicas.
"""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdist._update import can_be_errors, move_errors

_LOG = logging.getLogger("jaxdist")
_GIVEN, _SUMMED = "given", "summed"


def find_moved_pairs(
    records: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the names of each pair of error arrays that was saved with other replicas."""
    found = []
    for given in wanted:
        parts = given.split(".")
        # Every part of the path may be the field of the state: a module may be called "given", too.
        for place in (i for i, part in enumerate(parts) if part == _GIVEN):
            summed = ".".join([*parts[:place], _SUMMED, *parts[place + 1 :]])
            pair = (given, summed)
            if not all(n in records and n in wanted for n in pair):
                continue
            saved = (tuple(records[given]["shape"]), tuple(records[summed]["shape"]))
            now = (tuple(wanted[given].shape), tuple(wanted[summed].shape))
            if saved != now and can_be_errors(saved) and can_be_errors(now):
                found.append(pair)
    return found


def make_saved_shape(records: Mapping[str, Any], name: str) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf as it was saved."""
    return jax.ShapeDtypeStruct(tuple(records[name]["shape"]), records[name]["dtype"])


def divide_errors(
    arrays: dict[str, Any], pairs: list[tuple[str, str]], wanted: Mapping[str, Any]
) -> None:
    """Divide the errors in `arrays`, in place, among the replicas of this run."""
    for pair in pairs:
        given, summed = (np.asarray(arrays[n]) for n in pair)
        shapes = (tuple(wanted[pair[0]].shape), tuple(wanted[pair[1]].shape))
        arrays.update(zip(pair, move_errors(given, summed, shapes), strict=True))
        _LOG.info(
            "%s: what compressed_update had not sent yet was kept by %d replicas, and is divided "
            "among %d",
            pair[0],
            given.shape[0],
            shapes[0][0],
        )
