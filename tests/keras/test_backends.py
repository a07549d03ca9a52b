"""Keras reads its backend when it is imported, so each backend has a process of its own."""

import importlib.util

import pytest

from tests.processes.job import results_of_job

_MAKE = """
import jaxdist, os, sys
strategy = jaxdist.MirroredStrategy(["cpu:0"])
assert "keras" not in sys.modules
with strategy.scope():
    import keras
    try:
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        result = keras.backend.backend()
    except jaxdist.errors.UnsupportedError as error:
        result = str(error)
"""


def _make_model(**environment: str) -> str:
    """Make a Keras model in a scope; return the backend, or the error."""
    given = {"KERAS_NNX_ENABLED": None, "KERAS_BACKEND": None, **environment}
    return str(results_of_job(_MAKE, 1, env=given)[0])


@pytest.mark.slow
def test_a_model_of_another_backend_is_refused_with_the_way_to_switch() -> None:
    said = _make_model(KERAS_BACKEND="numpy")
    assert "The Keras model 'Sequential' was made in the scope of a MirroredStrategy" in said
    assert "Keras uses the backend 'numpy'" in said
    assert "Start the program with the environment variable KERAS_BACKEND=jax" in said


@pytest.mark.slow
def test_a_model_with_variables_in_flax_is_refused_with_the_way_to_switch() -> None:
    said = _make_model(KERAS_BACKEND="jax", KERAS_NNX_ENABLED="true")
    assert "The Keras model 'Sequential' was made in the scope of a MirroredStrategy" in said
    assert "Keras keeps its variables in Flax NNX (KERAS_NNX_ENABLED)" in said
    assert "Start the program with KERAS_NNX_ENABLED=false" in said


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [{}, {"KERAS_NNX_ENABLED": "false"}])
def test_a_model_of_the_backend_jax_is_made(enabled: dict[str, str]) -> None:
    assert _make_model(KERAS_BACKEND="jax", **enabled) == "jax"


_IMPORT = """
import jaxdist
strategy = jaxdist.MirroredStrategy(["cpu:0"])
try:
    import keras
except jaxdist.errors.MissingExtraError as error:
    result = str(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="has TensorFlow")
def test_keras_without_a_backend_says_what_to_set() -> None:
    given = {"KERAS_NNX_ENABLED": None, "KERAS_BACKEND": None}
    said = str(results_of_job(_IMPORT, 1, env=given)[0])
    assert "`import keras` needs TensorFlow, which is not installed: KERAS_BACKEND is not" in said
    assert 'os.environ["KERAS_BACKEND"] = "jax"' in said
