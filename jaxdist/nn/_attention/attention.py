"""`attention`, which divides positions over the devices of a replica in one of several ways."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import note_work
from jaxdist._validate import as_array, as_flag, as_integer, as_number, refuse_choice, show
from jaxdist.errors import ShapeError
from jaxdist.nn._attention import kernel, layouts, orders, tpu_kernel
from jaxdist.nn._attention.division import Division, Kind
from jaxdist.nn._attention.facts import list_facts
from jaxdist.nn._attention.gather import GATHER
from jaxdist.nn._attention.positions import DEFAULT_AXIS, check_divides
from jaxdist.nn._attention.ring import RING
from jaxdist.nn._attention.step_order import settle_order
from jaxdist.nn._attention.ulysses import ULYSSES
from jaxdist.nn._axis import Axis, find_axis

# A new kind is a file of its own, a name in this table, and a line in the docstring below.
_KINDS = {kind.name: kind for kind in (ULYSSES, GATHER, RING)}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@called("nn.attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: str = DEFAULT_AXIS,
    kind: str = "ulysses",
    causal: bool = False,
    order: str | None = None,
    segment_ids: Any = None,
    scale: float | None = None,
    block: int = 512,
) -> jax.Array:
    """Return softmax attention, with the positions over the devices of a replica.

    It computes what `jax.nn.dot_product_attention` does, block by block: neither the scores nor
    their gradient are ever whole in memory. On a mesh with the axis `"positions"` each device has a
    part of the positions of q, k and v; on one device, and outside of a step, it does all of them.

    Shapes:
        `q` `[rows, positions, heads, d]`; `k` and `v` `[rows, positions, kv_heads, d]`, where
        `kv_heads` divides `heads`: query head h sees head `h // (heads // kv_heads)` of them.
        Out: like `q`. All are those of the whole replica, as everywhere in a step.

    Cost:
        For n devices, B the bytes of q on one of them, K those of k and v together, with gradients:
        ulysses sends `(4 B + 2 K) (n-1)/n` in 8 all-to-alls, where heads of k and v are repeated
        as often as n needs; gather `2 (n-1) K`, and has k and v whole on each device; ring
        `n - 1` times K and then K and its gradient in float32, in `6 n - 4` permutes. With
        segments, these are gathered too. A pair of blocks that the mask hides is skipped.

    Guarantees:
        The mask is by true positions: `causal` holds for every kind and order. The gradient is that
        of one device. Scores, sums and gradients of sums are in float32, in float64 for float64.
        A row always sees its own position, so no row is empty. Its second derivative is right, and
        takes the memory of all blocks.

    Note:
        On TPUs, ulysses in contiguous order and a device with all positions use the kernel of JAX
        (splash attention) where all axes of the mesh with several devices are manual: those of the
        replicas, `axis`, and that of the stages around. Positions are then a multiple of 128 and d
        of 64, and dtypes are bfloat16 or float32. It multiplies q by `scale` in their dtype.

    Args:
        q: Queries, floating-point.
        k: Keys, of the same dtype.
        v: Values, of the same dtype.
        axis: The name of the axis of the mesh, which is not one of replicas. A mesh without the
            default axis computes on one device, or as XLA divides the heads.
        kind: How devices meet. `"ulysses"` exchanges heads for positions, and needs a number of
            heads that n divides. `"gather"` has all keys on each device, for any number of heads.
            `"ring"` passes keys on, from device to device, and needs the least memory where heads
            are few; it is slower.
        causal: Whether a position sees only itself and earlier ones.
        order: How the rows lie over the axis, `"contiguous"` or `"zigzag"`. Left out, it is that
            of the `split_positions` of the same step, else `"contiguous"`.
        segment_ids: Integers `[rows, positions]` in the order of the rows: a position sees only
            those of its own segment, such as a document. Padding is a segment, too.
        scale: The factor of the scores; None means `1 / sqrt(d)`.
        block: The number of keys that are taken at a time. It does not have to divide anything.
            The kernel of JAX takes the largest multiple of 128 up to it that divides the positions.

    Returns:
        An array like `q`.

    Raises:
        ShapeError: Shapes that do not fit each other; positions that the order, or heads that the
            kind cannot divide.
        ArgumentTypeError: Dtypes that differ or are not floating-point, segments that are not
            integers, or an argument of a wrong type.
        ArgumentError: No such kind, order or axis, an axis of replicas, a second order in one step,
            or a block that is not positive.
        ContextError: The axis is manual here, or JAX cannot compute over Explicit axes.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "positions"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> x = np.random.default_rng(0).normal(size=(2, 16, 4, 8)).astype("float32")
        >>> def step(x):
        ...     x = jaxdist.nn.split_positions(x, order="contiguous")
        ...     return jaxdist.nn.attention(x, x, x, causal=True)
        >>> found = strategy.run(step, (jax.device_put(x, strategy.per_replica_sharding),))
        >>> bool(jnp.allclose(found.array, jax.nn.dot_product_attention(x, x, x, is_causal=True),
        ...     atol=1e-6))
        True

    Source:
        arXiv:2309.14509 (Ulysses), arXiv:2310.01889 (ring), arXiv:2307.08691 (blocks);
        `jax.experimental.pallas.ops.tpu.splash_attention`.
    """
    settings: Any = jax.config
    chosen = _find_kind(kind)
    q, k, v = _check_arrays(q, k, v)
    segments = _check_segments(segment_ids, q)
    plan = kernel.Plan(
        causal=as_flag("causal", causal),
        scale=_check_scale(scale, q.shape[3]),
        block=as_integer("block", block, least=1, example=512),
        run=q.shape[1],
        precision=settings.jax_default_matmul_precision,
    )
    found = find_axis(axis, DEFAULT_AXIS)
    divided = orders.make(settle_order(axis, order), 1 if found is None else found.size)
    if found is not None:
        _check_division(q, k, chosen, divided, found)
    if not q.size:
        return jnp.zeros_like(q)
    if found is None:
        return layouts.call_auto(lambda *given: _attend_whole(plan, *given), q, k, v, segments)
    division = Division(found.name, divided, plan.with_run(divided.run(q.shape[1] // found.size)))
    note_work(
        _compat.find_line_of_model(),
        lambda: list_facts(chosen, division, q, k, has_segments=segments is not None),
    )
    return layouts.call_auto(
        lambda *given: _attend_divided(division, chosen, *given), q, k, v, segments
    )


def _attend_whole(plan: kernel.Plan, q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
    if tpu_kernel.can_attend(plan, q):
        return tpu_kernel.attend(plan, q, k, v, segments)
    rows = kernel.Rows(jnp.arange(q.shape[1], dtype=jnp.int32), segments)
    return kernel.attend(plan, q, rows, k, v, rows)


def _attend_divided(
    division: Division, kind: Kind, q: Any, k: Any, v: Any, segments: Any
) -> jax.Array:
    spec = PartitionSpec(None, division.axis)
    mapped = jax.shard_map(
        lambda *given: kind.attend(division, *given),
        # Each device has all segments: they are few bytes, and each kind needs other ones.
        in_specs=(spec, spec, spec, PartitionSpec()),
        out_specs=spec,
        axis_names={division.axis},
        check_vma=False,
    )
    return mapped(q, k, v, segments)


def _find_kind(kind: Any) -> Kind:
    rule = f"kind is one of {list(_KINDS)}."
    if not isinstance(kind, str):
        raise refuse_type(f"kind={show(kind)}.", rule, "Pass kind='ulysses'.")
    if kind not in _KINDS:
        raise refuse_choice("kind", kind, _KINDS)
    return _KINDS[kind]


def _check_arrays(q: Any, k: Any, v: Any) -> list[jax.Array]:
    arrays = [as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    q, k, v = arrays
    for name, x in zip("qkv", arrays, strict=True):
        if x.ndim != 4:
            raise refuse(
                f"{name} of shape {list(x.shape)}.",
                f"{name} is [rows, positions, {'heads' if name == 'q' else 'kv_heads'}, d].",
                f"Pass {name}[None] if it is one row."
                if x.ndim == 3
                else f"Reshape {name} to 4 dims.",
                kind=ShapeError,
            )
        if str(x.dtype) not in _DTYPES:
            raise refuse_type(
                f"{name} of dtype {x.dtype}.",
                f"{name} is of {', '.join(_DTYPES)}.",
                f"Pass {name}.astype(jnp.bfloat16), or another of them.",
            )
        if x.dtype != q.dtype:
            raise refuse_type(
                f"{name} of dtype {x.dtype}, and q of {q.dtype}.",
                "q, k and v have one dtype.",
                f"Pass {name}.astype({str(q.dtype)!r}).",
            )
    _check_shapes(q, k, v)
    return arrays


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    heads, kv_heads = q.shape[2], k.shape[2]
    shapes = f"q, k and v of shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    expected = [*q.shape[:2], kv_heads, q.shape[3]]
    for name, x in (("k", k), ("v", v)):
        if list(x.shape) != expected:
            raise refuse(
                f"{shapes}.",
                "k and v have the rows, the positions and the d of q, and one number of heads.",
                f"Pass {name} of shape {expected}.",
                kind=ShapeError,
            )
    if heads and (not kv_heads or heads % kv_heads):
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise refuse(
            f"{shapes}: {heads} heads, and {kv_heads} of k and v.",
            "Each head of k and v serves as many heads of q.",
            f"Pass k and v with a number of heads that divides {heads}: {divisors}.",
            kind=ShapeError,
        )


def _check_segments(segments: Any, q: jax.Array) -> jax.Array | None:
    if segments is None:
        return None
    array = as_array("segment_ids", segments)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise refuse_type(
            f"segment_ids of dtype {array.dtype}.",
            "segment_ids are integers: the number of the segment of each position.",
            "Pass segment_ids.astype('int32').",
        )
    if array.shape != q.shape[:2]:
        raise refuse(
            f"segment_ids of shape {list(array.shape)}, and q of shape {list(q.shape)}.",
            "segment_ids have an integer for each position of each row: [rows, positions].",
            f"Pass segment_ids of shape {list(q.shape[:2])}.",
            kind=ShapeError,
        )
    return array


def _check_scale(scale: Any, d: int) -> float:
    if scale is None:
        return kernel.default_scale(d)
    return as_number("scale", scale, example=0.125)


def _check_division(
    q: jax.Array, k: jax.Array, kind: Kind, order: orders.Order, axis: Axis
) -> None:
    check_divides(f"q of shape {list(q.shape)}", q.shape[1], order, axis)
    kind.check(q.shape[2], k.shape[2], axis.size)
