"""Imports modules of Keras where they are needed, and changes Keras for strategies."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxdist import _keras
from jaxdist._first_import import watch_import
from jaxdist.errors import MissingExtraError

# Classes of objects with variables: their modules inside `keras.src`, and their names.
WITH_VARIABLES = (
    ("backend.common.variables", "Variable"),
    ("layers.layer", "Layer"),
    ("metrics.metric", "Metric"),
    ("optimizers.base_optimizer", "BaseOptimizer"),
    ("random.seed_generator", "SeedGenerator"),
)


def keras_module(name: str) -> Any:
    """Return a module inside `keras.src`. A model exists, so Keras is imported already."""
    return importlib.import_module(f"keras.src.{name}")


def is_keras_imported() -> bool:
    """Whether the import of Keras is complete."""
    module = sys.modules.get("keras")
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def change_keras() -> None:
    """Change Keras if it is imported, or else at the end of its import."""
    if is_keras_imported():
        _keras.install()
    else:
        watch_import("keras", _import_keras)


def _import_keras(load: Callable[[], None]) -> None:
    try:
        load()
    except ModuleNotFoundError as error:
        if error.name == "tensorflow" and os.environ.get("KERAS_BACKEND") != "jax":
            raise _make_backend_error() from error
        raise
    _keras.install()


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
