"""Attention by JAX's kernel for TPUs: its numbers, and where it is used."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import nn
from jaxdist._devices import chips
from jaxdist.nn._attention import tpu_kernel
from jaxdist.nn._attention.kernel import Plan
from tests.nn.attention import by_definition, distance, draw

ROWS = [
    # rows, positions, heads, heads of keys, dims, causal, segments, block
    (2, 256, 4, 2, 64, True, True, 128),
    (1, 384, 2, 2, 128, False, False, 512),
    (1, 128, 3, 1, 64, False, True, 1),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_the_kernel_computes_attention_and_its_gradients(row: tuple[Any, ...]) -> None:
    *shape, causal, has_segments, block = row
    q, k, v, weights, segments = draw(0, *shape)
    plan = Plan(causal=causal, scale=0.3, block=block, run=shape[1])
    ids = jnp.asarray(segments) if has_segments else None

    def differentiate(attend: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            return jnp.sum(attend(q, k, v) * weights)

        return jax.value_and_grad(loss, (0, 1, 2))(*map(jnp.asarray, (q, k, v)))

    found = differentiate(lambda q, k, v: tpu_kernel.attend(plan, q, k, v, ids, interpret=True))
    expected = differentiate(
        lambda *x: by_definition(*x, causal=causal, segments=ids, scale=plan.scale)
    )
    assert distance(found, expected) < 5e-6


def _lower(
    shape: dict[str, int],
    *,
    positions: int = 1024,
    d: int = 64,
    dtype: Any = jnp.bfloat16,
    order: str = "contiguous",
    kind: str = "ulysses",
    derivatives: int = 1,
) -> str:
    """Return the program of a step on a described slice, before it is compiled."""
    devices = np.array(chips.describe_slice("v5e:2x4", 1)).reshape(tuple(shape.values()))
    mesh = Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, positions, 8, d), dtype, sharding=layout)

    def step(x: Any) -> Any:
        def loss(x: Any) -> jax.Array:
            return nn.attention(x, x, x, causal=True, kind=kind, order=order).sum()

        for _ in range(derivatives):
            before = loss
            loss = lambda x, of=before: jax.grad(of)(x).sum()  # noqa: E731
        return loss(x)

    return str(strategy.lower(step, (x,)).traced.closed)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"data": 2, "positions": 4}, {}),
        ({"data": 2, "positions": 4, "model": 1}, {}),
        ({"data": 8}, {"order": "zigzag"}),
        ({"data": 8}, {"dtype": jnp.float32}),
    ],
    ids=str,
)
def test_a_step_on_tpus_uses_the_kernel(shape: dict[str, int], options: dict[str, Any]) -> None:
    assert "pallas_call" in _lower(shape, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"data": 2, "positions": 2, "model": 2}, {}),
        ({"data": 2, "positions": 4}, {"order": "zigzag"}),
        ({"data": 2, "positions": 4}, {"kind": "gather"}),
        ({"data": 8}, {"positions": 1000}),
        ({"data": 8}, {"d": 32}),
        ({"data": 8}, {"dtype": jnp.float16}),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_computed_without_it(
    shape: dict[str, int], options: dict[str, Any]
) -> None:
    assert "pallas_call" not in _lower(shape, **options)


def test_products_of_another_precision_are_computed_without_it() -> None:
    with jax.default_matmul_precision("highest"):
        assert "pallas_call" not in _lower({"data": 8})


def test_a_second_derivative_is_computed_without_it() -> None:
    q, k, v, weights, segments = draw(0, 1, 128, 2, 1, 64)
    plan, ids = Plan(causal=True, scale=0.1, block=128, run=128), jnp.asarray(segments)

    def differentiate(attend: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            return jnp.sum(attend(q, k, v) ** 2 * weights)

        def squares(*x: Any) -> jax.Array:
            return sum((jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*x)), jnp.zeros(()))

        return jax.grad(squares, (0, 1, 2))(*map(jnp.asarray, (q, k, v)))

    found = differentiate(lambda q, k, v: tpu_kernel.attend(plan, q, k, v, ids, interpret=True))
    expected = differentiate(
        lambda *x: by_definition(*x, causal=True, segments=ids, scale=plan.scale)
    )
    assert distance(found, expected) < 1e-5
    assert "pallas_call" in _lower({"data": 8}, derivatives=2)
