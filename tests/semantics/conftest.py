"""Fixtures for the statements of the specification."""

import pytest

import jaxdist


@pytest.fixture
def two() -> jaxdist.MirroredStrategy:
    """Two replicas, as in nearly every statement."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
