"""Writing one file whole."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` by renaming a finished file over it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
