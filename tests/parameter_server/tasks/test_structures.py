"""Pytrees of arrays as JSON, and back."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._called import called
from jaxdist._parameter_server.worker.datasets import describe_tree, make_template
from jaxdist._parameter_server.worker.functions import describe_script, find_function, list_names
from jaxdist.errors import ArgumentError, NotFoundError, UnsupportedError


@pytest.mark.parametrize(
    "tree",
    [
        np.zeros(3, np.int8),
        {"b": np.zeros((2, 0)), "a": (jnp.ones(2, jnp.bfloat16), [np.float32(3), None])},
        ((), [], {}),
        None,
        3.5,
    ],
)
def test_a_tree_comes_back_with_the_same_structure_shapes_and_dtypes(tree: object) -> None:
    described = describe_tree("A batch", tree)
    found = make_template(json.loads(json.dumps(described)))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        other = np.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert describe_tree("A batch", found) == described


@pytest.mark.parametrize("tree", [{1: np.zeros(2)}, jax.tree_util.Partial(print, np.zeros(2))])
def test_another_container_is_a_named_error(tree: object) -> None:
    with pytest.raises(UnsupportedError, match=r"A batch contains a \w+"):
        describe_tree("A batch", tree)


@called("f")
def test_a_function_is_found_by_the_names_that_it_has() -> None:
    names = list_names(find_function)
    assert names == ["jaxdist._parameter_server.worker.functions:find_function"]
    module = names[0].partition(":")[0]
    assert find_function(names, "", [module], 0) is find_function
    with pytest.raises(NotFoundError, match="it is not defined there"):
        find_function([f"{module}:nothing"], "", [module], 0)
    with pytest.raises(ArgumentError, match="no lambda"):
        list_names(lambda: None)


@called("f")
def test_a_function_of_the_script_is_found_by_processes_of_the_same_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "count", find_function, raising=False)
    names = list_names(find_function)
    assert names[-1] == "__main__:count"
    assert find_function(names[-1:], describe_script(), [], 0) is find_function
