"""Gives each step its own states of the random number generators of a Keras model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# As for the replicas of a step: multiples of an odd number are different 32-bit words.
_STRIDE = 0x9E3779B9


class Seeds:
    """The states of the generators of a model.

    Workers that read the same state would draw the same numbers. So this process advances the
    states, and gives each step its own.

    Args:
        model: The model.
        worker: The number of this worker, if each worker has its own model; worker 0 draws the same
            numbers as a model without a strategy.
    """

    def __init__(self, model: Any, worker: int = 0) -> None:
        own = [g.state for layer in model._flatten_layers() for g in layer._seed_generators]
        known = {id(v) for v in own}
        fixed = model.non_trainable_variables
        self.positions = [n for n, v in enumerate(fixed) if id(v) in known]
        self._mixed = np.uint32(worker * _STRIDE & 0xFFFFFFFF)
        self._states: list[np.ndarray] = []
        # How much a step adds to the states; None until the first step has returned it.
        self._steps: list[np.ndarray] | None = None

    def start(self, fixed: Sequence[Any]) -> None:
        """Start from the states among the values of the non-trainable variables."""
        self._states = [np.array(fixed[n]) for n in self.positions]

    def take(self) -> list[np.ndarray]:
        """Return the states for the next step."""
        given = [np.array(state) for state in self._states]
        for state in given:
            state[0] ^= self._mixed.astype(state.dtype)
        if self._steps is not None:
            self._advance(self._steps)
        return given

    def learn(self, steps: Sequence[Any]) -> None:
        """Learn from the results of a step how much it has added to its states."""
        if self._steps is None:
            self._steps = [np.array(x) for x in steps]
            self._advance(self._steps)

    @property
    def is_known(self) -> bool:
        """Whether the states of the next step are known; if not, it waits for the previous step."""
        return self._steps is not None or not self.positions

    def put_into(self, fixed: list[Any]) -> None:
        """Write the states into the values of the non-trainable variables."""
        for place, state in zip(self.positions, self._states, strict=True):
            fixed[place] = state

    def _advance(self, steps: Sequence[np.ndarray]) -> None:
        for state, step in zip(self._states, steps, strict=True):
            state += step
