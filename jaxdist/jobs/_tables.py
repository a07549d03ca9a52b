"""Builds what a task needs beside its model: the configured optimizer, and large tables."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax import nnx

from jaxdist._called import called
from jaxdist._update import compressed_update, sharded_update
from jaxdist._validate import check_callable
from jaxdist.jobs._config.schema import OptimizerConfig


class Table:
    """A variable; each step reads and changes only some of its rows.

    Use it as an attribute of an NNX module. NNX does not look into it: a `jaxdist.Variable`
    would be a leaf of the model, and its whole value would move with the model.

    Args:
        make: Makes the variable, in the scope of the strategy. Given `shape` and `dtype`,
            servers compute the first values of their parts themselves.

    Attributes:
        variable: The variable, from `create` on; the steps of the task use it.

    Raises:
        ArgumentTypeError: `make` is not a function.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self):
        ...         self.table = Table(lambda: jaxdist.Variable(np.zeros((1024, 8))))
        >>> net = Net()
        >>> nnx.state(net)
        State({})
        >>> net.table.create()
        >>> net.table.variable.shape
        (1024, 8)
    """

    @called("jobs.Table")
    def __init__(self, make: Callable[[], Any]) -> None:
        check_callable(make, "make")
        self._make = make
        self.variable: Any = None

    def create(self) -> None:
        """Make the variable. A model that is only planned does not call this."""
        self.variable = self._make()


def find_tables(model: nnx.Module) -> Mapping[str, Table]:
    """Return the tables of a model, by the names of their attributes."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            own = ((name, x) for name, x in vars(node).items() if isinstance(x, Table))
            found.update({".".join(map(str, (*path, name))): table for name, table in own})
    return found


def make_optimizer(
    model: nnx.Module, config: OptimizerConfig, *, num_steps: int
) -> "nnx.Optimizer[Any]":
    """Make AdamW with the configured schedule. Call it in the scope of the training strategy."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rate: optax.Schedule
    if config.schedule == "cosine":
        # optax refuses a decay that is not longer than its warm-up.
        rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(num_steps, warmup + 1))
    else:
        rate = optax.join_schedules(
            [optax.linear_schedule(0.0, peak, max(warmup, 1)), optax.constant_schedule(peak)],
            [warmup],
        )
    transform: optax.GradientTransformation = optax.adamw(rate, weight_decay=config.weight_decay)
    if config.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(config.clip_norm), transform)
    if config.update == "sharded":
        transform = sharded_update(transform, reduce_op="sum")
    elif config.update == "compressed":
        transform = compressed_update(
            transform, config.compression, workers=config.workers, reduce_op="sum"
        )
    return nnx.Optimizer(model, transform, wrt=nnx.Param)
