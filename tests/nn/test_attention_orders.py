"""The order of positions: what makes it, numbers it, and how long a step remembers it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import nn
from jaxdist.errors import ArgumentError
from tests.nn.attention import KINDS, by_definition, distance, draw, on_mesh, rows_of, whole

ZIGZAG = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


def _run(step: Any, *arrays: Any, strategy: Any = None) -> Any:
    strategy = strategy or on_mesh((1, 4))
    return strategy.run(step, rows_of(strategy, *arrays))


def test_rows_and_their_numbers_are_in_one_order() -> None:
    x = np.arange(32).reshape(2, 16)

    def step(x: Any) -> Any:
        whole = nn.split_positions({"a": x, "b": (x[..., None] * 1.0, None)})
        return whole, nn.positions(16)

    found, numbers = _run(step, x)
    assert numbers.tolist() == ZIGZAG
    np.testing.assert_array_equal(found["a"], x[:, ZIGZAG])
    np.testing.assert_array_equal(found["b"][0], x[:, ZIGZAG, None])


def test_contiguous_rows_stay_where_they_are() -> None:
    def step(x: Any) -> Any:
        return nn.split_positions(x, order="contiguous"), nn.positions(12)

    found, numbers = _run(step, np.arange(12)[None])
    assert found[0].tolist() == numbers.tolist() == list(range(12))


def test_without_an_order_positions_are_contiguous() -> None:
    assert _run(lambda x: nn.positions(4) + x[0, 0], np.zeros((1, 1), int)).tolist() == [0, 1, 2, 3]
    assert nn.positions(3, order="zigzag").tolist() == [0, 1, 2]
    assert nn.positions(0).shape == (0,)


def test_each_device_takes_its_part_without_a_message() -> None:
    strategy = on_mesh((2, 4))
    compiled = strategy.lower(
        lambda x: (nn.split_positions(x) ** 2).sum(), rows_of(strategy, np.zeros((2, 16, 3), "f4"))
    ).compile()
    # The sum is an all-reduce.
    assert [c.kind for c in jaxdist.hlo.collectives(compiled.as_text())] == ["all-reduce"]


def test_the_gradient_of_split_positions_is_in_the_order_before() -> None:
    def step(x: Any) -> Any:
        weights = nn.positions(16, order="zigzag")[None]
        return jax.grad(lambda x: (nn.split_positions(x) * weights).sum())(x)

    assert _run(step, np.zeros((1, 16), "f4"))[0].tolist() == list(range(16))


def _attend(q: Any, k: Any, v: Any) -> jax.Array:
    return nn.attention(q, k, v, causal=True)


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_positions_are_true_positions(kind: str) -> None:
    def rotate(x: Any) -> jax.Array:
        half = x.shape[-1] // 2
        angles = nn.positions(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(half)[None] / half)
        sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def model(q: Any, k: Any, v: Any) -> jax.Array:
        q, k, v = nn.split_positions((q, k, v))
        return nn.attention(rotate(q), rotate(k), v, causal=True, kind=kind)

    arrays = draw(0, 1, 16, 4, 4, 4)[:3]
    found = np.asarray(_run(model, *arrays))[:, np.argsort(ZIGZAG)]
    assert distance(found, model(*arrays)) < 1e-6


def test_an_order_of_the_call_is_for_rows_that_lie_so_already() -> None:
    q, k, v, *_ = draw(1, 1, 16, 4, 4, 4)
    moved = [x[:, ZIGZAG] for x in (q, k, v)]
    found = _run(lambda *a: nn.attention(*a, causal=True, order="zigzag"), *moved)
    assert distance(found, by_definition(q, k, v, causal=True)[:, jnp.array(ZIGZAG)]) < 1e-6


LAYOUTS = {
    "four devices": lambda: on_mesh((1, 4)),
    "one device": lambda: jaxdist.MirroredStrategy(["cpu:0"]),
}


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_orders_in_one_step_are_refused_on_every_layout(layout: str, eagerly: bool) -> None:
    x = np.zeros((1, 16, 4, 2), "f4")

    def both(x: Any) -> Any:
        x = nn.split_positions(x)
        return nn.attention(x, x, x, order="contiguous")

    def late(x: Any) -> Any:
        nn.attention(x, x, x)
        return nn.split_positions(x)

    def numbers(x: Any) -> Any:
        nn.split_positions(x, order="contiguous")
        return nn.positions(16, order="zigzag")

    strategy = LAYOUTS[layout]()
    with jaxdist.config.run_eagerly(eagerly):
        for step, call, first in (
            (both, "nn.attention", "'zigzag' since nn.split_positions at "),
            (late, "nn.split_positions", "'contiguous' since nn.attention at "),
            (numbers, "nn.positions", "'contiguous' since nn.split_positions at "),
        ):
            with pytest.raises(ArgumentError) as error:
                _run(step, x, strategy=strategy)
            assert str(error.value).startswith(f"{call} was given order=")
            assert first in str(error.value)
            assert "test_attention_orders.py" in str(error.value)


def test_the_order_of_one_axis_is_not_that_of_another() -> None:
    strategy = on_mesh((1, 2, 4), ("data", "frames", "positions"))

    def step(x: Any) -> Any:
        nn.split_positions(x, axis="frames", order="contiguous")
        nn.split_positions(x)
        return nn.positions(16, axis="frames"), nn.positions(16)

    frames, numbers = _run(step, np.zeros((1, 16)), strategy=strategy)
    assert frames.tolist() == list(range(16))
    assert numbers.tolist() == ZIGZAG


ATTEND = jax.jit(_attend)
CHECKPOINTED = jax.checkpoint(_attend)


def _scanned(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.lax.scan(_body, q, (k[None], v[None]))[0]


def _body(q: Any, kv: Any) -> Any:
    return _attend(q, *kv), None


@pytest.mark.parametrize("attend", [ATTEND, CHECKPOINTED, _scanned], ids=["jit", "remat", "scan"])
def test_a_function_that_jax_has_traced_before_follows_the_order_of_each_step(attend: Any) -> None:
    """JAX keeps what it traced, by the function and the shapes, which are the same in all steps."""
    strategy = on_mesh((1, 4))
    q, k, v, *_ = draw(2, 1, 16, 4, 4, 4)
    expected = by_definition(q, k, v, causal=True)

    def plain(*arrays: Any) -> Any:
        return attend(*arrays)

    def zigzag(*arrays: Any) -> Any:
        return attend(*nn.split_positions(arrays))

    def contiguous(*arrays: Any) -> Any:
        return attend(*nn.split_positions(arrays, order="contiguous"))

    for step in (plain, zigzag, contiguous, zigzag, plain):
        found = np.asarray(_run(step, q, k, v, strategy=strategy))
        if step is zigzag:
            found = found[:, np.argsort(ZIGZAG)]
        assert distance(found, expected) < 1e-6, step.__name__
    # Outside of steps nothing is remembered.
    assert distance(attend(q, k, v), expected) < 1e-6


SPLIT = jax.jit(nn.split_positions)


def test_split_positions_in_a_function_that_jax_has_traced_before_is_noted_again() -> None:
    strategy = on_mesh((1, 4))
    q, k, v, *_ = draw(3, 1, 16, 4, 4, 4)
    expected = by_definition(q, k, v, causal=True)

    def one(*arrays: Any) -> Any:
        return _attend(*SPLIT(arrays))

    def two(*arrays: Any) -> Any:
        return _attend(*SPLIT(arrays)), nn.positions(16)

    assert distance(np.asarray(_run(one, q, k, v))[:, np.argsort(ZIGZAG)], expected) < 1e-6
    for _ in range(2):
        out, numbers = _run(two, q, k, v, strategy=strategy)
        assert numbers.tolist() == ZIGZAG
        assert distance(np.asarray(out)[:, np.argsort(ZIGZAG)], expected) < 1e-6


def test_a_step_that_is_traced_again_with_another_order_forgets_the_first() -> None:
    strategy = on_mesh((1, 4))

    def step(x: Any, order: str) -> Any:
        x = nn.split_positions(x, order=order)
        return ATTEND(x, x, x), nn.positions(x.shape[1])

    for order in ("zigzag", "contiguous", "zigzag"):
        for length in (16, 32):
            x = draw(4, 1, length, 4, 4, 4)[0]
            out, numbers = strategy.run(step, (*rows_of(strategy, x), order))
            assert (numbers.tolist() == list(range(length))) == (order == "contiguous")
            expected = by_definition(x, x, x, causal=True)
            assert distance(np.asarray(out)[:, np.argsort(np.asarray(numbers))], expected) < 1e-6


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    strategy = on_mesh((1, 4))

    def fails(x: Any) -> Any:
        nn.split_positions(x)
        raise ValueError("after it")

    with pytest.raises(ValueError, match="after it"):
        _run(fails, np.zeros((1, 16)), strategy=strategy)
    numbers = _run(lambda x: nn.positions(16) + x[0, 0], np.zeros((1, 16), int), strategy=strategy)
    assert numbers.tolist() == list(range(16))
    assert nn.positions(4).tolist() == [0, 1, 2, 3]


def test_a_step_within_a_merge_call_sees_the_order_around_it() -> None:
    strategy = on_mesh((1, 4))

    def inner(x: Any) -> Any:
        return nn.positions(16) + x[0, 0]

    def merge(strategy: Any, x: Any) -> Any:
        return strategy.run(inner, (x,))

    def step(x: Any) -> Any:
        x = nn.split_positions(x)
        return jaxdist.get_replica_context().merge_call(merge, (x,))

    assert whole(strategy, _run(step, np.zeros((1, 16), int), strategy=strategy)).tolist() == ZIGZAG


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_numbers_of_positions_are_sent_nowhere(order: str) -> None:
    strategy = on_mesh((2, 4))
    table = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")

    def step(x: Any) -> Any:
        x = nn.split_positions(x, order=order)
        return x + jnp.asarray(table)[nn.positions(16)][None]

    args = rows_of(strategy, np.zeros((2, 16, 4), "float32"))
    kinds = {c.kind for c in strategy.lower(step, args).compile().collectives}
    assert not kinds & {"collective-permute", "all-to-all"}, kinds
