"""Constants of 64-bit integers in a step: JAX cuts none off in silence.

The oracle is JAX itself with `jax_enable_x64`: a step gives the same numbers, or an error.
"""

import concurrent.futures
import operator
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist.errors import ArgumentError
from tests.tables import sampled

Constants = tuple[np.ndarray, np.integer[Any]]
KINDS: dict[str, Constants] = {
    "fits": (np.array([3, -(2**31), 2**31 - 1, 0]), np.int64(-7)),
    "2**40 + 5": (np.array([2**40 + 5, 1, 2, 3]), np.int64(2**40 + 5)),
    "-2**31 - 1": (np.array([0, 1, -(2**31) - 1, 3]), np.int64(-(2**31) - 1)),
    "2**32 as uint64": (np.array([2**32, 1, 2, 3], np.uint64), np.uint64(2**32)),
}


def _call_with(f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


# Functions of x, an int32 array of 4, an array of NumPy and a scalar of NumPy.
WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "x + a": lambda x, a, s: x + a,
    "a + x": lambda x, a, s: a + x,
    "x * s": lambda x, a, s: x * s,
    "s - x": lambda x, a, s: s - x,
    "x == a": lambda x, a, s: x == a,
    "x < s": lambda x, a, s: x < s,
    "x ^ s": lambda x, a, s: x ^ s,
    "float * a": lambda x, a, s: x.astype("float32") * a,
    "float * s": lambda x, a, s: x.astype("float32") * s,
    "jnp.add": lambda x, a, s: jnp.add(x, a),
    "jnp.multiply of two": lambda x, a, s: jnp.multiply(a, s),
    "asarray": lambda x, a, s: jnp.asarray(a),
    "asarray of a scalar": lambda x, a, s: jnp.asarray(s),
    "asarray as int": lambda x, a, s: jnp.asarray(a, dtype=int),
    "asarray as float32": lambda x, a, s: jnp.asarray(a, dtype="float32"),
    "array": lambda x, a, s: jnp.array(a),
    "array, not copied": lambda x, a, s: jnp.array(a, copy=False),
    "array as int32": lambda x, a, s: jnp.array(a, dtype="int32"),
    "array with more dims": lambda x, a, s: jnp.array(a, ndmin=2),
    "array of a list of arrays": lambda x, a, s: jnp.array([a, a]),
    "array of a list of scalars": lambda x, a, s: jnp.array([s, s]),
    "array of a list with a traced value": lambda x, a, s: jnp.array([x[0], s]),
    "array of a Python integer": lambda x, a, s: jnp.array(int(s)),
    "int32 of an array": lambda x, a, s: jnp.int32(a),
    "int32 of a scalar": lambda x, a, s: jnp.int32(s),
    "float32 of a scalar": lambda x, a, s: jnp.float32(s),
    "convert_element_type": lambda x, a, s: lax.convert_element_type(a, "int32"),
    "convert_element_type to float": lambda x, a, s: lax.convert_element_type(a, "float32"),
    "convert_element_type of a Python integer": lambda x, a, s: lax.convert_element_type(
        int(s), "int32"
    ),
    "stack": lambda x, a, s: jnp.stack([x, a]),
    "concatenate": lambda x, a, s: jnp.concatenate([a, a]),
    "where": lambda x, a, s: jnp.where(x > 5, a, x),
    "where of a scalar": lambda x, a, s: jnp.where(x > 5, s, x),
    "where of a Python integer": lambda x, a, s: jnp.where(x > 5, int(s), x),
    "clip": lambda x, a, s: jnp.clip(x, s, None),
    "full": lambda x, a, s: jnp.full((3,), s),
    "full of a Python integer": lambda x, a, s: jnp.full((3,), int(s), "int32"),
    "full_like": lambda x, a, s: jnp.full_like(x, s),
    "arange": lambda x, a, s: jnp.arange(s, s + np.int64(4).astype(s.dtype)),
    "arange with a step": lambda x, a, s: jnp.arange(0, 3 * int(s), int(s)),
    "at[].set": lambda x, a, s: x.at[0].set(s),
    "at[].add": lambda x, a, s: x.at[:].add(a),
    "pad": lambda x, a, s: jnp.pad(x, 1, constant_values=s),
    "device_put": lambda x, a, s: jax.device_put(a),
    "broadcast_to": lambda x, a, s: jnp.broadcast_to(a, (2, 4)),
    "reshape": lambda x, a, s: jnp.reshape(a, (2, 2)),
    "sum": lambda x, a, s: jnp.sum(a),
    "max": lambda x, a, s: jnp.max(a),
    "einsum": lambda x, a, s: jnp.einsum("i,j->ij", x, a),
    "outer": lambda x, a, s: jnp.outer(a, x),
    "isin": lambda x, a, s: jnp.isin(x, a),
    "array_equal": lambda x, a, s: jnp.array_equal(x, a),
    "meshgrid": lambda x, a, s: jnp.meshgrid(a, x),
    "tree.map": lambda x, a, s: jax.tree.map(jnp.add, {"x": x}, {"x": a}),
    "jit": lambda x, a, s: jax.jit(lambda v, w: v + w)(x, a),
    "jit of a closure": lambda x, a, s: jax.jit(lambda v: v + a)(x),
    "vmap": lambda x, a, s: jax.vmap(lambda v: v + 1)(a),
    "vmap of a closure": lambda x, a, s: jax.vmap(lambda v: v + s)(x),
    "map": lambda x, a, s: lax.map(lambda v: v, a),
    "scan over it": lambda x, a, s: lax.scan(lambda c, v: (c, v), 0, a)[1],
    "scan with a carry": lambda x, a, s: lax.scan(lambda c, v: (c, v), a, x)[0],
    "scan of a closure": lambda x, a, s: lax.scan(lambda c, v: (c, v + s), 0, x)[1],
    "cond": lambda x, a, s: lax.cond(x[0] > 5, lambda: a, lambda: a + 0),
    "cond with an operand": lambda x, a, s: lax.cond(x[0] > 5, lambda v: v, lambda v: v, a),
    "while_loop": lambda x, a, s: lax.while_loop(lambda c: c[0] > 9, lambda c: c * 0, a),
    "fori_loop": lambda x, a, s: lax.fori_loop(0, 2, lambda i, c: c, a),
    "checkpoint": lambda x, a, s: jax.checkpoint(lambda v: v + a)(x),
    "grad of a closure": lambda x, a, s: jax.grad(lambda v: (v * a).sum())(x.astype("float32")),
    "vjp": lambda x, a, s: jax.vjp(lambda v: v.astype("float32"), a)[0],
    "pure_callback": lambda x, a, s: jax.pure_callback(
        lambda v: np.asarray(v).astype("float32"), jax.ShapeDtypeStruct((4,), "float32"), a
    ),
    "the result": lambda x, a, s: {"a": a, "s": s},
    "a jit without arguments": lambda x, a, s: jax.jit(lambda: a)(),
    "an inner call": lambda x, a, s: _call_with(lambda v: v + a, x),
}


def _mirrored(**options: Any) -> Any:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def _in_a_merge_function(f: Callable[[Any], Any]) -> Any:
    def step(x: Any) -> Any:
        context = get_replica_context()
        return context.merge_call(lambda s, v: s.run(lambda w: f(w), (v,)), (x,))

    return step


def _op_by_op(f: Callable[[Any], Any], x: Any) -> Any:
    with jax.disable_jit():
        return _mirrored().run(f, (x,))


def _function_op_by_op(f: Callable[[Any], Any], x: Any) -> Any:
    with jax.disable_jit():
        return jaxdist.function(f)(jnp.asarray(x))  # NumPy would compute with its own arrays


def _in_jit(f: Callable[[Any], Any], x: Any) -> Any:
    strategy = _mirrored()
    return jax.jit(lambda v: strategy.run(f, (v,)))(x)


def _in_a_function(f: Callable[[Any], Any], x: Any) -> Any:
    strategy = _mirrored()
    return jaxdist.function(lambda v: strategy.run(f, (v,)))(x)


PLACES: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "2 replicas": lambda f, x: _mirrored().run(f, (x,)),
    "1 device": lambda f, x: jaxdist.OneDeviceStrategy("cpu:0").run(f, (x,)),
    "the default strategy": lambda f, x: jaxdist.get_strategy().run(f, (x,)),
    "op by op": _op_by_op,
    "virtual replicas": lambda f, x: _mirrored(deterministic=True).run(f, (x,)),
    "jaxdist.function op by op": _function_op_by_op,
    "jaxdist.function": lambda f, x: jaxdist.function(f)(x),
    "run in jaxdist.function": _in_a_function,
    "run in jit": _in_jit,
    "a merge function": lambda f, x: _mirrored().run(_in_a_merge_function(f), (x,)),
}
X = np.array([4, 5, 6, 7], np.int32)
TABLE = [
    (way, place, kind)
    for way in WAYS
    for place in PLACES
    for kind in KINDS
    # A merge function returns handles, and takes those that JAX traces.
    if place != "a merge function" or way in ("x + a", "asarray", "where", "jit")
    # There NumPy computes where all operands are its arrays, without JAX.
    if place != "jaxdist.function op by op" or "x" in way
]


def _compute_alone(way: str, kind: str) -> list[np.ndarray]:
    """JAX on one device: with 64 bits where the integers need them."""
    with jax.enable_x64(kind != "fits"):
        return [np.asarray(x) for x in jax.tree.leaves(WAYS[way](jnp.asarray(X), *KINDS[kind]))]


def _try(call: Callable[[], Any]) -> Any:
    """The result, or the error about integers; Python integers are an error of JAX."""
    try:
        return call()
    except (ArgumentError, OverflowError) as error:
        return error


@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("row", sampled(TABLE, 90, name=", ".join))
def test_a_step_gives_the_numbers_of_64_bits_or_an_error(row: tuple[str, str, str]) -> None:
    way, place, kind = row
    constants = KINDS[kind]
    found = _try(lambda: PLACES[place](lambda x: WAYS[way](x, *constants), X))
    if isinstance(found, Exception):
        assert kind != "fits", found
        assert isinstance(found, OverflowError) or "int64 with integers from" in str(found)
        return
    expected = _compute_alone(way, kind)
    got = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, PerReplica))
    for mine, alone in zip(got, expected, strict=True):
        one = mine.values[0] if isinstance(mine, PerReplica) else mine
        # Floats: int64 becomes float64 with 64 bits, and float32 without.
        np.testing.assert_allclose(np.asarray(one, float), alone.astype(float), rtol=1e-6)


def test_the_error_names_the_line_the_integers_and_the_ways_out() -> None:
    ids = np.array([[7, 2**40 + 5]])
    with pytest.raises(ArgumentError) as raised:
        _mirrored().run(lambda x: x + ids, (np.int32(1),))
    text = str(raised.value)
    assert text.startswith(f"At {__file__}:")
    for part in ("shape (1, 2)", "int64 with integers from 7 to 1099511627781", "jax_enable_x64"):
        assert part in text


def test_with_x64_constants_keep_their_integers() -> None:
    ids, _ = KINDS["2**40 + 5"]
    with jax.enable_x64(True):
        got = _mirrored().run(lambda x: x + ids, (np.int64(1),))
    assert np.asarray(got).tolist() == (ids + 1).tolist()


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "%": operator.mod,
    "^": operator.xor,
    "<": operator.lt,
    "==": operator.eq,
}


def _make_variable() -> Any:
    with _mirrored().scope():
        return jaxdist.Variable(X)


def _make_pieces() -> Any:
    rules = [("x", jaxdist.partition.Shard(0))]
    return jaxdist.partition.place(_mirrored(), {"x": X}, rules)["x"]


@pytest.mark.parametrize("make", [_make_variable, _make_pieces])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_variables_and_pieces_refuse_them(make: Any, name: str) -> None:
    value = make()
    if name == "==" and make is _make_pieces:
        pytest.skip("an array in pieces is equal to itself only")
    for kind, (a, s) in KINDS.items():
        for other in (a, s):
            if kind == "fits":
                got = np.asarray(OPERATORS[name](value, other))
                np.testing.assert_array_equal(got, OPERATORS[name](jnp.asarray(X), other))
            else:
                with pytest.raises(ArgumentError, match="int64 with integers from"):
                    OPERATORS[name](value, other)


def test_a_python_integer_is_named_as_one() -> None:
    with pytest.raises(ArgumentError, match="JAX was given a Python integer, int64 with"):
        _mirrored().run(lambda: jnp.full((3,), 2**40, "int32"))


def test_a_seed_may_be_any_hash() -> None:
    seed = hash("a name") | 2**40
    got = _mirrored().run(lambda: jax.random.key_data(jax.random.key(seed)))
    np.testing.assert_array_equal(got, jax.random.key_data(jax.random.key(seed)))


def test_outside_of_steps_jax_is_as_it_was() -> None:
    ids, _ = KINDS["2**40 + 5"]
    array = jnp.array
    seen = []

    def step() -> Any:
        seen.append(jnp.array)
        return jnp.asarray(ids)

    with pytest.raises(ArgumentError):
        _mirrored().run(step)
    assert seen != [array]
    assert jnp.array is array
    assert jnp.asarray(ids)[0] == 5


@pytest.mark.parametrize("place", [p for p in PLACES if p != "a merge function"])
@pytest.mark.parametrize("kind", ["jit", "scan", "custom_jvp"])
def test_functions_that_jax_has_traced_before_are_traced_again(kind: str, place: str) -> None:
    ids, _ = KINDS["2**40 + 5"]
    add: Any = jax.jit(lambda x: x + ids)
    if kind == "custom_jvp":
        add = jax.custom_jvp(lambda x: x + ids)
        add.defjvp(lambda primals, tangents: (add(*primals), tangents[0]))

    def turn(carry: Any, x: Any) -> Any:
        return carry, x + ids

    def call(x: Any) -> Any:
        return add(x) if kind != "scan" else lax.scan(turn, 0, jnp.stack([x, x]))[1]

    call(jnp.asarray(X))
    with pytest.raises(ArgumentError, match="int64 with integers from 1 to 1099511627781"):
        PLACES[place](call, X)


def test_another_thread_that_traces_does_not_change_jax_here() -> None:
    ids, _ = KINDS["2**40 + 5"]
    inside, done = threading.Event(), threading.Event()

    def step(x: Any) -> Any:
        inside.set()
        assert done.wait(60)
        return x + 1

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: _mirrored().run(step, (np.int32(1),)))
        assert inside.wait(60)
        try:
            assert jnp.asarray(ids)[0] == 5
            with pytest.raises(ArgumentError):
                jaxdist.function(lambda: jnp.asarray(ids))()
        finally:
            done.set()
        assert int(other.result()) == 2
    assert jnp.asarray(ids)[0] == 5
