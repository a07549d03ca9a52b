"""Complex values for variables that are not complex: nothing drops their imaginary parts."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, Variable
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import ArgumentTypeError

_COMPLEX = np.array([1 + 2j, 3])

_CHANGES: dict[str, Callable[[Any], Any]] = {
    "NumPy": lambda v: v.assign(_COMPLEX),
    "JAX": lambda v: v.assign_add(jnp.asarray(_COMPLEX)),
    "Python": lambda v: v.assign_sub([1j, 2]),
    "rows": lambda v: v.scatter_add(IndexedSlices(_COMPLEX[:1], [0])),
    "elements": lambda v: v.scatter_nd_add([[0]], _COMPLEX[:1]),
    "element": lambda v: v[0].assign(1j),
}


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
@pytest.mark.parametrize("how", _CHANGES)
def test_a_change_with_complex_values_does_not_advise_a_cast(how: str, dtype: str) -> None:
    v = Variable(np.zeros(2, dtype))
    with pytest.raises(ArgumentTypeError, match="imaginary parts") as caught:
        _CHANGES[how](v)
    assert "astype" not in str(caught.value)
    assert "x.real" in str(caught.value)
    assert "dtype='complex64'" in str(caught.value)
    assert not np.any(v.numpy())


@pytest.mark.parametrize(
    "value", [1j, _COMPLEX, lambda: jnp.ones(2) * 1j], ids=["number", "array", "function"]
)
def test_a_first_value_keeps_its_imaginary_parts_or_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="imaginary parts"):
        Variable(value, dtype="float32")
    assert Variable(value, dtype="complex64").dtype == jnp.complex64
    assert Variable(value).dtype == jnp.complex64
    assert Variable(np.ones(2), dtype="complex64").dtype == jnp.complex64


def test_a_first_value_that_a_server_makes_keeps_its_imaginary_parts_or_is_refused() -> None:
    spec = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    strategy = jaxdist.ParameterServerStrategy(SimpleClusterResolver(spec, rpc_layer="local"))
    # Large enough for a program that runs on the server.
    shape = (1 << 10, 1 << 10)
    with strategy.scope(), pytest.raises(ArgumentTypeError, match="imaginary parts"):
        Variable(lambda: jnp.ones(shape) * 1j, dtype="float32", shape=shape)
