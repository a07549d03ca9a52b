"""Whole parameters from pieces, and how long they are kept."""

from typing import Any, TypeVar

import jax
from flax import nnx
from jax.extend.core import Primitive

from jaxdist import _replica
from jaxdist._validate import check_has_arrays, check_instance, shown
from jaxdist._values import GATHERED, PerReplica, Sharded, gathered, is_sharded
from jaxdist.errors import ArgumentTypeError

T = TypeVar("T")


def gather(tree: T) -> T:
    """The whole arrays, in the place of those in pieces.

    In a step parameters in pieces are gathered where a layer uses them, so this is for what needs
    arrays: functions of `jax.lax`, sums over all parameters, a scan over stacked layers.

    Shapes:
        A `Sharded` of shape `[...]` gives the array `[...]`, without padding.

    Cost:
        One all-gather for each array in pieces; outside a step none.

    Guarantees:
        The gradient is held in pieces again: a reduce-scatter that gives the mean over all
        replicas (with `axes`, and an all-reduce over the other axes).

    Args:
        tree: A pytree, or an NNX object, of which a copy with whole parameters is made.

    Returns:
        The same with plain arrays.

    Raises:
        ReplicaValueError: An array in pieces whose dims are not those that it was cut with.

    Example:
        >>> strategy = MirroredStrategy()
        >>> params = partition.place(strategy, {"w": np.eye(8)}, partition.fsdp(min_bytes=0))
        >>> strategy.run(lambda p: jnp.linalg.det(partition.gather(p)["w"]), (params,))
        Array(1., dtype=float32)
    """
    check_has_arrays("partition.gather", "tree", tree, "a pytree of arrays, or an NNX object")
    frame = _replica.current_frame()
    layout = None if frame is None or not frame.inside_step else frame.strategy.layout

    def gather_leaf(x: Any) -> Any:
        if isinstance(x, PerReplica):
            raise ArgumentTypeError(
                f"partition.gather was given tree with {shown(x)}.\n\n"
                "It puts the pieces of one array together; a PerReplica is a value of each replica."
                "\n\nPass the parameters that partition.place returned."
            )
        if not isinstance(x, Sharded):
            return x
        is_piece = layout is not None and isinstance(x.held, jax.core.Tracer)
        return gathered(x, layout) if is_piece else x.whole()

    def gather_node(x: Any) -> Any:
        if not isinstance(x, nnx.Pytree):
            return gather_leaf(x)
        graphdef, state = nnx.split(x)
        return nnx.merge(graphdef, jax.tree.map(gather_leaf, state, is_leaf=is_sharded))

    result: T = jax.tree.map(
        gather_node, tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, Sharded, PerReplica))
    )
    return result


# What is made of a gathered parameter without arithmetic would be kept in its place.
_DATA_MOVEMENT = frozenset(
    "all_gather slice reshape squeeze transpose broadcast_in_dim convert_element_type copy rev "
    "expand_dims sharding_constraint".split()
)


def remat_policy(primitive: Any, *_: Any, **params: Any) -> bool:
    """What `jax.checkpoint` keeps from the forward to the backward pass: no gathered parameter.

    Without it each parameter is whole on every device from its use until its gradient. With it
    the backward pass gathers again, layer by layer, and everything that was computed is kept.

    Cost:
        One more all-gather of each parameter in a step.

    Args:
        primitive: The operation whose result might be kept; JAX calls this.
        params: Its parameters.

    Returns:
        Whether to keep it.

    Example:
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> saving = jax.checkpoint(loss, policy=partition.remat_policy)
        >>> float(jax.grad(saving)({"w": jnp.ones((1, 1))}, jnp.ones((1, 1)))["w"][0, 0])
        2.0

    Source:
        `jax.checkpoint_policies`; ZeRO-3, arXiv:1910.02054.
    """
    check_instance(
        "partition.remat_policy",
        "primitive",
        primitive,
        Primitive,
        "an operation of JAX",
        "Do not call it: pass it on, jax.checkpoint(fn, policy=partition.remat_policy).",
    )
    if primitive.name == "name":
        return bool(params.get("name") != GATHERED)
    return primitive.name not in _DATA_MOVEMENT
