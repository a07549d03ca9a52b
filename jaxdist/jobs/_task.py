"""What a job trains: the part of a training that differs between tasks."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, final

from flax import nnx

from jaxdist._strategies import Strategy
from jaxdist._typing import PyTree
from jaxdist.jobs._recipe import Recipe

Measures = Mapping[str, float]


@final
@dataclasses.dataclass(frozen=True)
class Curve:
    """A measure of evaluations, as it is drawn over the steps."""

    measure: str
    label: str
    factor: float = 1.0


class Task(abc.ABC):
    """Data, what is trained on it, and the words for what comes out.

    `train` does the rest for every task: batches, checkpoints, evaluation, progress, files.
    """

    title: ClassVar[str]
    examples: ClassVar[str]  # what a batch has rows of: images, windows
    unit: ClassVar[str]  # what throughput counts: images, bytes
    curve: ClassVar[Curve]

    recipe: Recipe

    # Data

    train: PyTree  # NumPy arrays [N, ...]
    held_out: PyTree
    units_per_example: int

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides which examples are held out: another split would train on them."""

    # Words

    @abc.abstractmethod
    def measures(self, means: Measures) -> dict[str, float]:
        """What is recorded of an evaluation."""

    @abc.abstractmethod
    def in_words(self, measures: Measures) -> str:
        """An evaluation, in words."""

    @abc.abstractmethod
    def headline(self, measures: Measures) -> str:
        """The last evaluation, in the last line."""

    @abc.abstractmethod
    def metrics(self, measures: Measures) -> dict[str, Any]:
        """What stands first in the metrics file."""

    # The end

    def finish(self, strategy: Strategy, model: nnx.Module) -> tuple[dict[str, Any], str]:
        """Something to do with the trained model: what is recorded of it, and what is shown."""
        del strategy, model
        return {}, ""
