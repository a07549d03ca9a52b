"""Replaces a file or an object atomically, and reads JSON that may be damaged."""

import json
import os
from collections.abc import Iterable
from typing import Any

from jaxdist._buckets import BucketPath, Place
from jaxdist.errors import BucketError


def replace_file(path: Place, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write `content`, or parts that are made one after the other, to `path` atomically.

    A reader sees either the old file or the whole new file, never a part. An object in a bucket is
    made in memory.
    """
    parts = [content] if isinstance(content, bytes) else content
    if isinstance(path, BucketPath):
        path.write_bytes(b"".join(parts))
        return
    # In the same folder, since a rename between file systems is not atomic. The process id prevents
    # two processes from writing to the same temporary file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_dict(path: Place) -> dict[str, Any] | None:
    """Return the dict in a JSON file; None if the file cannot be read or is not a dict.

    Raises:
        BucketError: The bucket cannot be read. That says nothing about the file.
    """
    try:
        found = json.loads(path.read_bytes())
    except BucketError:
        raise
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
