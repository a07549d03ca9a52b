"""Constants of a step that depend on the rows of a replica: their bits decide whether they agree.

0.0 equals -0.0 for Python and NumPy, and a nan does not equal itself. A joined program that went by
`==` would give a replica the constant of another one, or run twice what all replicas share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import StateDivergenceError
from tests.tables import sampled

NAN = float("nan")
OTHER_NAN = np.array(0x7FC00001, np.uint32).view(np.float32)
# Constants of the replicas with 2 rows and with 1 row, and whether their bits are equal.
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "0.0 and -0.0": (0.0, -0.0, False),
    "-0.0 and -0.0": (-0.0, -0.0, True),
    "nan and nan": (NAN, NAN, True),
    "nan and another nan": (np.float32(NAN), OTHER_NAN, False),
    "2.0 and 2.0": (2.0, 2.0, True),
    "2.0 and 3.0": (2.0, 3.0, False),
}


def _take_sign(w: Any, c: Any) -> Any:
    """An operation whose result shows every bit of a constant."""
    return jnp.copysign(jnp.float32(1) + w * 0, c)


def _bits(w: Any, c: Any) -> Any:
    return lax.bitcast_convert_type(jnp.where(w > 5, w, jnp.asarray(c, jnp.float32)), jnp.uint32)


# How a constant gets into a program, as a function of an argument and the constant.
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda w, c: _take_sign(w, float(c)),
    "a number of NumPy": lambda w, c: _bits(w, np.float32(c)),
    "an array of NumPy": lambda w, c: _bits(w, np.full(3, c, np.float32)),
    "an array of JAX": lambda w, c: _bits(w, _outside(c)),
    "in a branch": lambda w, c: lax.cond(w[0] > 5, lambda: w * 0, lambda: _where(w, c)),
    "in a loop": lambda w, c: lax.fori_loop(0, 2, lambda i, s: _where(s, c), w),
    "in a jit": lambda w, c: jax.jit(lambda w: _bits(w, c))(w),
    "complex": lambda w, c: jnp.where(w > 5, w, np.complex64(complex(0.0, c))).imag,
}


def _where(w: Any, c: Any) -> Any:
    return jnp.where(w > 5, w, jnp.float32(c))


def _outside(c: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return jnp.full(3, c, jnp.float32)


def _raw(value: Any) -> tuple[Any, bytes]:
    host = np.asarray(value)
    return host.dtype, host.tobytes()


TABLE = [(p, f) for p in PAIRS for f in FORMS]


@pytest.mark.parametrize("row", sampled(TABLE, 24, name=" as ".join))
def test_every_replica_has_the_bits_of_its_own_constant(row: tuple[str, str]) -> None:
    pair, form = row
    first, second, is_equal = PAIRS[pair]
    W = np.ones(3, np.float32)
    use = FORMS[form]

    def step(w: Any, x: Any) -> Any:
        return use(w, first if x.shape[0] == 2 else second)

    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)])
    got = strategy.run(step, (W, x))
    wanted = [jax.jit(lambda w, c=c: use(w, c))(W) for c in (first, second)]
    of_replicas = strategy.experimental_local_results(got)
    assert [_raw(v) for v in of_replicas] == [_raw(v) for v in wanted]
    # Where all replicas compute the same, the result is one array.
    assert isinstance(got, PerReplica) is not is_equal


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1, True), (1, 1.0)], ids=str)
def test_keys_of_results_that_differ_in_bits_are_no_common_structure(
    first: Any, second: Any, eagerly: bool
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)])
    with (
        jax.disable_jit(eagerly),
        pytest.raises(StateDivergenceError, match="different structures"),
    ):
        strategy.run(lambda x: {first if x.shape[0] == 2 else second: x.sum()}, (x,))


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1, True), (NAN, NAN)], ids=str)
def test_a_merge_function_sees_the_number_of_its_own_replica(first: Any, second: Any) -> None:
    """Op by op, replica 0 calls the merge function for all, if all pass the same numbers."""
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)])
    seen: list[str] = []

    def merge(strategy: Any, x: Any, number: Any) -> Any:
        seen.append(repr(number))
        return strategy.reduce("sum", x, axis=None)

    def step(x: Any) -> Any:
        number = first if x.shape[0] == 2 else second
        return jaxdist.get_replica_context().merge_call(merge, (x.sum(), number))

    with jax.disable_jit():
        strategy.run(step, (x,))
    assert set(seen) == {repr(first), repr(second)}
