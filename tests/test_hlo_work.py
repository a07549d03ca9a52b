"""Operations and memory traffic of compiled programs, against counts by hand and XLA's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import _chips, hlo

STEPS, ROWS, WIDTH = 6, 256, 512
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def layers(w: Any, x: Any, unroll: int = 1) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    return jnp.mean(jax.lax.scan(layer, x, w, unroll=unroll)[0] ** 2)


def remat_layers(w: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jnp.mean(jax.lax.scan(layer, x, w)[0])


def counted(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(3, 3 + STEPS, lambda i, h: jnp.tanh(h @ w[0]) * i, x)


def until(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda h: jnp.sum(h) > 1, lambda h: jnp.tanh(h @ w[0]), x)


def strided(kernel: Any, x: Any) -> Any:
    """With padding, a stride, and holes in both operands."""
    dims = ("NHWC", "HWIO", "NHWC")
    padding = ((2, 1), (0, 3))
    return jax.lax.conv_general_dilated(x, kernel, (2, 1), padding, (1, 2), (2, 1), dims)


def _described(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    mesh = Mesh(np.array(_chips.described("v5e:2x2", 1)), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32, sharding=everywhere) for s in shapes)


def _here(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)


STACK = ((STEPS, WIDTH, WIDTH), (ROWS, WIDTH))


@pytest.mark.parametrize("shapes_on", [_here, _described], ids=["cpu", "tpu"])
@pytest.mark.parametrize(
    ("fn", "products", "unknown"),
    [
        (layers, STEPS, 0),
        # Two products in the backward of each layer; TPUs keep the one for the first input too.
        (jax.grad(layers), 3 * STEPS, 0),
        (jax.grad(remat_layers), 4 * STEPS, 0),
        (counted, STEPS, 0),
        (until, 1, 1),
    ],
    ids=["scan", "grad_of_scan", "grad_of_remat", "fori_loop", "while_loop"],
)
def test_products_in_loops_are_counted_as_often_as_they_run(
    fn: Callable[..., Any],
    products: int,
    unknown: int,
    shapes_on: Callable[..., tuple[jax.ShapeDtypeStruct, ...]],
) -> None:
    found = hlo.work(jax.jit(fn).lower(*shapes_on(*STACK)).compile().as_text() or "")
    assert found.flops == products * PRODUCT
    assert found.unknown_loops == unknown


def test_products_of_convolutions_are_those_that_xla_counts() -> None:
    shapes = _described((3, 3, 64, 128), (8, 31, 32, 64))
    compiled = jax.jit(strided).lower(*shapes).compile()
    theirs: Any = compiled.cost_analysis()
    ours = hlo.work(compiled.as_text() or "")
    # XLA counts a few additions beside the products.
    assert ours.flops <= theirs["flops"] < 1.01 * ours.flops


def test_traffic_holds_what_goes_in_and_out_and_not_what_stays_in_fast_memory() -> None:
    shapes = _described((STEPS, 1024, 1024), (ROWS, 1024))
    looped, unrolled = (
        hlo.work(
            jax.jit(lambda w, x, u=u: layers(w, x, u)).lower(*shapes).compile().as_text() or ""
        )
        for u in (1, STEPS)
    )
    weights = STEPS * 1024 * 1024 * 4
    for found in (looped, unrolled):
        assert weights <= found.memory_bytes < 1.1 * weights
    assert looped.flops == unrolled.flops
