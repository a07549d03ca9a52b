"""The base class of recipes: the model, optimizer and steps of a configuration."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx

from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist.jobs._config.schema import JobConfig, OptimizerConfig
from jaxdist.jobs._optimizer import make_optimizer


class Recipe(abc.ABC):
    """A model, its optimizer and its steps, for training and for plans.

    The steps are class attributes, so that they are the same functions each time: jaxdist compiles
    a step once for each function.
    """

    train_step: ClassVar[Callable[..., Any]]
    """`(model, optimizer, batch) -> mean loss`, inside a replica."""

    evaluation_step: ClassVar[Callable[..., Any]]
    """`(model, batch, mask) -> weighted_sums(...)`; the weights are numbers of units."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the model, on the default device or abstract."""

    def optimizer_config(self) -> OptimizerConfig:
        """Return the optimizer's configuration, changed if the placement of the state needs it."""
        optimizer: OptimizerConfig = self._config.optimizer
        return optimizer

    def place(self, strategy: Strategy, model: Any, optimizer: Any) -> None:
        """Place the parameters and the optimizer's state; by default they stay replicated."""
        del strategy, model, optimizer

    def build(self, strategy: Strategy, *, abstract: bool = False) -> tuple[Any, Any]:
        """Make and place the model and its optimizer, with shapes for arrays if `abstract`."""
        config: JobConfig = self._config

        def make() -> tuple[Any, Any]:
            model = self.make_model(nnx.Rngs(config.training.seed))
            optimizer = self.optimizer_config()
            return model, make_optimizer(model, optimizer, num_steps=config.training.steps)

        with strategy.scope():
            model, optimizer = nnx.eval_shape(make) if abstract else make()
        self.place(strategy, model, optimizer)
        return model, optimizer

    @property
    def options(self) -> RunOptions:
        """The options with which the train step runs."""
        return RunOptions(donate_argnums=(0, 1) if self._config.training.donate else ())
