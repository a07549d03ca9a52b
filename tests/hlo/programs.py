"""Small programs of many kinds, for which compilers wrote the texts in `recorded/`.

Each is a function of arrays, mapped over all devices of a mesh with one axis `d`, or split by
GSPMD. What it asks for (products, bytes of collectives) is counted from its jaxpr by
`tests.hlo.asked`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "d"
F32, BF16, F8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
# Large enough that no compiler takes a product for a sum of elements.
WIDTH, ROWS = 256, 64


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A program: its function, its arrays (shape, dtype, spec), and how it is compiled.

    `specs` are of one device under `shard_map`; with `gspmd` the function sees whole arrays.
    `options` are compiler options, by platform.
    """

    name: str
    fn: Callable[..., Any]
    arrays: tuple[tuple[tuple[int, ...], Any, PartitionSpec], ...]
    gspmd: bool = False
    platforms: tuple[str, ...] = ("cpu", "tpu", "gpu")
    options: tuple[tuple[str, Any], ...] = ()
    # How many times the products of the trace the compiled program does, where compilers pad.
    most_products: float = 1.0

    def mapped(self, mesh: Mesh) -> Callable[..., Any]:
        """The function of whole arrays."""
        if self.gspmd:
            return self.fn
        specs = tuple(spec for _, _, spec in self.arrays)
        fn = functools.partial(self.fn, mesh.size)
        return jax.shard_map(
            fn, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), check_vma=False
        )

    def described(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Its arguments, for this mesh: a spec with an axis multiplies dim 0 by the devices."""
        given = []
        for shape, dtype, spec in self.arrays:
            if spec and spec[0] == AXIS and not self.gspmd:
                shape = (shape[0] * mesh.size, *shape[1:])
            given.append(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)))
        return tuple(given)


EACH, SAME = PartitionSpec(AXIS), PartitionSpec()


def _dense_loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def _as_rows(tree: Any) -> Any:
    """Results of one device, as arrays that can lie side by side."""
    return jax.tree.map(lambda x: jnp.reshape(x, (1, *jnp.shape(x))), tree)


def data_parallel(n: int, a: Any, b: Any, x: Any) -> Any:
    del n
    grads = jax.grad(_dense_loss)({"a": a, "b": b}, x)
    return _as_rows(jax.tree.map(lambda p, g: p - lax.pmean(g, AXIS), {"a": a, "b": b}, grads))


def fsdp(a: Any, b: Any, x: Any) -> Any:
    grads = jax.grad(_dense_loss)({"a": a, "b": b}, x)
    return a - grads["a"], b - grads["b"]


def _conv_loss(kernels: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    for k, stride in zip(kernels, (1, 2), strict=True):
        x = jax.nn.relu(lax.conv_general_dilated(x, k, (stride, stride), "SAME", None, None, dims))
    return jnp.mean(x**2)


def conv_net(n: int, k1: Any, k2: Any, x: Any) -> Any:
    del n
    grads = jax.grad(_conv_loss)((k1, k2), x)
    return _as_rows([k - lax.pmean(g, AXIS) for k, g in zip((k1, k2), grads, strict=True)])


def _grouped_loss(kernel: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        x, kernel, (1, 2), ((2, 2), (1, 1)), None, (2, 1), dims, feature_group_count=4
    )
    return jnp.mean(x**2)


def conv_grouped(n: int, kernel: Any, x: Any) -> Any:
    """Groups of features, and holes in the kernel; gradients of both operands."""
    del n
    return _as_rows(jax.grad(_grouped_loss, (0, 1))(kernel, x))


def _attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, w[i]) for i in range(3))
    scores = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k).astype(F32))
    return jnp.einsum("bhst,bhte,hed->bsd", scores.astype(x.dtype), v, w[3])


def _transformer_loss(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        qkv, out, up, down = w
        h = h + _attention((*qkv, out), h)
        return h + jax.nn.gelu(h @ up) @ down, None

    w = jax.tree.map(lambda p: p.astype(BF16), w)
    h, _ = lax.scan(layer, x.astype(BF16), w)
    return jnp.mean(h.astype(F32) ** 2)


def transformer(n: int, qkv: Any, out: Any, up: Any, down: Any, x: Any) -> Any:
    del n
    w = (qkv, out, up, down)
    grads = lax.pmean(jax.grad(_transformer_loss)(w, x), AXIS)
    return _as_rows(jax.tree.map(lambda p, g: p - g / (1 + jnp.sqrt(g * g)), w, grads))


def fp8(n: int, a: Any, b: Any) -> Any:
    del n
    product = jnp.dot(a, b, preferred_element_type=F32)
    return lax.psum(product, AXIS)[None]


def fp8_scaled(n: int, a: Any, b: Any, scale: Any) -> Any:
    """A product of wider numbers, of arrays in fp8: a fusion converts them before it multiplies."""
    del n
    return ((a.astype(BF16) * scale.astype(BF16)) @ b.astype(BF16))[None]


def ragged(n: int, x: Any, w: Any, sizes: Any) -> Any:
    """A mixture of experts: rows of several groups, each with its own matrix."""
    del n
    return lax.ragged_dot(x, w, sizes)


def solvers(n: int, x: Any) -> Any:
    del n
    q, r = jnp.linalg.qr(x)
    lower = jnp.linalg.cholesky(r @ r.T + q)
    return _as_rows((jnp.linalg.solve(lower, q), jnp.linalg.eigvalsh(lower)))


def scan(n: int, w: Any, x: Any) -> Any:
    del n

    def turn(h: Any, w: Any) -> Any:
        return jnp.tanh(lax.psum(h @ w, AXIS)), jnp.sum(h)

    return _as_rows(lax.scan(turn, x, w))


def reduce_scatter(n: int, x: Any, y: Any) -> Any:
    part = lax.psum_scatter(x, AXIS, tiled=True)
    both = lax.psum_scatter((y * 2, x * 3), AXIS, tiled=True)
    return _as_rows((lax.all_gather(part / n, AXIS, tiled=True), both))


def all_to_all(n: int, x: Any) -> Any:
    parts = x.reshape(n, -1, x.shape[-1])
    swapped = lax.all_to_all(parts, AXIS, 0, 0)
    tiled = lax.all_to_all(x * 2, AXIS, 1, 0, tiled=True)
    return _as_rows((swapped, tiled))


def ppermute(n: int, x: Any, y: Any) -> Any:
    ring = [(i, (i + 1) % n) for i in range(n)]
    moved = lax.ppermute(x, AXIS, ring)
    rest = lax.fori_loop(0, 3, lambda i, y: lax.ppermute(y + i, AXIS, ring[::-1]) * 2, y)
    return _as_rows((moved, rest))


def groups(n: int, x: Any, y: Any) -> Any:
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    pairs = [[i, i + n // 2] for i in range(n // 2)]
    inside = lax.psum(x, AXIS, axis_index_groups=halves)
    across = lax.psum(inside * 2, AXIS, axis_index_groups=pairs)
    return _as_rows((across, lax.pmax(y, AXIS), lax.all_gather(x, AXIS)))


def branches(n: int, x: Any, bound: Any) -> Any:
    del n
    bound = jnp.sum(bound)
    chosen = lax.cond(bound > 0, lambda x: lax.psum(x * 7, AXIS), lambda x: x @ x.T, x[:, :ROWS])
    until = lax.while_loop(lambda x: jnp.sum(x) > bound, lambda x: lax.pmin(x, AXIS) - 1, x)
    return _as_rows((chosen, until))


def sort(n: int, x: Any, y: Any) -> Any:
    del n
    order = jnp.argsort(x, axis=-1)
    best, at = lax.top_k(y, 8)
    return _as_rows((jnp.take_along_axis(x, order, -1), jnp.sort(y), best, at, jnp.cumsum(x)))


def fft(n: int, x: Any) -> Any:
    del n
    return jnp.abs(jnp.fft.ifft(jnp.fft.rfft(x)[:, :64] * 2))


def random(n: int, key: Any, table: Any, at: Any) -> Any:
    del n
    noise = jax.random.normal(jax.random.wrap_key_data(key[0]), table.shape)
    rows = (table + noise).at[at].add(1.0)[at]
    return _as_rows((rows, jnp.pad(rows, 1)[::2], jnp.flip(rows, 0)))


def splash(n: int, w: Any, x: Any) -> Any:
    """JAX's splash attention in a scan of layers that are computed again in the backward pass."""
    # It is for TPUs, and loads slowly.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    del n
    positions = x.shape[1]
    mask = kernels.MultiHeadMask([kernels.CausalMask((positions, positions))] * w.shape[2])
    attend = jax.vmap(kernels.make_splash_mha_single_device(mask))

    def layer(h: Any, w: Any) -> Any:
        q = jnp.einsum("bsd,dhe->bhse", h, w)
        return h + jnp.einsum("bhse,dhe->bsd", attend(q, q, q), w), None

    def loss(w: Any) -> Any:
        h, _ = lax.scan(jax.checkpoint(layer), x, w)
        return jnp.mean(h.astype(F32) ** 2)

    return _as_rows(jax.grad(loss)(w))


def scattered(n: int, x: Any, w: Any) -> Any:
    """Each device keeps a part of a sum. The compiler for TPUs writes that as one fusion."""
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    return lax.psum_scatter(x @ w, AXIS, axis_index_groups=halves, tiled=True)


def _w(*shape: int, dtype: Any = F32) -> tuple[tuple[int, ...], Any, PartitionSpec]:
    return shape, dtype, SAME


def _x(*shape: int, dtype: Any = F32) -> tuple[tuple[int, ...], Any, PartitionSpec]:
    return shape, dtype, EACH


_SQUARES = (_w(WIDTH, WIDTH), _w(WIDTH, WIDTH), _x(ROWS, WIDTH))
_IN_F8 = (_x(ROWS, WIDTH, dtype=F8), _w(WIDTH, WIDTH, dtype=F8))
_NO_TRITON = (("xla_gpu_enable_triton_gemm", False),)
_LAYERS, _HEADS = 3, 4
_STACKS = (
    _w(_LAYERS, 3, WIDTH, _HEADS, WIDTH // _HEADS),
    _w(_LAYERS, _HEADS, WIDTH // _HEADS, WIDTH),
    _w(_LAYERS, WIDTH, 4 * WIDTH),
    _w(_LAYERS, 4 * WIDTH, WIDTH),
    _x(2, ROWS, WIDTH),
)
_GPU = ("gpu",)

PROGRAMS: tuple[Recorded, ...] = (
    Recorded("data_parallel", data_parallel, _SQUARES),
    Recorded("data_parallel_gemm", data_parallel, _SQUARES, platforms=_GPU, options=_NO_TRITON),
    Recorded(
        "data_parallel_buffers",
        data_parallel,
        _SQUARES,
        platforms=_GPU,
        options=(("xla_gpu_enable_nccl_user_buffers", True),),
    ),
    Recorded(
        "fsdp",
        fsdp,
        (
            ((WIDTH, WIDTH), F32, EACH),
            ((WIDTH, WIDTH), F32, EACH),
            ((1024, WIDTH), F32, EACH),
        ),
        gspmd=True,
    ),
    Recorded("conv_net", conv_net, (_w(3, 3, 16, 32), _w(3, 3, 32, 64), _x(8, 29, 29, 16))),
    # On GPUs a gradient over a kernel with holes is one over a kernel with zeros.
    Recorded(
        "conv_grouped",
        conv_grouped,
        (_w(3, 3, 8, 64), _x(4, 29, 29, 32)),
        most_products=2.0,
    ),
    Recorded("transformer", transformer, _STACKS),
    Recorded("transformer_gemm", transformer, _STACKS, platforms=_GPU, options=_NO_TRITON),
    Recorded("fp8", fp8, _IN_F8),
    Recorded("fp8_gemm", fp8, _IN_F8, platforms=_GPU, options=_NO_TRITON),
    Recorded("fp8_scaled", fp8_scaled, (*_IN_F8, _w(1)), platforms=_GPU),
    # XLA multiplies all rows with the matrices of all 4 groups.
    Recorded(
        "ragged",
        ragged,
        (_x(ROWS, WIDTH, dtype=BF16), _w(4, WIDTH, 128, dtype=BF16), _w(4, dtype=jnp.int32)),
        platforms=_GPU,
        most_products=4.0,
    ),
    Recorded("solvers", solvers, (_x(64, 64),), platforms=_GPU),
    Recorded("scan", scan, (_w(5, WIDTH, WIDTH), _x(ROWS, WIDTH))),
    Recorded("reduce_scatter", reduce_scatter, (_x(4096), _x(64, 16, dtype=BF16))),
    Recorded(
        "splash",
        splash,
        (_w(3, WIDTH, 2, 128, dtype=BF16), _x(2, 256, WIDTH, dtype=BF16)),
        platforms=("tpu",),
    ),
    Recorded(
        "scattered",
        scattered,
        (_x(1024, WIDTH, dtype=BF16), _w(WIDTH, 4096, dtype=BF16)),
        platforms=("tpu",),
    ),
    Recorded("all_to_all", all_to_all, (_x(64, 128),)),
    Recorded("ppermute", ppermute, (_x(1024), _x(16, 16, dtype=BF16))),
    Recorded("groups", groups, (_x(2048), _x(8, 8, dtype=jnp.int32))),
    Recorded("branches", branches, (_x(ROWS, WIDTH), _x(1))),
    Recorded("sort", sort, (_x(16, 512), _x(4096))),
    Recorded("fft", fft, (_x(16, 256),)),
    Recorded(
        "random",
        random,
        (_x(1, 2, dtype=jnp.uint32), _w(512, 32), _x(16, dtype=jnp.int32)),
    ),
)
