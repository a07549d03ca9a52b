"""Rows of a sequence over the devices of a replica, and the numbers of these rows."""

from typing import Any, TypeVar

import jax

from jaxdist._called import called, refuse
from jaxdist._validate import as_array, as_integer, check_has_arrays
from jaxdist.errors import ShapeError
from jaxdist.nn._attention import layouts, orders
from jaxdist.nn._attention.step_order import settle_order
from jaxdist.nn._axis import Axis, find_axis

T = TypeVar("T")
DEFAULT_AXIS = "positions"


@called("nn.split_positions")
def split_positions(x: T, axis: str = DEFAULT_AXIS, order: str = "zigzag") -> T:
    """Return arrays `[rows, positions, ...]` whose positions lie over the devices of a replica.

    Call it once for each batch, at the start of the step, on all arrays that have a row for each
    position: tokens, labels, weights, segments. What a model computes for one position at a time
    stays on its device, and `attention` reads the order from here. A loss that is a mean over the
    positions needs no way back.

    In the order `"zigzag"` rows that follow each other are not positions that follow each other. So
    shift labels against tokens before this call, and number positions by `positions`. On one device
    nothing is moved.

    Shapes:
        Unchanged. Row j of the result is position `positions(n)[j]`.

    Cost:
        None on arrays that each device of the replica has whole, as those of a batch. Others are
        gathered for `"zigzag"`: each device sends its part.

    Args:
        x: Pytree of arrays, each with positions as dim 1.
        axis: The name of the axis of the mesh. On a mesh without the default axis, and outside of a
            step, `x` is returned as it is.
        order: `"zigzag"` cuts the positions into `2 * n` parts for n devices, of which device i has
            parts i and `2 * n - 1 - i`. So with a causal mask each device of `kind="ring"` has the
            same work. `"contiguous"` gives device i the i-th of n parts.

    Returns:
        The same pytree.

    Raises:
        ShapeError: An array has less than 2 dims, or a number of positions that the order cannot
            divide.
        ArgumentTypeError: `x` is not a pytree of arrays, or `axis` or `order` is not a string.
        ArgumentError: No such order or axis, an axis of replicas, or a second order in one step.
        ContextError: The axis is manual here.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "positions"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> step = lambda x: jaxdist.nn.split_positions(x)
        >>> strategy.run(step, (np.arange(16)[None],))[0].tolist()
        [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
        >>> OneDeviceStrategy("cpu:0").run(step, (np.arange(4)[None],))[0].tolist()
        [0, 1, 2, 3]

    Source:
        Striped and zigzag orders: arXiv:2311.09431, and zhuzilin/ring-flash-attention.
    """
    orders.check_name(order)
    check_has_arrays("x", x)
    found = find_axis(axis, DEFAULT_AXIS)
    chosen = orders.make(settle_order(axis, order), 1 if found is None else found.size)

    @called("nn.split_positions")
    def split_leaf(path: Any, leaf: Any) -> jax.Array:
        name = "x" + jax.tree_util.keystr(path)
        array = as_array(name, leaf)
        if array.ndim < 2:
            raise refuse(
                f"{name} of shape {list(array.shape)}.",
                "Dim 1 of each array has the positions: [rows, positions, ...].",
                f"Pass {name}[None] if it is one row of positions."
                if array.ndim
                else "Pass arrays only, and keep scalars beside them.",
                kind=ShapeError,
            )
        check_divides(f"{name} of shape {list(array.shape)}", array.shape[1], chosen, found)
        if found is None:
            return array
        arranged = layouts.call_auto(chosen.arrange, array)
        if arranged is not array:
            arranged = layouts.lay_whole(arranged, 1)
        return layouts.lay_over(arranged, found.name, 1)

    result: T = jax.tree_util.tree_map_with_path(split_leaf, x)
    return result


@called("nn.positions")
def positions(n: int, *, axis: str = DEFAULT_AXIS, order: str | None = None) -> jax.Array:
    """Return the position of each row of a sequence, as the rows lie in this step.

    They are for whatever depends on the position: rotary embeddings, learned embeddings, masks.

    Shapes:
        Out: int32 `[n]`, over the devices of the axis.

    Cost:
        No collective.

    Args:
        n: The number of positions of the whole sequence: `x.shape[1]`.
        axis: As in `split_positions`.
        order: How the rows lie. Left out, it is that of the `split_positions` of the same step,
            else `"contiguous"`: 0 to `n - 1`. So it is on one device, in every order.

    Raises:
        ArgumentTypeError: `n` is not an integer, or `axis` or `order` is not a string.
        ArgumentError: `n` is negative; no such order or axis, an axis of replicas, or a second
            order in one step.
        ShapeError: The order cannot divide `n` positions.
        ContextError: The axis is manual here.

    Example:
        >>> mesh = jax.make_mesh((4, 2), ("data", "positions"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> def rotate(x):  # rotary positions of queries or keys [rows, positions, heads, d]
        ...     half = x.shape[-1] // 2
        ...     angles = jaxdist.nn.positions(x.shape[1])[:, None] * 10000.0 ** (
        ...         -jnp.arange(half)[None] / half
        ...     )
        ...     sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
        ...     a, b = x[..., :half], x[..., half:]
        ...     return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        >>> def step(x):
        ...     x = jaxdist.nn.split_positions(x)
        ...     return jaxdist.nn.positions(x.shape[1]), rotate(x)
        >>> numbers, rotated = strategy.run(step, (np.ones((1, 8, 1, 2), np.float32),))
        >>> numbers.tolist(), bool(jnp.allclose(rotated[0, 2, 0, 0], np.cos(6) - np.sin(6)))
        ([0, 1, 6, 7, 2, 3, 4, 5], True)
    """
    n = as_integer("n", n, least=0, most=(1 << 31) - 2, remedy="Pass x.shape[1].")
    found = find_axis(axis, DEFAULT_AXIS)
    chosen = orders.make(settle_order(axis, order), 1 if found is None else found.size)
    check_divides(f"n={n}", n, chosen, found)
    numbers = chosen.number_all(n // chosen.devices)
    return numbers if found is None else layouts.lay_over(numbers, found.name, 0)


def check_divides(given: str, length: int, order: orders.Order, axis: Axis | None) -> None:
    """Check that an order can divide some positions over an axis.

    Raises:
        ShapeError: It cannot.
    """
    if axis is None or length % order.divisor == 0:
        return
    near = orders.describe_lengths(length, order.divisor)
    other = orders.name_fitting(length, axis.size)
    instead = "" if other is None else f", or order={other!r}"
    raise refuse(
        f"{given}: {length} positions for {axis.size} devices of axis={axis.name!r}, with "
        f"order={order.name!r}.",
        f"This order cuts the positions into {order.divisor} parts of one length.",
        f"Pad or cut the positions to {near}{instead}.",
        kind=ShapeError,
    )
