"""The base class of tasks: the part of a training that differs between tasks."""

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
    """A measure of the evaluations that is drawn over the steps.

    Attributes:
        measure: Its name.
        label: The label of its axis.
        factor: Multiplies the values, for instance by 100 for percent.
    """

    measure: str
    label: str
    factor: float = 1.0


class Task(abc.ABC):
    """The data of a training, its recipe, and the words for its results.

    `train` does everything else for all tasks: batches, checkpoints, evaluation, progress, files.
    """

    title: ClassVar[str]
    examples: ClassVar[str]  # the name of the rows of a batch: images, windows
    unit: ClassVar[str]  # the unit of throughput: images, bytes
    curve: ClassVar[Curve]

    recipe: Recipe

    # Data

    train: PyTree  # NumPy arrays [N, ...]
    held_out: PyTree
    units_per_example: int

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the values that determine which examples are held out.

        A run resumes only with the same values. With another split it would evaluate on examples
        that it was trained on.
        """

    # Words

    @abc.abstractmethod
    def measures(self, means: Measures) -> dict[str, float]:
        """Return the measures of an evaluation, for the history."""

    @abc.abstractmethod
    def in_words(self, measures: Measures) -> str:
        """Describe an evaluation in words."""

    @abc.abstractmethod
    def headline(self, measures: Measures) -> str:
        """Describe the last evaluation, for the last line of a run."""

    @abc.abstractmethod
    def metrics(self, measures: Measures) -> dict[str, Any]:
        """Return the first entries of the metrics file."""

    # The end

    def finish(self, strategy: Strategy, model: nnx.Module) -> tuple[dict[str, Any], str]:
        """Use the trained model. Return entries for the metrics file, and a text to print."""
        del strategy, model
        return {}, ""
