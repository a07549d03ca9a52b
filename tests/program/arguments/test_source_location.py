"""Warnings and reports name the line where a step was defined."""

import functools
from typing import Any

import jax
import pytest

from jaxdist._program.arguments.retrace import source_location


def step(x: Any) -> Any:
    return x


class _Callable:
    def __call__(self, x: Any) -> Any:
        return x

    def step(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("fn", "definition"),
    [
        (step, step),
        (functools.partial(functools.partial(step)), step),
        (jax.jit(step), step),
        (_Callable(), _Callable.__call__),
        (_Callable().step, _Callable.step),
    ],
    ids=["function", "partial", "jit", "object", "method"],
)
def test_the_place_of_a_callable_is_that_of_its_function(fn: Any, definition: Any) -> None:
    code = definition.__code__
    assert source_location(fn) == f"{code.co_filename}:{code.co_firstlineno}"


def test_a_function_of_c_has_no_place() -> None:
    assert source_location(len) == "an unknown place"
