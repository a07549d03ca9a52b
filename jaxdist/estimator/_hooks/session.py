"""`Session`: the view that hooks have of a model in training or evaluation."""

from collections.abc import Callable, Mapping
from typing import Any


class Session:
    """The model and the global step, as hooks see them.

    TensorFlow's hooks get a session to run operations in. Here they get the modules
    themselves: `session.modules["model"]`.

    Args:
        modules: The Flax NNX modules by name.
        find_step: Returns the global step.
        stop_all: Ends the training of all workers, if they are not in step.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        find_step: Callable[[], int],
        stop_all: Callable[[], None] | None = None,
    ) -> None:
        self.modules = modules
        self._find_step, self._stop_all = find_step, stop_all

    @property
    def global_step(self) -> int:
        """The number of completed steps of all workers together."""
        return self._find_step()

    def stop_all(self) -> None:
        """End the training of all workers, if they are not in step; else do nothing."""
        if self._stop_all is not None:
            self._stop_all()
