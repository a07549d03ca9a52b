"""The first import of JAX, without lines about a driver that a plan for GPUs does not need.

JAX 0.10 with its CUDA plugin writes them on a machine without a driver, and no setting prevents it.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from typing import Any

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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds JAX as other finders do, and hides the lines while it is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, with the lines hidden."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        with hide_driver_lines():
            self._loader.exec_module(module)


def _hide_lines_of_import() -> None:
    if "jax" in sys.modules or os.path.exists(_DRIVER):
        return
    if any(importlib.util.find_spec(name) is not None for name in _PLUGINS):
        # Whoever imports JAX first: jaxdist, when one of its names is read, or the program.
        sys.meta_path.insert(0, _Finder())


_hide_lines_of_import()
