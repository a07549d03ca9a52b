"""The first import of JAX, without lines about a driver that a plan for GPUs does not need.

JAX 0.10 with its CUDA plugin writes them on a machine without a driver, and no setting prevents it.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator

_EXPECTED_LINES = (
    b"Could not find cuda drivers on your machine",
    b"All log messages before absl::InitializeLog() is called",
)
_DRIVER = "/proc/driver/nvidia"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@contextlib.contextmanager
def hide_driver_lines() -> Iterator[None]:
    """Leave out the lines on stderr that say that this machine has no driver; keep all others."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # a process without stderr
        yield
        return
    with tempfile.TemporaryFile() as lines:
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            lines.seek(0)
            other = [line for line in lines if not any(e in line for e in _EXPECTED_LINES)]
            if other:
                os.write(2, b"".join(other))


def _import_jax() -> None:
    if "jax" in sys.modules or os.path.exists(_DRIVER):
        return
    if any(importlib.util.find_spec(name) is not None for name in _PLUGINS):
        with hide_driver_lines():
            importlib.import_module("jax")


_import_jax()
