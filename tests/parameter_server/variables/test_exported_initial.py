"""Large first values are made on the servers, if a function of JAX makes them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import Variable
from jaxdist._parameter_server.protocol import Create
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.variables import make_shards
from jaxdist.errors import ShapeError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_strategy
from tests.parameter_server.wrapping import wrap

SHAPE = (7, 3)
KEY = jax.random.key(3)
MANY = jnp.arange(21, dtype=jnp.float32).reshape(SHAPE)


@pytest.fixture(autouse=True)
def _small_values_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_shards, "_LARGE", 64)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kinds of the values that are sent to servers."""
    found: list[Any] = []

    def note(request: Create, go_on: Any) -> Any:
        found.extend(np.ndarray if c.program is None else bytes for c in request.variables)
        return go_on()

    monkeypatch.setattr(VariableServer, "call", wrap(VariableServer.call, Create, note))
    return found


def _draw() -> Any:
    return jax.random.normal(KEY, SHAPE)


def _number(partition_shape: Any = SHAPE, partition_offset: Any = (0, 0)) -> Any:
    rows = jnp.arange(partition_shape[0])[:, None] + partition_offset[0]
    return jnp.broadcast_to(rows * 10.0, partition_shape)


def _decide() -> Any:
    return jnp.ones(SHAPE) * float(jnp.sum(jnp.ones(3)))


def _count_in_numpy() -> Any:
    return np.arange(21, dtype=np.float32).reshape(SHAPE)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("make", "is_program"),
    [(_draw, True), (_number, True), (_decide, False), (_count_in_numpy, False)],
)
def test_the_value_is_that_of_the_function(
    make: Callable[[], Any], is_program: bool, shards: int, sent: list[Any]
) -> None:
    partitioner = FixedShardsPartitioner(shards) if shards > 1 else None
    strategy = make_strategy(variable_partitioner=partitioner)
    with strategy.scope():
        # The smallest shard has 24 bytes.
        table = Variable(make, shape=SHAPE, dtype=np.float32, name="table")
    np.testing.assert_allclose(table.numpy(), np.asarray(make()), rtol=1e-6)
    assert table.dtype == np.float32
    assert len(sent) == shards
    if shards == 1:
        assert sent == [bytes if is_program else np.ndarray]


def test_shards_are_programs_of_their_rows(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_shards, "_LARGE", 1)
    strategy = make_strategy(variable_partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        drawn = Variable(_draw, shape=SHAPE, dtype=np.float32)
        numbered = Variable(_number, shape=SHAPE, dtype=np.float32)
    assert sent == [bytes] * 4
    np.testing.assert_allclose(drawn.numpy(), _draw(), rtol=1e-6)
    np.testing.assert_array_equal(numbered.numpy(), _number())


def test_values_with_large_constants_and_small_ones_are_sent(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make_strategy()
    with strategy.scope():
        Variable(_draw, shape=SHAPE, dtype=np.float32)
        monkeypatch.setattr(make_shards, "_MOST_CONSTANTS", 16)
        constant = Variable(lambda: MANY + 1, shape=SHAPE, dtype=np.float32)
        monkeypatch.setattr(make_shards, "_LARGE", 2**24)
        Variable(_draw, shape=SHAPE, dtype=np.float32)
    assert sent == [bytes, np.ndarray, np.ndarray]
    np.testing.assert_array_equal(constant.numpy(), MANY + 1)


def test_a_function_of_numpy_is_called_once() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return np.zeros(SHAPE, np.float32)

    with make_strategy().scope():
        Variable(make, shape=SHAPE, dtype=np.float32)
    assert calls == [1]


def test_the_dtype_of_the_variable_wins_and_another_shape_is_named() -> None:
    with make_strategy().scope():
        half = Variable(_draw, shape=SHAPE, dtype=jnp.bfloat16)
        with pytest.raises(ShapeError, match=r"makes the shape \[7, 3\], and shape=\[8, 3\]"):
            Variable(_draw, shape=(8, 3), dtype=np.float32)
        with pytest.raises(ShapeError, match=r"\[7, 3\]"):
            Variable(_count_in_numpy, shape=(8, 3), dtype=np.float32)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.numpy(), _draw().astype(jnp.bfloat16))
