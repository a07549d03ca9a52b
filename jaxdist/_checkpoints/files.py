"""Replaces a file or an object atomically, and reads JSON that may be damaged."""

import json
import os
from typing import Any

from jaxdist._buckets import BucketPath, Place
from jaxdist.errors import BucketError


def replace_file(path: Place, content: bytes) -> None:
    """Write `content` to `path` atomically.

    A reader sees either the old file or the whole new file, never a part.
    """
    if isinstance(path, BucketPath):
        path.write_bytes(content)
        return
    # In the same folder, since a rename between file systems is not atomic. The process id prevents
    # two processes from writing to the same temporary file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
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
