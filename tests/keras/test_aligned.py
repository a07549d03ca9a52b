"""Two traces of a function are compared operation by operation, or are not comparable."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist._keras.forward.aligned import NotAlignedError, are_same, find_differences

X = jnp.ones(3)
NUMBER = jnp.int32(1)


def _switch(*branches: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda i, x: jax.lax.switch(i, branches, x)


@pytest.mark.parametrize(
    ("one", "other", "arguments"),
    [
        (lambda x: x + 1.0, lambda x: (x + 1.0) * 2.0, (X,)),
        (lambda x: x + 2.0, lambda x: x * 2.0, (X,)),
        (lambda x, y: x - y, lambda x, y: y - x, (X, X)),
        (lambda x, y: x + 1.0, lambda x, y: x + y, (X, X[0])),
        (lambda x: x + 1.0, lambda x: (x + 1.0, x), (X,)),
        (_switch(jnp.sin, jnp.cos), _switch(jnp.sin, jnp.cos, jnp.exp), (NUMBER, X)),
        (_switch(jnp.sin, jnp.cos), _switch(jnp.sin, jnp.exp), (NUMBER, X)),
    ],
    ids=[
        "more operations",
        "another operation",
        "another operand",
        "a number for an operand",
        "more results",
        "more branches",
        "another branch",
    ],
)
def test_programs_with_other_operations_are_not_compared(
    one: Callable[..., Any], other: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    first, second = jax.make_jaxpr(one)(*arguments), jax.make_jaxpr(other)(*arguments)
    for a, b in ((first, second), (second, first)):
        with pytest.raises(NotAlignedError):
            find_differences(a, b)
        assert not are_same(a, b)
    assert not find_differences(first, first)
    assert are_same(second, jax.make_jaxpr(other)(*arguments))


def test_programs_with_other_inputs_or_parameters_are_not_compared() -> None:
    first = jax.make_jaxpr(lambda x: x.sum())(X)
    second = jax.make_jaxpr(lambda x, y: x.sum())(X, X)
    with pytest.raises(NotAlignedError):
        find_differences(first, second)
    (eqn,) = first.jaxpr.eqns
    changed = first.jaxpr.replace(eqns=[eqn.replace(params={**eqn.params, "more": 1})])
    with pytest.raises(NotAlignedError):
        find_differences(first.jaxpr, changed)


def test_another_number_is_a_difference() -> None:
    first, second = (jax.make_jaxpr(lambda x, n=n: x * n)(X) for n in (2.0, 3.0))
    (eqn,) = first.jaxpr.eqns
    assert find_differences(first, second) == {id(eqn.invars[1])}
    assert not are_same(first, second)
