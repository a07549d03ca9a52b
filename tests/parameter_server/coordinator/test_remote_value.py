"""A `RemoteValue` that is used as if it was its result."""

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.coordinator import ClusterCoordinator, RemoteValue
from jaxdist.errors import ArgumentTypeError, MissingNameError
from tests.parameter_server.strategy.making import make_strategy

_USES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "index": operator.index,
    "len": len,
    "iter": list,
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "add": lambda x: x + 1,
    "add to": lambda x: 1 + x,
    "add to an array": lambda x: np.ones(2) + x,
    "add to an array of JAX": lambda x: jnp.ones(2) + x,
    "add to a variable": lambda x: jaxdist.Variable(1.0) + x,
    "negate": lambda x: -x,
    "compare": lambda x: x < 3,
    "element": lambda x: x[0],
    "format": lambda x: f"{x:.3f}",
}


@pytest.fixture(scope="module")
def coordinator() -> ClusterCoordinator:
    return ClusterCoordinator(make_strategy())


@pytest.mark.parametrize("how", _USES)
def test_a_result_that_was_not_fetched_is_no_array(
    coordinator: ClusterCoordinator, how: str
) -> None:
    value = coordinator.schedule(lambda: 3.0)
    coordinator.join()
    with pytest.raises(ArgumentTypeError, match=r"(?s)RemoteValue\(.*value\.fetch\(\)") as caught:
        _USES[how](value)
    assert "ClosureResult" not in str(caught.value)
    assert value.fetch() == 3


def test_names_of_arrays_are_those_of_the_fetched_result(coordinator: ClusterCoordinator) -> None:
    value: Any = coordinator.schedule(lambda: 3.0)
    for name in ("shape", "mean", "dtype"):
        assert not hasattr(value, name)
        with pytest.raises(MissingNameError, match=rf"no attribute '{name}'.*(\s|.)+fetch\(\)"):
            getattr(value, name)
    assert f"{value}".startswith("RemoteValue(")
    # By identity, as in TensorFlow.
    assert value in [value, 1]
    assert len({value, value}) == 1
    assert isinstance(value, RemoteValue)
