"""Operations and memory traffic of compiled programs, against counts by hand and XLA's own."""

import fractions
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import _compat, hlo
from jaxdist._devices import chips

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
    mesh = Mesh(np.array(chips.describe_slice("v5e:2x2", 1)), ("x",))
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


@pytest.mark.parametrize("kind", ["cpu", "v5e:2x2"])
def test_a_branch_with_a_note_counts_in_its_part_of_the_iterations(kind: str) -> None:
    """Of 8 iterations, 2 have a product; a conditional in the branch counts as the larger one."""
    devices = jax.devices("cpu") if kind == "cpu" else chips.describe_slice(kind, 1)
    sharding = jax.sharding.SingleDeviceSharding(devices[0])

    def inner(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    def turn(x: jax.Array, taken: jax.Array) -> tuple[jax.Array, None]:
        part = fractions.Fraction(2, 8)
        return _compat.cond_in_part(part, taken > 0, inner, lambda x: x, x), None

    def program(x: jax.Array, taken: jax.Array) -> jax.Array:
        return jax.lax.scan(turn, x, taken)[0]

    x = jax.ShapeDtypeStruct((128, 128), "float32", sharding=sharding)
    taken = jax.ShapeDtypeStruct((8,), "int32", sharding=sharding)
    text = jax.jit(program).lower(x, taken).compile().as_text()
    assert text is not None
    assert hlo.work(text).flops == 2 * 2 * 128**3


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


SCATTER = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%in_place (x: f32[1000,8], at: s32[4,1], rows: f32[4,8]) -> f32[1000,8] {
  %x = f32[1000,8]{1,0} parameter(0)
  %at = s32[4,1]{1,0} parameter(1)
  %rows = f32[4,8]{1,0} parameter(2)
  %same = f32[1000,8]{1,0} bitcast(%x)
  ROOT %d = f32[1000,8]{1,0} scatter(%same, %at, %rows), to_apply=%sum
}

%of_zeros (at: s32[4,1], rows: f32[4,8]) -> f32[1000,8] {
  %at = s32[4,1]{1,0} parameter(0)
  %rows = f32[4,8]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[1000,8]{1,0} broadcast(%zero), dimensions={}
  ROOT %d = f32[1000,8]{1,0} scatter(%zeros, %at, %rows), to_apply=%sum
}

ENTRY %main (x: f32[1000,8], at: s32[4,1], rows: f32[4,8]) -> f32[1000,8] {
  %x = f32[1000,8]{1,0} parameter(0)
  %at = s32[4,1]{1,0} parameter(1)
  %rows = f32[4,8]{1,0} parameter(2)
  ROOT %r = f32[1000,8]{1,0} CALL
}
"""
_INDICES, _ROWS, _WHOLE = 4 * 4, 4 * 8 * 4, 1000 * 8 * 4


@pytest.mark.parametrize(
    ("call", "bytes_"),
    [
        # The rows of the update and the old rows are read, and the new rows are written.
        ("scatter(%x, %at, %rows), to_apply=%sum", _INDICES + 3 * _ROWS),
        ("fusion(%x, %at, %rows), kind=kInput, calls=%in_place", _INDICES + 3 * _ROWS),
        # Here the zeros are written as well.
        ("fusion(%at, %rows), kind=kInput, calls=%of_zeros", _INDICES + _ROWS + _WHOLE),
    ],
)
def test_a_scatter_moves_the_rows_that_it_updates(call: str, bytes_: int) -> None:
    found = hlo.work(SCATTER.replace("CALL", call))
    assert found.memory_bytes == bytes_
    assert found.unknown == ()


# As XLA's own tests have them: gemm_rewriter_test, cudnn_fused_conv_rewriter_test.
CONFIG = (
    '{"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{'
    '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)
GEMM = """
%a = f32[3,5,7]{2,1,0} parameter(0)
%b = f32[3,7,11]{2,1,0} parameter(1)
%g = (f32[3,5,11]{2,1,0}, s8[80000]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config=CONFIG
"""
CONVOLUTIONS = """
%x = f8e4m3fn[2,6,6,16]{3,2,1,0} parameter(0)
%k = f8e4m3fn[32,3,3,16]{3,2,1,0} parameter(1)
%scale = f32[] parameter(2)
%bias = f32[32]{0} parameter(3)
%side = f32[2,4,4,32]{3,2,1,0} parameter(4)
%graph = (f8e4m3fn[2,4,4,32]{3,2,1,0}, f32[], u8[0]{0}) custom-call(%x, %k, %scale), \
window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForwardGraph", \
backend_config={"cudnn_conv_backend_config":{"serialized_graph":"28:[f32]conv();"}}
%relu = (f32[2,4,4,32]{3,2,1,0}, u8[4096]{0}) custom-call(%x, %k, %bias, %side), \
window={size=3x3}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBiasActivationForward"
"""


@pytest.mark.parametrize("config", [CONFIG, '"' + CONFIG.replace('"', '\\"') + '"'])
def test_products_of_cublas_are_read_from_the_configuration_of_the_call(config: str) -> None:
    found = hlo.work(GEMM.replace("CONFIG", config))
    assert found.flops == 2 * 3 * 5 * 7 * 11
    assert found.memory_bytes == 4 * (3 * 5 * 7 + 3 * 7 * 11 + 3 * 5 * 11)
    assert found.unknown == ()


def test_convolutions_of_cudnn_with_more_operands_and_results_count_like_plain_ones() -> None:
    found = hlo.work(CONVOLUTIONS)
    assert found.flops == 2 * (2 * 2 * 4 * 4 * 32 * 9 * 16)
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("line", "named", "may_communicate"),
    [
        ('%r = f32[4] custom-call(%a), custom_call_target="my_kernel"', "to my_kernel", True),
        ("%r = f32[4] custom-call(%a)", "to nothing named", True),
        ("%r = ((f32[4]), f32[4]) all-reduce-twice-start(%a)", "all-reduce-twice", True),
        ("%r is f32[4] all-reduce(%a)", "the line '%r is f32", True),
        ('%r = f32[4] custom-call(%a), custom_call_target="lapack_spotrf_ffi"', "lapack", False),
        ('%r = f32[4] custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"', "fmha", False),
        ("%r = f32[4] ragged-dot(%a, %a)", "ragged-dot", False),
        ('%r = f32[4] custom-call(%a), custom_call_target="__cublas$gemm"', "gemm", False),
        ("%r = f32[4] dot(%a, %a)", "dot", False),
        ("%r = f32[4] convolution(%a, %a)", "convolution", False),
    ],
)
@pytest.mark.parametrize("where", ["entry", "fusion", "loop"])
def test_what_is_not_known_is_named_wherever_it_stands(
    line: str, named: str, may_communicate: bool, where: str
) -> None:
    inside = f"%in (a: f32[4]) -> f32[4] {{\n  %a = f32[4] parameter(0)\n  {line}\n}}\n"
    call = {
        "entry": line,
        "fusion": "%f = f32[4] fusion(%a), kind=kCustom, calls=%in",
        "loop": "%w = f32[4] while(%a), condition=%in, body=%in",
    }[where]
    text = f"{inside if where != 'entry' else ''}ENTRY %main (a: f32[4]) -> f32[4] {{\n"
    text += f"  %a = f32[4] parameter(0)\n  {call}\n}}\n"
    assert [n for n in hlo.work(text).unknown if named in n]
    assert bool([n for n in hlo.unknown(text) if named in n]) == may_communicate
