"""The remedy for values of several dtypes is the dtype that JAX would promote them to."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._values import suggest_cast

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("pair", list(itertools.combinations(DTYPES, 2)), ids=str)
def test_the_dtype_is_that_of_a_sum_of_both(pair: tuple[str, str]) -> None:
    dtypes = [jnp.dtype(name) for name in pair]
    with jax.enable_x64(False):
        a, b = (jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)) for dtype in dtypes)
        expected = "bool" if pair == ("bool", "bool") else (a + b).dtype.name
        assert f"x.astype({expected!r})" in suggest_cast("x", dtypes)


@pytest.mark.parametrize("other", [np.dtype("<U3"), np.dtype("M8[s]"), np.dtype(object)], ids=str)
def test_dtypes_that_have_none_in_common_are_told_to_be_made_equal(other: np.dtype) -> None:
    assert suggest_cast("x", [np.dtype("float32"), other]).startswith("Give every replica")
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    assert suggest_cast("x", [np.dtype("float32"), key]).startswith("Give every replica")
