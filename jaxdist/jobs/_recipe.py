"""What a configuration trains, and how, without its data."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx

from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist.jobs._config.schema import JobConfig, OptimizerConfig
from jaxdist.jobs._optimizer import make_optimizer


class Recipe(abc.ABC):
    """A model, its optimizer and its steps: what is trained, and what is planned.

    The steps are the same functions each time: a step is compiled once for a function.
    """

    train_step: ClassVar[Callable[..., Any]]
    """`(model, optimizer, batch) -> mean loss`, as one replica sees them."""

    evaluation_step: ClassVar[Callable[..., Any]]
    """`(model, batch, mask) -> weighted_sums(...)`; the weights count units."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, on the default device or abstract."""

    def optimizer_config(self) -> OptimizerConfig:
        """The configured optimizer, as the layout needs it; by default as it is."""
        optimizer: OptimizerConfig = self._config.optimizer
        return optimizer

    def place(self, strategy: Strategy, model: Any, optimizer: Any) -> None:
        """Put the parameters and the optimizer's state on the devices; by default all on each."""
        del strategy, model, optimizer

    def build(self, strategy: Strategy, *, abstract: bool = False) -> tuple[Any, Any]:
        """The model and its optimizer in their places; `abstract` has shapes for arrays."""
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
        """What the train step is run with."""
        return RunOptions(donate_argnums=(0, 1) if self._config.training.donate else ())
