"""A backward program in two halves has the results of the whole, and computes nothing twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist._pipeline.halves import divide
from tests.tables import examples

WIDTH = 4


@jax.custom_vjp
def _own_vjp(x: Any) -> Any:
    return jnp.sin(x)


_own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3.0 * g * jnp.cos(x),))


@jax.custom_jvp
def _own_jvp(x: Any) -> Any:
    return jnp.cos(x)


@_own_jvp.defjvp
def _own_jvp_rule(primals: Any, tangents: Any) -> Any:
    return _own_jvp(primals[0]), 2.0 * jnp.sin(primals[0]) * tangents[0]


def _product(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def _loop(w: Any, x: Any) -> Any:
    def body(x: Any, row: Any) -> Any:
        x = jnp.tanh(x @ w + row)
        return x, x.sum()

    x, sums = jax.lax.scan(body, x, jnp.linspace(0, 1, 3), reverse=True)
    return x * sums.mean()


def _loop_over_weights(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, v: (jnp.sin(x * v[None]), None), x, w)[0]


def _nested_loops(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, v: (_loop(w, x) + v[None], None), x, w)[0]


def _carries_weights(w: Any, x: Any) -> Any:
    """The second loop has carries of its own: the weights change from iteration to iteration."""

    def body(carry: Any, _: Any) -> Any:
        x, w = carry
        return (jnp.tanh(x @ w), jnp.sin(w)), None

    return jax.lax.scan(body, (x, w), None, length=3)[0][0]


def _branch(w: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x @ w), lambda: x * w[:1])


def _branch_in_loop(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, v: (_branch(w, x) + v[None], None), x, w)[0]


def _counted(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)


def _until(w: Any, x: Any) -> Any:
    """JAX has no reverse derivative of it, so its result only counts."""
    count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return x @ w * count


def _no_gradient_of_input(w: Any, x: Any) -> Any:
    return x + jax.lax.stop_gradient(x) @ w


def _no_weights(w: Any, x: Any) -> Any:
    return jnp.sin(x)


PIECES: dict[str, Callable[[Any, Any], Any]] = {
    "product": _product,
    "remat": jax.checkpoint(_product),
    "jit": jax.jit(_product),
    "remat_of_jit_in_loop": jax.checkpoint(_nested_loops),
    "remat_with_policy": jax.checkpoint(
        _loop, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    ),
    "custom_vjp": lambda w, x: _own_vjp(x @ w),
    "custom_jvp": lambda w, x: _own_jvp(x @ w) + jax.nn.relu(x),
    "loop": _loop,
    "loop_over_weights": _loop_over_weights,
    "nested_loops": _nested_loops,
    "carries_weights": _carries_weights,
    "branch": _branch,
    "branch_in_loop": _branch_in_loop,
    "counted": _counted,
    "until": _until,
    "no_gradient_of_input": _no_gradient_of_input,
    "no_weights": _no_weights,
    "sorts": lambda w, x: jnp.sort(x @ w, axis=-1),
    "indexes": lambda w, x: w[jnp.array([0, 2])] * x[:, :1] + x[:2],
    "vmap": lambda w, x: jax.vmap(lambda r: _product(w, r))(x),
}


def _backward(fn: Callable[[Any, Any], Any]) -> tuple[Any, list[Any]]:
    """The program that computes the gradients of w and x, and its inputs."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((WIDTH, WIDTH), (2, WIDTH)))
    y, pull = jax.vjp(fn, w, x)
    leaves, tree = jax.tree.flatten(pull)
    g = jnp.asarray(rng.normal(size=y.shape), jnp.float32)

    def run(leaves: list[Any], g: Any) -> Any:
        return jax.tree.unflatten(tree, leaves)(g)

    return jax.make_jaxpr(run)(leaves, g), [*leaves, g]


def _divide(fn: Callable[[Any, Any], Any]) -> tuple[Any, Any, list[Any]]:
    program, inputs = _backward(fn)
    available = [True] * (len(inputs) - 1) + [False]
    return program, divide(program, [False, True], available), inputs


def _check(fn: Callable[[Any, Any], Any]) -> None:
    program, halves, inputs = _divide(fn)

    @jax.jit
    def run(*inputs: Any) -> Any:
        early, saved = halves.first(inputs)
        late = halves.second([*inputs[:-1], None], saved)
        return [e if e is not None else x for e, x in zip(early, late, strict=True)], early, late

    found, early, late = run(*inputs)
    assert early[1] is not None
    assert all((e is None) != (x is None) for e, x in zip(early, late, strict=True))
    wanted = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*inputs)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", PIECES)
def test_both_halves_have_the_results_of_the_whole(name: str) -> None:
    _check(PIECES[name])


@given(st.lists(st.sampled_from(sorted(PIECES)), min_size=2, max_size=3))
@settings(max_examples=examples(10, 200), deadline=None)
def test_both_halves_of_random_programs_have_the_results_of_the_whole(names: list[str]) -> None:
    def fn(w: Any, x: Any) -> Any:
        for n, name in enumerate(names):
            x = PIECES[name](w + n, x)
        return x

    _check(fn)


def _count(program: Any, name: str, times: int = 1) -> int:
    """How often an operation runs."""
    found = 0
    for eqn in getattr(program, "jaxpr", program).eqns:
        found += times * (eqn.primitive.name == name)
        inside = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found += _count(inner, name, inside)
    return found


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("product", 1, 1), ("loop", 3, 3), ("nested_loops", 12, 12), ("remat", 2, 1)],
)
def test_products_are_divided_and_none_is_computed_twice(
    name: str, first: int, second: int
) -> None:
    program, halves, inputs = _divide(PIECES[name])
    _, saved = halves.first(inputs)
    of_first = jax.make_jaxpr(lambda *a: halves.first(a))(*inputs)
    of_second = jax.make_jaxpr(lambda a, s: halves.second([*a, None], s))(inputs[:-1], saved)
    assert _count(of_first, "dot_general") == first
    assert _count(of_second, "dot_general") == second
    assert _count(program, "dot_general") == first + second


def test_what_is_not_divided_is_all_in_the_first_half() -> None:
    _, halves, inputs = _divide(_branch)
    early, saved = halves.first(inputs)
    assert all(e is not None for e in early)
    assert saved == []


def test_a_view_of_an_input_is_made_again_and_not_saved() -> None:
    def run(residual: Any, g: Any) -> Any:
        view = residual.T.astype(jnp.bfloat16)
        return view.astype(jnp.float32) @ g, g.T @ view.astype(jnp.float32).T

    inputs = [jnp.ones((3, 2)), jnp.ones((3, 5))]
    halves = divide(jax.make_jaxpr(run)(*inputs), [True, False], [True, False])
    _, saved = halves.first(inputs)
    assert [s.shape for s in saved] == [(3, 5)], "only g"
