"""Some pages train with Keras, which reads its backend when it is imported."""

import os
from collections.abc import Iterator

import jax
import pytest

os.environ["KERAS_BACKEND"] = "jax"


@pytest.fixture(autouse=True)
def _rank_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of Keras about its own code."""
    for item in items:
        if "/tests/seeds/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Explicitly requested dtype"))
