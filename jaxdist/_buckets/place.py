"""Arguments that name a local folder or a folder in a bucket."""

import os
from pathlib import Path
from typing import Any, TypeAlias

from jaxdist._buckets.path import SCHEMES, BucketPath
from jaxdist._called import refuse
from jaxdist._validate import as_path, split_scheme

Place: TypeAlias = Path | BucketPath


def is_in_bucket(path: str) -> bool:
    """Return whether a path has the scheme of a bucket."""
    return split_scheme(path)[0] in SCHEMES


def as_address(name: str, value: Any, example: str) -> str:
    """Return a local path as it was given, and an address in a bucket without a last slash.

    Raises:
        ArgumentTypeError: As `as_place`.
        ArgumentError: As `as_place`.
    """
    place = as_place(name, value, example)
    return str(place) if isinstance(place, BucketPath) else as_path(name, value, example)


def as_place(name: str, value: Any, example: str) -> Place:
    """Return a `BucketPath` for `gs://` and `s3://`, and an absolute local path otherwise.

    Raises:
        ArgumentTypeError: `value` is neither a string, an `os.PathLike` nor a `BucketPath`.
        ArgumentError: The path is empty, has another scheme, or names no bucket.
    """
    if isinstance(value, BucketPath):
        return value
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    scheme, rest = split_scheme(text) if isinstance(text, str) else ("", "")
    if scheme not in SCHEMES:
        return Path(as_path(name, value, example)).absolute()
    # `pathlib.Path("gs://bucket")` has one slash.
    bucket, _, key = rest.removeprefix("//" if rest.startswith("//") else "/").partition("/")
    if not bucket or "\0" in rest:
        raise refuse(
            f"{name}={text!r}, which names no bucket.",
            f"An address in a bucket is {scheme}://BUCKET/FOLDER.",
            f"Pass for instance {name}='{scheme}://bucket/{example}'.",
        )
    return BucketPath(scheme, bucket, key)


def shorten_place(place: Place) -> str:
    """Return a path for the user: relative to the current directory if it is below it."""
    if isinstance(place, BucketPath):
        return str(place)
    here = Path.cwd()
    return str(place.relative_to(here) if place.is_relative_to(here) else place)
