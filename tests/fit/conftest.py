"""Keras as the oracle of `fit`."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture
def keras() -> Iterator[Any]:
    # Keras reads its backend when it is imported.
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "jax"
    module = pytest.importorskip("keras")
    if before is None:
        del os.environ["KERAS_BACKEND"]
    else:
        os.environ["KERAS_BACKEND"] = before
    # Keras adds a bias of another rank, which is an error in the other tests.
    with jax.numpy_rank_promotion("allow"):
        yield module
