"""Prepares the first import of JAX, whether jaxdist or the program imports it.

Lines about a driver that a plan for GPUs does not need are left out. JAX 0.10 with its CUDA plugin
writes them on a machine without a driver, and no setting prevents it.

What JAX has to know of jaxdist from the beginning is registered, before the program can trace a
function.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_EXPECTED_LINES = (
    b"Could not find cuda drivers on your machine",
    b"All log messages before absl::InitializeLog() is called",
)
_DRIVER = "/proc/driver/nvidia"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# These modules are imported with JAX, and import nothing else of jaxdist. `_contexts` has parts of
# the keys of JAX's caches: made later, they would make JAX trace and compile all functions again.
# `sources` leaves the frames of jaxdist out of JAX's tracebacks.
_WITH_JAX = ("jaxdist._contexts", "jaxdist._compat.sources")

Around = Callable[[Callable[[], None]], None]


def hide_driver_lines() -> contextlib.AbstractContextManager[None]:
    """Leave out the lines on stderr that say that this machine has no driver; keep all others."""
    return hide_lines(_EXPECTED_LINES)


@contextlib.contextmanager
def hide_lines(parts: Sequence[bytes]) -> Iterator[None]:
    """Leave out the lines on stderr that have one of these parts; write the others at the end."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError):  # a process without stderr
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
            other = [line for line in lines if not any(part in line for part in parts)]
            if other:
                os.write(2, b"".join(other))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as other finders do, and calls a function around its import."""

    def __init__(self, name: str, around: Around) -> None:
        self.name = name
        self._around = around
        self._is_searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        # Some programs only look whether a module exists, so the finder stays until it is loaded.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self, self._around)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, in a function."""

    def __init__(self, loader: Any, finder: _Finder, around: Around) -> None:
        self._loader = loader
        self._finder = finder
        self._around = around

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._around(lambda: self._loader.exec_module(module))


def watch_import(name: str, around: Around) -> None:
    """Call a function around the import of a module, whoever imports it.

    Args:
        name: A module that is not imported.
        around: Is called once, with a function that loads the module.
    """
    if not any(isinstance(f, _Finder) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, around))


def _import_jax(load: Callable[[], None]) -> None:
    has_lines = not os.path.exists(_DRIVER) and any(map(importlib.util.find_spec, _PLUGINS))
    with hide_driver_lines() if has_lines else contextlib.nullcontext():
        load()
    _prepare_jax()


def _prepare_jax() -> None:
    for name in _WITH_JAX:
        importlib.import_module(name)


if "jax" in sys.modules:
    _prepare_jax()
else:
    watch_import("jax", _import_jax)
