"""Refuses a module whose layers are the stages of a pipeline."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist._called import refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Sharded, find_split_entries, is_sharded
from jaxdist.errors import UnsupportedError

_STAGE = "stage"  # the axis of `partition.Stage()`

_STEP = """\
Place the module without partition.Stage, or write the step in place of compile and fit:

    def step(model, optimizer, batch):
        def loss(model):
            parts = model.embed, model.layers, model.head
            return jaxdist.nn.pipeline_loss(
                embed, layer, head, parts, batch, micro_batches=8)
        value, grads = nnx.value_and_grad(loss)(model)
        value, grads = jaxdist.get_replica_context().all_reduce("mean", (value, grads))
        optimizer.update(model, grads)
        return value

    for batch in strategy.experimental_distribute_dataset(batches):
        loss = strategy.run(step, (model, optimizer, batch))"""


def check_no_stages(module: nnx.Module, layout: ReplicaMesh) -> None:
    """Check that no array of a module is on the stages of a pipeline.

    Raises:
        UnsupportedError: An array is split over the axis of the stages.
    """
    if layout.mesh.shape.get(_STAGE, 1) == 1:
        return
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.state(module), is_leaf=is_sharded)
    for path, leaf in flat:
        if _STAGE in _list_axes(leaf, layout):
            name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
            raise refuse(
                f"a module whose {name} {leaf.dtype}{list(leaf.shape)} is on the "
                f"{layout.mesh.shape[_STAGE]} stages of the axis {_STAGE!r}.",
                "It takes the outputs of the module, which would be computed without a pipeline. A "
                "pipeline computes the loss, micro-batch by micro-batch.",
                _STEP,
                kind=UnsupportedError,
            )


def _list_axes(leaf: Any, layout: ReplicaMesh) -> set[Any]:
    """Return the axes of the mesh over which an array is split."""
    if isinstance(leaf, Sharded):
        return {axis for names in find_split_entries(leaf.cut, layout).values() for axis in names}
    sharding = getattr(leaf, "sharding", None)
    entries = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return {axis for e in entries for axis in (e if isinstance(e, tuple) else (e,))}
