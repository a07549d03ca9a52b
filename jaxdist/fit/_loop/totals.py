"""Adds up the sums of an epoch. Fetches them a few steps late, so that no step waits for them."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxdist.errors import CheckpointError, NonFiniteLossError
from jaxdist.fit._step.runners import Runner
from jaxdist.fit._step.steps import Steps

Sums: TypeAlias = Mapping[str, Any]  # "names" and "values"

# How many dispatches may be pending, whose sums are not known yet.
_MOST_PENDING = 8


class Totals:
    """Adds up the sums of steps in 64 bits.

    Args:
        runner: Fetches the output that it returned for a step.
        steps: Turns sums into a loss and metrics.
        describe_batch: Describes the examples of a step, for a loss that is not finite.
        before: The names and the sums of earlier steps; None if there are none.
    """

    def __init__(
        self,
        runner: Runner,
        steps: Steps,
        describe_batch: Callable[[int], str],
        before: Sums | None = None,
    ) -> None:
        self._runner, self._steps, self._describe_batch = runner, steps, describe_batch
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

    def logs(self) -> dict[str, float]:
        """Return loss and metrics over all steps whose sums are fetched."""
        return {} if self._total is None else self._steps.results(self._total)

    def _make_error(self, step: int, total: float) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"fit.Model.fit stopped: the loss of step {step + 1} of this epoch is {total}.\n"
            f"{self._describe_batch(step)}\n\n"
            "A loss is finite; steps after this one have used parameters that are not.\n\n"
            "Lower the learning rate, clip the gradients with optax.clip_by_global_norm(1.0), or "
            "look at these examples: a label that is no class gives nan. With "
            "compile(find_nonfinite=True), fit names the first layer whose output is not finite, "
            "and leaves the model as it was before the step."
        )
