"""Computes one step of training, evaluation or prediction inside a replica."""

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import ReduceOp, current_log, fresh_trace_key
from jaxdist._strategies import get_replica_context
from jaxdist._validate import show
from jaxdist._values import is_sharded, wide_dtype
from jaxdist.errors import ShapeError
from jaxdist.fit._step.find_metrics import measure_sums
from jaxdist.fit._step.loss_scale import ScaledOptimizer, keep_state
from jaxdist.fit._step.losses import CALLER
from jaxdist.fit._step.metrics import Metric
from jaxdist.fit._step.output_losses import Losses, weigh_classes
from jaxdist.training import reduce_and_update

LOSS, ROWS, PART = "loss", "rows", "loss of an output"
# A step returns its sums as one vector, so that fetching them is one copy of one array.
# The layout has the name and shape of each part; index i of a name is that metric.
Layout = tuple[tuple[tuple[str, str], tuple[int, ...]], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A batch for replicas that need equal numbers of rows.

    Attributes:
        batch: The batch, with padding.
        is_real: True for real rows, False for padding, `[b]`.
    """

    batch: Any
    is_real: Any

    def fill(self) -> Any:
        """Return the batch, padded with copies of a real row, which layers can compute."""

        def fill_leaf(leaf: jax.Array) -> jax.Array:
            is_real = self.is_real.reshape(-1, *[1] * (jnp.ndim(leaf) - 1))
            return jnp.where(is_real, leaf, leaf[:1])

        return jax.tree.map(fill_leaf, self.batch)


@called("fit.Model")
def split_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Return `x`, `y` and the weights of a batch; None for those that it does not have."""
    if isinstance(batch, PaddedBatch):
        batch = batch.batch
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise refuse(
            f"a dataset whose batches are {type(batch).__name__}s of {len(batch)} entries.",
            "A batch is x, (x,), (x, y) or (x, y, sample_weight).",
            "If x has several arrays, put them into a dict or a tuple of their own: ((a, b), y).",
        )
    return (*batch, None, None)[0], (*batch, None, None)[1], (*batch, None, None)[2]


@called("fit.Model")
def check_targets(x: Any, y: Any) -> None:
    """Raise if a batch has no targets.

    Raises:
        ArgumentTypeError: The batch is only `x`.
    """
    if y is not None:
        return
    what, remedy = "no y", "Pass y; a model that predicts its own input takes y=x."
    if isinstance(x, Mapping) and len(x) > 1:
        # Many loops and datasets use such a dict as a batch.
        first, *_, last = x
        what = f"no y: its batches are dicts with {list(x)}, which are all x"
        remedy = (
            f"Pass [(b[{first!r}], b[{last!r}]) for b in dataset], or whichever entries are x "
            "and y."
        )
    raise refuse_type(
        f"{what}, and the loss compares the outputs of the model with it.",
        "A batch is (x, y) or (x, y, sample_weight).",
        remedy,
    )


@called("fit.Model")
def count_rows(x: Any) -> int:
    """Return the number of examples of this replica."""
    leaves = jax.tree.leaves(x)
    if not leaves or jnp.ndim(leaves[0]) == 0:
        raise refuse(
            f"x={show(x)}.",
            "x is an array [N, ...], or a dict or tuple of such arrays.",
            "Add a dim for the examples: x[None].",
            kind=ShapeError,
        )
    return int(leaves[0].shape[0])


class Steps:
    """The steps of a compiled model.

    Args:
        module: The module, to see which arguments it takes.
        losses: The losses of the outputs.
        metrics: Metrics in which each example counts once.
        weighted: Metrics in which each example counts with its weight.
        compute_dtype: The dtype of parameters and inputs during a call; None keeps theirs.

    Raises:
        ArgumentError: Two values would have the same name in the logs.
        ArgumentTypeError: The module cannot be called.
    """

    def __init__(
        self,
        module: nnx.Module,
        losses: Losses,
        metrics: Sequence[Metric],
        weighted: Sequence[Metric],
        compute_dtype: Any,
    ) -> None:
        if not callable(module):
            raise refuse_type(
                f"a module of type {type(module).__name__}, which has no __call__.",
                "fit, evaluate and predict call the module with x.",
                f"Give {type(module).__name__} a method __call__(self, x).",
            )
        self._losses, self._dtype = losses, compute_dtype
        self._metrics = [(m.name, m, False) for m in metrics]
        taken = {m.name for m in metrics}
        # As in Keras: of two metrics with the same name, the weighted one gets a prefix.
        self._metrics += [
            (f"weighted_{m.name}" if m.name in taken else m.name, m, True) for m in weighted
        ]
        _check_names([LOSS, *losses.names.values(), *(name for name, _, _ in self._metrics)])
        self._mode = _find_mode_argument(module)
        # By the size of the vector: a metric may have other shapes when it evaluates other data.
        self._layouts: dict[int, Layout] = {}

    # Inside a replica

    def train(
        self, module: nnx.Module, optimizer: "nnx.Optimizer[Any]", batch: Any, classes: Any
    ) -> jax.Array:
        """Update the module in place, and return the sums over all replicas as one vector.

        `classes` are classes and their weights, or None.
        """
        is_real = batch.is_real if isinstance(batch, PaddedBatch) else None
        x, y, weight = split_batch(batch if is_real is None else batch.fill())
        check_targets(x, y)
        size = count_rows(x)
        rows = size if is_real is None else jnp.sum(is_real, dtype=jnp.float32)

        scaled = optimizer if isinstance(optimizer, ScaledOptimizer) else None
        restore = None if scaled is None else keep_state(module, scaled)

        def total_loss(module: nnx.Module) -> tuple[jax.Array, dict[Any, jax.Array]]:
            with _use_real_rows(is_real):
                outputs = self.call(module, x, is_training=True)
            of_example = weight
            if classes is not None:
                of_example = weigh_classes(classes, y, outputs, weight)
            sums = self._measure(y, outputs, of_example, is_real, size)
            loss = sums[LOSS, ""]
            return loss if scaled is None else loss * scaled.scale[...], sums

        _check_parameters(module)
        find = nnx.value_and_grad(total_loss, has_aux=True)
        (_, sums), grads = find(as_view(module, is_training=True))
        if size == 0 or is_real is not None:
            # They are zeros, unless a statistic over no rows makes them nan. Sharded gradients are
            # sums over the replicas already.
            grads = jax.tree.map(
                lambda g: g if is_sharded(g) else jnp.where(rows > 0, g, jnp.zeros_like(g)),
                grads,
                is_leaf=is_sharded,
            )
        vector = self._pack(sums)
        if scaled is None or restore is None:
            return _update(module, optimizer, grads, rows, vector)
        # Replicas see different gradients, and those in pieces are never whole: they add up what
        # they found, so all of them skip the step or none.
        grads, found = scaled.unscale(grads)
        vector, found = _update(module, optimizer, grads, rows, (vector, found))
        restore(found > 0)
        was_least = scaled.move(found == 0)
        # A skipped step whose loss is not finite counts in no sum, unless the scale is no longer
        # its cause.
        is_finite = jnp.isfinite(vector[0])
        is_left_out = (found > 0) & ~was_least & ~is_finite
        vector = jnp.where(is_left_out, jnp.zeros_like(vector), vector)
        # A finite loss whose gradients are not finite at any scale: every step would be skipped.
        is_stuck = (found > 0) & was_least & is_finite
        return vector.at[0].set(jnp.where(is_stuck, jnp.nan, vector[0]))

    def evaluate(self, module: nnx.Module, batch: Any, mask: jax.Array | None) -> jax.Array:
        """Return the sums over the real examples of all replicas as one vector.

        `mask` is 0 for padding, or None without padding.
        """
        x, y, weight = split_batch(batch if mask is None else PaddedBatch(batch, mask).fill())
        check_targets(x, y)
        view = as_view(module, is_training=False)
        outputs = self.call(view, x, is_training=False)
        sums = self._measure(y, outputs, weight, mask, count_rows(x))
        context = get_replica_context()
        packed = self._pack(sums)
        return packed if context is None else context.all_reduce(ReduceOp.SUM, packed)

    def predict(self, module: nnx.Module, batch: Any) -> Any:
        """Return the outputs for the examples of this replica.

        Raises:
            ShapeError: There is not one output for each example.
        """
        x, _, _ = split_batch(batch)
        view = as_view(module, is_training=False)
        outputs, rows = self.call(view, x, is_training=False), count_rows(x)
        for leaf in jax.tree.leaves(outputs):
            if jnp.shape(leaf)[:1] != (rows,):
                raise ShapeError(
                    f"fit.Model.predict called the module with {rows} examples of x, and it "
                    f"returned an array of shape {list(jnp.shape(leaf))}.\n\n"
                    "Dim 0 of what a module returns is the examples.\n\n"
                    "Return one output for each example."
                )
        return outputs

    def call(self, module: nnx.Module, x: Any, *, is_training: bool) -> Any:
        """Call a module with the settings of `compile`, in training or not."""
        given: dict[str, bool] = {} if self._mode is None else {self._mode: is_training}
        if self._mode == "deterministic":
            given = {self._mode: not is_training}
        args = x if isinstance(x, (tuple, list)) else (x,)
        try:
            if self._dtype is None:
                return module(*args, **given)
            outputs = call_in_dtype(module, self._dtype, args, given)
        except Exception as error:
            shapes = jax.tree.map(lambda leaf: list(jnp.shape(leaf)), x)
            error.add_note(
                f"Raised by the module, {type(module).__name__}, which fit.Model called with x of "
                f"local shape {shapes}. Dim 0 is the examples of one replica; check that its "
                "layers take the other dims."
            )
            raise
        return jax.tree.map(lambda leaf: _cast(leaf, jnp.float32), outputs)

    @called("fit.Model")
    def _measure(
        self, y: Any, outputs: Any, weight: Any, mask: jax.Array | None, rows: int
    ) -> dict[tuple[str, str], jax.Array]:
        """Return the sums of loss and metrics over the examples of this replica."""
        counts = jnp.ones(rows, jnp.float32) if mask is None else mask.astype(jnp.float32)
        if weight is not None:
            if jnp.iscomplexobj(weight):
                raise refuse_type(
                    f"sample_weight of the dtype {weight.dtype}.",
                    "A weight is a real number.",
                    "Pass for instance np.abs(sample_weight).",
                )
            # The padding has copies of a real row and of its weight. Set these weights to 0.
            weight = jnp.asarray(weight, jnp.float32)
            shape = counts.shape + (1,) * (weight.ndim - 1)
            weight = jnp.where(counts.reshape(shape) > 0, weight, 0)
        total, parts = self._losses.sum_all(
            y, outputs, weight, None if mask is None else counts, rows
        )
        sums = {(LOSS, ""): total, (ROWS, ""): jnp.sum(counts)}
        sums |= {(PART, name): part for name, part in parts.items()}
        of_example = counts if weight is None else _reduce_weight(weight)
        for index, (_, metric, is_weighted) in enumerate(self._metrics):
            given = counts
            if is_weighted:
                given = weight if metric._takes_all_weights and weight is not None else of_example
            for name, value in sorted(measure_sums(metric, y, outputs, given, rows).items()):
                sums[str(index), name] = value
        if mask is None:
            return sums
        # A replica with only padding adds nothing, even if its numbers are nan.
        has_rows = jnp.any(counts > 0)
        return {key: jnp.where(has_rows, x, jnp.zeros_like(x)) for key, x in sums.items()}

    def _pack(self, sums: dict[tuple[str, str], jax.Array]) -> jax.Array:
        # The loss is first. JAX sorts the keys of a dict that passes through `grad`, but not those
        # of an evaluation, so sort here.
        keys = sorted(sums, key=lambda key: (key[0] != LOSS, key))
        kind = wide_dtype(sums[LOSS, ""].dtype)
        vector = jnp.concatenate([jnp.ravel(sums[key]).astype(kind) for key in keys])
        self._layouts[vector.size] = tuple((key, sums[key].shape) for key in keys)
        return vector

    # Outside a step

    def count(self, vector: np.ndarray) -> float:
        """Return the number of examples from the sums over all examples."""
        return float(self._read(vector)[ROWS, ""])

    def results(self, vector: np.ndarray) -> dict[str, float]:
        """Return loss and metrics from the sums over all examples."""
        found = self._read(vector)
        rows = float(found[ROWS, ""])
        logs = {LOSS: float(found[LOSS, ""]) / rows if rows else math.nan}
        for part, name in self._losses.names.items():
            logs[name] = float(found[PART, part]) / rows if rows else math.nan
        for index, (name, metric, _) in enumerate(self._metrics):
            parts = {part: v for (i, part), v in found.items() if i == str(index)}
            logs[name] = float(metric.result(parts))
        return logs

    def _read(self, vector: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
        """Return the parts of a vector that `_pack` made."""
        found: dict[tuple[str, str], np.ndarray] = {}
        at = 0
        for key, shape in self._layouts[vector.size]:
            size = math.prod(shape)
            found[key] = vector[at : at + size].reshape(shape)
            at += size
        return found


@called(CALLER)
def _update(
    module: nnx.Module, optimizer: "nnx.Optimizer[Any]", grads: Any, rows: Any, sums: Any
) -> Any:
    """Update the module, and return the sums over all replicas.

    Raises:
        ArgumentTypeError: The optimizer needs more than gradients and parameters.
    """
    try:
        return reduce_and_update(module, optimizer, grads, rows, sums)[1]
    except TypeError as error:
        if not _NEEDS_MORE.search(str(error)):
            raise
        raise refuse_type(
            f"an optimizer whose update needs more than gradients: {error}.",
            "fit gives an optimizer the gradients and the parameters.",
            "For reduce_on_plateau add the callback fit.ReduceLROnPlateau instead. Call a line "
            "search such as optax.lbfgs in a step of your own, which passes it value and value_fn.",
        ) from error


_NEEDS_MORE = re.compile(r"update\w*\(\) missing \d+ required keyword-only argument")


def _check_parameters(module: nnx.Module) -> None:
    """Check that all parameters are real numbers.

    JAX has no gradient of integers. Of complex numbers it returns the conjugate of the direction in
    which optax moves them, so that the loss would grow.
    """
    for path, leaf in tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise refuse_type(
                f"a module whose parameter {keystr(path, simple=True, separator='.')} is "
                f"{leaf.dtype}.",
                "fit trains parameters of real numbers.",
                "Make another kind of nnx.Variable of integers that are not trained, and two "
                "parameters of the real and the imaginary part of a complex one.",
            )


def _check_names(names: Sequence[str]) -> None:
    """Check that each value has its own name in the logs, also beside those of validation."""
    of_logs = [*names, *(f"val_{name}" for name in names)]
    twice = sorted({name for name in of_logs if of_logs.count(name) > 1})
    if twice:
        raise refuse(
            f"losses and metrics with the names {', '.join(names)}.",
            "Each value of the logs has its own name, after that of its output, and a validation "
            f"adds val_: here {', '.join(twice)} would be two values.",
            "Give the metric another name: fit.Mean(function, 'another name').",
        )


@contextlib.contextmanager
def _use_real_rows(is_real: jax.Array | None) -> Iterator[None]:
    """Restrict the statistics of normalization layers to the real rows of a batch."""
    context = get_replica_context()
    rows = (
        _compat.weigh_batch_statistics(has_equal_rows=current_log() is None)
        if is_real is None or context is None
        else _compat.leave_out_padding(is_real, context.strategy.layout.replica_axes)
    )
    # A jitted function of the module that was traced elsewhere has other statistics.
    with rows, fresh_trace_key():
        yield


def call_in_dtype(
    module: nnx.Module, dtype: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a module with parameters and inputs of another dtype; its other state keeps its own."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    lower = jax.tree.map(lambda leaf: _cast(leaf, dtype), params)
    other = nnx.merge(graph, lower, rest)
    outputs = other(*(jax.tree.map(lambda a: _cast(a, dtype), arg) for arg in args), **kwargs)
    # Statistics and random streams come from the copy; the parameters stay in full precision.
    _, changed = nnx.state(other, nnx.Param, ...)
    nnx.update(module, changed)
    return outputs


def _cast(leaf: Any, dtype: Any) -> Any:
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if is_float else leaf


def as_view(module: nnx.Module, *, is_training: bool) -> nnx.Module:
    """Return the module with its dropout and batch statistics set for training or for inference.

    The view shares all variables. The attributes of the user's module do not change.
    """
    view = nnx.view(
        module,
        raise_if_not_found=False,
        deterministic=not is_training,
        use_running_average=not is_training,
    )
    # User modules may have these attributes, but not support setting them in an NNX view.
    view.train() if is_training else view.eval()
    return view


def _find_mode_argument(module: nnx.Module) -> str | None:
    """Return the argument of the call that says if the module is training, or None."""
    try:
        names = inspect.signature(type(module).__call__).parameters
    except (AttributeError, TypeError, ValueError):
        return None
    return next((n for n in ("training", "train", "deterministic") if n in names), None)


def _reduce_weight(weight: jax.Array) -> jax.Array:
    return weight if weight.ndim == 1 else jnp.mean(weight, axis=tuple(range(1, weight.ndim)))
