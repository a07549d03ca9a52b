"""The recipe of the language model: model, optimizer, steps, and placement."""

from typing import Any, final

from flax import nnx

from jaxdist import partition
from jaxdist._strategies import Strategy
from jaxdist.jobs._config.schema import OptimizerConfig
from jaxdist.jobs._recipe import Recipe
from jaxdist.jobs.topics_lm._model import Transformer
from jaxdist.jobs.topics_lm._partition import adapt_optimizer, get_rules
from jaxdist.jobs.topics_lm._steps import evaluation_step, train_step


@final
class TopicsRecipe(Recipe):
    """The transformer, placed by `strategy.partition`."""

    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    def make_model(self, rngs: nnx.Rngs) -> Transformer:
        return Transformer(self._config.model, rngs=rngs)

    def optimizer_config(self) -> OptimizerConfig:
        return adapt_optimizer(self._config.strategy.partition, self._config.optimizer)

    def place(self, strategy: Strategy, model: Any, optimizer: Any) -> None:
        asked = self._config.strategy
        # With replicated parameters, `sharded_update` places its own state.
        if asked.partition != "replicated":
            rules = get_rules(asked.partition, asked.whole_below)
            partition.place(strategy, (model, optimizer), rules)
