"""Changes Keras as soon as a strategy exists and Keras is imported."""

import os
from collections.abc import Callable

from jaxdist import _keras
from jaxdist._first_import import watch_import
from jaxdist._keras.source import is_keras_imported
from jaxdist.errors import MissingExtraError


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
