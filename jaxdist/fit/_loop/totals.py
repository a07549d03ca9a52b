"""Adds up the sums of an epoch, a few steps late, and finds values that are not finite."""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist._values import PerReplica, is_per_replica
from jaxdist.errors import CheckpointError, NonFiniteLossError
from jaxdist.fit._compiled import Compiled
from jaxdist.fit._step.loss_scale import ScaledOptimizer
from jaxdist.fit._step.steps import Steps, as_view, split_batch

Sums: TypeAlias = Mapping[str, Any]  # "names" and "values"

_LOG = logging.getLogger("jaxdist")

# How many dispatches may be pending, whose sums are not known yet.
_MOST_PENDING = 8


class Totals:
    """Adds up the sums of steps in 64 bits.

    Args:
        compiled: Has the runner, which fetches the output that it returned for a step.
        describe_batch: Describes the examples of a step, for a loss that is not finite.
        before: The names and the sums of earlier steps; None if there are none.
    """

    def __init__(
        self, compiled: Compiled, describe_batch: Callable[[int], str], before: Sums | None = None
    ) -> None:
        self._runner, self._steps = compiled.runner, compiled.steps
        self._is_scaled = isinstance(compiled.optimizer, ScaledOptimizer)
        self._describe_batch = describe_batch
        self._pending: deque[tuple[int, Any]] = deque()
        self._before = before
        self._total: np.ndarray | None = None

    def add(self, first_step: int, output: Any) -> None:
        """Add the output of a dispatch; `first_step` is the number of its first step."""
        self._pending.append((first_step, output))
        self.fetch(_MOST_PENDING)

    def fetch(self, most_pending: int = 0) -> None:
        """Fetch the oldest outputs until only `most_pending` are left.

        Raises:
            NonFiniteLossError: A loss is not finite.
        """
        while len(self._pending) > most_pending:
            first_step, output = self._pending.popleft()
            vectors = np.atleast_2d(self._runner.fetch(output).astype(np.float64))
            for index, vector in enumerate(vectors):
                if not math.isfinite(vector[0]):
                    raise self._make_error(first_step + index, vector[0])
                if self._is_scaled and not vector.any():
                    self._tell_left_out(first_step + index)
            total = vectors.sum(axis=0)
            before, self._before = self._before, None
            if before is not None:
                total = total + self._read_sums(before, total)
            self._total = total if self._total is None else self._total + total

    def sums(self) -> Sums | None:
        """Return names and sums over all steps, after waiting for them; None without steps."""
        self.fetch()
        if self._total is None:
            return None
        return {"names": list(self.logs()), "values": self._total.tolist()}

    def _read_sums(self, before: Sums, total: np.ndarray) -> np.ndarray:
        names, values = list(self._steps.results(total)), np.asarray(before["values"], np.float64)
        if (names, total.shape) != (before["names"], values.shape):
            raise CheckpointError(
                f"fit.Model.fit continues within an epoch with the loss and metrics "
                f"{', '.join(names)} ({total.size} numbers), and the checkpoint has "
                f"{', '.join(before['names'])} ({values.size} numbers).\n\n"
                "The values of an epoch are those of all its steps.\n\n"
                "Call compile with the losses and metrics that the training began with."
            )
        return values

    def has_no_examples(self) -> bool:
        """Whether all steps whose sums are fetched had no examples.

        With a loss scale, steps that are skipped count none either, so it is False.
        """
        if self._total is None or self._is_scaled:
            return False
        return not self._steps.count(self._total)

    def logs(self) -> dict[str, float]:
        """Return loss and metrics over all steps whose sums are fetched."""
        return {} if self._total is None else self._steps.results(self._total)

    def _tell_left_out(self, step: int) -> None:
        _LOG.warning(
            "fit: the loss of step %d of this epoch is not finite in float16. The step is skipped, "
            "and its examples count in no loss or metric. %s",
            step + 1,
            self._describe_batch(step),
        )

    def _make_error(self, step: int, total: float) -> NonFiniteLossError:
        what = "the loss"
        rule = "A loss is finite; steps after this one have used parameters that are not."
        if self._is_scaled:
            what = "the loss, or a gradient at the lowest loss scale,"
            rule = "Both are finite, and a lower loss scale would not change that."
        return NonFiniteLossError(
            f"fit.Model.fit stopped: {what} of step {step + 1} of this epoch is {total}.\n"
            f"{self._describe_batch(step)}\n\n"
            f"{rule}\n\n"
            "Lower the learning rate, clip the gradients with optax.clip_by_global_norm(1.0), or "
            "look at these examples: a label that is not a class gives nan. With "
            "compile(find_nonfinite=True), fit names the first layer whose output is not finite, "
            "and leaves the model as it was before the step."
        )


class StateBefore:
    """The state of a model before a step.

    JAX arrays are immutable, so this keeps references. While it exists, a step cannot reuse the
    memory of the parameters.

    Args:
        model: The `fit.Model`.
        batches: The batch of the step, in a list.
    """

    def __init__(self, model: Any, batches: Sequence[Any]) -> None:
        self._model, self._batch = model, batches[0]
        self._objects = (model.module, model.optimizer)
        self._states = [jax.tree.map(lambda leaf: leaf, nnx.state(o)) for o in self._objects]

    def check(self, vector: np.ndarray, step: int, batch: str) -> None:
        """Raise if the loss of the step is not finite, and restore the model.

        Raises:
            NonFiniteLossError: The loss is not finite. The error names the layer.
        """
        loss = float(vector[0])
        if math.isfinite(loss):
            return
        for node, state in zip(self._objects, self._states, strict=True):
            nnx.update(node, state)
        steps = self._model.get_compiled("fit").steps
        where = find_first_nonfinite(steps, self._model.module, self._batch)
        raise NonFiniteLossError(
            f"fit.Model.fit stopped: the loss of step {step + 1} of this epoch is {loss}.\n"
            f"{batch}\n{where}\n\n"
            "A loss is finite. The model is as it was before this step.\n\n"
            "Look at these examples and at this layer; lower the learning rate, or clip the "
            "gradients with optax.clip_by_global_norm(1.0)."
        )


def find_first_nonfinite(steps: Steps, module: nnx.Module, batch: Any) -> str:
    """Describe the first array that is not finite: a parameter, an input or an output.

    Calls a copy of the module, layer by layer, on the examples of all replicas.
    """
    x = jax.tree.map(_join, split_batch(batch)[0], is_leaf=is_per_replica)
    for path, leaf in tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))[0]:
        if not _is_finite(leaf):
            return f"The parameter {keystr(path)} is not finite before the step."
    for path, leaf in tree_flatten_with_path(x)[0]:
        if not _is_finite(leaf):
            return f"The input x{keystr(path)} is not finite."
    found: list[str] = []
    # A copy: this must not change the classes of the layers or statistics of the model.
    watched = as_view(nnx.clone(module), is_training=True)
    _watch_layers(watched, found)
    steps.call(watched, x, is_training=True)
    if found:
        return f"The first layer whose output is not finite is {found[0]}."
    return (
        "The outputs of all layers are finite, so the value comes from the loss function (for "
        "instance nan for a label that is not a class), or from dropout or another random number."
    )


def _watch_layers(module: nnx.Module, found: list[str]) -> None:
    """Record the layers of a module whose output is not finite, in the order of the calls."""
    for path, layer in nnx.iter_modules(module):
        kind = type(layer)
        if callable(layer):
            name = ".".join(map(str, path)) or "the module itself"
            layer.__class__ = _make_watched(kind, f"{name} ({kind.__name__})", found)


def _make_watched(kind: type, name: str, found: list[str]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(self, *args, **kwargs)  # type: ignore[operator]
        if not all(map(_is_finite, jax.tree.leaves(out))):
            found.append(name)
        return out

    return type(kind)(kind.__name__, (kind,), {"__call__": call})


def _is_finite(leaf: Any) -> bool:
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return not is_float or bool(jnp.all(jnp.isfinite(leaf)))


def _join(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return jnp.concatenate([jnp.asarray(np.asarray(v)) for v in leaf.values])
    return jnp.asarray(np.asarray(leaf))
