"""Changes Keras as soon as a strategy exists and Keras is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from jaxdist._keras.patch import install
from jaxdist._keras.source import is_keras_imported
from jaxdist.errors import MissingExtraError


def change_keras() -> None:
    """Change Keras if it is imported, or else at the end of its import."""
    if is_keras_imported():
        install()
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Keras as other finders do, and changes it after its import."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, and then installs the changes."""

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
        try:
            self._loader.exec_module(module)
        except ModuleNotFoundError as error:
            if error.name == "tensorflow" and os.environ.get("KERAS_BACKEND") != "jax":
                raise _make_backend_error() from error
            raise
        install()


def _make_backend_error() -> MissingExtraError:
    found = os.environ.get("KERAS_BACKEND")
    given = "is not set" if found is None else f"is {found!r}"
    return MissingExtraError(
        f"`import keras` needs TensorFlow, which is not installed: KERAS_BACKEND {given}.\n\n"
        "Without it Keras takes TensorFlow as its backend. Strategies of jaxdist train models of "
        "the JAX backend, which Keras reads once, when it is imported.\n\n"
        "Start the program with the environment variable KERAS_BACKEND=jax, or set "
        'os.environ["KERAS_BACKEND"] = "jax" before `import keras`.'
    )
