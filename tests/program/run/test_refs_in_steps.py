"""Mutable arrays of `jax.new_ref`: those that a step makes work, others are a named error."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ArgumentTypeError, ContextError

X = np.arange(8, dtype=np.float32).reshape(4, 2)
TOTAL = X.sum(0)


def two() -> jaxdist.MirroredStrategy:
    """Two replicas."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def all_sum(x: Any) -> Any:
    """Sum over the replicas."""
    return jaxdist.get_replica_context().all_reduce("sum", x)


def new() -> Any:
    """A ref of two zeros."""
    return jax.new_ref(jnp.zeros(2))


def at_the_top(x: Any) -> Any:
    ref = new()
    ref[...] = all_sum(x.sum(0))
    return ref[...]


def frozen(x: Any) -> Any:
    ref = new()
    ref[...] = all_sum(x.sum(0))
    return jax.freeze(ref)


def in_scan(x: Any) -> Any:
    ref = new()

    def body(carry: Any, row: Any) -> Any:
        ref[...] += all_sum(row)
        return carry, None

    jax.lax.scan(body, 0, x)
    return ref[...]


def in_while(x: Any) -> Any:
    ref = new()

    def body(i: Any) -> Any:
        ref[...] += x[i]
        return i + 1

    jax.lax.while_loop(lambda i: i < 2, body, 0)
    return all_sum(ref[...])


def in_cond(x: Any) -> Any:
    ref = new()

    def add() -> None:
        ref[...] += x.sum(0)

    jax.lax.cond(all_sum(x.sum()) > 0, add, lambda: None)
    return all_sum(ref[...])


def in_jit(x: Any) -> Any:
    ref = new()

    @jax.jit
    def add(ref: Any, x: Any) -> None:
        ref[...] += x.sum(0)

    add(ref, x)
    return all_sum(ref[...])


def in_grad(x: Any) -> Any:
    def loss(w: Any) -> Any:
        ref = new()
        ref[...] = w * x.sum(0)
        return ref[...].sum()

    return all_sum(jax.grad(loss)(jnp.ones(2)))


def in_vmap(x: Any) -> Any:
    def copy(row: Any) -> Any:
        ref = new()
        ref[...] = row
        return ref[...]

    return all_sum(jax.vmap(copy)(x).sum(0))


INSIDE = [at_the_top, frozen, in_scan, in_while, in_cond, in_jit, in_grad, in_vmap]


def executor(name: str) -> contextlib.AbstractContextManager[Any]:
    """Run steps in this way in the block."""
    return jaxdist.config.run_eagerly(True) if name == "op by op" else contextlib.nullcontext()


@pytest.mark.parametrize("how", ["compiled", "op by op"])
@pytest.mark.parametrize("step", INSIDE)
def test_a_ref_that_a_step_makes_works(step: Callable[[Any], Any], how: str) -> None:
    strategy = two()
    with executor(how):
        got = strategy.run(step, (jax.device_put(X, strategy.per_replica_sharding),))
    for value in strategy.experimental_local_results(got):
        np.testing.assert_allclose(value, TOTAL)


def add_to(ref: Any, x: Any) -> None:
    """Add the sum of all rows to a ref."""
    ref[...] += all_sum(x.sum(0))


def in_the_users_jit(strategy: Any, ref: Any, x: Any) -> None:
    """Run the step in a function that JAX traces."""
    jax.jit(lambda ref, x: strategy.run(add_to, (ref, x)))(ref, x)


OUTSIDE: dict[str, tuple[Callable[[Any, Any, Any], Any], type[Exception], str]] = {
    "argument": (lambda s, ref, x: s.run(add_to, (ref, x)), ArgumentTypeError, "args[0]"),
    "in a dict": (
        lambda s, ref, x: s.run(lambda d, x: add_to(d["sum"], x), ({"sum": ref}, x)),
        ArgumentTypeError,
        "args[0]['sum']",
    ),
    "keyword": (
        lambda s, ref, x: s.run(lambda x, ref: add_to(ref, x), (x,), {"ref": ref}),
        ArgumentTypeError,
        "kwargs['ref']",
    ),
    "captured": (
        lambda s, ref, x: s.run(lambda x: add_to(ref, x), (x,)),
        ContextError,
        "closes over",
    ),
    "captured and read": (
        lambda s, ref, x: s.run(lambda x: x.sum(0) + ref[...], (x,)),
        ContextError,
        "closes over",
    ),
    "result": (lambda s, ref, x: s.run(lambda x: ref, (x,)), ArgumentTypeError, "result"),
    "result of the step": (
        lambda s, ref, x: s.run(lambda x: [jax.new_ref(x)], (x,)),
        ArgumentTypeError,
        "result[0]",
    ),
    "PerReplica": (
        lambda s, ref, x: jaxdist.PerReplica([ref, ref]),
        ArgumentTypeError,
        "PerReplica",
    ),
    "in a jit": (in_the_users_jit, ArgumentTypeError, "args[0]"),
}


@pytest.mark.parametrize("how", ["compiled", "op by op"])
@pytest.mark.parametrize("place", OUTSIDE)
def test_a_ref_from_outside_is_a_named_error_and_keeps_its_value(place: str, how: str) -> None:
    use, kind, where = OUTSIDE[place]
    strategy, ref = two(), new()
    with executor(how), pytest.raises(kind) as raised:
        use(strategy, ref, jax.device_put(X, strategy.per_replica_sharding))
    assert where in str(raised.value)
    assert "Variable" in str(raised.value)
    np.testing.assert_array_equal(ref[...], [0.0, 0.0])
